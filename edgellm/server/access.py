"""Who may ask: the Host header, origins, API keys, rates. Decided before a body is read.

* Host: a page on the internet can point its own name at 127.0.0.1 (DNS rebinding) and then read a
  local server. So a name that is not one of this server's is refused.
* Origin: CORS is closed. Without keys a browser's request from another origin is refused even
  where CORS would only hide the answer, because it would still cost the GPU.
* Keys: several, named, compared in constant time, kept as digests only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from edgellm.errors import ConfigError
from edgellm.server.errors import Problem
from edgellm.server.http import Call

PUBLIC: Final = frozenset(
    {"/", "/health", "/v1/health", "/ping", "/openapi.json", "/docs", "/favicon.ico"}
)
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_EXPOSED: Final = b"x-request-id, request-id, retry-after, openai-processing-ms"


class Key(msgspec.Struct, frozen=True):
    """One API key: its name for logs and limits, and the SHA-256 of its text."""

    name: str
    digest: bytes


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What is allowed. Rates and concurrency are per key, or per address without keys."""

    keys: tuple[Key, ...] = ()
    hosts: frozenset[str] | None = LOOPBACK_NAMES
    """Names the Host header may carry; None takes any."""
    origins: tuple[str, ...] = ()
    """Allowed origins; ``*`` is any, ``localhost`` any port of this machine."""
    rate_per_minute: int | None = None
    max_concurrent: int | None = None


def make_key(text: str, name: str | None = None) -> Key:
    """A key from ``KEY`` or ``NAME:KEY``."""
    label, colon, secret = text.partition(":")
    if not colon:
        label, secret = "", text
    if not secret.strip():
        raise ConfigError("an API key is empty", hint="edgellm serve MODEL --api-key KEY")
    digest = hashlib.sha256(secret.strip().encode()).digest()
    return Key(name or label.strip() or "key-" + digest.hex()[:6], digest)


def read_keys(path: Path) -> list[Key]:
    """Keys from a file: one a line, ``KEY`` or ``NAME:KEY``; ``#`` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from error
    wanted = [line.split("#", 1)[0].strip() for line in lines]
    keys = [make_key(line) for line in wanted if line]
    if not keys:
        raise ConfigError(f"the key file {path} holds no key", hint="one key a line")
    return keys


def is_loopback(host: str) -> bool:
    """Whether a bind address can only be reached from this machine."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_hosts(
    bind: Sequence[str], keys: Sequence[Key], more: Iterable[str]
) -> frozenset[str] | None:
    """The names the Host header may carry. Behind a key any will do: rebinding gains nothing."""
    extra = {name.lower() for name in more}
    if keys or "*" in extra:
        return None
    here = set() if all(map(is_loopback, bind)) else {socket.gethostname().lower(), *bind}
    return LOOPBACK_NAMES | here | extra


class Access:
    """The policy at work: what it has counted lives here."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._tokens: dict[str, tuple[float, float]] = {}
        self._running: dict[str, int] = {}
        self._any_origin = "*" in policy.origins
        self._local_origin = "localhost" in policy.origins

    def check(self, call: Call) -> None:
        """Let ``call`` in, or raise Problem 401, 403 or 421. Sets ``call.key`` and CORS headers."""
        self._check_host(call)
        if b"origin" in call.headers:
            self._check_origin(call)
        if self.policy.keys and call.path not in PUBLIC and call.method != "OPTIONS":
            call.key = self._key_name(call)

    def _check_host(self, call: Call) -> None:
        if self.policy.hosts is None:
            return
        host = call.header(b"host")
        if host in self.policy.hosts or (not host and call.scope.get("http_version") == "1.0"):
            # HTTP/1.0 knows no Host (health checks of load balancers), and no browser speaks it.
            return
        name = host_name(host)
        if name in self.policy.hosts or (self._serves_networks and _is_address(name)):
            return
        raise Problem(
            421,
            f"this server does not answer to the host name {name[:100]!r}",
            code="host_not_allowed",
            hint="edgellm serve --allowed-host NAME",
            anthropic="permission_error",
        )

    @property
    def _serves_networks(self) -> bool:
        return self.policy.hosts is not None and self.policy.hosts != LOOPBACK_NAMES

    def _check_origin(self, call: Call) -> None:
        origin = call.header(b"origin")
        if self.allows_origin(origin):
            call.extra_headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-allow-credentials", b"true"),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"Origin"),
            ]
            return
        is_same = urlsplit(origin).netloc == call.header(b"host")
        if self.policy.keys or is_same or call.method in ("GET", "HEAD", "OPTIONS"):
            return
        raise Problem(
            403,
            f"requests from the origin {origin[:100]!r} are not allowed",
            code="origin_not_allowed",
            hint="edgellm serve --cors-origin ORIGIN",
        )

    def allows_origin(self, origin: str) -> bool:
        """Whether a page from ``origin`` may read answers."""
        if self._any_origin or origin in self.policy.origins:
            return True
        if not self._local_origin:
            return False
        try:
            return (urlsplit(origin).hostname or "") in LOOPBACK_NAMES
        except ValueError:
            return False

    def _key_name(self, call: Call) -> str:
        scheme, _, token = call.header(b"authorization").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        given = given or call.header(b"x-api-key")
        digest = hashlib.sha256(given.encode("latin-1")).digest()
        found = ""
        # Every key is compared, whichever matches, so that time tells nothing.
        for key in self.policy.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.name
        if found and given:
            return found
        raise Problem(
            401,
            "the API key is wrong" if given else "an API key is needed",
            type="authentication_error",
            code="invalid_api_key",
            hint="send it as: Authorization: Bearer KEY",
            headers=((b"www-authenticate", b"Bearer"),),
        )

    def enter(self, call: Call) -> None:
        """Count a generating request; Problem 429 over the rate or the concurrency of its key."""
        who = call.key or call.client
        policy = self.policy
        if policy.rate_per_minute is not None:
            self._take(who, policy.rate_per_minute, call)
        running = self._running.get(who, 0)
        if policy.max_concurrent is not None and running >= policy.max_concurrent:
            raise _too_many(f"{running} requests of this client are running already", 1)
        self._running[who] = running + 1

    def leave(self, call: Call) -> None:
        """The request that ``enter`` counted has ended."""
        who = call.key or call.client
        left = self._running.get(who, 1) - 1
        if left > 0:
            self._running[who] = left
        else:
            self._running.pop(who, None)

    def _take(self, who: str, per_minute: int, call: Call) -> None:
        """One token from a bucket that holds a minute's worth and fills evenly."""
        now = time.monotonic()
        tokens, since = self._tokens.get(who, (float(per_minute), now))
        tokens = min(float(per_minute), tokens + (now - since) * per_minute / 60)
        if tokens < 1:
            self._tokens[who] = (tokens, now)
            wait = (1 - tokens) * 60 / per_minute
            raise _too_many(f"over {per_minute} requests a minute", int(wait) + 1)
        self._tokens[who] = (tokens - 1, now)
        call.extra_headers += [
            (b"x-ratelimit-limit-requests", str(per_minute).encode()),
            (b"x-ratelimit-remaining-requests", str(int(tokens - 1)).encode()),
        ]
        if len(self._tokens) > 10_000:  # addresses of clients without keys
            self._tokens = {k: v for k, v in self._tokens.items() if now - v[1] < 60}


def preflight_headers(access: Access, call: Call) -> tuple[tuple[bytes, bytes], ...]:
    """What an OPTIONS request is told; nothing but Allow for an origin that is not allowed."""
    if not access.allows_origin(call.header(b"origin")):
        return ((b"allow", b"GET, POST, DELETE, OPTIONS"),)
    asked = call.headers.get(b"access-control-request-headers", b"*")
    return (
        (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
        (b"access-control-allow-headers", asked),
        (b"access-control-max-age", b"600"),
    )


def host_name(host: str) -> str:
    """The name in a Host header, without its port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].split("]", 1)[0]
    return host.rsplit(":", 1)[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _too_many(message: str, wait_s: int) -> Problem:
    return Problem(
        429,
        message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=((b"retry-after", str(wait_s).encode()),),
    )
