"""A server with known latencies on a clock that only moves when everyone waits.

Connections are pairs of in-memory transports, so a run of minutes takes milliseconds and every
figure is known exactly.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def as_chunk(data: bytes) -> bytes:
    """Bytes as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def as_event(data: dict[str, Any]) -> bytes:
    """One server-sent event in one chunk."""
    return as_chunk(b"data: " + json.dumps(data).encode() + b"\n\n")


class _Selector(selectors.SelectSelector):
    """Waiting moves the clock instead of taking time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0 if timeout is not None else None)
        if not events and timeout:
            self.now += timeout
        return events


@dataclass
class Answer:
    """What the server does with one request. Times in seconds from when it is scheduled."""

    ttft: float = 0.2
    gaps: Sequence[float] = (0.02,) * 63
    per_event: Sequence[int] = ()
    """Tokens an event; empty: one each. The event comes when its last token is known."""
    has_usage: bool = True
    finish: str | None = "stop"
    status: int = 200
    error_after: int | None = None
    cut_after: int | None = None
    n_prompt: int = 100
    n_cached: int = 0
    chat: bool = False
    token_ids: bool = False
    counts_along: bool = False
    """Each chunk has llama-server's timings.predicted_n."""
    has_done: bool = True
    retry_after: str | None = None
    """With another status than 200."""
    together: int = 1
    """Events that reach the client in one read, at the time of the last of them."""
    raw: Sequence[tuple[float, bytes]] | None = None
    """Instead of all that: these bytes, head included, at these times; then the end."""

    def token_times(self) -> list[float]:
        times = [self.ttft]
        for gap in self.gaps:
            times.append(times[-1] + gap)
        return times

    def events(self) -> list[tuple[float, int]]:
        """(time, tokens) of every event."""
        times, out, at = self.token_times(), [], 0
        for n in self.per_event or (1,) * len(times):
            at += n
            out.append((times[at - 1], n))
        assert at == len(times), "per_event must cover every token"
        return out


@dataclass
class SimServer:
    """``slots`` requests at once, the rest in order of arrival."""

    answer: Callable[[int, dict[str, Any]], Answer] = lambda i, body: Answer()
    slots: int = 1_000
    tokenizer: Callable[[str], int] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    n_closed_early: int = 0
    _busy: int = 0
    _queue: list[_Connection] = field(default_factory=list)

    def schedule(self, connection: _Connection) -> None:
        self._queue.append(connection)
        self._pump()

    def release(self) -> None:
        self._busy -= 1
        self._pump()

    def _pump(self) -> None:
        while self._queue and self._busy < self.slots:
            self._busy += 1
            self._queue.pop(0).serve()


class _Connection:
    """The server's end of one connection."""

    def __init__(self, server: SimServer, client: asyncio.Protocol, loop: SimLoop) -> None:
        self.server, self.client, self.loop = server, client, loop
        self.buffer = b""
        self.is_open = True
        self.is_serving = False
        self.body: dict[str, Any] = {}
        self.index = -1

    def receive(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        path = head.split(b" ")[1].decode()
        if head.startswith(b"GET"):
            self.send_json(404, {})
            return
        self.body = json.loads(body)
        if path == "/tokenize":
            self.tokenize()
            return
        self.index = len(self.server.requests)
        self.server.requests.append(self.body)
        self.server.arrivals.append(self.loop.time())
        self.server.schedule(self)

    def tokenize(self) -> None:
        if self.server.tokenizer is None:
            self.send_json(404, {})
        else:
            n = self.server.tokenizer(self.body["content"])
            self.send_json(200, {"tokens": list(range(n))})

    def serve(self) -> None:
        self.is_serving = True
        self.loop.create_task(self._serve(self.server.answer(self.index, self.body)))

    async def _serve(self, answer: Answer) -> None:
        begin = self.loop.time()
        try:
            if answer.raw is not None:
                await self._send_raw(answer.raw, begin)
                return
            if answer.status != 200:
                wait = answer.retry_after
                head = b"" if wait is None else b"Retry-After: %b\r\n" % wait.encode()
                self.send_json(answer.status, {"error": {"message": "no"}}, head)
                return
            self.send_head()
            await self._stream(answer, begin)
        finally:
            self.server.release()

    async def _send_raw(self, raw: Sequence[tuple[float, bytes]], begin: float) -> None:
        for at, data in raw:
            await asyncio.sleep(begin + at - self.loop.time())
            self.write(data)
        self.close(None)

    async def _stream(self, answer: Answer, begin: float) -> None:
        held = b""
        events = answer.events()
        for i, (at, n) in enumerate(events):
            await asyncio.sleep(begin + at - self.loop.time())
            if not self.is_open:
                return
            if i == answer.cut_after:
                self.close(ConnectionResetError("reset"))
                return
            if i == answer.error_after:
                self.event({"error": {"message": "decode failed", "code": 500}})
                return
            data = self._chunk(answer, "word " * n, None, n)
            if answer.counts_along:
                data["timings"] = {"predicted_n": sum(n for _, n in events[: i + 1])}
            held += as_event(data)
            if (i + 1) % answer.together == 0 or i + 1 == len(events):
                self.write(held)
                held = b""
        self.event(self._chunk(answer, "", answer.finish, 0))
        if answer.has_usage:
            n_output = len(answer.gaps) + 1
            details = {"cached_tokens": answer.n_cached}
            usage = {"prompt_tokens": answer.n_prompt, "completion_tokens": n_output}
            self.event({"choices": [], "usage": {**usage, "prompt_tokens_details": details}})
        if answer.has_done:
            self.write(as_chunk(b"data: [DONE]\n\n"))
        self.write(b"0\r\n\r\n")
        self.close(None)

    def _chunk(self, answer: Answer, text: str, finish: str | None, n: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if answer.chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        if answer.token_ids:
            choice["token_ids"] = list(range(n))
        return {"choices": [choice]}

    def event(self, data: dict[str, Any]) -> None:
        self.write(as_event(data))

    def send_head(self) -> None:
        self.write(HEAD)

    def send_json(self, status: int, body: dict[str, Any], head: bytes = b"") -> None:
        data = json.dumps(body).encode()
        head += b"Content-Length: %d\r\n" % len(data)
        self.write(b"HTTP/1.1 %d X\r\n%b\r\n%b" % (status, head, data))
        self.close(None)

    def write(self, data: bytes) -> None:
        if self.is_open:
            self.loop.call_soon(self.client.data_received, data)

    def close(self, error: Exception | None) -> None:
        if self.is_open:
            self.is_open = False
            self.loop.call_soon(self.client.connection_lost, error)

    def client_left(self) -> None:
        if self.is_open:
            self.is_open = False
            self.server.n_closed_early += self.is_serving


class _ClientTransport(asyncio.Transport):
    """The client's end: writes go to the server on the loop's next turn."""

    def __init__(self, connection: _Connection) -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: Any) -> None:
        self._connection.loop.call_soon(self._connection.receive, bytes(data))

    def abort(self) -> None:
        self._connection.client_left()

    close = abort


class SimLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is simulated and whose connections lead to ``server``."""

    def __init__(self, server: SimServer) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._server = server
        self.refuse_connections = False

    def time(self) -> float:
        return self._virtual.now

    async def create_connection(self, factory: Any, *args: Any, **kwargs: Any) -> Any:
        if self.refuse_connections:
            raise ConnectionRefusedError(111, "refused")
        protocol = factory()
        transport = _ClientTransport(_Connection(self._server, protocol, self))
        protocol.connection_made(transport)
        return transport, protocol


def simulate(server: SimServer, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` on a simulated clock against ``server``."""
    loop = SimLoop(server)
    try:
        return loop.run_until_complete(main())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
