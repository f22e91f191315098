"""What /metrics says: counters and histograms kept here, gauges read from the engines when asked.

Prometheus text format 0.0.4. Every name begins with ``edgellm_``; the few ``llamacpp:`` names at
the end are those that dashboards made for llama-server read.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from edgellm.request import Priority, TokenEvent

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

# Seconds. ITL needs milliseconds; a queue or a whole request may take minutes.
_FAST: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_SLOW: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)

HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "edgellm_ttft_seconds": ("From arrival to the first token, queue included.", _SLOW),
    "edgellm_itl_seconds": ("Gaps between tokens.", _FAST),
    "edgellm_queue_seconds": ("From arrival to the first step.", _SLOW),
    "edgellm_e2e_seconds": ("From arrival to the last token.", _SLOW),
}
COUNTERS: Final = {
    "edgellm_requests_total": "Requests that ended, by endpoint and status.",
    "edgellm_errors_total": "Errors by class.",
    "edgellm_prompt_tokens_total": "Prompt tokens, cached ones included.",
    "edgellm_cached_tokens_total": "Prompt tokens that a cached prefix saved.",
    "edgellm_generated_tokens_total": "Generated tokens.",
    "edgellm_upstream_requests_total": "Requests passed to other servers, by outcome.",
}

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """One labelled histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Counters and histograms by name and labels."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._histograms: dict[str, dict[Labels, Histogram]] = {name: {} for name in HISTOGRAMS}
        self._counters: dict[str, dict[Labels, float]] = {name: {} for name in COUNTERS}

    def add(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Raise a counter."""
        values = self._counters[name]
        key = tuple(labels.items())
        values[key] = values.get(key, 0) + value

    def histogram(self, name: str, labels: Labels) -> Histogram:
        """The histogram of these labels, made on first use."""
        found = self._histograms[name].get(labels)
        if found is None:
            found = self._histograms[name][labels] = Histogram(HISTOGRAMS[name][1])
        return found

    def total(self, name: str) -> float:
        """A counter over all its labels."""
        return sum(self._counters[name].values())

    def sum(self, name: str) -> float:
        """A histogram's sum over all its labels."""
        return sum(h.total for h in self._histograms[name].values())

    def observe(self, model: str, priority: Priority) -> Observer:
        """What one request's tokens are counted with."""
        return Observer(self, model, priority)

    def render(self, gauges: Iterable[Gauge]) -> str:
        """The whole page."""
        lines: list[str] = []
        for name, text in COUNTERS.items():
            _head(lines, name, text, "counter")
            lines += [f"{name}{_braces(k)} {_number(v)}" for k, v in self._counters[name].items()]
        for name, (text, _) in HISTOGRAMS.items():
            _head(lines, name, text, "histogram")
            for labels, histogram in self._histograms[name].items():
                _histogram_lines(lines, name, labels, histogram)
        for gauge in gauges:
            _head(lines, gauge.name, gauge.text, gauge.kind)
            lines += [f"{gauge.name}{_braces(k)} {_number(v)}" for k, v in gauge.values.items()]
        return "\n".join(lines) + "\n"


class Gauge:
    """A value that is read when asked."""

    def __init__(
        self, name: str, text: str, values: Mapping[Labels, float], kind: str = "gauge"
    ) -> None:
        self.name = name
        self.text = text
        self.values = values
        self.kind = kind


class Observer:
    """Counts the tokens of one request as they pass."""

    __slots__ = ("_e2e", "_itl", "_last", "_metrics", "_model", "_queue", "_ttft")

    def __init__(self, metrics: Metrics, model: str, priority: Priority) -> None:
        labels: Labels = (("model", model), ("priority", priority.name.lower()))
        self._metrics = metrics
        self._model = model
        self._itl = metrics.histogram("edgellm_itl_seconds", labels)
        self._ttft = metrics.histogram("edgellm_ttft_seconds", labels)
        self._queue = metrics.histogram("edgellm_queue_seconds", labels)
        self._e2e = metrics.histogram("edgellm_e2e_seconds", labels)
        self._last: dict[int, float] = {}

    def event(self, event: TokenEvent) -> None:
        """Count one event: its gap, and with the last one the request's own numbers."""
        now = time.perf_counter()
        last = self._last.get(event.index)
        if last is not None and event.token_ids:
            self._itl.observe(now - last)
        self._last[event.index] = now
        if event.is_last:
            self._finish(event)

    def _finish(self, event: TokenEvent) -> None:
        timings, usage = event.timings, event.usage
        if timings is not None:
            if timings.ttft_s is not None:
                self._ttft.observe(timings.ttft_s)
            self._queue.observe(timings.queue_s)
            self._e2e.observe(timings.e2e_s)
        if usage is not None:
            add, model = self._metrics.add, self._model
            add("edgellm_prompt_tokens_total", usage.n_prompt, model=model)
            add("edgellm_cached_tokens_total", usage.n_cached, model=model)
            add("edgellm_generated_tokens_total", usage.n_output, model=model)


def _head(lines: list[str], name: str, text: str, kind: str) -> None:
    lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _histogram_lines(lines: list[str], name: str, labels: Labels, h: Histogram) -> None:
    seen = 0
    for bound, count in zip((*h.bounds, None), h.counts, strict=True):
        seen += count
        le = "+Inf" if bound is None else f"{bound:g}"
        lines.append(f"{name}_bucket{_braces((*labels, ('le', le)))} {seen}")
    lines.append(f"{name}_sum{_braces(labels)} {_number(h.total)}")
    lines.append(f"{name}_count{_braces(labels)} {seen}")


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    inside = ",".join(f'{name}="{_escape(value)}"' for name, value in labels)
    return "{" + inside + "}"


def _number(value: float) -> str:
    # ":g" would round a counter to six digits.
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
