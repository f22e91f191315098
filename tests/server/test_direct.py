"""Events of a stream are written where they arrive, and the client cannot tell."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgellm.engine.info import EngineOptions, Script
from edgellm.engine.pending import Direct
from edgellm.request import TokenEvent
from edgellm.server import sse
from edgellm.server.http import PUSH, Call
from edgellm.server.run import push
from edgellm.server.sse import Hub, Stream
from tests.server.conftest import Running

CHAT = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 24, "seed": 5}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 3}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True}),
    ("/v1/completions", {"prompt": "once", "max_tokens": 24, "seed": 5}),
    ("/v1/completions", {"prompt": ["once", "twice"], "max_tokens": 6, "seed": 5}),
    ("/v1/messages", CHAT),
    ("/v1/responses", {"input": "tell me", "max_output_tokens": 24, "temperature": 0}),
]
_CHANGING = re.compile(
    r'"(id|item_id|created|created_at|completed_at|[a-z0-9_]*_ms|[a-z_]*per_second|cache_n|prompt_n'
    r'|cached_tokens|cache_read_input_tokens|input_tokens)":("[^"]*"|[0-9.e+-]+)'
)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running() as found:
        yield found


def streamed(running: Running, path: str, body: dict[str, Any]) -> list[str]:
    with (
        running.client() as client,
        client.stream("POST", path, json={**body, "stream": True}) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        lines = [_CHANGING.sub(r'"\1":0', line) for line in answer.iter_lines() if line]
    # The answers of several choices or prompts mix as they come.
    return sorted(lines) if body.get("n") or isinstance(body.get("prompt"), list) else lines


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_is_the_same_whoever_writes_it(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    direct = streamed(running, path, body)
    monkeypatch.setattr(Stream, "direct", lambda _self, _render: None)
    assert direct == streamed(running, path, body)


def test_most_events_of_a_stream_wake_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    n_written = 0
    write = Stream.write

    async def counted(self: Stream, events: bytes) -> None:
        nonlocal n_written
        n_written += 1
        await write(self, events)

    monkeypatch.setattr(sse.Stream, "write", counted)
    # Slow enough that each event finds the one before it gone.
    slow = EngineOptions(script=Script(answer_tokens=0, step_s=0.02))
    with Running(engine=slow) as running:
        lines = streamed(running, "/v1/chat/completions", CHAT)
    assert len(lines) > 20
    # The first events (until the head has left) and the last one with the closing chunks.
    assert n_written <= 5


class Cycle:
    """uvicorn's cycle, as far as push looks at it."""

    def __init__(self) -> None:
        self.disconnected = False
        self.response_started = True
        self.response_complete = False
        self.chunked_encoding = True
        self.flow = self
        self.write_paused = False
        self.transport = self
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def pushed(change: Callable[[Any], None], body: bytes = b"data: 1\n\n") -> tuple[bool, list[bytes]]:
    cycle: Any = Cycle()
    change(cycle)
    return push(cycle, body), cycle.written


def test_a_push_is_one_chunk() -> None:
    assert pushed(lambda _: None) == (True, [b"9\r\ndata: 1\n\n\r\n"])
    assert pushed(lambda _: None, b"") == (True, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disconnected", True),
        ("response_started", False),
        ("response_complete", True),
        ("chunked_encoding", False),
        ("write_paused", True),
    ],
)
def test_nothing_is_pushed_where_the_connection_takes_nothing(name: str, value: bool) -> None:
    assert pushed(lambda cycle: setattr(cycle, name, value)) == (False, [])


async def nothing(*_: Any) -> Any:
    return {}


def make_stream(pushes: list[bytes], *, is_started: bool = True) -> tuple[Stream, Direct]:
    def keep(body: bytes) -> bool:
        pushes.append(body)
        return True

    scope = {"method": "POST", "path": "/", "headers": [], PUSH: keep}
    call = Call(scope, nothing, nothing)
    call.is_started = is_started
    stream = Hub().open(call)
    direct = stream.direct(lambda event: event.text.encode())
    assert direct is not None
    return stream, direct


EVENT = TokenEvent(request_id="r", text="x")


def test_nothing_is_written_directly_before_the_head_or_while_a_write_waits() -> None:
    pushes: list[bytes] = []
    _, early = make_stream(pushes, is_started=False)
    assert not early(EVENT)
    stream, direct = make_stream(pushes)
    stream.is_writing = True
    assert not direct(EVENT)
    assert pushes == []
    stream.is_writing = False
    assert direct(EVENT)
    assert b"x" in pushes


def test_a_connection_without_a_push_has_no_direct_way() -> None:
    async def main() -> Direct | None:
        call = Call({"method": "POST", "path": "/", "headers": []}, nothing, nothing)
        return Hub().open(call).direct(lambda _: b"")

    assert asyncio.run(main()) is None
