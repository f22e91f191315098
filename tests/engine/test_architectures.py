"""Caches that are not plain attention, on tiny real models: windows, recurrent and hybrid state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions
from edgellm.planner.plan import Plan
from edgellm.request import Priority, Request, TokenEvent, Usage
from tests.engine.factories import plan, request
from tests.engine.simulate import Simulation, over_model
from tests.engine.tiny import tiny_model

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

ARCHES = ("gemma3", "lfm2", "mamba")
N_LAYER = {"gemma3": 6}
"""Every sixth layer of gemma3 sees everything."""
STORY = "Once upon a time there was a small engine that pulled long trains over high hills. " * 6
PROMPTS = tuple(STORY + end for end in ("Every evening", "The oldest", "Her name", "Far away"))
"""No near ties: the two highest logits of gemma3's 60 tokens are 0.19 apart at least, or the order
of a sum would decide."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def tiny_plan(folder: Path, arch: str, **changes: Any) -> Plan:
    return plan(tiny_model(folder, arch, n_layer=N_LAYER.get(arch, 4)), **changes)


def loading(folder: Path, arch: str, options: EngineOptions | None = None, **changes: Any) -> Any:
    planned = tiny_plan(folder, arch, **changes)
    return Engine.load(planned, options=options or EngineOptions())


@pytest_asyncio.fixture(params=ARCHES, scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Engine]:
    engine = await loading(folder, request.param)
    yield engine
    await engine.close()


async def collect(engine: Engine, r: Request) -> list[TokenEvent]:
    return [event async for event in engine.generate(r)]


def ids(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


def usage(events: list[TokenEvent]) -> Usage:
    found = events[-1].usage
    assert found is not None
    return found


def asking(prompt: str, n: int = 20, **kw: Any) -> Request:
    return request(prompt, max_tokens=n, ignore_eos=True, **kw)


async def alone(engine: Engine, *prompts: str, n: int = 20) -> list[tuple[int, ...]]:
    """What each prompt gives with nothing else running and nothing reused."""
    return [ids(await collect(engine, asking(p, n, cache_prompt=False))) for p in prompts]


async def test_the_text_depends_on_the_whole_of_what_the_model_can_see(engine: Engine) -> None:
    a, b = await alone(engine, "a b c d", "x b c d")
    assert a != b


async def test_many_at_once_equal_each_alone(engine: Engine) -> None:
    expected = await alone(engine, *PROMPTS)
    together = await asyncio.gather(*(collect(engine, asking(p)) for p in PROMPTS))
    assert [ids(events) for events in together] == expected


async def test_a_prompt_seen_before_starts_from_its_checkpoint(engine: Engine) -> None:
    assert engine.info.sharing == "checkpoint"
    prompt = "Another story altogether: " + PROMPTS[0]
    (expected,) = await alone(engine, prompt)
    first = await collect(engine, asking(prompt))
    second = await collect(engine, asking(prompt))
    assert ids(first) == ids(second) == expected
    assert usage(first).n_cached == 0
    assert usage(second).n_cached == usage(second).n_prompt - 1
    longer = prompt + " and its driver was"
    extended = await collect(engine, asking(longer))
    assert usage(extended).n_cached >= usage(first).n_prompt - 2
    assert ids(extended) == (await alone(engine, longer))[0]


async def test_a_cancelled_stream_leaves_nothing_in_the_cache(engine: Engine) -> None:
    (expected,) = await alone(engine, PROMPTS[1])
    stream = engine.generate(asking(PROMPTS[0], 500))
    await stream.__anext__()
    await stream.aclose()
    assert (await alone(engine, PROMPTS[1]))[0] == expected
    assert (await engine.stats()).cells_used == 0


def each_alone(simulation: Simulation, *prompts: str) -> list[tuple[int, ...]]:
    requests = [asking(prompt, 60, cache_prompt=False) for prompt in prompts]
    return [ids for r in requests for ids in simulation.ids_of(r)]


@pytest.mark.parametrize("arch", ARCHES)
async def test_without_a_slot_one_is_preempted_and_goes_on_with_its_text(
    arch: str, folder: Path
) -> None:
    with over_model(tiny_plan(folder, arch, n_seq_max=1)) as simulation:
        expected = each_alone(simulation, *PROMPTS[:2])
        slow = asking(PROMPTS[0], 60, priority=Priority.BATCH)
        urgent = asking(PROMPTS[1], 60, priority=Priority.INTERACTIVE)
        assert simulation.preempted(slow, urgent) == expected
        assert simulation.loop.scheduler.n_preemptions == 1


@pytest.mark.parametrize("arch", ["gemma3", "lfm2"])
async def test_without_cells_one_is_preempted_and_goes_on_with_its_text(
    arch: str, folder: Path
) -> None:
    with over_model(tiny_plan(folder, arch, n_ctx=512, n_ctx_seq=512)) as simulation:
        expected = each_alone(simulation, *PROMPTS)
        assert simulation.ids_of(*(asking(p, 60) for p in PROMPTS)) == expected
        assert simulation.loop.scheduler.n_preemptions >= 1


@pytest.mark.parametrize("arch", ARCHES)
async def test_guessing_changes_no_token(arch: str, folder: Path) -> None:
    options = EngineOptions(spec="ngram")
    engine = await loading(folder, arch, options, n_outputs_max=32)
    try:
        repeated = "one two three four five six seven eight " * 8
        expected = await alone(engine, repeated)
        assert [ids(await collect(engine, asking(repeated)))] == expected
    finally:
        await engine.close()
