"""Two or more servers on the same file: alternating heats, medians, ratios, one document.

Every server stays loaded while the others are driven (or is started for its own heats alone, with
``in_turn``); the order changes from round to round, so that a drift of the machine hits all alike.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from edgellm.bench.contests import CONTESTS, LEVELLED, Figures, Heat, Sizes, warm_up
from edgellm.bench.machine import (
    MAX_OTHER_CPU,
    Machine,
    conditions,
    describe_machine,
    moment,
    safety_warnings,
)
from edgellm.bench.stats import METRICS, Stat, over_repeats, stat_of
from edgellm.bench.target import RunningServer, ServerSpec, Target
from edgellm.errors import EngineError

SCHEMA: Final = "edgellm.versus/1"
RAW: Final = "llama-batched-bench"
"""The library alone, no server: the name its rates are kept under."""

KEY_FIGURES: Final[dict[str, tuple[str, ...]]] = {
    "distinct": ("output_tps", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "itl_p99_s"),
    "decode": ("steady_output_tps", "tpot_p50_s", "step_python_s"),
    "shared": (
        "ttft_p50_s",
        "ttft_p99_s",
        "again_ttft_p50_s",
        "again_ttft_p99_s",
        "cached_ratio",
    ),
    "mixed": ("output_tps", "ttft_p50_s", "ttft_p99_s", "itl_p99_s"),
    "long": (
        "worst_over_calm",
        "worst_itl_s",
        "calm_itl_p50_s",
        "during_itl_p50_s",
        "intruder_ttft_s",
    ),
    "disconnects": ("ttft_p50_s", "ttft_p99_s", "stayer_e2e_p50_s", "whole_s"),
    "interactive": ("ttft_p50_s", "ttft_max_s", "idle_ttft_s", "chunk_ttft_s", "ttft_over_fair"),
}
OWN_TITLES: Final = {
    "again_ttft_p50_s": "TTFT p50 of as many again",
    "again_ttft_p99_s": "TTFT p99 of as many again",
    "worst_over_calm": "worst ITL while the long prompt is read / calm median",
    "worst_itl_s": "worst ITL while the long prompt is read",
    "calm_itl_p50_s": "ITL p50 before it came",
    "during_itl_p50_s": "ITL p50 while it is read",
    "intruder_ttft_s": "TTFT of the long prompt",
    "stayer_e2e_p50_s": "e2e p50 of those that stayed",
    "whole_s": "the whole contest",
    "idle_ttft_s": "TTFT of an idle server",
    "chunk_ttft_s": "TTFT of a 400-word prompt, idle",
    "ttft_over_fair": "worst urgent TTFT / (twice the idle one and a chunk)",
    "step_python_s": "schedule + deliver, a step",
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Contests that share one server configuration: slots and cells."""

    contests: tuple[str, ...]
    n_seq: int
    n_ctx: int
    levels: tuple[int, ...]
    """Concurrencies of the contests that are run at several; the others use n_seq."""


class Entry(msgspec.Struct, kw_only=True):
    """One contest at one concurrency: every round's figures, by server."""

    contest: str
    concurrency: int
    rounds: dict[str, list[Figures]] = msgspec.field(default_factory=dict)

    def stats(self, server: str) -> dict[str, Stat]:
        """Medians and spread of one server."""
        return over_repeats(self.rounds.get(server, []))

    def ratio(self, name: str, server: str, peer: str) -> Stat | None:
        """``server`` / ``peer`` of one figure, round by round."""
        pairs = zip(self.rounds.get(server, []), self.rounds.get(peer, []), strict=False)
        ratios = [a[name] / b[name] for a, b in pairs if a.get(name) is not None and b.get(name)]
        return stat_of(ratios) if ratios else None


class Outcome(msgspec.Struct, kw_only=True):
    """Everything a comparison found, with what it was found on."""

    schema: str = SCHEMA
    model: str
    machine: Machine
    sizes: Sizes
    started: str
    servers: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    entries: list[Entry] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)
    other_cpu: list[float] = msgspec.field(default_factory=list)
    """Each heat's share of the CPU that neither the client nor the server used."""

    def entry(self, contest: str, concurrency: int) -> Entry:
        """The entry of a contest, made when it is new."""
        for entry in self.entries:
            if (entry.contest, entry.concurrency) == (contest, concurrency):
                return entry
        self.entries.append(Entry(contest=contest, concurrency=concurrency))
        return self.entries[-1]


MakeSpecs = Callable[[Setting], list[ServerSpec]]
Say = Callable[[str], None]


class Comparison:
    """Drives servers through contests and gathers what they show in one outcome."""

    def __init__(
        self,
        outcome: Outcome,
        specs: MakeSpecs,
        *,
        rounds: int,
        say: Say,
        after_heat: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        """``after_heat`` is called with what is known so far: an interrupted run keeps it."""
        self.outcome = outcome
        self._specs = specs
        self._rounds = rounds
        self._say = say
        self._after_heat = after_heat

    async def together(self, setting: Setting) -> None:
        """All servers loaded, driven alternately."""
        async with AsyncExitStack() as stack:
            targets = [await self._start(stack, setting, spec) for spec in self._specs(setting)]
            for contest, level in heats_of(setting):
                for number in range(self._rounds):
                    for target in targets if number % 2 == 0 else targets[::-1]:
                        await self._heat(target, contest, level, number)

    async def in_turn(self, setting: Setting) -> None:
        """One server loaded at a time, started anew in every round."""
        for number in range(self._rounds):
            specs = self._specs(setting)
            for spec in specs if number % 2 == 0 else specs[::-1]:
                async with AsyncExitStack() as stack:
                    target = await self._start(stack, setting, spec)
                    for contest, level in heats_of(setting):
                        await self._heat(target, contest, level, number)

    async def _start(self, stack: AsyncExitStack, setting: Setting, spec: ServerSpec) -> Target:
        self._say(f"starting {spec.name}: {' '.join(spec.command) or spec.url}")
        target = await stack.enter_async_context(RunningServer(spec))
        about = {"command": list(spec.command), **target.about}
        self.outcome.servers.setdefault(spec.name, about)
        await warm_up(self._heat_of(target, setting.n_seq, "warm"))
        return target

    def _heat_of(self, target: Target, level: int, seed: str) -> Heat:
        sizes = self.outcome.sizes
        return Heat(target=target, concurrency=level, sizes=sizes, seed=seed)

    async def _heat(self, target: Target, contest: str, level: int, number: int) -> None:
        seed = f"{self.outcome.started}/{contest}/{level}/{number}"
        pids = [] if target.pid is None else [target.pid]
        before = moment(pids)
        figures = await CONTESTS[contest](self._heat_of(target, level, seed))
        seen = conditions(before, moment(pids))
        entry = self.outcome.entry(contest, level)
        entry.rounds.setdefault(target.name, []).append(figures)
        where = f"{contest} x{level} {target.name} round {number + 1}"
        if pids:
            self.outcome.other_cpu.append(seen.other_cpu)
        warnings = safety_warnings(seen, knows_server=False)
        self.outcome.warnings += [f"{where}: {w}" for w in warnings]
        self._say(f"  {where}: {summary_line(contest, figures)}")
        self._after_heat(self.outcome)


def heats_of(setting: Setting) -> list[tuple[str, int]]:
    """(contest, concurrency) of everything that one configuration is asked."""
    alone = min(8, setting.n_seq)
    return [
        (contest, level)
        for contest in setting.contests
        for level in (setting.levels if contest in LEVELLED else (alone,))
    ]


def summary_line(contest: str, figures: Figures) -> str:
    """A heat in one line, errors first."""
    failed = figures.get("error_ratio", 0.0)
    names = [name for name in KEY_FIGURES[contest] if name in figures]
    shown = [f"{name} {format_figure(name, figures[name])}" for name in names]
    return ", ".join([f"{failed:.0%} FAILED"] * bool(failed) + shown)


def batched_bench(
    binary: str, model: str, levels: Sequence[int], sizes: Sizes, flags: Sequence[str] = ()
) -> dict[int, float]:
    """llama-batched-bench's decode rate (tok/s) at each level: the library with no server."""
    n_ctx = max(levels) * (sizes.prompt_words + sizes.max_tokens + 64)
    folder = str(Path(binary).resolve().parent)
    command = [binary, "-m", model, "-c", str(n_ctx), "-npp", str(sizes.prompt_words)]
    command += ["-ntg", str(sizes.max_tokens), "-npl", ",".join(map(str, levels))]
    command += ["--output-format", "jsonl", *flags]
    paths = os.pathsep.join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": paths},
    )
    if done.returncode != 0:
        raise EngineError(f"{binary} failed ({done.returncode}): {done.stderr[-500:]}")
    return parse_batched_bench(done.stdout)


def parse_batched_bench(text: str) -> dict[int, float]:
    """``pl`` -> ``speed_tg`` of its JSON lines."""
    rows = [msgspec.json.decode(x) for x in text.splitlines() if x.startswith("{")]
    return {int(row["pl"]): float(row["speed_tg"]) for row in rows}


def add_raw(outcome: Outcome, rates: dict[int, float]) -> None:
    """Keep batched-bench's rates beside the ``decode`` entries."""
    for level, rate in rates.items():
        rounds = outcome.entry("decode", level).rounds.setdefault(RAW, [])
        rounds.append({"steady_output_tps": rate})


def figure_title(name: str) -> str:
    """How a figure is called in tables."""
    return OWN_TITLES.get(name) or (METRICS[name].title if name in METRICS else name)


def format_figure(name: str, value: float) -> str:
    """A figure with its unit, three digits or so."""
    if name.endswith("_s"):
        return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"
    if name.endswith(("ratio", "_over_idle", "_over_calm")):
        return f"{value:.2f}"
    return f"{value:.1f}"


def new_outcome(model: str, sizes: Sizes, started: str) -> Outcome:
    """An empty outcome on this machine."""
    return Outcome(model=model, machine=describe_machine(), sizes=sizes, started=started)


def to_markdown(outcome: Outcome) -> str:
    """Tables of medians and ratios: the first server's figures over each other server's."""
    first, *peers = outcome.servers or ["nothing"]
    lines = [*_heading(outcome), ""]
    for contest in KEY_FIGURES:
        entries = [e for e in outcome.entries if e.contest == contest]
        if entries:
            about = " ".join((CONTESTS[contest].__doc__ or "").replace("``", "`").split())
            lines += [f"## {contest}", "", about, ""]
            lines += [*_table(contest, entries, first, peers), ""]
    warnings = [*_disturbance(outcome.other_cpu), *dict.fromkeys(outcome.warnings)]
    if warnings:
        lines += ["## Warnings", "", *(f"- {w}" for w in warnings), ""]
    return "\n".join(lines)


def _disturbance(other_cpu: Sequence[float]) -> list[str]:
    disturbed = sum(share > MAX_OTHER_CPU for share in other_cpu)
    if not disturbed:
        return []
    return [
        f"other processes used more than {MAX_OTHER_CPU:.0%} of the CPU in {disturbed} of "
        f"{len(other_cpu)} heats, {max(other_cpu):.0%} at most"
    ]


def _heading(outcome: Outcome) -> list[str]:
    m = outcome.machine
    gpus = "; ".join(f"{g.name}, driver {g.driver}" for g in m.gpus) or "no GPU"
    lines = [
        f"# {Path(outcome.model).name}: {' against '.join(outcome.servers)}",
        "",
        f"{outcome.started}. {m.cpu}, {m.n_cores} cores; {gpus}. {m.os}, Python {m.python}, "
        f"edgellm {m.edgellm}, llama-cpp-python {m.llama_cpp}.",
        "",
        "Medians over the rounds; a ratio is the median of the rounds' own ratios, with the "
        "lowest and the highest in brackets.",
        "",
    ]
    for name, about in outcome.servers.items():
        command = [Path(word).name if "/" in word else word for word in about.get("command", [])]
        lines.append(f"- **{name}**: `{' '.join(command) or 'already running'}`")
    return lines


def _table(contest: str, entries: Sequence[Entry], first: str, peers: Sequence[str]) -> list[str]:
    others = [*peers, *([RAW] if any(RAW in e.rounds for e in entries) else [])]
    head = ["streams", "figure", first]
    for peer in others:
        head += [peer, f"{first} / {peer}"]
    rows = [_row(e, name, first, others) for e in entries for name in KEY_FIGURES[contest]]
    table = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return table + ["| " + " | ".join(row) + " |" for row in rows if row]


def _row(entry: Entry, name: str, first: str, others: Sequence[str]) -> list[str]:
    mine = entry.stats(first).get(name)
    if mine is None:
        return []
    row = [str(entry.concurrency), figure_title(name), format_figure(name, mine.median)]
    for peer in others:
        theirs = entry.stats(peer).get(name)
        ratio = entry.ratio(name, first, peer)
        row.append("" if theirs is None else format_figure(name, theirs.median))
        row.append(
            "" if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        )
    return row
