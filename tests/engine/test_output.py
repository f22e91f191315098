"""Events: tokens of a request that wants them seldom are joined, and none is lost."""

from __future__ import annotations

import msgspec
import pytest

from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions, Fault, Script
from edgellm.errors import DecodeError
from edgellm.request import Request, SamplingParams, TokenEvent
from tests.engine.factories import plan

ASKED = Request(id="a", prompt="one two three", sampling=SamplingParams(max_tokens=24, seed=3))


async def events_of(engine: Engine, request: Request) -> list[TokenEvent]:
    return [event async for event in engine.generate(request)]


def text_of(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def test_joined_tokens_are_the_same_text_and_tokens_in_fewer_events() -> None:
    engine = await Engine.load(plan(), backend="scripted")
    seldom = msgspec.structs.replace(ASKED, id="b", event_interval_s=60.0)
    plain, joined = await events_of(engine, ASKED), await events_of(engine, seldom)
    await engine.close()
    assert len(plain) > len(joined) == 2
    assert (text_of(joined), tokens_of(joined)) == (text_of(plain), tokens_of(plain))


async def test_the_first_token_does_not_wait_and_the_last_event_has_the_totals() -> None:
    engine = await Engine.load(plan(), backend="scripted")
    first, last = await events_of(engine, msgspec.structs.replace(ASKED, event_interval_s=60.0))
    await engine.close()
    assert len(first.token_ids) == 1
    assert last.is_last
    assert last.usage is not None
    assert last.usage.n_output == 1 + len(last.token_ids)


async def test_a_zero_interval_sends_each_token() -> None:
    engine = await Engine.load(plan(), backend="scripted")
    events = await events_of(engine, ASKED)
    await engine.close()
    assert max(len(event.token_ids) for event in events) == 1


async def test_an_answer_that_fails_brings_what_it_had_before_the_error() -> None:
    script = Script(faults=(Fault(kind="code", at_step=8, code=-3),))
    engine = await Engine.load(
        plan(), backend="scripted", options=EngineOptions(script=script, restart=False)
    )
    events: list[TokenEvent] = []

    async def collect() -> None:
        async for event in engine.generate(msgspec.structs.replace(ASKED, event_interval_s=60.0)):
            events.append(event)  # noqa: PERF401  (what came before the error is wanted)

    with pytest.raises(DecodeError):
        await collect()
    await engine.close()
    assert len(tokens_of(events)) > 1
