"""From samples to figures: one phase's metrics, their medians over repeats, and the spread."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from edgellm.bench.load import Phase
from edgellm.bench.sample import Sample
from edgellm.errors import ConfigError
from edgellm.metrics import percentile

PERCENTILES: Final = (50, 90, 99)


MAX_SECONDS: Final = 1e7
"""Four months: longer is a slip, and overflows timers."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """How a figure is called, in which unit it is kept, and which direction is good."""

    title: str
    unit: str
    """s, tok/s, req/s, ratio or count."""
    higher_is_better: bool


def _times(name: str, title: str) -> dict[str, Metric]:
    parts = [*(f"p{p}" for p in PERCENTILES), "max"]
    return {
        f"{name}_{part}_s": Metric(title=f"{title} {part}", unit="s", higher_is_better=False)
        for part in parts
    }


def _rate(title: str, unit: str) -> Metric:
    return Metric(title=title, unit=unit, higher_is_better=True)


METRICS: Final[dict[str, Metric]] = {
    "output_tps": _rate("output tok/s, all streams", "tok/s"),
    "steady_output_tps": _rate("output tok/s while all streams run", "tok/s"),
    "prompt_tps": _rate("prompt tok/s, all streams", "tok/s"),
    "requests_per_s": _rate("requests/s", "req/s"),
    "goodput_rps": _rate("requests/s within the objective", "req/s"),
    "goodput_ratio": _rate("share within the objective", "ratio"),
    "decode_tps_p50": _rate("decode_tps of one stream, p50", "tok/s"),
    "prefill_tps_p50": _rate("prefill_tps of one request, p50", "tok/s"),
    **_times("ttft", "TTFT"),
    **_times("tpot", "TPOT"),
    **_times("itl", "ITL"),
    **_times("stall", "gap between events"),
    **_times("e2e", "e2e"),
    "cached_ratio": _rate("prompt tokens reused", "ratio"),
    "error_ratio": Metric(title="errors", unit="ratio", higher_is_better=False),
    "n_prompt_mean": Metric(title="prompt tokens, mean", unit="count", higher_is_better=True),
    "n_output_mean": Metric(title="output tokens, mean", unit="count", higher_is_better=True),
}


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """A service objective: a request counts as good when it keeps every bound (seconds)."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """From ``ttft=1s,tpot=50ms``; raises ConfigError with the form on anything else."""
        bounds: dict[str, float] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, value = part.partition("=")
            if name not in ("ttft", "tpot", "e2e"):
                raise ConfigError(f"{part!r}: an objective reads ttft=1s,tpot=50ms,e2e=20s")
            bounds[f"{name}_s"] = parse_seconds(value)
        if not bounds:
            raise ConfigError("the objective is empty: it reads ttft=1s,tpot=50ms,e2e=20s")
        return cls(**bounds)

    def is_met(self, sample: Sample) -> bool:
        """Whether this request kept every bound; a failed one never does."""
        t = sample.timings
        pairs = ((self.ttft_s, t.ttft_s), (self.tpot_s, t.tpot_s), (self.e2e_s, t.e2e_s))
        return sample.is_ok and all(
            bound is None or value is None or value <= bound for bound, value in pairs
        )


def parse_seconds(text: str) -> float:
    """``"50ms"``, ``"1.5s"``, ``"2m"`` or plain seconds."""
    for suffix, scale in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("", 1.0)):
        if text.endswith(suffix):
            try:
                seconds = float(text.removesuffix(suffix) if suffix else text) * scale
            except ValueError:
                break
            if 0 <= seconds <= MAX_SECONDS:
                return seconds
    raise ConfigError(f"{text!r} is not a time; write 50ms, 1.5s or 2m")


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the repeats."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def spread(self) -> float:
        """(high - low) / median; 0 when there was one repeat."""
        return (self.high - self.low) / self.median if self.median else 0.0


def stat_of(values: Iterable[float]) -> Stat:
    """Median, lowest and highest of at least one value."""
    given = tuple(values)
    ordered = sorted(given)
    median = percentile(ordered, 50)
    if median is None:
        raise ValueError("no values")
    return Stat(median=median, low=ordered[0], high=ordered[-1], values=given)


def over_repeats(repeats: Sequence[Mapping[str, float]]) -> dict[str, Stat]:
    """A Stat for every figure that at least one repeat has."""
    names = dict.fromkeys(name for metrics in repeats for name in metrics)
    return {name: stat_of(m[name] for m in repeats if name in m) for name in names}


def phase_metrics(
    phase: Phase, *, concurrency: int | None = None, objective: Objective | None = None
) -> dict[str, float]:
    """Every figure of one phase; what cannot be known is left out."""
    good = [s for s in phase.samples if s.is_ok]
    wall = phase.end - phase.begin
    metrics = {
        "error_ratio": 1 - len(good) / len(phase.samples) if phase.samples else 0.0,
        **_rates(good, wall),
        **_distributions(good),
        **_means(good),
    }
    if concurrency is not None and (window := steady_window(good, concurrency)) is not None:
        metrics["steady_output_tps"] = tokens_between(good, *window) / (window[1] - window[0])
    if objective is not None and wall > 0:
        n_met = sum(map(objective.is_met, phase.samples))
        metrics["goodput_rps"] = n_met / wall
        metrics["goodput_ratio"] = n_met / max(1, len(phase.samples))
    return metrics


def _rates(good: Sequence[Sample], wall: float) -> dict[str, float]:
    if wall <= 0:
        return {}
    out = {
        "output_tps": sum(s.n_output for s in good) / wall,
        "requests_per_s": len(good) / wall,
    }
    if good and all(s.n_prompt is not None for s in good):
        out["prompt_tps"] = sum(s.n_prompt or 0 for s in good) / wall
    return out


def _distributions(good: Sequence[Sample]) -> dict[str, float]:
    t = [s.timings for s in good]
    out: dict[str, float] = {}
    out |= _quantiles("ttft", (x.ttft_s for x in t))
    # 0: everything came in one read, which says nothing of the pace.
    out |= _quantiles("tpot", (x.tpot_s or None for x in t))
    out |= _quantiles("e2e", (x.e2e_s for x in t))
    out |= _quantiles("itl", (gap for s in good for gap in s.token_gaps()))
    out |= _quantiles("stall", (b - a for s in good for a, b in pairwise(s.arrival_times)))
    for name, values in (
        ("prefill_tps_p50", [x.prefill_tps for x in t]),
        ("decode_tps_p50", [x.decode_tps for x in t]),
    ):
        middle = percentile(sorted(v for v in values if v is not None), 50)
        if middle is not None:
            out[name] = middle
    return out


def _quantiles(name: str, values: Iterable[float | None]) -> dict[str, float]:
    ordered = sorted(v for v in values if v is not None)
    out = {f"{name}_p{p}_s": percentile(ordered, p) for p in PERCENTILES}
    out[f"{name}_max_s"] = ordered[-1] if ordered else None
    return {k: v for k, v in out.items() if v is not None}


def _means(good: Sequence[Sample]) -> dict[str, float]:
    if not good:
        return {}
    told = [s.n_prompt for s in good if s.n_prompt]
    n_prompt = sum(told)
    out = {"n_output_mean": sum(s.n_output for s in good) / len(good)}
    if told:
        out["n_prompt_mean"] = n_prompt / len(told)
    if told and any(s.n_cached is not None for s in good):
        out["cached_ratio"] = sum(s.n_cached or 0 for s in good) / n_prompt
    return out


def steady_window(samples: Sequence[Sample], concurrency: int) -> tuple[float, float] | None:
    """When all streams ran: from the first moment that ``concurrency`` requests were producing to
    the last moment that ``concurrency`` were open. None when there is no such stretch.
    """
    first_tokens = sorted(s.token_times[0] for s in samples if s.token_times)
    ends = sorted(s.token_times[-1] for s in samples if s.token_times)
    if len(first_tokens) < concurrency:
        return None
    begin, end = first_tokens[concurrency - 1], ends[-concurrency]
    return (begin, end) if end > begin else None


def tokens_between(samples: Sequence[Sample], begin: float, end: float) -> int:
    """Output tokens that came after ``begin`` and not after ``end``."""
    return sum(
        bisect_left(s.token_times, end + 1e-9) - bisect_left(s.token_times, begin + 1e-9)
        for s in samples
    )


def drift(samples: Sequence[Sample], window: tuple[float, float]) -> float:
    """Token rate of a window's second half over its first, less one: 0 is steady."""
    begin, end = window
    middle = (begin + end) / 2
    before = tokens_between(samples, begin, middle)
    return tokens_between(samples, middle, end) / before - 1 if before else 0.0


def errors_by_class(samples: Iterable[Sample]) -> dict[str, int]:
    """How many requests failed, by the error's class."""
    return dict(Counter(s.error for s in samples if s.error is not None))
