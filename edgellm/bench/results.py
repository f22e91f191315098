"""What a benchmark run leaves: one document with the figures and everything they depend on."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from edgellm.bench.machine import Conditions, Machine
from edgellm.bench.scenarios import Scenario
from edgellm.bench.stats import METRICS, Objective, Stat
from edgellm.units import format_bytes

SCHEMA: Final = "edgellm.bench/1"


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of a run. Levels are concurrencies (closed loop) or rates (open loop)."""

    scenario: Scenario
    concurrency: tuple[int, ...] = (1, 4, 8)
    rates: tuple[float, ...] = ()
    """Requests a second; when given, the loop is open and concurrency is not used."""
    n_requests: int | None = None
    """A level and repeat; None: twice the concurrency, 8 at least."""
    seconds: float = 0.0
    repeats: int = 3
    warmup_rounds: int = 4
    """At most; it ends as soon as two rounds in a row agree."""
    objective: Objective | None = None
    seed: str = "1"
    timeout_s: float = 600.0


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One concurrency or rate: figures over the repeats."""

    concurrency: int | None = None
    rate: float | None = None
    n_requests: int
    """In all repeats together."""
    stats: dict[str, Stat]
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    first_error: str = ""
    counted_by: dict[str, int] = msgspec.field(default_factory=dict)
    """How tokens were counted -> requests (Sample.counted_by)."""
    drift: float = 0.0
    """The last repeat's second half over its first, less one."""
    curves: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    """Percentiles 0, 1 ... 100 of ttft_s, itl_s, e2e_s over all repeats."""
    timeline: tuple[tuple[float, float], ...] = ()
    """(seconds since the last repeat began, output tok/s) in equal steps."""

    @property
    def label(self) -> str:
        """``8 streams`` or ``4 req/s``."""
        if self.rate is not None:
            return f"{self.rate:g} req/s"
        return f"{self.concurrency} stream{'s' if self.concurrency != 1 else ''}"

    def median(self, name: str) -> float | None:
        """A figure's median, or None when this level has none."""
        stat = self.stats.get(name)
        return None if stat is None else stat.median


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, as far as it said."""

    name: str
    url: str
    model: str
    command: tuple[str, ...] = ()
    about: dict[str, Any] = msgspec.field(default_factory=dict)
    """The server's plan (edgellm) or properties (llama-server)."""
    model_path: str | None = None
    model_digest: str | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """engine.* of a model that was served for the run, from variables, config.toml or a profile."""
    memory: dict[str, int] = msgspec.field(default_factory=dict)
    """Measured bytes: the server's resident memory, and the growth of each card."""


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of ``edgellm bench``: schema ``edgellm.bench/1``."""

    schema: str = SCHEMA
    label: str = ""
    started: str
    took_s: float
    config: BenchConfig
    target: TargetRecord
    machine: Machine
    conditions: Conditions
    levels: tuple[Level, ...]
    warnings: tuple[str, ...] = ()


def format_value(unit: str, value: float) -> str:
    """A figure as people read it: ``12.3 ms``, ``1.24 s``, ``85 %``, ``2098``."""
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"
    if unit == "ratio":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        return format_bytes(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_metric(name: str, value: float | None) -> str:
    """:func:`format_value` by a metric's name; a dash for None."""
    if value is None:
        return "-"
    return format_value(METRICS[name].unit, value)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two runs."""

    level: str
    metric: str
    before: float
    after: float
    is_better: bool | None
    """None: the difference is within what the repeats themselves differ by."""

    @property
    def ratio(self) -> float:
        """after / before."""
        return self.after / self.before if self.before else float("inf")


def compare_runs(before: BenchRun, after: BenchRun, metrics: tuple[str, ...]) -> list[Change]:
    """Figures of the levels both runs have, with a verdict that respects their spread."""
    old = {level.label: level for level in before.levels}
    changes = []
    for level in after.levels:
        for name in metrics:
            a = old[level.label].stats.get(name) if level.label in old else None
            b = level.stats.get(name)
            if a is not None and b is not None:
                changes.append(_change(level.label, name, a, b))
    return changes


def _change(level: str, name: str, a: Stat, b: Stat) -> Change:
    apart = a.low > b.high or b.low > a.high
    # One repeat has no spread of its own: 5 % stands in for it.
    close = abs(b.median - a.median) < 0.05 * abs(a.median) if len(a.values) == 1 else not apart
    better = (b.median > a.median) == METRICS[name].higher_is_better
    return Change(
        level=level,
        metric=name,
        before=a.median,
        after=b.median,
        is_better=None if close else better,
    )


def settings_diff(before: BenchRun, after: BenchRun) -> list[tuple[str, str, str]]:
    """(name, before, after) of everything configured, planned or installed that differs."""
    a, b = flat(_setup(before)), flat(_setup(after))
    return [
        (key, str(a.get(key, "-")), str(b.get(key, "-")))
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key)
    ]


def _setup(run: BenchRun) -> dict[str, Any]:
    plan = run.target.about.get("plan", {})
    machine = msgspec.to_builtins(run.machine)
    gpus = machine.pop("gpus", [])
    return {
        "config": msgspec.to_builtins(run.config),
        "engine": run.target.settings,
        "model": {"digest": run.target.model_digest, "name": run.target.model},
        "params": plan.get("params", {}) if isinstance(plan, dict) else {},
        "machine": machine,
        "gpu": [{"name": g["name"], "driver": g["driver"]} for g in gpus],
    }


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested values as dotted keys."""
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)) and any(isinstance(v, (dict, list)) for v in value):
        pairs = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, inner in pairs:
        out |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return out
