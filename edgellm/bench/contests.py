"""The traffic two servers are compared under: each contest drives one server once.

A contest returns figures by the names of :mod:`edgellm.bench.stats`, and a few of its own. All of
them use prompts that no earlier round used, unless sharing is the point.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from edgellm.bench.client import clock
from edgellm.bench.load import Driver, Phase, closed_phase, run_phase
from edgellm.bench.sample import Job, Sample
from edgellm.bench.scenarios import SCENARIOS, Scenario, make_job, make_jobs, scenario_from, words
from edgellm.bench.stats import phase_metrics
from edgellm.bench.target import Target, engine_stats
from edgellm.metrics import percentile

SHARED_PREFIXES: Final = 3
"""Prefixes a heat of the shared contest goes through: a wave of eight is few for a percentile."""
CHUNK_WORDS: Final = 400
"""About 500 tokens: what a server reads in one go."""
BATCH: Final = {"priority": "batch"}
INTERACTIVE: Final = {"priority": "interactive"}
COUNTS_ALONG: Final = {"timings_per_token": True}
"""llama-server's and edgellm's: each chunk says how many tokens there are by now. A token may have
no text to show until the next one comes (a part of a character), and what came together is counted
as the tokens it was."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much work a contest asks for. Words in, tokens out."""

    prompt_words: int = 100
    max_tokens: int = 128
    shared_words: int = 1200
    own_words: int = 25
    shared_tokens: int = 64
    long_words: int = 6500
    n_running: int = 4
    running_tokens: int = 4096
    """More than the streams can produce before the disturbance is over."""
    n_batch: int = 30
    batch_tokens: int = 256
    n_interactive: int = 2
    interactive_tokens: int = 32
    requests_a_stream: int = 2
    min_requests: int = 4
    settle_s: float = 1.5
    """How long streams run before the disturbance comes."""


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """One go at one server."""

    target: Target
    concurrency: int
    sizes: Sizes
    seed: str
    """Different in every round and for every server: no prompt is ever seen twice."""


Figures = dict[str, float]


async def distinct(heat: Heat) -> Figures:
    """Equal prompts and answers, none alike, ``concurrency`` at once."""
    scenario = _scenario(heat, "batch")
    return await _closed(heat, scenario)


async def decode(heat: Heat) -> Figures:
    """One wave of ``concurrency`` streams: the steady rate while all of them decode."""
    scenario = _scenario(heat, "batch")
    return await _closed(heat, scenario, n=heat.concurrency)


async def shared(heat: Heat) -> Figures:
    """A long prefix that the server has seen once, then ``concurrency`` requests that begin with
    it; and as many again.

    The first of them tell whether streams share what one of them had read; by the second wave a
    server that copies a prefix for each slot has its copies.
    """
    scenario = scenario_from(
        "shared",
        shared_words=heat.sizes.shared_words,
        prompt_words=heat.sizes.own_words,
        max_tokens=heat.sizes.shared_tokens,
    )
    waves: tuple[list[Sample], list[Sample]] = ([], [])
    begin = clock()
    for number in range(SHARED_PREFIXES):
        seed = f"{heat.seed}/{number}"
        await _wave(heat, scenario, f"{seed}/seen", seed, n=1)
        for i, wave in enumerate(waves):
            wave.extend(await _wave(heat, scenario, f"{seed}/{i}", seed, n=heat.concurrency))
    first, again = (phase_metrics(Phase(samples=w, begin=begin, end=clock())) for w in waves)
    figures = {k: v for k, v in first.items() if not k.endswith(("_tps", "_per_s"))}
    figures |= {f"again_{k}": again[k] for k in ("ttft_p50_s", "ttft_p99_s") if k in again}
    return figures | await _step_times(heat.target)


async def _wave(
    heat: Heat, scenario: Scenario, seed: str, shared_seed: str, *, n: int
) -> list[Sample]:
    """``n`` requests at once that begin with the seed's prefix."""
    jobs = make_jobs(scenario, heat.target.model, seed, shared_seed=shared_seed)
    return (await closed_phase(heat.target.endpoint, jobs, n, n=n)).samples


async def mixed(heat: Heat) -> Figures:
    """Log-normal lengths, as real traffic has."""
    return await _closed(heat, scenario_from("mixed"))


async def long_prompt(heat: Heat) -> Figures:
    """A long prompt arrives beside running streams: how long do they stand still?"""
    sizes = heat.sizes

    async def load(driver: Driver) -> None:
        leave = asyncio.get_running_loop().create_future()
        # Made before anything runs: words for 8k tokens would hold up the reading of the streams.
        intruder = _job(heat, "intruder", sizes.long_words, 8)
        n, n_tokens = sizes.n_running, sizes.running_tokens
        streams = _streams(heat, "running", n, n_tokens, COUNTS_ALONG)
        running = [asyncio.create_task(driver.send(job, leave=leave)) for job in streams]
        await asyncio.sleep(sizes.settle_s)
        await _first_tokens(driver, sizes.n_running, running)
        await asyncio.sleep(sizes.settle_s)
        await driver.send(intruder)
        await asyncio.sleep(sizes.settle_s)
        leave.set_result(None)
        await asyncio.gather(*running)

    phase = await _phase(heat, load)
    running, intruders = _by_group(phase, "running"), _by_group(phase, "intruder")
    if not intruders or not intruders[0].token_times or not running:
        return {"error_ratio": 1.0}
    return _stalls(running, intruders[0])


async def disconnects(heat: Heat) -> Figures:
    """Half of the clients leave early; do their sequences stop costing the others anything?"""
    n = max(2, heat.concurrency)
    rng = random.Random(heat.seed)

    async def load(driver: Driver) -> None:
        leavers = [
            _job(heat, "leaver", heat.sizes.prompt_words, 512, disconnect_after=rng.randint(2, 8))
            for _ in range(n)
        ]
        stayers = _streams(heat, "stayer", n // 2, heat.sizes.max_tokens)
        await asyncio.gather(*(driver.send(job) for job in leavers), *map(driver.send, stayers))
        followers = _streams(heat, "follower", n, 16)
        await asyncio.gather(*map(driver.send, followers))

    phase = await _phase(heat, load)
    after = Phase(samples=_by_group(phase, "follower"), begin=phase.begin, end=phase.end)
    stayed = Phase(samples=_by_group(phase, "stayer"), begin=phase.begin, end=phase.end)
    figures = phase_metrics(after)
    figures |= {f"stayer_{k}": v for k, v in phase_metrics(stayed).items() if k.startswith("e2e")}
    figures["error_ratio"] = phase_metrics(phase)["error_ratio"]
    figures["whole_s"] = phase.end - phase.begin
    return figures


async def interactive(heat: Heat) -> Figures:
    """A few urgent short requests among a pile of batch work; beside an idle server's TTFT.

    Fair is twice that and the one chunk of a prompt that may be under way when they come.
    """
    sizes = heat.sizes
    idle = await _phase(heat, lambda d: _one_by_one(d, _urgent(heat, "idle", 3)))
    chunk = await _phase(heat, lambda d: _one_by_one(d, _chunks(heat)))

    async def load(driver: Driver) -> None:
        leave = asyncio.get_running_loop().create_future()
        work = _streams(heat, "batch", sizes.n_batch, sizes.batch_tokens, BATCH)
        running = [asyncio.create_task(driver.send(job, leave=leave)) for job in work]
        await asyncio.sleep(sizes.settle_s)
        await asyncio.gather(*map(driver.send, _urgent(heat, "urgent", sizes.n_interactive)))
        leave.set_result(None)
        await asyncio.gather(*running)

    phase = await _phase(heat, load)
    urgent = Phase(samples=_by_group(phase, "urgent"), begin=phase.begin, end=phase.end)
    figures = phase_metrics(urgent)
    # Batch work that was left before it had its turn is no failure.
    phase.samples = [s for s in phase.samples if (s.finish, s.error) != ("disconnected", "empty")]
    figures["error_ratio"] = phase_metrics(phase)["error_ratio"]
    idle_ttft = phase_metrics(idle).get("ttft_p50_s")
    if idle_ttft and "ttft_max_s" in figures:
        figures["idle_ttft_s"] = idle_ttft
        figures["ttft_over_idle"] = figures["ttft_max_s"] / idle_ttft
        if chunk_ttft := phase_metrics(chunk).get("ttft_p50_s"):
            figures["chunk_ttft_s"] = chunk_ttft
            figures["ttft_over_fair"] = figures["ttft_max_s"] / (2 * idle_ttft + chunk_ttft)
    return figures


Contest = Callable[[Heat], Awaitable[Figures]]
CONTESTS: Final[dict[str, Contest]] = {
    "distinct": distinct,
    "decode": decode,
    "shared": shared,
    "mixed": mixed,
    "long": long_prompt,
    "disconnects": disconnects,
    "interactive": interactive,
}
LEVELLED: Final = ("distinct", "decode")
"""Contests that are run at every concurrency; the others run at one."""


async def warm_up(heat: Heat) -> None:
    """Fill every stream once: kernels are loaded, buffers grown, thread pools awake."""
    scenario = _scenario(heat, "batch", max_tokens=16)
    jobs = make_jobs(scenario, heat.target.model, f"{heat.seed}/warm")
    await closed_phase(heat.target.endpoint, jobs, heat.concurrency, n=heat.concurrency)


def _scenario(heat: Heat, name: str, **changes: int) -> Scenario:
    sizes = {"prompt_words": heat.sizes.prompt_words, "max_tokens": heat.sizes.max_tokens}
    return scenario_from(name, **{**sizes, **changes})


async def _closed(heat: Heat, scenario: Scenario, n: int | None = None) -> Figures:
    sizes = heat.sizes
    count = n or max(sizes.requests_a_stream * heat.concurrency, sizes.min_requests)
    jobs = make_jobs(scenario, heat.target.model, heat.seed)
    phase = await closed_phase(heat.target.endpoint, jobs, heat.concurrency, n=count)
    figures = phase_metrics(phase, concurrency=heat.concurrency)
    return figures | await _step_times(heat.target)


async def _step_times(target: Target) -> Figures:
    """edgellm's own account of a step, where the server is edgellm."""
    stats = await engine_stats(target.endpoint)
    step = _find(stats, "step")
    if not isinstance(step, dict):
        return {}
    parts = {k: float(v) for k, v in step.items() if isinstance(v, (int, float))}
    python = parts.get("schedule_s", 0.0) + parts.get("deliver_s", 0.0)
    return {f"step_{k}": v for k, v in parts.items()} | {"step_python_s": python}


def _find(value: object, key: str) -> object:
    """The first value under ``key`` at any depth."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        children = list(value.values())
    else:
        children = value if isinstance(value, list) else []
    found = (_find(child, key) for child in children)
    return next((f for f in found if f is not None), None)


async def _phase(heat: Heat, load: Callable[[Driver], Awaitable[None]]) -> Phase:
    driver = Driver(heat.target.endpoint)
    return await run_phase(driver, load)


async def _one_by_one(driver: Driver, jobs: Sequence[Job]) -> None:
    for job in jobs:
        await driver.send(job)


async def _first_tokens(
    driver: Driver, n: int, running: Sequence[asyncio.Task[object]], timeout_s: float = 60.0
) -> None:
    """Wait until ``n`` streams produce (or one of them has ended)."""
    deadline = clock() + timeout_s
    while clock() < deadline and not any(task.done() for task in running):
        if driver.n_producing() >= n:
            return
        await asyncio.sleep(0.02)


def _job(
    heat: Heat,
    group: str,
    n_words: int,
    max_tokens: int,
    extra: Mapping[str, Any] | None = None,
    *,
    disconnect_after: int | None = None,
    index: int = 0,
) -> Job:
    rng = random.Random(f"{heat.seed}/{group}/{index}")
    return make_job(
        SCENARIOS["batch"],
        heat.target.model,
        words(rng, n_words),
        max_tokens,
        group=group,
        extra=extra,
        disconnect_after=disconnect_after,
    )


def _streams(
    heat: Heat,
    group: str,
    n: int,
    max_tokens: int,
    extra: Mapping[str, Any] | None = None,
) -> list[Job]:
    n_words = heat.sizes.prompt_words
    return [_job(heat, group, n_words, max_tokens, extra, index=i) for i in range(n)]


def _chunks(heat: Heat) -> list[Job]:
    """Prompts of about as many tokens as servers read in one go (512)."""
    return [_job(heat, "chunk", CHUNK_WORDS, 1, index=i) for i in range(3)]


def _urgent(heat: Heat, group: str, n: int) -> list[Job]:
    tokens = heat.sizes.interactive_tokens
    return _streams(heat, group, n, tokens, INTERACTIVE)


def _by_group(phase: Phase, group: str) -> list[Sample]:
    return [s for s in phase.samples if s.group == group]


def _stalls(running: Sequence[Sample], intruder: Sample) -> Figures:
    """The running streams' gaps before the long prompt came and until its first token."""
    first = intruder.token_times[0]
    before, during = [], []
    for sample in running:
        for a, b in pairwise(sample.token_times):
            if b <= intruder.intended:
                before.append(b - a)
            elif a < first:
                during.append(b - a)
    calm = percentile(sorted(before), 50) or 0.0
    figures = {
        "calm_itl_p50_s": calm,
        "intruder_ttft_s": first - intruder.intended,
        "n_intruder_prompt": float(intruder.n_prompt or 0),
        "error_ratio": 0.0,
    }
    if during:
        figures["worst_itl_s"] = max(during)
        figures["during_itl_p50_s"] = percentile(sorted(during), 50) or 0.0
    if during and calm:
        figures["worst_over_calm"] = max(during) / calm
    return figures
