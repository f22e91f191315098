#!/usr/bin/env python3
"""edgellm beside other servers on the same file, on this machine.

    python benchmarks/versus.py model.gguf --llama-server bin/llama-server \\
        --batched-bench bin/llama-batched-bench --concurrency 1,8,32 --goals gpu --out results/h200

    python benchmarks/versus.py starter --llama-server bin/llama-server --concurrency 1,4,8 --quick

Both servers get the same file, the same number of slots and the same number of cells, and drive
alternately after a warm-up. --edgellm-args and --llama-args pass flags on; --url NAME=URL adds a
server that already runs. Results are written after every heat, so an interrupted run keeps what it
had. Needs nothing beyond edgellm's own dependencies.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import shlex
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgellm.bench.contests import CONTESTS, Sizes
from edgellm.bench.target import (
    ServerSpec,
    edgellm_spec,
    llama_cpp_python_spec,
    llama_server_spec,
)
from edgellm.bench.versus import (
    RAW,
    Comparison,
    Outcome,
    Setting,
    add_raw,
    batched_bench,
    new_outcome,
    to_markdown,
)
from edgellm.store import catalog

# What edgellm sets out to reach: (contest, streams or None, figure, against, bound, at least?).
Goal = tuple[str, "int | None", str, "str | None", float, bool]
GOALS: dict[str, list[Goal]] = {
    "gpu": [
        ("distinct", 1, "output_tps", "llama-server", 1.05, True),
        ("distinct", 8, "output_tps", "llama-server", 2.2, True),
        ("distinct", 32, "output_tps", "llama-server", 3.5, True),
        ("decode", 1, "steady_output_tps", RAW, 0.95, True),
        ("decode", 8, "steady_output_tps", RAW, 0.9, True),
        ("decode", 32, "steady_output_tps", RAW, 0.75, True),
        ("decode", 32, "step_python_s", None, 0.0007, False),
        ("shared", None, "ttft_p50_s", "llama-server", 0.15, False),
        ("shared", None, "ttft_p99_s", "llama-server", 0.2, False),
        ("long", None, "worst_over_calm", None, 3.0, False),
        ("interactive", None, "ttft_over_fair", None, 1.0, False),
    ],
    "cpu": [
        *(("distinct", n, "output_tps", "llama-server", 1.0, True) for n in (1, 4, 8)),
        *(("decode", n, "steady_output_tps", RAW, 0.9, True) for n in (1, 4, 8)),
        ("shared", None, "ttft_p50_s", "llama-server", 0.5, False),
        ("shared", None, "ttft_p99_s", "llama-server", 0.1, False),
        ("long", None, "worst_over_calm", None, 4.0, False),
        ("interactive", None, "ttft_over_fair", None, 1.0, False),
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    outcome = new_outcome(args.model, sizes_of(args), now)
    run(contest(args, outcome))
    write(outcome, args.out)
    print(to_markdown(outcome))
    print_goals(outcome, args.goals)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", help="a GGUF file, or a name that edgellm knows")
    p.add_argument("--llama-server", help="the llama-server binary")
    p.add_argument("--batched-bench", help="the llama-batched-bench binary: the library's own rate")
    p.add_argument("--llama-cpp-python", action="store_true", help="also llama_cpp.server")
    p.add_argument("--url", action="append", default=[], metavar="NAME=URL")
    p.add_argument("--no-edgellm", action="store_true")
    p.add_argument("--contests", default=",".join(CONTESTS))
    p.add_argument("--concurrency", default="1,8,32")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--ctx-seq", type=int, default=2048, help="cells a slot")
    p.add_argument("--long-words", type=int, default=6500)
    p.add_argument("--long-ctx-seq", type=int, help="cells a slot in the long contest")
    p.add_argument("--long-parallel", type=int, default=6, help="slots in the long contest")
    p.add_argument("--edgellm-args", default="", help="further flags of edgellm serve")
    p.add_argument("--llama-args", default="", help="further flags of llama-server")
    p.add_argument("--bench-args", default="", help="further flags of llama-batched-bench")
    p.add_argument("--in-turn", action="store_true", help="one server loaded at a time")
    p.add_argument("--quick", action="store_true", help="a look, not a measurement")
    p.add_argument("--goals", choices=sorted(GOALS))
    p.add_argument("--out", help="results go to OUT.json and OUT.md")
    args = p.parse_args(argv)
    args.path = str(catalog.resolve(args.model).path or args.model)
    return args


def sizes_of(args: argparse.Namespace) -> Sizes:
    if not args.quick:
        return Sizes(long_words=args.long_words)
    return Sizes(
        max_tokens=32,
        shared_words=300,
        shared_tokens=8,
        long_words=min(args.long_words, 600),
        n_running=2,
        n_batch=6,
        batch_tokens=64,
        interactive_tokens=8,
        requests_a_stream=1,
        min_requests=2,
        settle_s=0.5,
    )


def run(main: Coroutine[Any, Any, None]) -> None:
    """On uvloop where it exists: the client shares the cores with what it measures."""
    try:
        import uvloop
    except ImportError:  # Windows
        asyncio.run(main)
        return

    class Loop(uvloop.Loop):
        def time(self) -> float:
            return time.monotonic()  # its own moves in whole milliseconds

    loop = Loop()
    try:
        loop.run_until_complete(main)
    finally:
        loop.close()


async def contest(args: argparse.Namespace, outcome: Outcome) -> None:
    levels = tuple(int(c) for c in args.concurrency.split(","))
    names = [name.strip() for name in args.contests.split(",")]
    unknown = [name for name in names if name not in CONTESTS]
    if unknown:
        raise SystemExit(f"no contest {', '.join(unknown)}; there are {', '.join(CONTESTS)}")
    if args.batched_bench and "decode" in names:
        flags = shlex.split(args.bench_args)
        for number in range(args.rounds):
            say(f"llama-batched-bench round {number + 1}")
            add_raw(
                outcome, batched_bench(args.batched_bench, args.path, levels, outcome.sizes, flags)
            )
    comparison = Comparison(
        outcome,
        lambda setting: specs(args, setting),
        rounds=args.rounds,
        say=say,
        after_heat=lambda o: write(o, args.out),
    )
    for setting in settings(args, names, levels):
        await (comparison.in_turn if args.in_turn else comparison.together)(setting)


def settings(args: argparse.Namespace, names: list[str], levels: tuple[int, ...]) -> list[Setting]:
    n_seq = max(levels)
    short = tuple(n for n in names if n != "long")
    out = []
    if short:
        out.append(Setting(contests=short, n_seq=n_seq, n_ctx=n_seq * args.ctx_seq, levels=levels))
    if "long" in names:
        # Words are a little over one token each; the answer and the template need room too.
        each = args.long_ctx_seq or -(-int(args.long_words * 1.2) // 256) * 256
        n = args.long_parallel
        out.append(Setting(contests=("long",), n_seq=n, n_ctx=n * each, levels=(n,)))
    return out


def specs(args: argparse.Namespace, setting: Setting) -> list[ServerSpec]:
    cells, slots = str(setting.n_ctx), str(setting.n_seq)
    out = []
    if not args.no_edgellm:
        flags = ["--ctx", cells, "--parallel", slots, *shlex.split(args.edgellm_args)]
        out.append(edgellm_spec(args.path, flags))
    if args.llama_server:
        flags = ["-c", cells, "-np", slots, *shlex.split(args.llama_args)]
        out.append(llama_server_spec(args.llama_server, args.path, flags))
    if args.llama_cpp_python:
        out.append(llama_cpp_python_spec(args.path, ["--n_ctx", cells]))
    for pair in args.url:
        name, _, url = pair.partition("=")
        out.append(ServerSpec(name=name, url=url))
    return out


def write(outcome: Outcome, out: str | None) -> None:
    if out is None:
        return
    base = Path(out)
    base.parent.mkdir(parents=True, exist_ok=True)
    document = msgspec.json.format(msgspec.json.encode(outcome), indent=1)
    base.with_name(base.name + ".json").write_bytes(document)
    base.with_name(base.name + ".md").write_text(to_markdown(outcome), encoding="utf-8")


def print_goals(outcome: Outcome, kind: str | None) -> None:
    for contest_name, streams, figure, against, bound, at_least in GOALS.get(kind or "", []):
        for entry in outcome.entries:
            if entry.contest != contest_name or streams not in (None, entry.concurrency):
                continue
            if against is None:
                stat = entry.stats("edgellm").get(figure)
            else:
                stat = entry.ratio(figure, "edgellm", against)
            if stat is None:
                continue
            good = stat.median >= bound if at_least else stat.median <= bound
            sign = ">=" if at_least else "<="
            print(
                f"{'reached' if good else 'SHORT  '} {contest_name} x{entry.concurrency} {figure} "
                f"{'/ ' + against if against else ''}: {stat.median:.4g} (goal {sign} {bound:g})"
            )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
