"""Random requests against a real child: lengths, stops, choices, schemas, cancels at any moment.

    python benchmarks/soak.py MODEL.gguf --requests 2000
    python benchmarks/soak.py scripted --backend scripted --requests 2000

Ends with the engine's own count of cells, slots and failures, and with the child's memory before
and after: nothing may be left but retained prefixes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from benchmarks.bare_plan import bare_plan
from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions, Script
from edgellm.metrics import EngineStats
from edgellm.planner.plan import Plan
from edgellm.request import Grammar, GrammarKind, Overflow, Priority, Request, SamplingParams

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "that",
    "for",
    "was",
    "on",
    "are",
    "as",
    "be",
] * 2
MEMORY_SLACK = 16 << 20
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer","maximum":99}},"required":["a"]}'


def make_plan(args: argparse.Namespace) -> Plan:
    """A context far too small for what is asked of it."""
    return bare_plan(
        args.model,
        n_gpu_layers=args.ngl,
        n_ctx=args.ctx,
        n_ctx_seq=args.ctx // 2,
        n_batch=128,
        n_ubatch=128,
        n_seq_max=8,
        n_outputs_max=16,
        n_threads=args.threads,
        n_threads_batch=args.threads,
    )


def random_request(numbers: random.Random, i: int, most: int) -> Request:
    """Anything that a client may ask for."""
    shared = " ".join(WORDS[: numbers.choice([0, 8, 20])])
    own = " ".join(numbers.choice(WORDS) for _ in range(numbers.randrange(1, 60)))
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=SCHEMA)
    sampling = SamplingParams(
        temperature=numbers.choice([0.0, 0.8, 1.2]),
        max_tokens=numbers.randrange(1, most),
        n=numbers.choice([1, 1, 1, 1, 2, 3]),
        stop=numbers.choice([(), (), (" the",), (".", "\n")]),
        logprobs=numbers.choice([None, None, None, 3]),
        seed=numbers.choice([None, i]),
        grammar=numbers.choice([None] * 9 + [grammar]),
        repeat_penalty=numbers.choice([1.0, 1.1]),
    )
    return Request(
        id=f"soak-{i}",
        prompt=f"{shared} {own}",
        sampling=sampling,
        priority=numbers.choice(list(Priority)),
        overflow=numbers.choice(list(Overflow)),
        n_keep=numbers.randrange(0, 8),
        cache_prompt=numbers.random() < 0.9,
    )


async def one(engine: Engine, request: Request, stop_after: int | None, *, leaves: bool) -> str:
    """Read a request to its end; after ``stop_after`` events leave it, or ask for its end."""
    stream = engine.generate(request)
    n = 0
    async for event in stream:
        n += 1
        if event.is_last:
            return str(event.finish_reason)
        if stop_after is None or n <= stop_after:
            continue
        if leaves:
            await stream.aclose()
            return "left"
        await engine.cancel(request.id)
        stop_after = None
    return "no end"


async def soak(args: argparse.Namespace) -> int:
    """Run them all, a few dozen at a time; 1 when something is left over."""
    numbers = random.Random(args.seed)
    options = EngineOptions(max_waiting=args.requests, spec="ngram", script=Script())
    engine = await Engine.load(make_plan(args), backend=args.backend, options=options)
    child = psutil.Process(engine.pid)
    gate = asyncio.Semaphore(args.concurrency)
    ends: dict[str, int] = {}
    memory: list[int] = []

    async def guarded(i: int) -> None:
        async with gate:
            stop_after = numbers.choice([None, None, None, numbers.randrange(0, 20)])
            request = random_request(numbers, i, args.most)
            end = await one(engine, request, stop_after, leaves=numbers.random() < 0.5)
            ends[end] = ends.get(end, 0) + 1
            if sum(ends.values()) % max(1, args.requests // 10) == 0:
                memory.append(child.memory_info().rss)
                print(f"{sum(ends.values())} of {args.requests}", flush=True)

    began = time.monotonic()
    await asyncio.gather(*(guarded(i) for i in range(args.requests)))
    await asyncio.sleep(0.2)
    stats = await engine.stats()
    await engine.close()
    print(f"{args.requests} requests in {time.monotonic() - began:.1f} s: {ends}")
    print(f"child's memory, MiB: {[m >> 20 for m in memory]}")
    print(
        f"steps {stats.n_steps}, preemptions {stats.preemptions}, prefix hits {stats.prefix_hits}, "
        f"misses {stats.prefix_misses}, guessed {stats.drafted_tokens}/{stats.accepted_tokens}"
    )
    wrong = left_over(stats, memory) + ["a stream without an end"] * ends.get("no end", 0)
    print("\n".join(wrong) or "nothing is left over")
    return 1 if wrong else 0


def left_over(stats: EngineStats, memory: list[int]) -> list[str]:
    """What the engine still holds that it should not, in words."""
    wrong = []
    if stats.running or stats.waiting or stats.preempted:
        wrong.append(f"sequences: {stats.running} run, {stats.waiting + stats.preempted} wait")
    if stats.cells_used != stats.cells_retained:
        wrong.append(f"cells: {stats.cells_used} used, {stats.cells_retained} by kept prefixes")
    if stats.requests_failed:
        wrong.append(f"{stats.requests_failed} requests failed")
    growth = memory[-1] - memory[len(memory) // 3] if memory else 0
    if growth > MEMORY_SLACK:
        wrong.append(f"memory grew by {growth >> 20} MiB in the last two thirds")
    return wrong


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--backend", default="llama", choices=("llama", "scripted"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--most", type=int, default=60, help="most tokens of an answer")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--ngl", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    sys.exit(asyncio.run(soak(parser.parse_args())))


if __name__ == "__main__":
    main()
