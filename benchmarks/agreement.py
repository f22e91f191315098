#!/usr/bin/env python3
"""`edgellm bench` held against another load client, on the same servers, in turns.

    python benchmarks/agreement.py starter --llama-server bin/llama-server --rounds 3

Both clients ask for the same number of requests of the same lengths at the same concurrency. They
go alternately, the order changing from round to round; a figure agrees when the difference of the
medians is no larger than what each client's own rounds differ by (2 % at least). `--tool` names
another client that prints plain_load.py's lines. `--only NAME` measures one server, `--out FILE`
adds a JSON line a run, `--table FILE...` prints what such files hold. With `--together` both run at
the same time, each with half the slots: then they see the same machine, however busy it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from edgellm.bench.target import RunningServer, ServerSpec, Target, edgellm_spec, llama_server_spec
from edgellm.store import catalog

PLAIN = str(Path(__file__).with_name("plain_load.py"))
FIGURES = ("output tok/s", "requests/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
LEAST = 0.02
"""Two medians nearer than this are equal, however still the machine was."""
Figures = dict[str, dict[str, float]]
"""Level -> figure -> value; times in milliseconds."""


def main() -> int:
    args = parse()
    if args.table:
        lines = [line for path in args.table for line in Path(path).read_text().splitlines()]
        print(to_markdown([json.loads(line) for line in lines]))
        return 0
    print(to_markdown(asyncio.run(measure(args))))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="starter")
    parser.add_argument("--llama-server")
    parser.add_argument("--tool", default=PLAIN, help="the other client")
    parser.add_argument("--only", help="measure this server alone")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-c", default="1,4,8")
    parser.add_argument("-n", type=int, default=16)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out")
    parser.add_argument("--table", nargs="+")
    return parser.parse_args()


def specs(args: argparse.Namespace) -> list[ServerSpec]:
    """The servers, with equal slots and cells."""
    n_seq = max(map(int, args.c.split(","))) * (2 if args.together else 1)
    cells = str(1024 * n_seq)
    out = [edgellm_spec(args.model, ["--ctx", cells, "--parallel", str(n_seq)])]
    if args.llama_server:
        path = str(catalog.resolve(args.model).path)
        flags = ["-c", cells, "-np", str(n_seq)]
        out.append(llama_server_spec(args.llama_server, path, flags))
    return [spec for spec in out if args.only in (None, spec.name)]


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every server, every round, both clients."""
    rows = []
    for spec in specs(args):
        async with RunningServer(spec) as target:
            for number in range(args.rounds):
                for name, levels, cpu_s in await both(target, args, number):
                    row = {"server": spec.name, "client": name, "round": number}
                    rows.append({**row, "levels": levels, "client_cpu_s": cpu_s})
                    keep(rows[-1], args.out)
    return rows


async def both(
    target: Target, args: argparse.Namespace, number: int
) -> list[tuple[str, Figures, float]]:
    """Both clients' figures and CPU seconds: in turns, or at the same time (no seconds then)."""
    pair = [("edgellm bench", by_bench), ("the other", by_other)]
    if args.together:
        found = await asyncio.gather(*(asyncio.to_thread(f, target, args) for _, f in pair))
        return [(name, levels, 0.0) for (name, _), levels in zip(pair, found, strict=True)]
    order = pair[:: 1 if number % 2 == 0 else -1]
    return [(name, *timed(client, target, args)) for name, client in order]


def keep(row: dict[str, Any], out: str | None) -> None:
    """Show a run at once, and write it down: an interrupted comparison keeps what it had."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    if out:
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def timed(client: Any, target: Target, args: argparse.Namespace) -> tuple[Figures, float]:
    """A client's figures, and the CPU seconds that its processes took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    levels = client(target, args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return levels, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def by_bench(target: Target, args: argparse.Namespace) -> Figures:
    """One repeat of `edgellm bench`. The other begins each prompt with its number: three tokens."""
    lengths = ["--prompt-words", str(args.prompt_words + 3), "--max-tokens", str(args.max_tokens)]
    loads = ["-s", "batch", "-c", args.c, "-n", str(args.n), "--repeats", "1", *lengths]
    command = [
        sys.executable,
        "-m",
        "edgellm",
        "bench",
        target.endpoint.url,
        *loads,
        "--no-save",
        "--json",
    ]
    run = json.loads(output_of(command))
    return {str(level["concurrency"]): bench_figures(level["stats"]) for level in run["levels"]}


def bench_figures(stats: dict[str, Any]) -> dict[str, float]:
    """A level of `edgellm bench --json` under this script's names."""

    def times(name: str, p: int) -> float:
        return float(1e3 * stats[f"{name}_p{p}_s"]["median"])

    return {
        "output tok/s": stats["output_tps"]["median"],
        "requests/s": stats["requests_per_s"]["median"],
        **{f"{k.upper()} p{p}": times(k, p) for k in ("ttft", "tpot") for p in (50, 99)},
        "prompt tokens": stats["n_prompt_mean"]["median"],
    }


def by_other(target: Target, args: argparse.Namespace) -> Figures:
    """One run of the other client."""
    lengths = ["--prompt-words", str(args.prompt_words), "--max-tokens", str(args.max_tokens)]
    # A seed of its own each time: a server that kept the prompts would answer from its cache.
    seed = os.urandom(4).hex()
    loads = ["--model", target.model, "-c", args.c, "-n", str(args.n), *lengths, "--seed", seed]
    lines = output_of([sys.executable, args.tool, target.endpoint.url, *loads]).splitlines()
    return {str(row["conc"]): other_figures(row) for row in map(json.loads, lines)}


def other_figures(row: dict[str, Any]) -> dict[str, float]:
    """A line of the other client under this script's names."""
    return {
        "output tok/s": row["out_tps"],
        "requests/s": row["rps"],
        **{f"{k.upper()} p{p}": row[f"{k}_p{p}"] for k in ("ttft", "tpot") for p in (50, 99)},
        "prompt tokens": row["prompt"],
    }


def output_of(command: list[str]) -> str:
    """What a client printed; its errors when it failed."""
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
        errors.seek(0)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()}{done.stdout}")
    return done.stdout


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """A table: medians of each client's rounds with the lowest and highest."""
    out = [
        "| server | streams | figure | edgellm bench | the other | difference | noise | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for server in dict.fromkeys(row["server"] for row in rows):
        own = [r for r in rows if r["server"] == server]
        for streams in own[0]["levels"]:
            out += [line(own, server, streams, figure) for figure in FIGURES]
    return "\n".join([*out, "", *costs(rows)])


def line(rows: list[dict[str, Any]], server: str, streams: str, figure: str) -> str:
    """One figure of both clients."""
    a, b = (values(rows, name, streams, figure) for name in ("edgellm bench", "the other"))
    difference = statistics.median(a) / statistics.median(b) - 1
    noise = max(LEAST, spread(a), spread(b))
    verdict = "agrees" if abs(difference) <= noise else "**differs**"
    cells = (server, streams, figure, shown(a), shown(b), f"{difference:+.1%}", f"{noise:.1%}")
    return f"| {' | '.join((*cells, verdict))} |"


def values(rows: list[dict[str, Any]], client: str, streams: str, figure: str) -> list[float]:
    """A figure's value in every round."""
    return [r["levels"][streams][figure] for r in rows if r["client"] == client]


def spread(given: list[float]) -> float:
    """(highest - lowest) / median."""
    return (max(given) - min(given)) / statistics.median(given)


def shown(given: list[float]) -> str:
    """``median [lowest, highest]``"""
    return f"{statistics.median(given):.4g} [{min(given):.4g}, {max(given):.4g}]"


def costs(rows: list[dict[str, Any]]) -> list[str]:
    """What each client itself took of the machine it measures."""
    out = []
    for client in ("edgellm bench", "the other"):
        taken = [row["client_cpu_s"] for row in rows if row["client"] == client]
        if not any(taken):
            continue
        out.append(f"- {client}: {statistics.median(taken):.2f} s of CPU a run, start included")
    return out


if __name__ == "__main__":
    sys.exit(main())
