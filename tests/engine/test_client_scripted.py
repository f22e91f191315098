"""An engine over a real child with the scripted backend: streams, ends, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from edgellm.engine.child import Child
from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions, Fault, Script
from edgellm.errors import (
    ContextOverflowError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
)
from edgellm.request import FinishReason, Request, TokenEvent
from tests.engine.factories import plan, request


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = await Engine.load(plan(), backend="scripted")
    yield engine
    await engine.close()


async def collect(engine: Engine, r: Request) -> list[TokenEvent]:
    return [event async for event in engine.generate(r)]


def text_of(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


async def test_a_request_streams_to_its_last_event_with_usage_and_timings(engine: Engine) -> None:
    events = await collect(engine, request("the answer is", max_tokens=12))
    last = events[-1]
    assert last.is_last
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage is not None
    assert (last.usage.n_output, last.usage.n_cached) == (12, 0)
    assert last.timings is not None
    assert last.timings.ttft_s is not None
    assert text_of(events).strip()


async def test_the_same_request_gives_the_same_text_and_reuses_its_prefix(engine: Engine) -> None:
    prompt = "the and of to in is it that for was on are as with his they be at"
    first = await collect(engine, request(prompt, max_tokens=8))
    second = await collect(engine, request(prompt, max_tokens=8))
    assert text_of(first) == text_of(second)
    usage = second[-1].usage
    assert usage is not None
    assert usage.n_cached > 10


async def test_many_at_once_equal_each_alone(engine: Engine) -> None:
    prompts = [
        f"{word} of the world" for word in ("alpha", "beta", "gamma", "delta", "zeta", "eta")
    ]
    alone = [text_of(await collect(engine, request(p, max_tokens=20))) for p in prompts]
    together = await asyncio.gather(*(collect(engine, request(p, max_tokens=20)) for p in prompts))
    assert [text_of(events) for events in together] == alone


async def test_closing_the_generator_frees_the_slot() -> None:
    options = EngineOptions(script=Script(step_s=0.01, answer_tokens=0))
    engine = await Engine.load(plan(), backend="scripted", options=options)
    stream = engine.generate(request("forever"))
    await stream.__anext__()
    await stream.aclose()
    while (stats := await engine.stats()).running:
        await asyncio.sleep(0.01)
    assert stats.requests_cancelled == 1
    await engine.close()


async def test_a_prompt_longer_than_the_context_says_both_numbers(engine: Engine) -> None:
    with pytest.raises(ContextOverflowError) as caught:
        await collect(engine, request("x" * 5000))
    assert (caught.value.n_prompt, caught.value.n_ctx) == (5001, 1024)


async def test_an_unknown_token_id_is_the_requests_fault(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError):
        await collect(engine, request((1, 10**6)))


async def test_killed_mid_stream_fails_that_request_and_serves_the_next() -> None:
    options = EngineOptions(script=Script(step_s=0.01, answer_tokens=0))
    engine = await Engine.load(plan(), backend="scripted", options=options)
    stream = engine.generate(request("forever"))
    await stream.__anext__()
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        async for _ in stream:
            pass
    events = await collect(engine, request("next", max_tokens=3))
    assert events[-1].is_last
    await engine.close()


async def test_an_abort_in_native_code_says_the_childs_last_words() -> None:
    faults = (Fault(kind="abort", on_word="!"),)
    options = EngineOptions(script=Script(faults=faults))
    engine = await Engine.load(plan(), backend="scripted", options=options)
    with pytest.raises(EngineDeadError, match="GGML_ASSERT"):
        await collect(engine, request("boom!"))
    events = await collect(engine, request("next", max_tokens=3))
    assert events[-1].finish_reason is FinishReason.LENGTH
    await engine.close()


async def test_a_poisoned_request_fails_alone() -> None:
    faults = (Fault(kind="code", code=-3, on_word="!"),)
    options = EngineOptions(script=Script(faults=faults, step_s=0.002))
    engine = await Engine.load(plan(), backend="scripted", options=options)
    results = await asyncio.gather(
        collect(engine, request("good one", max_tokens=10)),
        collect(engine, request("bad one!", max_tokens=10)),
        collect(engine, request("another", max_tokens=10)),
        return_exceptions=True,
    )
    kinds = [type(r).__name__ for r in results]
    assert kinds == ["list", "DecodeError", "list"]
    await engine.close()


async def test_ping_and_stats_answer_while_running(engine: Engine) -> None:
    assert await engine.ping(5.0) < 5.0
    assert (await engine.stats()).n_cells == 1024


async def test_text_goes_round_through_tokens(engine: Engine) -> None:
    text = "the world — é and € 💡"
    assert await engine.detokenize(await engine.tokenize(text)) == text


async def test_a_queued_request_is_replayed_when_the_child_dies() -> None:
    options = EngineOptions(script=Script(step_s=0.01, answer_tokens=0))
    engine = await Engine.load(plan(n_seq_max=1), backend="scripted", options=options)
    running = engine.generate(request("forever"))
    await running.__anext__()
    queued = asyncio.create_task(collect(engine, request("patient", max_tokens=3)))
    await asyncio.sleep(0.05)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        async for _ in running:
            pass
    assert (await queued)[-1].finish_reason is FinishReason.LENGTH
    await engine.close()


async def test_a_loop_that_hangs_fails_the_ping_and_not_the_parent() -> None:
    faults = (Fault(kind="hang", at_step=2, seconds=2.0),)
    options = EngineOptions(script=Script(faults=faults))
    engine = await Engine.load(plan(), backend="scripted", options=options)
    task = asyncio.create_task(collect(engine, request("one", max_tokens=4)))

    async def ask_all_along() -> None:
        while not task.done():
            await engine.ping(0.1)

    with pytest.raises(EngineError, match="did not answer within"):
        await ask_all_along()
    assert (await task)[-1].is_last
    assert await engine.ping(5.0) < 5.0
    await engine.close()


async def test_a_hung_child_is_ended_and_the_next_request_is_served() -> None:
    faults = (Fault(kind="hang", on_word="!"),)
    options = EngineOptions(script=Script(faults=faults), hang_timeout_s=2.0)
    engine = await Engine.load(plan(), backend="scripted", options=options)
    first = engine.pid
    # It had sent nothing, so it was replayed once, and hung again.
    with pytest.raises(EngineDeadError, match=r"did not answer for 2 s and was ended by SIGKILL"):
        await collect(engine, request("stuck!"))
    events = await collect(engine, request("next", max_tokens=3))
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert engine.pid != first
    await engine.close()


async def test_a_loop_without_work_or_with_quick_steps_is_left_alone() -> None:
    options = EngineOptions(script=Script(step_s=0.05, answer_tokens=0), hang_timeout_s=2.0)
    engine = await Engine.load(plan(), backend="scripted", options=options)
    first = engine.pid
    await collect(engine, request("steady", max_tokens=60))
    await asyncio.sleep(0.6)  # it is looked at each half second
    assert engine.pid == first
    await engine.close()


async def test_a_closed_engine_ends_its_streams_and_its_child() -> None:
    options = EngineOptions(script=Script(step_s=0.01, answer_tokens=0))
    engine = await Engine.load(plan(), backend="scripted", options=options)
    stream = engine.generate(request("forever"))
    await stream.__anext__()
    pid = engine.pid
    await engine.close()
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not engine.is_alive


async def test_a_long_answer_that_ran_alone_says_how_fast_the_model_is(engine: Engine) -> None:
    def long(prompt: str) -> Request:
        return request(prompt, max_tokens=64, ignore_eos=True)

    await collect(engine, request("a short one", max_tokens=8, ignore_eos=True))
    assert engine.alone_tps == 0
    await asyncio.gather(collect(engine, long("one of two")), collect(engine, long("the other")))
    assert engine.alone_tps == 0
    last = (await collect(engine, long("the answer is")))[-1]
    assert last.timings is not None
    assert engine.alone_tps == last.timings.decode_tps > 0


async def test_who_wants_to_know_is_told_that_the_engine_was_closed() -> None:
    engine = await Engine.load(plan(), backend="scripted")
    told: list[bool] = []
    engine.on_closed = lambda: told.append(engine.is_alive)
    await engine.close()
    await engine.close()
    assert told == [False]


async def test_a_child_that_cannot_be_started_again_leaves_nobody_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(child: Child) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(Child, "start", start)
    stream = engine.generate(request("hello", max_tokens=500, ignore_eos=True))
    await anext(stream)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError, match="no more processes"):
        await asyncio.wait_for(collect(engine, request("hello")), 20)
    assert engine.is_dead


async def test_a_request_that_cannot_be_sent_leaves_its_id_free(engine: Engine) -> None:
    with pytest.raises(UnicodeEncodeError):
        await collect(engine, request("half a pair: \ud800", id="a"))
    assert (await collect(engine, request("hello", id="a", max_tokens=3)))[-1].is_last
