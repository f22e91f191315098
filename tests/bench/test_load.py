"""Against a server with known latencies every figure is right, whatever the wire looks like."""

from __future__ import annotations

import gc
import random
from itertools import islice
from typing import Any

import pytest

from edgellm.bench.client import Endpoint, exchange
from edgellm.bench.load import Phase, closed_phase, open_phase, poisson_times
from edgellm.bench.sample import share_out
from edgellm.bench.scenarios import SCENARIOS, make_jobs, scenario_from
from edgellm.bench.stats import Objective, errors_by_class, phase_metrics
from edgellm.metrics import percentile

from .sim import Answer, SimServer, simulate

ENDPOINT = Endpoint.parse("http://127.0.0.1:1/v1")
BATCH = SCENARIOS["batch"]
CHAT = SCENARIOS["chat"]


def closed(server: SimServer, concurrency: int = 4, n: int = 16, name: str = "batch") -> Phase:
    jobs = make_jobs(scenario_from(name), "m", "seed")
    return simulate(server, lambda: closed_phase(ENDPOINT, jobs, concurrency, n=n))


def figures(phase: Phase, **kwargs: Any) -> dict[str, float]:
    return phase_metrics(phase, **kwargs)


def near(value: float) -> Any:
    return pytest.approx(value, rel=0.02)


def test_the_client_collects_no_garbage_while_it_measures() -> None:
    states: list[bool] = []

    def answer(i: int, body: dict[str, Any]) -> Answer:
        states.append(gc.isenabled())
        return Answer()

    closed(SimServer(answer), n=4)
    assert states == [False] * 4
    assert gc.isenabled()


def test_fixed_latencies_are_reported_as_they_are() -> None:
    m = figures(closed(SimServer()), concurrency=4)
    assert m["ttft_p50_s"] == near(0.2)
    assert m["ttft_p99_s"] == near(0.2)
    assert m["itl_p50_s"] == near(0.02)
    assert m["itl_p99_s"] == near(0.02)
    assert m["tpot_p50_s"] == near(0.02)
    assert m["e2e_p50_s"] == near(0.2 + 63 * 0.02)
    assert m["decode_tps_p50"] == near(50.0)
    assert m["prefill_tps_p50"] == near(100 / 0.2)
    assert m["output_tps"] == near(4 * 64 / 1.46)
    assert m["requests_per_s"] == near(4 / 1.46)
    assert m["prompt_tps"] == near(4 * 100 / 1.46)
    assert m["error_ratio"] == 0.0


def test_percentiles_of_a_known_distribution_are_found() -> None:
    rng = random.Random(5)
    ttfts = [0.1 + rng.expovariate(5) for _ in range(200)]
    gaps = [[rng.lognormvariate(-4, 0.6) for _ in range(63)] for _ in range(200)]
    server = SimServer(lambda i, body: Answer(ttft=ttfts[i], gaps=gaps[i]))
    m = figures(closed(server, concurrency=8, n=200))
    all_gaps = sorted(g for row in gaps for g in row)
    for p in (50, 90, 99):
        assert m[f"ttft_p{p}_s"] == near(percentile(sorted(ttfts), p) or 0)
        assert m[f"itl_p{p}_s"] == near(percentile(all_gaps, p) or 0)
        tpots = sorted(sum(row) / 63 for row in gaps)
        assert m[f"tpot_p{p}_s"] == near(percentile(tpots, p) or 0)
    assert m["itl_max_s"] == near(all_gaps[-1])


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_events_of_several_tokens_do_not_change_rates(size: int) -> None:
    n = 96
    per_event = [size] * (n // size) + ([n % size] if n % size else [])
    server = SimServer(lambda i, body: Answer(gaps=(0.02,) * (n - 1), per_event=per_event))
    m = figures(closed(server), concurrency=4)
    first = 0.2 + (size - 1) * 0.02
    assert m["n_output_mean"] == n
    assert m["ttft_p50_s"] == near(first)
    assert m["tpot_p50_s"] == near(0.02)
    assert m["decode_tps_p50"] == near(50)
    assert m["itl_p50_s"] == near(0.02)
    assert m["itl_p99_s"] == near(0.02)
    assert m["stall_p50_s"] == near(size * 0.02)
    assert m["output_tps"] == near(4 * n / (0.2 + 95 * 0.02))


def test_a_first_token_alone_then_groups_is_understood() -> None:
    server = SimServer(lambda i, body: Answer(gaps=(0.02,) * 127, per_event=[1, *[5] * 25, 2]))
    m = figures(closed(server))
    assert (m["ttft_p50_s"], m["tpot_p50_s"]) == (near(0.2), near(0.02))
    assert (m["itl_p50_s"], m["itl_p99_s"]) == (near(0.02), near(0.02))


def test_random_groups_keep_the_median_gap() -> None:
    sizes = [random.Random(3).choice((1, 2, 3, 4)) for _ in range(40)]
    total = sum(sizes)
    server = SimServer(lambda i, body: Answer(gaps=(0.01,) * (total - 1), per_event=sizes))
    m = figures(closed(server))
    assert m["itl_p50_s"] == near(0.01)
    assert m["itl_p99_s"] == near(0.01)


def test_token_ids_in_events_are_taken_at_their_word() -> None:
    sizes = [1, 7, 1, 7, 1, 7]
    server = SimServer(
        lambda i, body: Answer(
            gaps=(0.01,) * 23, per_event=sizes, token_ids=True, has_usage=False, finish="stop"
        )
    )
    phase = closed(server)
    assert {(s.n_output, s.counted_by) for s in phase.samples} == {(24, "tokens")}
    assert figures(phase)["itl_max_s"] == near(0.01)


@pytest.mark.parametrize(
    ("finish", "tokenizer", "counted_by"),
    [
        ("length", None, "length"),
        ("stop", lambda text: len(text.split()), "tokenize"),
    ],
)
def test_without_usage_tokens_are_still_counted(
    finish: str, tokenizer: Any, counted_by: str
) -> None:
    answer = Answer(gaps=(0.01,) * 127, per_event=[4] * 32, has_usage=False, finish=finish)
    phase = closed(SimServer(lambda i, body: answer, tokenizer=tokenizer))
    assert {(s.n_output, s.counted_by) for s in phase.samples} == {(128, counted_by)}
    assert figures(phase)["itl_p50_s"] == near(0.01)


def test_a_count_that_is_only_a_guess_says_so() -> None:
    answer = Answer(gaps=(0.01,) * 31, has_usage=False, finish="stop")
    phase = closed(SimServer(lambda i, body: answer))
    assert {(s.n_output, s.counted_by) for s in phase.samples} == {(32, "events")}


def test_an_open_loops_clock_begins_with_the_first_request() -> None:
    """Two tokens a request, 0.3 s each; the wait for the first arrival is nobody's time."""
    jobs, server = make_jobs(BATCH, "m", "seed"), SimServer(lambda i, body: Answer(0.1, (0.2,)))
    m = figures(simulate(server, lambda: open_phase(ENDPOINT, jobs, 0.5, n=5, seed="s")))
    times = poisson_times(0.5, 5, "s")
    assert m["requests_per_s"] == near(5 / (times[-1] + 0.3 - times[0]))


def test_open_loop_latency_counts_the_queue() -> None:
    """One slot, service 0.5 s, arrivals every 0.25 s on average: the n-th waits for the others."""
    server = SimServer(lambda i, body: Answer(ttft=0.1, gaps=(0.05,) * 8), slots=1)
    jobs = make_jobs(BATCH, "m", "seed")
    phase = simulate(server, lambda: open_phase(ENDPOINT, jobs, 4.0, n=40, seed="s"))
    expected, free = [], 0.0
    for at in poisson_times(4.0, 40, "s"):
        begin = max(at, free)
        expected.append(begin + 0.1 - at)
        free = begin + 0.5
    m = figures(phase)
    for p in (50, 90, 99):
        assert m[f"ttft_p{p}_s"] == near(percentile(sorted(expected), p) or 0)
    assert server.arrivals == pytest.approx(poisson_times(4.0, 40, "s"))


def test_a_stall_is_not_averaged_away() -> None:
    gaps = [0.01] * 20 + [2.0] + [0.01] * 20
    m = figures(closed(SimServer(lambda i, body: Answer(gaps=gaps))))
    assert m["itl_p50_s"] == near(0.01)
    assert m["stall_max_s"] == near(2.0)
    assert m["itl_max_s"] == near(2.0)


def test_errors_are_counted_by_class_and_kept_out_of_the_figures() -> None:
    def answer(i: int, body: dict[str, Any]) -> Answer:
        kinds = {
            0: Answer(status=503),
            1: Answer(error_after=3),
            2: Answer(cut_after=3),
            3: Answer(finish=None, has_done=False, has_usage=False),
        }
        return kinds.get(i % 8, Answer())

    phase = closed(SimServer(answer), concurrency=4, n=32)
    assert errors_by_class(phase.samples) == {
        "http_503": 4,
        "stream": 4,
        "reset": 4,
        "truncated": 4,
    }
    m = figures(phase)
    assert m["error_ratio"] == 0.5
    assert m["tpot_p99_s"] == near(0.02)


def test_goodput_counts_requests_within_the_objective() -> None:
    server = SimServer(lambda i, body: Answer(ttft=0.2 if i % 4 else 3.0))
    m = figures(closed(server, n=40), objective=Objective.parse("ttft=1s,tpot=50ms"))
    assert m["goodput_ratio"] == 0.75
    assert m["goodput_rps"] == near(0.75 * m["requests_per_s"])


def test_the_steady_rate_leaves_out_ramps() -> None:
    """With 1 s before each first token the whole run's rate is far below the decode rate."""
    server = SimServer(lambda i, body: Answer(ttft=1.0, gaps=(0.01,) * 99))
    m = figures(closed(server, concurrency=8, n=8), concurrency=8)
    assert m["steady_output_tps"] == near(8 / 0.01)
    assert m["output_tps"] == near(800 / 1.99)


def test_a_client_that_leaves_closes_its_connection() -> None:
    server = SimServer()
    body = {"prompt": "x", "stream": True}
    reply = simulate(
        server, lambda: exchange(ENDPOINT, "/v1/completions", body, disconnect_after=5)
    )
    assert (reply.finish, reply.error, len(reply.arrivals)) == ("disconnected", None, 5)
    assert server.n_closed_early == 1


def test_a_server_that_hangs_is_a_timeout() -> None:
    server = SimServer(lambda i, body: Answer(ttft=1000.0))
    body = {"prompt": "x", "stream": True}
    reply = simulate(server, lambda: exchange(ENDPOINT, "/v1/completions", body, timeout_s=5.0))
    assert (reply.error, reply.end - reply.sent) == ("timeout", pytest.approx(5.0))


def test_chat_events_are_read_like_completions() -> None:
    server = SimServer(lambda i, body: Answer(chat=True))
    m = figures(closed(server, name="chat"))
    assert "messages" in server.requests[0]
    assert (m["ttft_p50_s"], m["tpot_p50_s"]) == (near(0.2), near(0.02))


def test_reused_prompt_tokens_do_not_count_as_prefill() -> None:
    server = SimServer(lambda i, body: Answer(ttft=0.1, n_prompt=1000, n_cached=900))
    m = figures(closed(server))
    assert m["cached_ratio"] == near(0.9)
    assert m["prefill_tps_p50"] == near(100 / 0.1)


def test_shared_prefix_prompts_share_exactly_their_prefix() -> None:
    a, b = islice(make_jobs(SCENARIOS["shared"], "m", "s"), 2)
    first, second = a.body["prompt"].split(), b.body["prompt"].split()
    assert first[:1200] == second[:1200]
    assert first[1200:] != second[1200:]


def test_distinct_prompts_of_two_repeats_do_not_begin_alike() -> None:
    prompts = [
        next(make_jobs(BATCH, "m", seed)).body["prompt"].split()[:6] for seed in ("1", "2", "3")
    ]
    assert prompts[0] != prompts[1] != prompts[2] != prompts[0]


@pytest.mark.parametrize(
    ("total", "n_events", "expected"),
    [(5, 5, [1] * 5), (10, 4, [3, 3, 3, 1]), (11, 3, [4, 4, 3]), (2, 3, [1, 0, 1])],
)
def test_tokens_are_shared_out_over_events(total: int, n_events: int, expected: list[int]) -> None:
    assert share_out(total, ["abcd"] * n_events) == expected
