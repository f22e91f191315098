"""One HTTP request: its headers, its body within limits, its answer. Plain ASGI, no framework.

Every answer carries ``x-request-id``. A client that goes away cancels the handler's task, so
whatever the handler waits for (a queue, a model load, the engine) is given up at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import msgspec

from edgellm.server.errors import Problem, invalid_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]
T = TypeVar("T")

CLIENT: Final = "edgellm.client"
"""Scope key of the connection's :class:`Client`."""
PUSH: Final = "edgellm.push"
"""Scope key of the connection's :data:`Push`, where it has one."""
Push = Callable[[bytes], bool]
"""Writes a part of the body at once; False: the connection takes none now (ask with no bytes)."""
JSON: Final = (b"content-type", b"application/json")
_ID: Final = re.compile(r"[A-Za-z0-9._\-]{1,128}")
_counter: Final = itertools.count(1)
encode: Final = msgspec.json.Encoder().encode


class Client:
    """The other end of a connection: whoever works for it is told when it leaves. (A task a
    request that waits for ASGI's disconnect message would cost 12 µs.)"""

    __slots__ = ("is_gone", "on_leave")

    def __init__(self) -> None:
        self.is_gone = False
        self.on_leave: set[Callable[[], None]] = set()

    def leave(self) -> None:
        """The connection is lost."""
        self.is_gone = True
        for tell in tuple(self.on_leave):
            tell()


class Call:
    """A request under way."""

    __slots__ = (
        "client",
        "expired",
        "extra_headers",
        "gone",
        "headers",
        "is_started",
        "key",
        "log",
        "method",
        "path",
        "receive",
        "request_id",
        "scope",
        "send",
        "started_at",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = given if _ID.fullmatch(given) else "req_" + secrets.token_hex(12)
        self.started_at = time.monotonic()
        self.key = ""
        """The name of the API key that was used; empty without keys."""
        self.client = ""
        self.status = 0
        self.is_started = False
        self.gone = False
        self.expired = False
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.log: dict[str, Any] = {}
        """What the log line of this request says beside the usual (model, token counts)."""

    def next_id(self) -> str:
        """An id for a request to an engine. Two calls may carry the same ``x-request-id``."""
        return f"{self.request_id}-{next(_counter)}"

    def header(self, name: bytes) -> str:
        """A header's value, or an empty string."""
        return self.headers.get(name, b"").decode("latin-1")

    def query(self, name: str) -> str | None:
        """A parameter of the query string."""
        values = parse_qs(self.scope.get("query_string", b"").decode("latin-1")).get(name)
        return values[0] if values else None

    @property
    def is_anthropic(self) -> bool:
        """Errors of this request take Anthropic's shape."""
        return self.path.startswith(("/v1/messages", "/v1/models")) and (
            self.path.startswith("/v1/messages") or b"anthropic-version" in self.headers
        )

    async def body(self, *, limit: int, timeout: float) -> bytes:
        """The whole body. Problem 413 over ``limit`` bytes, 408 after ``timeout`` seconds."""
        declared = self.headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large(limit)
        # A timer that never fires costs a microsecond, where wait_for costs a task.
        timer = asyncio.get_running_loop().call_later(timeout, self.expire, asyncio.current_task())
        try:
            return await self._read(limit)
        except asyncio.CancelledError:
            if not self.expired:
                raise
            self.expired = False
            raise Problem(
                408,
                "the request body did not arrive in time",
                code="request_timeout",
                headers=((b"connection", b"close"),),
            ) from None
        finally:
            timer.cancel()

    async def _read(self, limit: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise asyncio.CancelledError
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise too_large(limit)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def expire(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel ``task`` because its time is up."""
        if task is not None and not task.done():
            self.expired = True
            task.cancel()

    def watch(self, *, time_limit: float | None = None) -> Callable[[], None]:
        """From now on, cancel this task when the client goes away or time is up.

        Returns what ends the watching. Call it after the body was read.
        """
        task = asyncio.current_task()
        client: Client = self.scope.get(CLIENT) or Client()

        def gone() -> None:
            if task is not None and not task.done():
                self.gone = True
                task.cancel()

        client.on_leave.add(gone)
        if client.is_gone:
            gone()
        timer = None
        if time_limit:
            timer = asyncio.get_running_loop().call_later(time_limit, self.expire, task)

        def stop() -> None:
            client.on_leave.discard(gone)
            if timer is not None:
                timer.cancel()

        return stop

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and headers."""
        self.status = status
        self.is_started = True
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *headers,
                    (b"x-request-id", self.request_id.encode()),
                    *self.extra_headers,
                ],
            }
        )

    async def write(self, chunk: bytes) -> None:
        """Send a part of the body."""
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self) -> None:
        """Send the end of the body."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply(self, body: bytes, *, status: int = 200, headers: Headers = (JSON,)) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, (*headers, length))
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, value: Any, *, status: int = 200, headers: Headers = ()) -> None:
        """Send ``value`` as JSON."""
        await self.reply(encode(value), status=status, headers=(JSON, *headers))


def too_large(limit: int) -> Problem:
    """413; the connection is closed because the rest of the body was not read."""
    return Problem(
        413,
        f"the request body is larger than {limit} bytes",
        code="request_too_large",
        headers=((b"connection", b"close"),),
    )


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Problem(
            400, f"the field {twice!r} is given twice", code="duplicate_field", param=twice
        )
    return built


# The standard library's scanner sees what msgspec passes over: a field given twice, and invalid
# UTF-8 inside fields nobody reads. It costs 2 µs for a usual body.
_strict: Final = json.JSONDecoder(object_pairs_hook=_reject_duplicates)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """``body`` as the endpoint's struct. Problem 400 that names the parameter otherwise."""
    try:
        value = decoder.decode(body)
        _strict.decode(body.decode())
    except msgspec.ValidationError as error:
        if _FLOAT_FOR_INT not in str(error):
            raise invalid_json(error) from error
        return _decode_whole_floats(decoder, body)
    except (ValueError, RecursionError) as error:
        raise invalid_json(error) from error
    return value


_FLOAT_FOR_INT: Final = "got `float`"
_EXACT: Final = 2.0**53  # beyond it a float is no certain whole number


def _decode_whole_floats(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """``body`` once more, with 4.0 as 4: to JSON the two are one number, and sliders send it."""
    try:
        found: T = msgspec.convert(_whole(_strict.decode(body.decode())), decoder.type)
    except (ValueError, RecursionError) as error:
        raise invalid_json(error) from error
    return found


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value
