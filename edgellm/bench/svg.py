"""A chart as inline SVG: lines, bands and bars over linear, logarithmic or named axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

import msgspec

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


def is_bar(chart: Chart) -> bool:
    return bool(chart.ticks) and any(s.points for s in chart.series)


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
