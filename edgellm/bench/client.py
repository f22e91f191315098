"""A streaming HTTP/1.1 client that costs little: it shares the machine with what it measures.

One connection a request (llama-server closes kept ones without notice), one timestamp a network
read, and a typed decoder that skips every field it does not need: about 6 us a token.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from edgellm.bench.events import Event, read_event
from edgellm.errors import ConfigError

MAX_ERROR_BODY: Final = 64 * 1024
_TIMEOUT_S: Final = 600.0
# People paste what stands in another client's settings.
_API_PATH: Final = re.compile(r"(/v1(/chat/completions|/completions|/models)?)?/*$")


def clock() -> float:
    """Seconds on the running loop's clock (monotonic; microseconds fine on asyncio's own loops)."""
    return asyncio.get_running_loop().time()


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server's address: ``base`` is the path before ``/v1``."""

    host: str
    port: int
    tls: bool = False
    base: str = ""
    api_key: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        """From ``http://host:port[/base][/v1[/chat/completions]]``; raises ConfigError on
        another scheme."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            given_port = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:  # a port of 99999, http://[, http://a..b
            raise ConfigError(f"{url!r} is not an address: {error}") from error
        if any(map(str.isspace, url)):
            raise ConfigError(f"{url!r} is not an address: there is a space in it")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not an http(s) address")
        tls = parts.scheme == "https"
        base = quote(_API_PATH.sub("", parts.path), safe="/%:@!$&'()*+,;=~")
        port = given_port or (443 if tls else 80)
        return cls(host=parts.hostname, port=port, tls=tls, base=base, api_key=api_key)

    @property
    def url(self) -> str:
        """The address as people write it."""
        return f"http{'s' if self.tls else ''}://{self.authority}{self.base}"

    @property
    def authority(self) -> str:
        """``host:port``, an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Output that came in one event: when, its text, and its tokens when the server said so."""

    time: float
    text: str
    n_tokens: int | None = None


class Reply(msgspec.Struct, kw_only=True):
    """Everything one exchange showed; times are of :data:`clock`."""

    sent: float
    end: float = 0.0
    status: int = 0
    arrivals: list[Arrival] = msgspec.field(default_factory=list)
    finish: str | None = None
    is_done: bool = False
    """``data: [DONE]`` came."""
    n_prompt: int | None = None
    n_output: int | None = None
    n_cached: int | None = None
    retry_after_s: float | None = None
    """How long a server that refused asked to be left alone."""
    timings: dict[str, Any] | None = None
    """The server's own, when it sends them (llama-server, edgellm)."""
    error: str | None = None
    """The error's class: connect, timeout, reset, http_503, stream, truncated or protocol."""
    message: str = ""
    body: bytes = b""
    """The body of an answer that is no event stream."""


def _status(head: bytes) -> int:
    """The number in ``HTTP/1.1 200 OK``; raises ValueError when this is no HTTP."""
    words = head.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError(f"no HTTP answer: {head[:60]!r}")
    return int(words[1])


def _seconds(text: str) -> float | None:
    """Retry-After in seconds; its other form, a date, is not waited for."""
    return float(text) if text.isdecimal() else None


class _Body:
    """Undoes ``Transfer-Encoding: chunked``; without it the bytes pass unchanged."""

    def __init__(self, *, chunked: bool, length: int | None) -> None:
        self._chunked = chunked
        self._left = length
        self._buffer = b""
        self.is_complete = length == 0 and not chunked

    @property
    def ends_with_connection(self) -> bool:
        return not self._chunked and self._left is None

    def feed(self, data: bytes) -> bytes:
        if self._chunked:
            return self._dechunk(data)
        if self._left is not None:
            self._left -= len(data)
            self.is_complete = self._left <= 0
        return data

    def _dechunk(self, data: bytes) -> bytes:
        buffer = self._buffer + data if self._buffer else data
        out, at = [], 0
        while (line := buffer.find(b"\r\n", at)) >= 0:
            size = int(buffer[at:line].split(b";", 1)[0], 16)
            if size < 0:
                raise ValueError(f"a chunk of {size} bytes")
            stop = line + 2 + size
            if size == 0:
                self.is_complete = True
            if len(buffer) < stop + 2 or size == 0:
                break
            out.append(buffer[line + 2 : stop])
            at = stop + 2
        self._buffer = buffer[at:]
        return b"".join(out)


class _Exchange(asyncio.Protocol):
    """One request on one connection. ``finished`` resolves when the reply is complete."""

    def __init__(self, payload: bytes, disconnect_after: int | None) -> None:
        self._payload = payload
        self._n_so_far = 0
        self._disconnect_after = disconnect_after
        self._head = b""
        self._body: _Body | None = None
        self._line = b""
        self._events = False
        self._transport: asyncio.Transport | None = None
        self.reply = Reply(sent=clock())
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        transport.write(self._payload)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = clock()
        try:
            self._feed(data, now)
        except (ValueError, msgspec.MsgspecError) as error:
            self._fail("protocol", f"{type(error).__name__}: {error}", now)

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.finished.done():
            return
        until_close = self._body is not None and self._body.ends_with_connection
        if exc is None and until_close:
            self._end_body(clock())
        else:
            self._fail("reset", str(exc or "the connection was closed early"), clock())

    def abort(self, error: str, message: str) -> None:
        """End the exchange from this side because something is wrong."""
        self._fail(error, message, clock())

    def leave(self) -> None:
        """End the exchange from this side, as a client that goes away does."""
        if not self.finished.done():
            self.reply.finish = "disconnected"
            self._finish(clock())

    def _feed(self, data: bytes, now: float) -> None:
        if self._body is None:
            head, found, data = self._take_head(data)
            if not found:
                return
            self._begin(head)
        body = self._body
        if body is None or self.finished.done():
            return
        plain = body.feed(data)
        if self._events:
            self._feed_lines(plain, now)
        elif len(self.reply.body) < MAX_ERROR_BODY:
            self.reply.body += plain
        if body.is_complete and not self.finished.done():
            self._end_body(now)

    def _take_head(self, data: bytes) -> tuple[bytes, bytes, bytes]:
        """The head, whether it is whole, what follows; interim answers (100, 103) are skipped."""
        self._head += data
        while (parts := self._head.partition(b"\r\n\r\n"))[1] and _status(parts[0]) < 200:
            self._head = parts[2]
        return parts

    def _begin(self, head: bytes) -> None:
        _, *lines = head.decode("latin-1").split("\r\n")
        self.reply.status = _status(head)
        headers = {k.strip().lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
        self._events = self.reply.status == 200 and "event-stream" in headers.get(
            "content-type", ""
        )
        if where := headers.get("location"):
            self.reply.message = f"it points to {where}"
        self.reply.retry_after_s = _seconds(headers.get("retry-after", ""))
        length = headers.get("content-length")
        self._body = _Body(
            chunked="chunked" in headers.get("transfer-encoding", "").lower(),
            length=int(length) if length else None,
        )

    def _feed_lines(self, data: bytes, now: float) -> None:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not self.finished.done():
                self._event(line[5:].strip(), now)

    def _end_body(self, now: float) -> None:
        """Everything has come; a last line without its newline counts too."""
        self._feed_lines(b"\n", now)
        self._finish(now)

    def _event(self, data: bytes, now: float) -> None:
        reply = self.reply
        if data == b"[DONE]":
            reply.is_done = True
            self._finish(now)
            return
        event = read_event(data)
        if event.error:
            self._fail("stream", event.error, now)
            return
        self._take(event)
        if event.text or event.token_ids:
            reply.arrivals.append(Arrival(now, event.text, self._tokens_of(event)))
        after = self._disconnect_after
        if after is not None and len(reply.arrivals) >= after:
            self.leave()

    def _tokens_of(self, event: Event) -> int | None:
        """How many tokens the event stands for, text that was held back before it included."""
        if event.token_ids:
            return len(event.token_ids)
        if event.n_so_far is None or event.n_so_far <= self._n_so_far:
            return None
        n, self._n_so_far = event.n_so_far - self._n_so_far, event.n_so_far
        return n

    def _take(self, event: Event) -> None:
        """Counts that come in every event are running ones: the last says the most."""
        reply = self.reply
        reply.finish = event.finish or reply.finish
        reply.timings = event.timings or reply.timings
        for name in ("n_prompt", "n_output", "n_cached"):
            if (value := getattr(event, name)) is not None:
                setattr(reply, name, value)

    def _fail(self, error: str, message: str, now: float) -> None:
        if self.finished.done():
            return
        self.reply.error, self.reply.message = error, message
        self._finish(now)

    def _finish(self, now: float) -> None:
        if self.finished.done():
            return
        self.reply.end = now
        self._classify()
        self.finished.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    def _classify(self) -> None:
        reply = self.reply
        if reply.error is None and reply.status != 200:
            reply.error = f"http_{reply.status}"
            reply.message = reply.message or reply.body.decode(errors="replace")[:500]
        elif reply.error is None and self._events and reply.finish is None and not reply.is_done:
            reply.error, reply.message = "truncated", "the stream ended without a finish reason"


def _payload(endpoint: Endpoint, method: str, path: str, body: bytes) -> bytes:
    key = f"Authorization: Bearer {endpoint.api_key}\r\n" if endpoint.api_key else ""
    head = (
        f"{method} {endpoint.base}{path} HTTP/1.1\r\nHost: {endpoint.authority}\r\n"
        f"Accept: text/event-stream, application/json\r\nConnection: close\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def exchange(
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, Any] | bytes | None,
    *,
    timeout_s: float = _TIMEOUT_S,
    disconnect_after: int | None = None,
    leave: asyncio.Future[None] | None = None,
    on_open: Callable[[Reply], None] | None = None,
) -> Reply:
    """Send one request and read its answer to the end; never raises for what the far end does.

    ``body`` None makes it a GET. ``disconnect_after`` closes the connection after so many events
    with output, as a client that goes away would, and ``leave`` does so when it is done.
    ``on_open`` gets the reply that fills up as the answer comes.
    """
    data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
    payload = _payload(endpoint, "GET" if body is None else "POST", path, data)
    loop = asyncio.get_running_loop()
    started = clock()
    context = ssl.create_default_context() if endpoint.tls else None
    try:
        _, protocol = await asyncio.wait_for(
            loop.create_connection(
                lambda: _Exchange(payload, disconnect_after),
                endpoint.host,
                endpoint.port,
                ssl=context,
            ),
            min(timeout_s, 30.0),
        )
    except (OSError, asyncio.TimeoutError) as error:
        message = f"{endpoint.url}: {error or 'no connection'}"
        return Reply(sent=started, end=clock(), error="connect", message=message)
    if leave is not None:
        leave.add_done_callback(lambda _: protocol.leave())
    if on_open is not None:
        on_open(protocol.reply)
    return await _wait(protocol, timeout_s, started)


async def _wait(protocol: _Exchange, timeout_s: float, started: float) -> Reply:
    timer = asyncio.get_running_loop().call_later(
        timeout_s, protocol.abort, "timeout", f"no end after {timeout_s:g} s"
    )
    try:
        await protocol.finished
    finally:
        timer.cancel()
        protocol.abort("cancelled", "cancelled by this side")
    protocol.reply.sent = started
    return protocol.reply


async def get_json(endpoint: Endpoint, path: str, *, timeout_s: float = 5.0) -> Any:
    """The decoded body of a GET, or None when the server has nothing of the kind."""
    reply = await exchange(endpoint, path, None, timeout_s=timeout_s)
    if reply.error is not None:
        return None
    try:
        return msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        return None


async def post_json(
    endpoint: Endpoint, path: str, body: Mapping[str, Any], *, timeout_s: float = 60.0
) -> Any:
    """The decoded body of a POST, or None when the server refused."""
    reply = await exchange(endpoint, path, body, timeout_s=timeout_s)
    if reply.error is not None:
        return None
    try:
        return msgspec.json.decode(reply.body)
    except msgspec.DecodeError:
        return None
