"""The engine over the real starter model: its tokens are the library's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edgellm.engine.client import Engine
from edgellm.request import Request, TokenEvent
from tests.engine.factories import request
from tests.engine.starter import library_greedy, starter_plan

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small engine that",
    "def fibonacci(n):\n    ",
    "The three laws of motion are",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    engine = await Engine.load(starter_plan())
    yield engine
    await engine.close()


async def collect(engine: Engine, r: Request) -> list[TokenEvent]:
    return [event async for event in engine.generate(r)]


def ids(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_greedy_alone_equals_the_librarys_greedy(engine: Engine, prompt: str) -> None:
    events = await collect(engine, request(prompt, max_tokens=40, cache_prompt=False))
    assert ids(events) == library_greedy(prompt, 40)


async def test_greedy_in_a_batch_equals_the_librarys_greedy(engine: Engine) -> None:
    results = await asyncio.gather(
        *(collect(engine, request(p, max_tokens=40, cache_prompt=False)) for p in PROMPTS)
    )
    assert [ids(r) for r in results] == [library_greedy(p, 40) for p in PROMPTS]
