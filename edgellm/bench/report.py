"""Runs in the terminal: tables with rich, plots with plotext."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

import plotext
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from edgellm.bench.archive import Entry
from edgellm.bench.results import (
    BenchRun,
    Change,
    Level,
    compare_runs,
    format_metric,
    settings_diff,
)
from edgellm.bench.stats import METRICS
from edgellm.units import format_bytes

# Rows of the main table. The p99 of few requests is marked in the warnings.
ROWS: Final = (
    "output_tps",
    "steady_output_tps",
    "requests_per_s",
    "goodput_ratio",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "itl_p50_s",
    "itl_p99_s",
    "e2e_p50_s",
    "e2e_p99_s",
    "prefill_tps_p50",
    "decode_tps_p50",
    "cached_ratio",
)
DIFF_METRICS: Final = (
    "output_tps",
    "requests_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "itl_p50_s",
    "itl_p99_s",
    "e2e_p50_s",
    "prefill_tps_p50",
    "decode_tps_p50",
    "goodput_ratio",
    "error_ratio",
)


def show_run(console: Console, run: BenchRun, number: int | None = None) -> None:
    """Everything a person wants to see first."""
    console.print(_title(run, number))
    console.print(_levels_table(run))
    for warning in run.warnings:
        console.print(Text(f"! {warning}", style="yellow"))


def _title(run: BenchRun, number: int | None) -> Text:
    text = Text()
    if number is not None:
        text.append(f"#{number} ", style="dim")
    text.append(f"{run.target.name} ", style="bold")
    scenario = run.config.scenario
    text.append(f"{PurePath(run.target.model).name}, {scenario.name}: {scenario.about}")
    if run.label:
        text.append(f"  [{run.label}]", style="cyan")
    text.append(f"\n{_machine_line(run)}", style="dim")
    return text


def _machine_line(run: BenchRun) -> str:
    m = run.machine
    gpus = ", ".join(f"{g.name} (driver {g.driver})" for g in m.gpus) or "no GPU"
    memory = ", ".join(f"{k} {format_bytes(v)}" for k, v in run.target.memory.items())
    parts = [run.started, f"{m.cpu} x{m.n_cores}", gpus, f"edgellm {m.edgellm}"]
    return "; ".join([*parts, *([f"memory {memory}"] if memory else [])])


def _levels_table(run: BenchRun) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for level in run.levels:
        table.add_column(level.label, justify="right")
    for metric in ROWS:
        if any(metric in level.stats for level in run.levels):
            cells = [_cell(level, metric) for level in run.levels]
            table.add_row(METRICS[metric].title, *cells)
    failed = [sum(level.errors.values()) for level in run.levels]
    table.add_row("errors", *(Text(str(n), style="red" if n else "dim") for n in failed))
    return table


def _cell(level: Level, metric: str) -> Text:
    """The median; with repeats, half of what they differ by."""
    stat = level.stats.get(metric)
    text = Text(format_metric(metric, None if stat is None else stat.median))
    if metric == "output_tps" and stat is not None and len(stat.values) > 1:
        text.append(f" ±{50 * stat.spread:.0f}%", style="dim")
    return text


def show_plots(console: Console, run: BenchRun) -> None:
    """Rate by load, time to the first token by load, and the output rate over time."""
    width = min(console.width, 100)
    if len(run.levels) > 1:
        console.print(Text.from_ansi(_by_load(run, "output_tps", width)))
        console.print(Text.from_ansi(_by_load(run, "ttft_p50_s", width)))
    elif run.levels and run.levels[0].timeline:
        console.print(Text.from_ansi(_over_time(run.levels[0], width)))


def _by_load(run: BenchRun, metric: str, width: int) -> str:
    pairs = [(level.label, level.median(metric)) for level in run.levels]
    shown = [(label, value) for label, value in pairs if value is not None]
    scale = 1e3 if METRICS[metric].unit == "s" else 1.0
    unit = "ms" if METRICS[metric].unit == "s" else METRICS[metric].unit
    plotext.clear_figure()
    plotext.simple_bar(
        [label for label, _ in shown],
        [round(value * scale, 1) for _, value in shown],
        width=width,
        title=f"{METRICS[metric].title} ({unit})",
    )
    return str(plotext.build())


def _over_time(level: Level, width: int) -> str:
    plotext.clear_figure()
    plotext.plotsize(width, 14)
    plotext.theme("pro")
    plotext.plot([at for at, _ in level.timeline], [rate for _, rate in level.timeline])
    plotext.title("output tok/s over the last repeat")
    plotext.xlabel("seconds")
    return str(plotext.build())


def show_entries(console: Console, entries: Sequence[Entry]) -> None:
    """``bench ls``."""
    if not entries:
        console.print("no runs yet: edgellm bench MODEL")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("run", "started", "what", "model", "result"):
        table.add_column(title, overflow="fold", no_wrap=title in ("run", "started"))
    for e in entries:
        model = Text(PurePath(e.model).name)
        if e.label:
            model.append(f" [{e.label}]", style="cyan")
        what = f"{e.kind} {e.scenario}" + (f" ({e.target})" if e.kind == "bench" else "")
        table.add_row(str(e.id), e.started[5:16].replace("T", " "), what, model, e.headline)
    console.print(table)


def show_diff(console: Console, before: BenchRun, after: BenchRun) -> None:
    """``bench diff``: what was set differently, and what came of it."""
    console.print(
        Group(Text("before  ") + _title(before, None), Text("after   ") + _title(after, None))
    )
    different = settings_diff(before, after)
    if different:
        console.print(_settings_table(different))
    for warning in diff_warnings(before, after):
        console.print(Text(f"! {warning}", style="yellow"))
    changes = compare_runs(before, after, DIFF_METRICS)
    if not changes:
        console.print("the two runs have no level in common")
        return
    console.print(_changes_table(changes))


def diff_warnings(before: BenchRun, after: BenchRun) -> list[str]:
    """Why two runs should not be held against one another, or not with confidence."""
    out = work_warnings(before, after)
    for name, run in (("before", before), ("after", after)):
        if len(run.levels) and run.config.repeats == 1:
            out.append(f"{name}: one repeat, so its spread is not known")
        out += [f"{name}: {warning}" for warning in run.warnings]
    return list(dict.fromkeys(out))


def work_warnings(before: BenchRun, after: BenchRun) -> list[str]:
    """What two runs did not have in common, so that neither can be better at it."""
    out = []
    if before.config.scenario != after.config.scenario:
        names = before.config.scenario.name, after.config.scenario.name
        what = f"{names[0]} and {names[1]}" if names[0] != names[1] else f"two kinds of {names[0]}"
        out.append(f"the two runs did different work ({what}): nothing here is better or worse")
    if before.target.model_digest != after.target.model_digest and before.target.model_digest:
        out.append("the models are different files")
    return out


def _settings_table(different: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="What differs")
    table.add_column("setting", overflow="fold")
    table.add_column("before", overflow="fold")
    table.add_column("after", overflow="fold")
    for row in different:
        table.add_row(*row)
    return table


def _changes_table(changes: Sequence[Change]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="What came of it")
    for title in ("load", "figure", "before", "after", "ratio", ""):
        table.add_column(title, justify="left" if title in ("load", "figure", "") else "right")
    for c in changes:
        if not c.before and not c.after:
            continue
        word, style = VERDICTS[c.is_better]
        table.add_row(
            c.level,
            METRICS[c.metric].title,
            format_metric(c.metric, c.before),
            format_metric(c.metric, c.after),
            f"{c.ratio:.2f}x" if c.before else "-",
            Text(word, style=style),
        )
    return table


VERDICTS: Final = {
    True: ("better", "green"),
    False: ("worse", "red"),
    None: ("within the spread", "dim"),
}
