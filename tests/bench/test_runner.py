"""A run warms up, measures every level and repeat, and says what speaks against it."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from edgellm.bench import machine
from edgellm.bench.machine import Conditions, parse_gpu_states, safety_warnings
from edgellm.bench.results import BenchConfig, compare_runs, settings_diff
from edgellm.bench.runner import Runner, quick_digest, without_keys
from edgellm.bench.scenarios import make_jobs, scenario_from
from edgellm.bench.stats import Objective, over_repeats, parse_seconds
from edgellm.bench.target import Target
from edgellm.errors import ConfigError, EngineError

from .factories import ENDPOINT, make_run, slower
from .sim import HEAD, Answer, SimServer, as_chunk, as_event, simulate


def test_every_level_and_repeat_is_measured() -> None:
    server = SimServer()
    run = make_run(server, concurrency=(1, 4), repeats=3)
    assert [level.label for level in run.levels] == ["1 stream", "4 streams"]
    assert [level.n_requests for level in run.levels] == [24, 24]
    one, four = run.levels
    assert len(one.stats["output_tps"].values) == 3
    assert one.median("ttft_p50_s") == pytest.approx(0.2)
    assert four.median("output_tps") == pytest.approx(4 * 64 / 1.46)
    # Two warm-up rounds of four agree at once.
    assert len(server.requests) == 48 + 8


def test_no_prompt_is_sent_twice() -> None:
    server = SimServer()
    make_run(server)
    prompts = [body["prompt"] for body in server.requests]
    assert len(set(prompts)) == len(prompts)


def test_the_warm_up_goes_on_until_two_rounds_agree() -> None:
    """Rounds of four requests: 4.3 s, 2.3 s, 1.46 s, 1.46 s each."""
    slow = {0: 3.0, 1: 1.0}
    server = SimServer(lambda i, body: Answer(ttft=0.2 + slow.get(i // 4, 0.0)))
    run = make_run(server)
    assert len(server.requests) - sum(x.n_requests for x in run.levels) == 16
    assert not any("settle" in w for w in run.warnings)
    assert run.levels[1].median("ttft_max_s") == pytest.approx(0.2)


def test_an_open_loop_run_reports_by_rate() -> None:
    run = make_run(rates=(2.0, 5.0), n_requests=30, repeats=1)
    assert [level.label for level in run.levels] == ["2 req/s", "5 req/s"]
    assert run.levels[0].median("ttft_p99_s") == pytest.approx(0.2)


def test_a_server_that_refuses_everything_ends_the_run() -> None:
    with pytest.raises(EngineError, match="http_503"):
        make_run(SimServer(lambda i, body: Answer(status=503)))


@pytest.mark.parametrize(("status", "hint"), [(401, "--api-key"), (404, "--model"), (500, "API")])
def test_a_refusal_names_the_next_step(status: int, hint: str) -> None:
    with pytest.raises(EngineError) as caught:
        make_run(SimServer(lambda i, body: Answer(status=status)))
    assert hint in (caught.value.hint or "")


def test_one_round_of_refusals_does_not_end_the_run() -> None:
    server = SimServer(lambda i, body: Answer(status=500) if i < 4 else Answer())
    assert make_run(server).levels[0].errors == {}


def test_a_server_that_hangs_is_waited_for_once() -> None:
    server = SimServer(lambda i, body: Answer(ttft=1e6))
    with pytest.raises(EngineError, match="timeout") as caught:
        make_run(server, timeout_s=30.0)
    assert len(server.requests) == 4  # one round
    assert "--timeout" in (caught.value.hint or "")


def test_a_model_that_says_nothing_at_first_is_not_a_server_that_refuses() -> None:
    nothing = HEAD + as_event({"choices": [{"text": "", "finish_reason": "stop"}]})
    empty = Answer(raw=[(0.1, nothing + as_chunk(b"data: [DONE]\n\n"))])
    server = SimServer(lambda i, body: empty if i < 12 else Answer())
    assert make_run(server).levels[0].errors == {}
    with pytest.raises(EngineError, match="the stream held no text") as caught:
        make_run(SimServer(lambda i, body: empty))
    assert "messages" in (caught.value.hint or "")


def test_what_a_template_puts_before_every_prompt_is_reused_rightly() -> None:
    """90 tokens, of which 60 are the chat scenario's own words."""
    for n_cached, is_said in ((28, False), (60, True)):
        answer = Answer(n_prompt=90, n_cached=n_cached)
        run = make_run(SimServer(lambda i, body, a=answer: a), scenario=scenario_from("chat"))
        assert any("came from a cache" in w for w in run.warnings) == is_said


def test_a_key_is_not_kept_with_the_command() -> None:
    given = ("serve", "m", "--api-key", "sk-1", "--api-key=sk-2", "--port", "1")
    kept = ("serve", "m", "--api-key", "...", "--api-key=...", "--port", "1")
    assert without_keys(given) == kept


def test_an_interrupted_run_leaves_the_repeats_that_had_ended() -> None:
    server = SimServer()
    runner = Runner(
        Target(name="sim", endpoint=ENDPOINT, model="m"),
        BenchConfig(scenario=scenario_from("batch"), concurrency=(1, 4), repeats=3),
    )

    async def interrupted() -> None:
        task = asyncio.create_task(runner.run(label="mine"))
        while len(server.requests) < 8 + 24 + 8 + 3:  # in the second repeat at 4
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    simulate(server, interrupted)
    assert runner.partial is not None
    assert [len(x.stats["output_tps"].values) for x in runner.partial.levels] == [3, 1]
    assert runner.partial.label == "mine"
    assert "interrupted: this is what had been measured until then" in runner.partial.warnings


def test_errors_appear_with_their_class_and_text() -> None:
    server = SimServer(lambda i, body: Answer(error_after=2) if i % 5 == 4 else Answer())
    run = make_run(server)
    assert run.levels[0].errors.keys() == {"stream"}
    assert any("stream of 16 (" in w and "decode failed" in w for w in run.warnings)


def test_guessed_counts_and_reused_prompts_are_pointed_out() -> None:
    server = SimServer(lambda i, body: Answer(has_usage=False))
    assert any("events were counted" in w for w in make_run(server).warnings)
    server = SimServer(lambda i, body: Answer(n_cached=90))
    assert any("came from a cache" in w for w in make_run(server).warnings)


def test_answers_of_another_length_than_asked_are_pointed_out() -> None:
    """Servers that do not know ignore_eos do less work; their requests/s is no better speed."""
    short = make_run(scenario=scenario_from("batch", max_tokens=128)).warnings
    assert any("answers have 64 tokens, not the 128 asked for" in w for w in short)
    for fair in ("batch", "mixed"):
        run = make_run(scenario=scenario_from(fair, max_tokens=64))
        assert not any("asked for" in w for w in run.warnings)


def test_repeats_that_differ_are_pointed_out() -> None:
    """After 8 warm-up and 16 + 8 measured requests the server takes twice as long."""
    server = SimServer(lambda i, body: Answer(ttft=0.2 if i < 32 else 3.0))
    assert any("repeats differ by" in w for w in make_run(server).warnings)


def test_the_curves_and_the_timeline_hold_what_was_seen() -> None:
    level = make_run().levels[1]
    assert level.curves["ttft_s"][50] == pytest.approx(0.2)
    assert len(level.curves["itl_s"]) == 101
    width = level.timeline[1][0] - level.timeline[0][0]
    assert sum(rate * width for _, rate in level.timeline) == pytest.approx(8 * 64)


def test_a_slower_run_is_worse_and_an_equal_one_is_within_the_spread() -> None:
    changes = compare_runs(make_run(), make_run(slower(1.5)), ("output_tps", "ttft_p50_s"))
    assert {c.is_better for c in changes} == {False}
    assert {round(c.ratio, 2) for c in changes} == {0.67, 1.5}
    same = compare_runs(make_run(), make_run(), ("output_tps", "ttft_p50_s"))
    assert {c.is_better for c in same} == {None}


def test_the_settings_that_differ_are_listed() -> None:
    changed = settings_diff(make_run(), make_run(scenario=scenario_from("batch", max_tokens=32)))
    assert changed == [("config.scenario.max_tokens", "128", "32")]


def test_real_prompts_come_from_a_file_in_order(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    server = SimServer()
    make_run(server, scenario=scenario_from(str(file)), concurrency=(1,), repeats=1, n_requests=4)
    bodies = server.requests[-4:]
    assert [b.get("prompt") or b["messages"][0]["content"] for b in bodies] == ["a", "b", "a", "b"]
    assert "ignore_eos" not in bodies[0]


@pytest.mark.parametrize("text", ["{", '{"other": 1}\n', ""])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
        make_run(scenario=scenario_from(str(file)))


def test_a_file_from_another_system_holds_the_same_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two", "max_tokens": 2}\r\n')
    jobs = make_jobs(scenario_from(str(file)), "m", "seed")
    assert [(j.body["prompt"], j.max_tokens) for j in islice(jobs, 3)] == [
        ("one", 256),
        ("two", 2),
        ("one", 256),
    ]


def test_a_file_is_read_before_the_clock_of_a_run_begins(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n')
    jobs = make_jobs(scenario_from(str(file)), "m", "seed")
    file.unlink()
    assert next(jobs).body["prompt"] == "one"


def test_an_unknown_scenario_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        scenario_from("nonesuch")
    assert "shared" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("1.5s", 1.5), ("2m", 120.0), ("3", 3.0)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["fast", "ttft", "ttft=soon", "speed=1s", "", " , "])
def test_a_malformed_objective_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Objective.parse(text)


def test_a_figure_that_one_repeat_lacks_is_the_median_of_the_others() -> None:
    stats = over_repeats([{"a": 1.0}, {"a": 3.0, "b": 5.0}])
    assert (stats["a"].median, stats["b"].median, stats["a"].spread) == (2.0, 5.0, 1.0)


def seen(**changes: Any) -> Conditions:
    return Conditions(**{"other_cpu": 0.0, "server_cpu": 0.5, "client_cpu": 0.1, **changes})


def test_a_quiet_machine_gives_no_warning() -> None:
    assert safety_warnings(seen(), spread=0.02, lags=[0.0005] * 100) == []


@pytest.mark.parametrize(
    ("conditions", "spread", "lags", "word"),
    [
        (seen(other_cpu=0.4), 0.0, [], "other processes used 40%"),
        (seen(client_cpu=0.95), 0.0, [], "load client used 95%"),
        (seen(), 0.0, [0.02] * 100, "20 ms late"),
        (seen(), 0.3, [], "repeats differ by 30%"),
    ],
)
def test_each_disturbance_is_named(
    conditions: Conditions, spread: float, lags: list[float], word: str
) -> None:
    warnings = safety_warnings(conditions, spread=spread, lags=lags)
    assert len(warnings) == 1
    assert word in warnings[0]


SMI = (
    "0, GPU-1f, NVIDIA RTX 3060, 550.54, 12288, 512, 86, 1200, 2100, 170.0, 99, "
    "0x0000000000000020\n"
)


def test_a_hot_and_slowed_card_is_named() -> None:
    (gpu,) = parse_gpu_states(SMI)
    assert (gpu.uuid, gpu.memory_used, gpu.is_slowed) == ("GPU-1f", 512 * 2**20, True)
    warnings = safety_warnings(seen(gpus_after=(gpu,)))
    assert [w.split(" (")[0] for w in warnings] == ["GPU 0 lowered its clocks", "GPU 0 was at 86 C"]


def test_a_card_that_says_little_is_still_read() -> None:
    text = SMI.replace("86", "[N/A]").replace("0x0000000000000020", "[Not Supported]")
    (gpu,) = parse_gpu_states(text)
    assert (gpu.temperature_c, gpu.is_slowed) == (None, False)
    assert parse_gpu_states("No devices were found\n") == []


def test_conditions_are_what_happened_between_two_moments() -> None:
    a = machine.Moment(at=0.0, busy_s=0.0, own_s=0.0, client_s=0.0)
    b = machine.Moment(at=10.0, busy_s=9.0, own_s=5.0, client_s=1.0)
    result = machine.conditions(a, b)
    cores = machine.os.cpu_count() or 1
    assert result.client_cpu == pytest.approx(0.1)
    assert result.server_cpu == pytest.approx(0.5 / cores)
    assert result.other_cpu == pytest.approx(0.3 / cores)


def test_the_quick_digest_sees_size_head_and_tail(tmp_path: Path) -> None:
    files = {"a": b"x" * 10, "b": b"x" * 11, "c": b"y" + b"x" * 9, "d": b"x" * 10}
    digests = {}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        digests[name] = quick_digest(tmp_path / name)
    assert digests["a"] == digests["d"]
    assert len(set(digests.values())) == 3


def test_a_rate_that_falls_within_a_repeat_is_pointed_out() -> None:
    """From the 60th request on every gap is twice as long; the second repeat's middle is there."""
    server = SimServer(lambda i, body: Answer(gaps=(0.02 if i < 60 else 0.04,) * 63))
    run = make_run(server, concurrency=(4,), repeats=1, n_requests=104)
    assert run.levels[0].drift == pytest.approx(-0.3, abs=0.2)
    assert any("drifted by -" in w for w in run.warnings)
    assert not any("drifted" in w for w in make_run(n_requests=24).warnings)
