"""A small HTTP/1.1 client: one request, its answer as it comes, and whether anything came at all.

Whether a request may be sent again depends on that last thing, so it is what errors say.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from edgellm.errors import ConfigError, EdgeLLMError

Headers = list[tuple[bytes, bytes]]

CONNECT_TIMEOUT_S: Final = 3.0
_READ: Final = 1 << 16
_IDLE_KEPT: Final = 64
_SILENT_S: Final = 4
"""Seconds until a connection whose other side no longer acknowledges counts as broken."""


class UpstreamError(EdgeLLMError):
    """The far end broke off. ``has_answered``: something of the answer came before."""

    def __init__(self, message: str, *, has_answered: bool) -> None:
        super().__init__(message)
        self.has_answered = has_answered


class Origin:
    """A server by its URL, and connections to it that wait for their next request."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no http address", hint="--upstream http://host:8000")
        self.host = parts.hostname
        self.is_tls = parts.scheme == "https"
        try:
            self.port = parts.port or (443 if self.is_tls else 80)
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}", hint="--upstream http://host:8000") from error
        # People give the address with and without the /v1 that SDKs want.
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self.prefix}"
        self._idle: list[_Connection] = []

    async def send(
        self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes = b""
    ) -> Answer:
        """Send a request and wait for the answer's head. Raises UpstreamError."""
        message = self._message(method, path, headers, body)
        while self._idle:
            # One that was kept may have been closed meanwhile: then nothing comes, and a new one
            # is as good.
            answer = Answer(self, self._idle.pop())
            with contextlib.suppress(UpstreamError):
                await answer.begin(message)
                return answer
            if answer.has_answered:
                raise UpstreamError(f"{self.url} broke off", has_answered=True)
        answer = Answer(self, await self._connect())
        await answer.begin(message)
        return answer

    def _message(
        self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1".encode("latin-1"),
            f"host: {host}:{self.port}".encode("latin-1"),
            *(name + b": " + value for name, value in headers),
        ]
        if body or method == "POST":
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self.is_tls else None
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(self.host, self.port, ssl=context), CONNECT_TIMEOUT_S
            )
        except asyncio.TimeoutError as error:
            raise UpstreamError(f"{self.url} does not answer", has_answered=False) from error
        except OSError as error:
            raise UpstreamError(
                f"{self.url} cannot be reached: {error}", has_answered=False
            ) from error
        _notice_silence(writer)
        return _Connection(reader, writer)

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for the next request."""
        if len(self._idle) < _IDLE_KEPT:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the connections that wait."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    """A cut cable ends the connection within seconds instead of never."""
    link: Any = writer.get_extra_info("socket")
    if link is None:
        return
    wanted = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": _SILENT_S - 1,
        "TCP_USER_TIMEOUT": _SILENT_S * 1000,
    }
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in wanted.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def close(self) -> None:
        self.writer.transport.abort()


class Answer:
    """An answer under way: ``status`` and ``headers``, then :meth:`chunks`; close it in the end."""

    def __init__(self, origin: Origin, connection: _Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.has_answered = False
        self._origin = origin
        self._connection: _Connection | None = connection
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._has_head = False
        self._is_over = False

    # httptools calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._has_head = True
        else:
            self.headers.clear()

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        self._is_over = self.status >= 200

    async def begin(self, message: bytes) -> None:
        """Send the request and read up to the end of the head."""
        connection = self._connection
        if connection is None:
            return
        try:
            connection.writer.write(message)
            await connection.writer.drain()
        except OSError as error:
            self.close()
            raise UpstreamError(
                f"{self._origin.url} broke off: {error}", has_answered=False
            ) from error
        except BaseException:
            self.close()
            raise
        while not self._has_head:
            await self._read()

    async def _read(self) -> None:
        connection = self._connection
        if connection is None:
            raise UpstreamError(f"{self._origin.url} was closed", has_answered=True)
        try:
            data = await connection.reader.read(_READ)
            self.has_answered = self.has_answered or bool(data)
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            raise UpstreamError(
                f"{self._origin.url} broke off: {error}", has_answered=self.has_answered
            ) from error
        except BaseException:
            self.close()
            raise
        if not data and self._has_head and not self._is_framed:
            self._is_over = True  # such a body ends where the connection does
        if not data and not self._is_over:
            self.close()
            raise UpstreamError(
                f"{self._origin.url} closed the connection", has_answered=self.has_answered
            )

    @property
    def _is_framed(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises UpstreamError when it ends too early."""
        while True:
            if self._chunks:
                chunk = b"".join(self._chunks)
                self._chunks.clear()
                yield chunk
            elif self._is_over:
                self._finish()
                return
            else:
                await self._read()

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    def _finish(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._is_framed and self._parser.should_keep_alive():
            self._origin.keep(connection)
        else:
            connection.close()

    def close(self) -> None:
        """End the connection unless the answer was read to its end; the far end notices."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
