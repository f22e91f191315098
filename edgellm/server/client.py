"""How ``ps``, ``stop`` and other local commands speak to a running server."""

from __future__ import annotations

import http.client
import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec

from edgellm.errors import EdgeLLMError, ModelNotFoundError
from edgellm.server.statefile import ServerState, running


class RemoteError(EdgeLLMError):
    """The server answered with an error, or not at all."""


def find(port: int | None = None) -> ServerState:
    """The running server (on ``port``, when several run); the newest one otherwise."""
    servers = running()
    if port is not None:
        servers = [s for s in servers if urlsplit(s.url).port == port]
    if not servers:
        where = "" if port is None else f" on port {port}"
        raise RemoteError(f"no server runs{where}", hint="edgellm serve MODEL")
    return servers[-1]


def ask(
    server: ServerState, method: str, path: str, body: Any = None, *, timeout: float = 60
) -> Any:
    """One request and its JSON answer. RemoteError, or ModelNotFoundError for a 404's model."""
    parts = urlsplit(server.url)
    host = parts.hostname or "127.0.0.1"
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    connection = _connect(parts.scheme, host, parts.port or 80, timeout)
    headers = {"authorization": f"Bearer {server.token}", "content-type": "application/json"}
    try:
        data = None if body is None else msgspec.json.encode(body)
        connection.request(method, path, body=data, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
    except OSError as error:
        raise RemoteError(f"the server at {server.url} does not answer: {error}") from error
    finally:
        connection.close()
    return _decode(answer.status, content)


def _connect(scheme: str, host: str, port: int, timeout: float) -> http.client.HTTPConnection:
    if scheme == "https":
        # Our own process on this machine, whose certificate names another host.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
    return http.client.HTTPConnection(host, port, timeout=timeout)


def _decode(status: int, content: bytes) -> Any:
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:
        raise RemoteError(f"the server answered {status} with no JSON") from None
    if status < 400:
        return value
    error = value.get("error", {}) if isinstance(value, dict) else {}
    message = error.get("message", f"the server answered {status}")
    if error.get("code") == "model_not_found":
        raise ModelNotFoundError(message, hint="edgellm ps")
    raise RemoteError(message)
