"""HTTP/1.1 for one purpose: JSON and event streams of a server, without blocking the interface.

A connection a request, over asyncio's streams: nothing to pool, nothing that a server which closes
kept-alive connections abruptly could break, and closing the generator closes the connection, which
is how a server learns that its client went away.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

from edgellm.errors import (
    ContextOverflowError,
    EdgeLLMError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
)
from edgellm.tui.ports import ServerLostError

CONNECT_S: Final = 5.0
LIMIT: Final = 4 * 1024 * 1024


class Http:
    """One server's address and key."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(
                f"{url!r} is not a server's address", hint="http://127.0.0.1:8080", param="url"
            )
        self._host = parts.hostname
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        async with self._open("GET", path, None) as body:
            return json.loads(await _all(body) or b"null")

    async def post(self, path: str, value: Any) -> Any:
        async with self._open("POST", path, value) as body:
            return json.loads(await _all(body) or b"null")

    async def events(self, path: str, value: Any) -> AsyncGenerator[Any, None]:
        """The JSON values of an event stream until ``[DONE]``; ServerLostError when it is cut."""
        async with self._open("POST", path, value) as body:
            async for line in _lines(body):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
        raise ServerLostError(
            f"{self.url} ended the answer in the middle", hint="is it still running?"
        )

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, value: Any
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        reader, writer = await self._connect()
        try:
            writer.write(self._request(method, path, value))
            await writer.drain()
            status, headers = await _head(reader)
            body = _body(reader, headers)
            if status >= 400:
                raise _error(status, await _all(body))
            yield body
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise ServerLostError(f"{self.url}: {_words(error)}", hint="edgellm ps") from error
        finally:
            writer.close()
            with suppress(OSError, asyncio.CancelledError):
                await asyncio.wait_for(writer.wait_closed(), 0.2)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        context = ssl.create_default_context() if self._tls else None
        opening = asyncio.open_connection(self._host, self._port, ssl=context, limit=LIMIT)
        try:
            return await asyncio.wait_for(opening, CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise ServerLostError(
                f"nothing answers at {self.url}", hint="edgellm serve MODEL starts a server"
            ) from error

    def _request(self, method: str, path: str, value: Any) -> bytes:
        body = b"" if value is None else json.dumps(value).encode()
        lines = [
            f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._host}:{self._port}",
            "Connection: close", "Accept: application/json, text/event-stream",
            "User-Agent: edgellm-terminal", f"Content-Length: {len(body)}",
        ]  # fmt: skip
        if body:
            lines.append("Content-Type: application/json")
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(first.split(" ", 2)[1])
    pairs = (line.partition(":") for line in lines if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(
    reader: asyncio.StreamReader, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """The body as it arrives; IncompleteReadError when the connection ends before it does."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(65536):
            yield data


async def _all(body: AsyncGenerator[bytes, None]) -> bytes:
    return b"".join([piece async for piece in body])


async def _lines(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


def _words(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection ended in the middle"
    return str(error) or type(error).__name__


def _error(status: int, body: bytes) -> EdgeLLMError:
    """OpenAI's error body as one of ours, by its status and its code."""
    try:
        said = json.loads(body)["error"]
        message, code = str(said["message"]), str(said.get("code"))
    except (ValueError, KeyError, TypeError):
        message, code = body[:200].decode("utf-8", "replace") or f"HTTP {status}", ""
    return error_of(message, code, status)


def error_of(message: str, code: str, status: int) -> EdgeLLMError:
    """Our class for what a server said."""
    if code == "context_length_exceeded":
        error: EdgeLLMError = ContextOverflowError(0, 0)
        error.message = message
        return error
    if status in (401, 403):
        return InvalidRequestError(message, param="api_key", hint="the server wants its API key")
    if status in (429, 503):
        return QueueFullError(message, hint="try again in a moment")
    if 400 <= status < 500:
        return InvalidRequestError(message)
    return EngineError(message)
