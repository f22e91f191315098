"""Runs as one HTML file that opens anywhere: inline SVG, inline script, nothing fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

import msgspec

from edgellm.bench.report import DIFF_METRICS, work_warnings
from edgellm.bench.results import BenchRun, Level, compare_runs, flat, format_metric, settings_diff
from edgellm.bench.stats import METRICS
from edgellm.bench.svg import Chart, Series, draw, is_bar
from edgellm.units import format_bytes


def render(runs: Sequence[tuple[int | None, BenchRun]]) -> str:
    """A page about one run, or several side by side."""
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    names = [_name(number, run) for number, run in runs]
    body = [_cards(run, name) for (_, run), name in zip(runs, names, strict=True)]
    body += [_warnings(run, name) for (_, run), name in zip(runs, names, strict=True)]
    body.append('<div class="charts">' + "".join(map(draw, charts(runs))) + "</div>")
    if len(runs) == 2:
        body.append(_diff(runs[0][1], runs[1][1]))
    body += [_table(run, name) for (_, run), name in zip(runs, names, strict=True)]
    body += [_setup(run, name) for (_, run), name in zip(runs, names, strict=True)]
    title = " and ".join(names)
    return Template(page).substitute(title=escape(title), body="\n".join(body))


def _name(number: int | None, run: BenchRun) -> str:
    label = f" [{run.label}]" if run.label else ""
    shown = f"#{number} " if number is not None else ""
    return f"{shown}{run.target.name} {Path(run.target.model).name}{label}"


def charts(runs: Sequence[tuple[int | None, BenchRun]]) -> list[Chart]:
    """The charts that these runs have points for."""
    made = [
        _by_load(runs, "Output rate", (("output_tps", ""),), "tok/s"),
        _by_load(
            runs,
            "Time to first token",
            (("ttft_p50_s", "p50"), ("ttft_p99_s", "p99")),
            "s",
        ),
        _by_load(runs, "Gap between tokens", (("itl_p50_s", "p50"), ("itl_p99_s", "p99")), "s"),
        _distribution(runs, "Time to first token, distribution", "ttft_s"),
        _distribution(runs, "Gap between tokens, distribution", "itl_s"),
        _over_time(runs),
    ]
    return [c for c in made if any(len(s.points) > 1 for s in c.series) or is_bar(c)]


def _by_load(
    runs: Sequence[tuple[int | None, BenchRun]],
    title: str,
    metrics: Sequence[tuple[str, str]],
    unit: str,
) -> Chart:
    labels = list(dict.fromkeys(level.label for _, run in runs for level in run.levels))
    at = {label: float(i) for i, label in enumerate(labels)}
    series = []
    for number, run in runs:
        for metric, part in metrics:
            stats = [(at[x.label], x.stats[metric]) for x in run.levels if metric in x.stats]
            name = " ".join(filter(None, (_short(number, run, len(runs)), part)))
            series.append(
                Series(
                    name=name or METRICS[metric].title,
                    points=tuple((x, stat.median) for x, stat in stats),
                    spread=tuple((stat.low, stat.high) for _, stat in stats),
                )
            )
    ticks = tuple((x, label) for label, x in at.items())
    return Chart(title=title, series=tuple(series), x_label="load", unit=unit, ticks=ticks)


def _short(number: int | None, run: BenchRun, n_runs: int) -> str:
    if n_runs == 1:
        return ""
    return run.label or (f"#{number}" if number is not None else run.target.name)


def _levels(run: BenchRun, n_runs: int) -> Sequence[Level]:
    """All levels of one run, the highest of each when several runs share a chart."""
    return run.levels if n_runs == 1 else run.levels[-1:]


def _distribution(runs: Sequence[tuple[int | None, BenchRun]], title: str, curve: str) -> Chart:
    series = []
    for number, run in runs:
        for level in _levels(run, len(runs)):
            values = level.curves.get(curve, ())
            # The first and last percentile are one request each: they only stretch the axis.
            points = tuple((max(v, 1e-6), float(p)) for p, v in enumerate(values) if 1 <= p <= 99)
            name = " ".join(filter(None, (_short(number, run, len(runs)), level.label)))
            series.append(Series(name=name, points=points))
    return Chart(title=title, series=tuple(series), x_label="", unit="s", log_x=True, swap=True)


def _over_time(runs: Sequence[tuple[int | None, BenchRun]]) -> Chart:
    series = [
        Series(
            name=" ".join(filter(None, (_short(number, run, len(runs)), level.label))),
            points=tuple((100 * (i + 0.5) / n, y) for i, (_, y) in enumerate(level.timeline)),
        )
        for number, run in runs
        for level in _levels(run, len(runs))
        if (n := len(level.timeline))
    ]
    return Chart(
        title="Output rate within the last repeat",
        series=tuple(series),
        x_label="% of the repeat",
        unit="tok/s",
    )


def _cards(run: BenchRun, name: str) -> str:
    best = max(run.levels, key=lambda x: x.median("output_tps") or 0.0, default=None)
    first = run.levels[0] if run.levels else None
    cards = []
    if best is not None and first is not None:
        cards = [
            (format_metric("output_tps", best.median("output_tps")), "tok/s out", best.label),
            (format_metric("ttft_p50_s", first.median("ttft_p50_s")), "TTFT p50", first.label),
            (format_metric("itl_p50_s", first.median("itl_p50_s")), "ITL p50", first.label),
            (format_metric("itl_p99_s", best.median("itl_p99_s")), "ITL p99", best.label),
        ]
    boxes = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span>'
        f"<small>{escape(where)}</small></div>"
        for value, what, where in cards
    )
    return (
        f"<header><h2>{escape(name)}</h2><p>{escape(_about(run))}</p></header>"
        f'<div class="cards">{boxes}</div>'
    )


def _about(run: BenchRun) -> str:
    m, scenario = run.machine, run.config.scenario
    gpus = ", ".join(g.name for g in m.gpus) or "no GPU"
    how = "open loop" if run.config.rates else "closed loop"
    return (
        f"{run.started}. {scenario.name}: {scenario.about}; {how}, {run.config.repeats} repeats, "
        f"medians. {m.cpu}, {m.n_cores} cores, {format_bytes(m.ram_total)}, {gpus}; "
        f"edgellm {m.edgellm}, llama-cpp-python {m.llama_cpp}."
    )


def _warnings(run: BenchRun, name: str) -> str:
    if not run.warnings:
        return ""
    items = "".join(f"<li>{escape(w)}</li>" for w in run.warnings)
    return f"<aside><h3>Before trusting {escape(name)}</h3><ul>{items}</ul></aside>"


def _table(run: BenchRun, name: str) -> str:
    names = [m for m in METRICS if any(m in level.stats for level in run.levels)]
    head = "".join(f"<th>{escape(level.label)}</th>" for level in run.levels)
    rows = "".join(_metric_row(run, metric) for metric in names)
    return (
        f"<h3>{escape(name)}: every figure</h3><div class='scroll'><table><thead><tr><th></th>"
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _metric_row(run: BenchRun, metric: str) -> str:
    cells = []
    for level in run.levels:
        stat = level.stats.get(metric)
        if stat is None:
            cells.append("<td>-</td>")
            continue
        ends = f"{format_metric(metric, stat.low)} to {format_metric(metric, stat.high)}"
        cells.append(f'<td title="{escape(ends)}">{format_metric(metric, stat.median)}</td>')
    unit = METRICS[metric].unit
    shown = f" <small>{unit}</small>" if unit in ("tok/s", "req/s") else ""
    return f"<tr><th>{escape(METRICS[metric].title)}{shown}</th>{''.join(cells)}</tr>"


def _diff(before: BenchRun, after: BenchRun) -> str:
    words: dict[bool | None, str] = {True: "better", False: "worse", None: "same"}
    rows = [
        (
            c.level,
            METRICS[c.metric].title,
            format_metric(c.metric, c.before),
            format_metric(c.metric, c.after),
            f"{c.ratio:.2f}x" if c.before else "-",
            words[c.is_better],
        )
        for c in compare_runs(before, after, DIFF_METRICS)
        if c.before or c.after
    ]
    settings = _rows_table(("setting", "before", "after"), settings_diff(before, after))
    figures = _rows_table(("load", "figure", "before", "after", "ratio", ""), rows, last_class=True)
    apart = work_warnings(before, after)
    items = "".join(f"<li>{escape(w)}</li>" for w in apart)
    aside = f"<aside><h3>Before comparing</h3><ul>{items}</ul></aside>" if apart else ""
    return f"<h3>What differs</h3>{aside}{settings}<h3>What came of it</h3>{figures}"


def _rows_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, last_class: bool = False
) -> str:
    cell: Callable[[str], str] = lambda text: f"<td>{escape(text)}</td>"  # noqa: E731
    body = "".join(
        f'<tr class="{escape(row[-1]) if last_class else ""}">{"".join(map(cell, row))}</tr>'
        for row in rows
    )
    titles = "".join(f"<th>{escape(h)}</th>" for h in head)
    return (
        f"<div class='scroll'><table class='rows'><thead><tr>{titles}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _setup(run: BenchRun, name: str) -> str:
    about = {
        "config": msgspec.to_builtins(run.config),
        "target": msgspec.to_builtins(run.target),
        "machine": msgspec.to_builtins(run.machine),
        "conditions": msgspec.to_builtins(run.conditions),
    }
    rows = [(k, str(v)) for k, v in flat(about).items() if v not in (None, "", {}, [])]
    table = _rows_table(("", ""), rows)
    return f"<details><summary>{escape(name)}: the whole setup</summary>{table}</details>"
