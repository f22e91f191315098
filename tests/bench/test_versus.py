"""A comparison alternates, keeps every round, and divides the right figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from edgellm.bench.client import Endpoint
from edgellm.bench.contests import CONTESTS, SHARED_PREFIXES, Heat, Sizes
from edgellm.bench.machine import Machine
from edgellm.bench.target import Target
from edgellm.bench.versus import (
    KEY_FIGURES,
    RAW,
    Outcome,
    Setting,
    add_raw,
    heats_of,
    parse_batched_bench,
    to_markdown,
)

from .sim import Answer, SimServer, simulate

SMALL = Sizes(
    prompt_words=10, max_tokens=64, shared_words=40, long_words=500, n_batch=6, batch_tokens=64
)


def heat(**changes: Any) -> Heat:
    endpoint = Endpoint.parse("http://127.0.0.1:1")
    target = Target(name="sim", endpoint=endpoint, model="m")
    return Heat(**{"target": target, "concurrency": 4, "sizes": SMALL, "seed": "s", **changes})


def answer(i: int, body: dict[str, Any]) -> Answer:
    """As long as was asked, 10 ms a token, a first token after 100 ms."""
    return Answer(ttft=0.1, gaps=(0.01,) * (body["max_tokens"] - 1), finish="length")


@pytest.mark.parametrize("name", sorted(CONTESTS))
def test_every_contest_ends_and_gives_its_key_figures(name: str) -> None:
    figures = simulate(SimServer(answer), lambda: CONTESTS[name](heat()))
    from_server = {"step_python_s"}
    assert set(KEY_FIGURES[name]) - from_server <= set(figures)
    assert figures["error_ratio"] == 0.0


def test_every_heat_has_a_shared_prefix_of_its_own_seen_once_before() -> None:
    prompts: list[str] = []

    def listen(i: int, body: dict[str, Any]) -> Answer:
        prompts.append(body["prompt"])
        return answer(i, body)

    for seed in ("one", "two"):
        simulate(SimServer(listen), lambda seed=seed: CONTESTS["shared"](heat(seed=seed)))
    begins = [" ".join(prompt.split()[:40]) for prompt in prompts]
    assert set(Counter(begins).values()) == {1 + 4 + 4}
    assert len(set(begins)) == 2 * SHARED_PREFIXES
    assert len(set(prompts)) == len(prompts)


def test_the_second_wave_of_the_shared_contest_is_told_apart_from_the_first() -> None:
    """A server that copies the prefix for each slot is slow once: 0.6 s, then 0.1 s."""
    seen: Counter[str] = Counter()

    def copying(i: int, body: dict[str, Any]) -> Answer:
        prefix = " ".join(body["prompt"].split()[:40])
        seen[prefix] += 1
        slow = 1 < seen[prefix] <= 1 + 4
        return Answer(ttft=0.6 if slow else 0.1, gaps=(0.01,) * 63, finish="length")

    figures = simulate(SimServer(copying), lambda: CONTESTS["shared"](heat()))
    assert figures["ttft_p50_s"] == pytest.approx(0.6)
    assert figures["again_ttft_p50_s"] == pytest.approx(0.1)


def test_the_long_prompt_contest_sees_how_long_streams_stood_still() -> None:
    """Streams run at 10 ms; the server stands still for 0.5 s from 3.05 s on, when it comes."""

    def stalling(i: int, body: dict[str, Any]) -> Answer:
        if body["max_tokens"] == 8:
            return Answer(ttft=0.6, gaps=(0.01,) * 7)
        return Answer(ttft=0.1, gaps=(0.01,) * 295 + (0.5,) + (0.01,) * 900)

    figures = simulate(SimServer(stalling), lambda: CONTESTS["long"](heat()))
    assert figures["calm_itl_p50_s"] == pytest.approx(0.01)
    assert figures["worst_itl_s"] == pytest.approx(0.5)
    assert figures["worst_over_calm"] == pytest.approx(50)
    assert figures["intruder_ttft_s"] == pytest.approx(0.6)


def test_a_token_without_text_is_no_stall_of_the_long_prompt_contest() -> None:
    """Every eighth token comes with the next one, and the server counts along."""

    def holding(i: int, body: dict[str, Any]) -> Answer:
        if body["max_tokens"] == 8:
            return Answer(ttft=0.6, gaps=(0.01,) * 7)
        assert body["timings_per_token"]
        sizes = ([1] * 6 + [2]) * 150
        return Answer(ttft=0.1, gaps=(0.01,) * (sum(sizes) - 1), per_event=sizes, counts_along=True)

    figures = simulate(SimServer(holding), lambda: CONTESTS["long"](heat()))
    assert figures["worst_over_calm"] == pytest.approx(1, rel=0.01)


def test_half_of_the_clients_of_the_disconnect_contest_leave() -> None:
    server = SimServer(answer)
    simulate(server, lambda: CONTESTS["disconnects"](heat()))
    assert server.n_closed_early == 4
    assert len(server.requests) == 4 + 2 + 4


def test_the_interactive_contest_compares_with_an_idle_server() -> None:
    """A first-come server: all slots are busy for 2.65 s, the urgent come after 1.5 s."""
    server = SimServer(answer, slots=6)
    sizes = msgspec.structs.replace(SMALL, n_batch=6, batch_tokens=256)
    figures = simulate(server, lambda: CONTESTS["interactive"](heat(sizes=sizes)))
    assert figures["idle_ttft_s"] == pytest.approx(0.1)
    worst = 2.65 - 1.5 + 0.1
    assert figures["ttft_over_idle"] == pytest.approx(worst / 0.1)
    assert figures["ttft_over_fair"] == pytest.approx(worst / (2 * 0.1 + 0.1))
    assert {b.get("priority") for b in server.requests} == {"interactive", "batch", None}


def test_prompts_differ_between_rounds() -> None:
    server = SimServer(answer)
    for number in range(2):
        simulate(server, lambda n=number: CONTESTS["distinct"](heat(seed=f"round {n}")))
    prompts = [b["prompt"] for b in server.requests]
    assert len(set(prompts)) == len(prompts) == 16


def test_only_levelled_contests_run_at_every_concurrency() -> None:
    setting = Setting(contests=("distinct", "shared"), n_seq=32, n_ctx=1, levels=(1, 8, 32))
    assert heats_of(setting) == [
        ("distinct", 1),
        ("distinct", 8),
        ("distinct", 32),
        ("shared", 8),
    ]


def outcome() -> Outcome:
    machine = Machine(
        cpu="c", n_cores=2, ram_total=1, os="o", python="3", edgellm="0", llama_cpp="0"
    )
    made = Outcome(model="/x/m.gguf", machine=machine, sizes=SMALL, started="now")
    made.servers = {"edgellm": {"command": ["edgellm"]}, "peer": {"command": ["/p/peer", "-c"]}}
    made.entry("distinct", 8).rounds = {
        "edgellm": [{"output_tps": v} for v in (100.0, 110.0, 400.0)],
        "peer": [{"output_tps": v} for v in (50.0, 50.0, 100.0)],
    }
    return made


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    ratio = outcome().entry("distinct", 8).ratio("output_tps", "edgellm", "peer")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (2.2, 2.0, 4.0)


def test_the_table_shows_medians_ratios_and_both_commands() -> None:
    text = to_markdown(outcome())
    assert "| 8 | output tok/s, all streams | 110.0 | 50.0 | 2.20 [2.00, 4.00] |" in text
    assert "`peer -c`" in text


def test_what_else_ran_is_one_line() -> None:
    made = outcome()
    made.other_cpu = [0.01, 0.5, 0.2]
    text = to_markdown(made)
    assert "- other processes used more than 10% of the CPU in 2 of 3 heats, 50% at most" in text
    made.other_cpu = [0.01]
    assert "Warnings" not in to_markdown(made)


def test_the_library_alone_stands_beside_the_servers() -> None:
    made = outcome()
    made.entry("decode", 8).rounds["edgellm"] = [{"steady_output_tps": 90.0}]
    add_raw(made, parse_batched_bench('noise\n{"pl": 8, "speed_tg": 100.0}\n'))
    assert "| 8 | output tok/s while all streams run | 90.0 |  |  | 100.0 | 0.90" in to_markdown(
        made
    )
    assert made.entry("decode", 8).rounds[RAW] == [{"steady_output_tps": 100.0}]
