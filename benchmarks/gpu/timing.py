"""Timing a plan: it is loaded, one stream is timed, the better of two runs counts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from edgellm.engine.client import Engine, OnProgress
from edgellm.engine.info import EngineOptions, LoadProgress
from edgellm.errors import EngineError
from edgellm.planner.plan import Plan
from edgellm.request import Request, SamplingParams, TokenEvent

N_PROMPT, N_OUTPUT = 512, 128
FILLERS = 4
ONE_TRY = EngineOptions(restart=False)


@dataclass(frozen=True)
class Timed:
    """Tokens a second of one stream."""

    decode_tps: float
    prefill_tps: float


@asynccontextmanager
async def loaded(
    plan: Plan,
    on_progress: OnProgress | None = None,
    options: EngineOptions = ONE_TRY,
) -> AsyncIterator[Engine]:
    """An engine with ``plan``, ended with the block."""
    engine = await Engine.load(plan, options=options, on_progress=on_progress)
    try:
        yield engine
    finally:
        await engine.close()


async def one_stream(engine: Engine, n_long: int = 0) -> Timed:
    """Decode behind a prompt of 512 tokens, and the reading of that prompt; of one of ``n_long``
    where given."""
    n_vocab = engine.info.n_vocab
    short = [
        await answer(engine, prompt(N_PROMPT, n_vocab, 90 + i), N_OUTPUT, f"short-{i}")
        for i in range(2)
    ]
    long = [
        await answer(engine, prompt(n_long, n_vocab, 80 + i), 1, f"long-{i}")
        for i in range(2 if n_long else 0)
    ]
    return Timed(
        max(e.timings.decode_tps or 0 for e in short if e.timings),
        max(e.timings.prefill_tps or 0 for e in long or short if e.timings),
    )


def prompt(n: int, n_vocab: int, seed: int) -> tuple[int, ...]:
    """Random ordinary tokens: real work for every expert and no shared prefix."""
    rng = random.Random(seed)
    return tuple(rng.randrange(1000, min(n_vocab, 30000)) for _ in range(n))


async def answer(engine: Engine, tokens: tuple[int, ...], n_output: int, name: str) -> TokenEvent:
    request = Request(
        id=name,
        prompt=tokens,
        sampling=SamplingParams(max_tokens=n_output, ignore_eos=True, seed=1),
        cache_prompt=False,
    )
    last: TokenEvent | None = None
    async for event in engine.generate(request):
        last = event
    if last is None or last.timings is None:
        raise RuntimeError(f"{name} ended without timings")
    return last


async def fill(engine: Engine) -> None:
    """Bring several sequences to the end of the context together."""
    room = engine.info.n_ctx // FILLERS - 8
    n_output = min(32, room // 2)
    jobs = [
        answer(engine, prompt(room - n_output, engine.info.n_vocab, i), n_output, f"fill-{i}")
        for i in range(FILLERS)
    ]
    await asyncio.gather(*jobs)


def no_second_try(progress: LoadProgress) -> None:
    """A trial that steps down the ladder is no trial of what it was asked for."""
    if progress.stage == "fallback":
        raise EngineError(f"out of memory ({progress.message})")
