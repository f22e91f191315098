"""What llama_decode itself refuses: no cells, an abort, a batch it cannot take. Nobody else loses
a token by it."""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from edgellm.engine import wire
from edgellm.engine.info import EngineOptions
from edgellm.engine.loop import Arrived, Loop
from edgellm.request import FinishReason, TokenEvent
from tests.engine.factories import request
from tests.engine.starter import library_greedy, starter_plan
from tests.engine.test_starter import SURE

llama = pytest.importorskip("edgellm.engine.llama", reason="the engine is not installed")
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    plan = starter_plan(n_ctx=256, n_ctx_seq=256)
    backend = llama.load(plan, EngineOptions(warmup=False), lambda progress: None)
    yield backend
    backend.close()


class Run:
    """A loop over the real backend that remembers what decode returned."""

    def __init__(self, backend: Any) -> None:
        self.events: list[TokenEvent] = []
        self.codes: list[int] = []
        self.backend = backend
        self.loop = Loop(backend, EngineOptions(retain_prefixes=False), self._take)
        self.loop.backend = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def decode(self, spans: Any, meanwhile: Any = None) -> int:
        self.codes.append(self.backend.decode(spans, meanwhile))
        return self.codes[-1]

    def _take(self, message: wire.FromChild) -> None:
        if isinstance(message, wire.Events):
            self.events += message.events

    def add(self, prompt: str | list[int], **kw: Any) -> str:
        ids = prompt
        if isinstance(ids, str):
            ids = self.backend.tokenize(ids, add_special=True, parse_special=True)
        r = request("x", **kw)
        self.loop.inbox.put(Arrived(r, array("i", ids), time.monotonic()))
        return r.id

    def run(self, each: Callable[[int], None] = lambda step: None) -> None:
        self.loop._take_in()
        step = 0
        while self.loop.scheduler.has_work:
            each(step)
            self.loop.turn()
            step += 1
        self.loop.turn()
        assert self.loop.scheduler.n_cells_used == 0
        self.loop.scheduler.check()

    def ids(self, request_id: str) -> tuple[int, ...]:
        return tuple(t for e in self.events if e.request_id == request_id for t in e.token_ids)

    def last(self, request_id: str) -> TokenEvent:
        return [e for e in self.events if e.request_id == request_id][-1]


def test_no_cells_although_the_count_says_so_preempts_and_cuts_nobody(backend: Any) -> None:
    run = Run(backend)
    limits = msgspec.structs.replace(backend.limits, n_cells=10_000)
    run.loop.scheduler.limits = limits
    ids = [run.add(p, max_tokens=48) for p in SURE[:3]]  # 342 tokens in 256 cells
    run.run()
    assert 1 in run.codes
    assert [run.ids(i) for i in ids] == [library_greedy(p, 48) for p in SURE[:3]]


def test_an_aborted_step_is_computed_again(backend: Any) -> None:
    from edgellm.engine.llama.library import lib

    now = [False]
    callback = lib.ggml_abort_callback(lambda _: now[0])
    lib.llama_set_abort_callback(backend._ctx, callback, None)
    run = Run(backend)
    inner = backend.decode

    def decode(spans: Any, meanwhile: Any = None) -> int:
        now[0] = len(run.codes) in (0, 3, 7)
        code = inner(spans)
        now[0] = False
        return code

    backend.decode = decode
    try:
        ids = [run.add(p, max_tokens=8) for p in SURE[:3]]
        run.run()
    finally:
        del backend.decode
        never = ctypes.cast(None, lib.ggml_abort_callback)
        lib.llama_set_abort_callback(backend._ctx, never, None)
    assert run.codes.count(2) == 3
    assert [run.ids(i) for i in ids] == [library_greedy(p, 8) for p in SURE[:3]]


@pytest.mark.parametrize("bad", [10_000_000, -5])
def test_a_request_that_decode_refuses_fails_alone(backend: Any, bad: int) -> None:
    run = Run(backend)
    good = [run.add(p, max_tokens=16) for p in SURE[:2]]
    poisoned = run.add([1, 2, bad, 3], max_tokens=16)
    run.run()
    assert [run.ids(i) for i in good] == [library_greedy(p, 16) for p in SURE[:2]]
    last = run.last(poisoned)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error.type == "DecodeError"
    assert last.error.attributes["code"] == -1
