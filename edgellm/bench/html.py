"""Runs as one HTML file that opens anywhere: inline SVG, inline script, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Final

import msgspec

from edgellm.bench.report import DIFF_METRICS
from edgellm.bench.results import BenchRun, Level, compare_runs, flat, format_metric, settings_diff
from edgellm.bench.stats import METRICS
from edgellm.units import format_bytes

_WIDTH: Final = 560
_HEIGHT: Final = 300
_LEFT: Final = 62
_RIGHT: Final = 14
_TOP: Final = 14
_BOTTOM: Final = 42
# Distinguishable for people with any colour vision, on white and on dark (Okabe and Ito).
_COLOURS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c8c00",
    "#7a5195",
)


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart; ``spread`` holds (low, high) for a band."""

    name: str
    points: tuple[tuple[float, float], ...]
    spread: tuple[tuple[float, float], ...] = ()


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart to draw. ``ticks`` names places on x when x is no number."""

    title: str
    series: tuple[Series, ...]
    x_label: str
    unit: str
    ticks: tuple[tuple[float, str], ...] = ()
    log_x: bool = False
    swap: bool = False
    """The unit belongs to x (a distribution); y is a percentage."""


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
    return [c for c in made if any(len(s.points) > 1 for s in c.series) or _is_bar(c)]


def _is_bar(chart: Chart) -> bool:
    return bool(chart.ticks) and any(s.points for s in chart.series)


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


def draw(chart: Chart) -> str:
    """One chart as a figure with a legend whose entries switch their line."""
    axes = _Axes(chart)
    parts = [axes.grid()]
    for i, series in enumerate(chart.series):
        if series.points:
            parts.append(_line(axes, series, i))
    legend = "".join(
        f'<button data-series="{i}" style="--c:{_colour(i)}">{escape(s.name)}</button>'
        for i, s in enumerate(chart.series)
        if s.points
    )
    unit = "" if chart.unit == "s" else escape(chart.unit)
    return (
        f"<figure><figcaption>{escape(chart.title)} <small>{unit}</small></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">'
        f'{"".join(parts)}</svg><div class="legend">{legend}</div></figure>'
    )


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


class _Axes:
    """From values to pixels."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        xs = [x for s in chart.series for x, _ in s.points]
        ys = [y for s in chart.series for _, y in s.points]
        ys += [high for s in chart.series for _, high in s.spread]
        self._x0, self._x1 = _bounds(xs, log=chart.log_x)
        if chart.ticks:
            self._x0, self._x1 = -0.5, len(chart.ticks) - 0.5
        self._y0, self._y1 = 0.0, max([*ys, 1e-9]) * (1.0 if chart.swap else 1.08)

    def x(self, value: float) -> float:
        if self.chart.log_x:
            value = math.log10(value)
        share = (value - self._x0) / (self._x1 - self._x0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self._y0) / (self._y1 - self._y0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def label(self, value: float, *, on_x: bool) -> str:
        if self.chart.swap != on_x:
            return f"{value:.0f} %" if self.chart.swap else f"{value:g}"
        return _with_unit(self.chart.unit, value)

    def grid(self) -> str:
        out = []
        for value in nice_ticks(self._y0, self._y1):
            y = self.y(value)
            text = escape(self._y_text(value))
            out.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            out.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for value, text in self._x_ticks():
            x, y = self.x(value), _HEIGHT - _BOTTOM
            out.append(f'<path class="tick" d="M{x:.1f} {y}v5"/>')
            out.append(f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle">{escape(text)}</text>')
        if self.chart.x_label:
            middle = (_LEFT + _WIDTH - _RIGHT) / 2
            out.append(
                f'<text class="axis" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">'
                f"{escape(self.chart.x_label)}</text>"
            )
        return "".join(out)

    def _y_text(self, value: float) -> str:
        return f"{value:.0f} %" if self.chart.swap else _with_unit(self.chart.unit, value)

    def _x_ticks(self) -> list[tuple[float, str]]:
        if self.chart.ticks:
            return list(self.chart.ticks)
        if self.chart.log_x:
            return [(v, _with_unit("s", v)) for v in _log_ticks(self._x0, self._x1)]
        return [(v, f"{v:g}") for v in nice_ticks(self._x0, self._x1)]


def _with_unit(unit: str, value: float) -> str:
    if unit != "s":
        return f"{value:,.0f}" if abs(value) >= 10 or value == 0 else f"{value:.2g}"
    if value == 0:
        return "0"
    return f"{value:g} s" if value >= 1 else f"{1e3 * value:g} ms"


def _bounds(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low) - 0.02, math.log10(high) + 0.02
    return (low, high) if high - low > 1e-12 else (low - 0.5, high + 0.5)


def nice_ticks(low: float, high: float, n: int = 5) -> list[float]:
    """About ``n`` round numbers from ``low`` to ``high``."""
    raw = (high - low) / n
    if raw <= 0:
        return [low]
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Places in every decade that people call round: fewer, the more decades there are."""
    span = high - low
    steps = (1, 1.5, 2, 3, 5, 7) if span < 1 else (1, 2, 5) if span < 2.2 else (1,)
    exponents = range(math.floor(low), math.ceil(high) + 1)
    values = [m * 10.0**e for e in exponents for m in steps]
    return [v for v in values if low <= math.log10(v) <= high]


def _line(axes: _Axes, series: Series, i: int) -> str:
    chart = axes.chart
    points = [(axes.x(x), axes.y(y)) for x, y in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    whiskers = "".join(
        f'<path class="whisker" d="M{x:.1f} {axes.y(low):.1f}V{axes.y(high):.1f}"/>'
        for (x, _), (low, high) in zip(points, series.spread, strict=False)
        if high > low
    )
    step = max(1, len(points) // 24)
    names = dict(chart.ticks)
    dots = []
    for (x, y), (raw_x, raw_y) in list(zip(points, series.points, strict=True))[::step]:
        where = names.get(raw_x) or axes.label(raw_x, on_x=True)
        tip = f"{series.name}: {axes.label(raw_y, on_x=False)} at {where}"
        if chart.swap:
            tip = f"{series.name}: p{raw_y:.0f} {format_seconds(raw_x)}"
        elif chart.unit == "s":
            tip = f"{series.name}: {format_seconds(raw_y)} at {where}"
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" data-tip="{escape(tip)}"/>')
    return (
        f'<g data-series="{i}" style="--c:{_colour(i)}"><path class="line" d="{path}"/>'
        f'{whiskers}<g class="dots{" sparse" if len(points) > 12 else ""}">{"".join(dots)}</g></g>'
    )


def format_seconds(value: float) -> str:
    """``12.3 ms`` or ``1.24 s``."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


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
            f"{c.ratio:.2f}x",
            words[c.is_better],
        )
        for c in compare_runs(before, after, DIFF_METRICS)
        if c.before or c.after
    ]
    settings = _rows_table(("setting", "before", "after"), settings_diff(before, after))
    figures = _rows_table(("load", "figure", "before", "after", "ratio", ""), rows, last_class=True)
    return f"<h3>What differs</h3>{settings}<h3>What came of it</h3>{figures}"


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
