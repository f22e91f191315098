"""TTFT, ITL, TPOT, queue time and throughput: what they mean and how they are computed, once.

Every time is seconds of a monotonic clock; every rate is tokens a second. The words:
TTFT runs from arrival to the first token, queue included; ITL is one gap between tokens; TPOT is
(end - first token) / (n_output - 1); prefill and decode have a rate each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request's time went. None where there was nothing to measure."""

    queue_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    tpot_s: float | None = None
    prefill_tps: float | None = None
    decode_tps: float | None = None
    itl_p50_s: float | None = None
    itl_p90_s: float | None = None
    itl_p99_s: float | None = None
    itl_max_s: float | None = None


def request_timings(
    *,
    arrival: float,
    scheduled: float | None,
    token_times: Sequence[float],
    end: float,
    n_computed: int,
) -> RequestTimings:
    """Timings of one sequence from the moments of its life.

    ``scheduled`` is when its first step began, ``token_times`` when each output token was known,
    ``n_computed`` the prompt tokens really prefilled (prompt less cached).
    """
    first = token_times[0] if token_times else None
    gaps = sorted(b - a for a, b in pairwise(token_times))
    decode_s = token_times[-1] - token_times[0] if len(token_times) > 1 else 0.0
    prefill_s = first - scheduled if first is not None and scheduled is not None else 0.0
    tpot = decode_s / (len(token_times) - 1) if len(token_times) > 1 else None
    return RequestTimings(
        queue_s=(scheduled if scheduled is not None else end) - arrival,
        ttft_s=None if first is None else first - arrival,
        e2e_s=end - arrival,
        tpot_s=tpot,
        prefill_tps=n_computed / prefill_s if prefill_s > 0 and n_computed else None,
        decode_tps=1 / tpot if tpot else None,
        itl_p50_s=percentile(gaps, 50),
        itl_p90_s=percentile(gaps, 90),
        itl_p99_s=percentile(gaps, 99),
        itl_max_s=gaps[-1] if gaps else None,
    )


def percentile(ordered: Sequence[float], p: float) -> float | None:
    """The ``p``-th percentile of values already in ascending order, by linear interpolation."""
    if not ordered:
        return None
    position = (len(ordered) - 1) * p / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


class StepTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a step spent in each part, averaged over the last steps."""

    schedule_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0
    deliver_s: float = 0.0


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the list of running requests shows it."""

    id: str
    client: str
    state: str
    """waiting, running or preempted."""
    priority: int
    n_prompt: int
    n_computed: int
    n_output: int
    age_s: float
    ttft_s: float | None = None
    decode_tps: float | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine loop says of itself; the counters only grow."""

    uptime_s: float = 0.0
    n_steps: int = 0
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    n_cells: int = 0
    cells_used: int = 0
    """Cells held by running sequences and retained prefixes."""
    cells_retained: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_misses: dict[str, int] = msgspec.field(default_factory=dict)
    """Why a prefix was not shared -> how often."""
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
    """Rates over the last second."""
    step: StepTimings = StepTimings()
    requests: tuple[RunningRequest, ...] = ()
    speculation: str = "off"
    """off, on, or paused with the reason."""
