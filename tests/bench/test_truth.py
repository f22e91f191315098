"""Every figure against what the simulated server really did, in every combination of traits."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any

import pytest

from edgellm.bench.client import Endpoint
from edgellm.bench.load import Phase, closed_phase, open_phase, poisson_times
from edgellm.bench.scenarios import make_jobs, scenario_from
from edgellm.bench.stats import errors_by_class, phase_metrics
from edgellm.metrics import percentile

from .sim import Answer, SimServer, simulate

ENDPOINT = Endpoint.parse("http://127.0.0.1:1/v1")
N, N_TOKENS, N_PROMPT = 60, 48, 90

EVENTS = {
    "one": (1,) * N_TOKENS,
    "four": (4,) * 12,
    "first alone": (1, *(5,) * 9, 2),
    "random": (2, 1, 4, 3, 1, 1, 6, 2, 5, 1, 3, 3, 4, 2, 2, 1, 3, 4),
}
COUNTED = {
    "usage": {},
    "length": {"has_usage": False, "finish": "length"},
    "tokenize": {"has_usage": False},
    "ids": {"has_usage": False, "token_ids": True},
}
MISHAPS = {
    503: {"status": 503},
    "stream": {"error_after": 3},
    "reset": {"cut_after": 2},
    "truncated": {"finish": None, "has_done": False, "has_usage": False, "token_ids": True},
}


@dataclass(frozen=True)
class Truth:
    """One request as the server made it. Times are of the simulated clock."""

    due: float
    served: float
    answer: Answer

    @property
    def is_good(self) -> bool:
        a = self.answer
        is_cut = a.cut_after is not None or a.error_after is not None
        return a.status == 200 and not is_cut and a.finish is not None

    @property
    def arrivals(self) -> list[float]:
        return [self.served + at for at, _ in self.answer.events()]

    @property
    def end(self) -> float:
        a = self.answer
        if a.status != 200:
            return self.served
        stopped = a.cut_after if a.cut_after is not None else a.error_after
        return self.arrivals[-1 if stopped is None else stopped]

    def token_gaps(self) -> list[float]:
        """Tokens of one event share the gap before it; before the first there is none."""
        sizes = [n for _, n in self.answer.events()]
        return [
            (now - before) / n
            for (before, now), n in zip(pairwise(self.arrivals), sizes[1:], strict=True)
            for _ in range(n)
        ]


def answers(events: str, counted: str, *, stalls: bool, errors: bool) -> list[Answer]:
    """One answer a request, from a fixed seed: latencies drawn, stalls and mishaps strewn in."""
    rng, out = random.Random(11), []
    for i in range(N):
        gaps = [rng.uniform(0.01, 0.03) for _ in range(N_TOKENS - 1)]
        if stalls and i % 3 == 0:
            gaps[rng.randrange(len(gaps))] = rng.uniform(0.5, 1.5)
        answer = Answer(
            ttft=rng.uniform(0.1, 0.5),
            gaps=gaps,
            per_event=EVENTS[events],
            n_prompt=N_PROMPT,
            **COUNTED[counted],
        )
        mishap = list(MISHAPS.values())[i // 5 % len(MISHAPS)]
        out.append(replace(answer, **mishap) if errors and i % 5 == 2 else answer)
    return out


def served_at(arrivals: Sequence[float], given: Sequence[Answer], slots: int) -> list[float]:
    """When each request gets its slot, first come, first served."""
    free, out = [0.0] * slots, []
    for at, answer in zip(arrivals, given, strict=True):
        begin = max(at, heapq.heappop(free))
        out.append(begin)
        heapq.heappush(free, Truth(due=at, served=begin, answer=answer).end)
    return out


def expected(truths: Sequence[Truth]) -> dict[str, float]:
    good = [t for t in truths if t.is_good]
    wall = max(t.end for t in truths) - min(t.due for t in truths)
    out = {
        "error_ratio": 1 - len(good) / len(truths),
        "requests_per_s": len(good) / wall,
        "output_tps": len(good) * N_TOKENS / wall,
        "n_output_mean": N_TOKENS,
    }
    shown = [t.arrivals for t in good]
    series = {
        "ttft": [at[0] - t.due for at, t in zip(shown, good, strict=True)],
        "e2e": [at[-1] - t.due for at, t in zip(shown, good, strict=True)],
        "tpot": [
            (at[-1] - at[0]) / (N_TOKENS - t.answer.events()[0][1])
            for at, t in zip(shown, good, strict=True)
        ],
        "stall": [b - a for at in shown for a, b in pairwise(at)],
        "itl": [gap for t in good for gap in t.token_gaps()],
    }
    for name, values in series.items():
        out |= {f"{name}_p{p}_s": percentile(sorted(values), p) or 0.0 for p in (50, 90, 99)}
        out[f"{name}_max_s"] = max(values)
    out["decode_tps_p50"] = percentile(sorted(1 / x for x in series["tpot"]), 50) or 0.0
    return out


def run(server: SimServer, loop: str) -> Phase:
    jobs = make_jobs(scenario_from("batch", max_tokens=N_TOKENS), "m", "seed")
    if loop == "closed":
        return simulate(server, lambda: closed_phase(ENDPOINT, jobs, 6, n=N))
    return simulate(server, lambda: open_phase(ENDPOINT, jobs, 2.5, n=N, seed="s"))


@pytest.mark.parametrize(
    ("loop", "events", "counted", "stalls", "errors"),
    product(("closed", "open"), EVENTS, COUNTED, (False, True), (False, True)),
)
def test_every_figure_is_within_two_percent(
    loop: str, events: str, counted: str, stalls: bool, errors: bool
) -> None:
    """Against three slots, the closed loop's six clients and the open loop's queue wait."""
    given = answers(events, counted, stalls=stalls, errors=errors)
    server = SimServer(lambda i, body: given[i], slots=3, tokenizer=lambda text: len(text.split()))
    phase = run(server, loop)
    due = server.arrivals if loop == "closed" else poisson_times(2.5, N, "s")
    served = served_at(server.arrivals, given, 3)
    truths = [Truth(due=d, served=s, answer=a) for d, s, a in zip(due, served, given, strict=True)]
    found = phase_metrics(phase)
    for name, value in expected(truths).items():
        assert found[name] == pytest.approx(value, rel=0.02, abs=1e-9), name
    if counted == "usage":
        reading = [N_PROMPT / (t.arrivals[0] - t.due) for t in truths if t.is_good]
        assert found["prefill_tps_p50"] == pytest.approx(percentile(sorted(reading), 50), rel=0.02)
    told = errors_by_class(phase.samples)
    assert told == ({"http_503": 3, "stream": 3, "reset": 3, "truncated": 3} if errors else {})


def test_the_combinations_differ() -> None:
    """The oracle itself is no constant: traits change what is expected."""

    def of(**traits: Any) -> dict[str, float]:
        given = answers("four", "usage", **traits)
        at = list(accumulate([0.5] * N))
        return expected([Truth(due=d, served=d, answer=a) for d, a in zip(at, given, strict=True)])

    calm, stalled = of(stalls=False, errors=False), of(stalls=True, errors=False)
    assert stalled["stall_max_s"] > 5 * calm["stall_max_s"]
    assert of(stalls=False, errors=True)["requests_per_s"] < calm["requests_per_s"]
