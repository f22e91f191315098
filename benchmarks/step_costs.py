"""What a step of streams costs over HTTP, by process: CPU, waiting for a core, context switches.

    python benchmarks/step_costs.py starter --llama-server bin/llama-server --streams 1,8 --heats 10

Counters say where a token's time goes when rates only say that it is gone: the engine's threads,
the server, and this client share the cores. All servers stay loaded and are driven in turn, in a
new order each heat; figures are medians over the heats, milliseconds and switches a step, while
every stream produces. --other NAME=FOLDER adds edgellm from another checkout. Linux (/proc).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import starmap
from pathlib import Path

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parent))

from versus import run

from edgellm.bench.contests import Heat, Sizes
from edgellm.bench.load import Driver
from edgellm.bench.sample import Job
from edgellm.bench.scenarios import make_jobs, scenario_from
from edgellm.bench.target import (
    RunningServer,
    ServerSpec,
    Target,
    edgellm_spec,
    llama_server_spec,
)
from edgellm.store import catalog

COUNTERS = ("cpu", "wait", "sleeps", "preempted")
"""Milliseconds on a core and ready for one; voluntary and involuntary switches."""
Row = dict[str, float]


def counters(pids: Sequence[int]) -> tuple[float, ...]:
    """The sum over all threads of these processes (/proc/PID/task/TID/schedstat and status)."""
    totals = [0.0] * len(COUNTERS)
    for path in (p for pid in pids for p in Path(f"/proc/{pid}/task").glob("*")):
        for i, value in enumerate(_of_thread(path)):
            totals[i] += value
    return tuple(totals)


def _of_thread(path: Path) -> tuple[float, ...]:
    try:
        on_cpu, waited, _ = map(int, (path / "schedstat").read_text().split())
        lines = (path / "status").read_text().splitlines()
    except OSError:  # it ended
        return ()
    switches = {k: int(v) for k, _, v in (x.partition(":") for x in lines) if "ctxt_sw" in k}
    sleeps = switches["voluntary_ctxt_switches"]
    return on_cpu / 1e6, waited / 1e6, sleeps, switches["nonvoluntary_ctxt_switches"]


def jobs_of(heat: Heat) -> Iterator[Job]:
    """Prompts that nobody has seen."""
    sizes = heat.sizes
    scenario = scenario_from("batch", prompt_words=sizes.prompt_words, max_tokens=sizes.max_tokens)
    return make_jobs(scenario, heat.target.model, heat.seed)


async def measure(heat: Heat) -> Row:
    """One wave of streams: counters from the moment when all produce to the end of the first."""
    driver, n = Driver(heat.target.endpoint), heat.concurrency
    jobs = jobs_of(heat)
    tasks = [asyncio.create_task(driver.send(next(jobs))) for _ in range(n)]
    while driver.n_producing() < n and not any(task.done() for task in tasks):
        await asyncio.sleep(0.02)
    groups = {"client": [os.getpid()]}
    if heat.target.pid is not None:
        children = psutil.Process(heat.target.pid).children(recursive=True)
        groups |= {"server": [heat.target.pid], "engine": [child.pid for child in children]}
    count, began = driver.n_arrivals(), time.monotonic()
    before = {name: counters(pids) for name, pids in groups.items()}
    # Not to the very end: a stream that is over makes the others' steps cheaper.
    while driver.fewest_arrivals() < heat.sizes.max_tokens - 4 and not any(
        task.done() for task in tasks
    ):
        await asyncio.sleep(0.05)
    after = {name: counters(pids) for name, pids in groups.items()}
    n_steps = max(1, driver.n_arrivals() - count) / n
    row = {"step": (time.monotonic() - began) * 1e3 / n_steps}
    await asyncio.gather(*tasks)
    for name in groups:
        spent = [b - a for a, b in zip(before[name], after[name], strict=True)]
        row |= {f"{name} {c}": x / n_steps for c, x in zip(COUNTERS, spent, strict=True)}
    return row


def specs(args: argparse.Namespace, path: str) -> list[ServerSpec]:
    """The servers to compare, edgellm first."""
    ours = ["--ctx", str(args.ctx), "--parallel", str(args.parallel)]
    out = [edgellm_spec(path, ours)]
    for pair in args.other:
        name, _, folder = pair.partition("=")
        spec = edgellm_spec(path, ours, name=name)
        out.append(msgspec.structs.replace(spec, environment={"PYTHONPATH": folder}))
    if args.llama_server:
        flags = ["-c", str(args.ctx), "-np", str(args.parallel)]
        out.append(llama_server_spec(args.llama_server, path, flags))
    return out


async def compare(args: argparse.Namespace) -> None:
    """Every server at every number of streams."""
    path = str(catalog.resolve(args.model).path or args.model)
    sizes = Sizes(max_tokens=args.tokens)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        targets = [await enter(RunningServer(spec)) for spec in specs(args, path)]
        for n in map(int, args.streams.split(",")):
            rows: dict[str, list[Row]] = {target.name: [] for target in targets}
            for number in range(-1, args.heats):  # the first one warms up
                for target in random.sample(targets, len(targets)):
                    row = await measure(_heat(target, n, sizes, number))
                    if number >= 0:
                        rows[target.name].append(row)
            show(n, rows)


def _heat(target: Target, n: int, sizes: Sizes, number: int) -> Heat:
    seed = f"{target.name}/{n}/{number}"
    return Heat(target=target, concurrency=n, sizes=sizes, seed=seed)


def show(n: int, rows: dict[str, list[Row]]) -> None:
    """A line a server and process."""
    base = next(iter(rows.values()))
    for name, found in rows.items():
        ratio = statistics.median(starmap(_ratio, zip(base, found, strict=True)))
        step = statistics.median(row["step"] for row in found)
        print(f"{n} streams, {name}: {step:.2f} ms a step, {ratio:.3f} of the first one's rate")
        for who in ("engine", "server", "client"):
            if f"{who} cpu" in found[0]:
                values = (statistics.median(row[f"{who} {c}"] for row in found) for c in COUNTERS)
                print(f"    {who:7}", "  ".join(map(_shown, COUNTERS, values)), flush=True)


def _ratio(base: Row, row: Row) -> float:
    return base["step"] / row["step"]


def _shown(name: str, value: float) -> str:
    return f"{name} {value:.3f}" + (" ms" if name in ("cpu", "wait") else "")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--llama-server")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--heats", type=int, default=10)
    parser.add_argument("--ctx", type=int, default=16384)
    parser.add_argument("--parallel", type=int, default=8)
    run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
