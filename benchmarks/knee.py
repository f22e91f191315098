#!/usr/bin/env python3
"""Where is the knee? A sweep by hand, with the trials that `edgellm tune` makes.

    python benchmarks/knee.py starter --rounds 2 --grid parallel=1,2,4,8,16 --out sweep.jsonl
    python benchmarks/knee.py starter --grid parallel=8,threads=1,2,4 --grid parallel=8,ubatch=64
    python benchmarks/knee.py --table sweep.jsonl

Every --grid is a product of plan settings. All points are measured once, then all again: a slow
minute of the machine is shared by all of them. A line is written for every trial.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
from pathlib import Path

import msgspec

from edgellm.bench.trial import EngineTrials, Workload
from edgellm.bench.tune import Settings, Trial, trial_key


def main() -> int:
    args = parse()
    if args.table:
        print(to_markdown([line for path in args.table for line in read(path)]))
        return 0
    print(to_markdown(asyncio.run(sweep(args))))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="starter")
    parser.add_argument("--grid", action="append", default=[])
    parser.add_argument("--for", dest="objective", default="throughput")
    parser.add_argument("--prompt-words", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out")
    parser.add_argument("--table", nargs="+")
    return parser.parse_args()


def points(grids: list[str]) -> list[Settings]:
    """``parallel=8,threads=1,2`` -> [{plan.parallel: 8, plan.threads: 1}, {..: 8, ..: 2}]"""
    out: list[Settings] = []
    for grid in grids:
        axes: dict[str, list[int]] = {}
        for word in grid.split(","):
            name, is_new, value = word.rpartition("=")
            if is_new:
                axes[f"plan.{name}"] = []
            axes[list(axes)[-1]].append(int(value))
        out += [
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        ]
    return [point for i, point in enumerate(out) if point not in out[:i]]


async def sweep(args: argparse.Namespace) -> list[Trial]:
    """Every point, round after round."""
    work = Workload(
        objective=args.objective, prompt_words=args.prompt_words, max_tokens=args.max_tokens
    )
    measure = EngineTrials(args.model, work)
    out = []
    for number in range(args.rounds):
        for point in points(args.grid):
            out.append(await measure(point, number))
            line = msgspec.json.encode(out[-1]) + b"\n"
            print(point, out[-1].score, out[-1].reason, file=sys.stderr, flush=True)
            if args.out:
                with Path(args.out).open("ab") as file:
                    file.write(line)
    return out


def read(path: str) -> list[Trial]:
    """The trials of an earlier sweep, or of a search's journal."""
    return [msgspec.json.decode(line, type=Trial) for line in Path(path).read_bytes().splitlines()]


def to_markdown(trials: list[Trial]) -> str:
    """The median score of each point, the best in bold."""
    scores: dict[str, list[float]] = {}
    names: dict[str, str] = {}
    for trial in trials:
        key = trial_key(trial.settings, -1)
        names[key] = " ".join(f"{k[5:]}={v}" for k, v in trial.settings.items()) or "the plan"
        scores.setdefault(key, [])
        if trial.score is not None:
            scores[key].append(trial.score)
    medians = {key: statistics.median(values) for key, values in scores.items() if values}
    out = ["| settings | output tok/s, median [lowest, highest] |", "|---|---|"]
    for key, middle in medians.items():
        shown = f"{middle:.1f} [{min(scores[key]):.1f}, {max(scores[key]):.1f}]"
        mark = "**" if middle == max(medians.values()) else ""
        out.append(f"| {names[key]} | {mark}{shown}{mark} |")
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
