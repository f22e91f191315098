"""Servers write their streams in many ways: each is read for what it says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from edgellm.bench.client import Endpoint, Reply, exchange
from edgellm.bench.load import Phase, closed_phase, open_phase
from edgellm.bench.sample import Sample, share_out
from edgellm.bench.scenarios import make_jobs, scenario_from
from edgellm.bench.stats import errors_by_class, phase_metrics

from .sim import HEAD, Answer, SimServer, as_chunk, as_event, simulate

ENDPOINT = Endpoint.parse("http://127.0.0.1:1/v1")
PLAIN_HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = as_chunk(b"data: [DONE]\n\n")
END = b"0\r\n\r\n"


def chat(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(n_output: float, n_prompt: int = 10) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_output}}


def stream(*events: dict[str, Any]) -> bytes:
    return b"".join(map(as_event, events))


def server_of(raw: Sequence[tuple[float, bytes]]) -> SimServer:
    return SimServer(lambda i, body: Answer(raw=raw))


def asked(*raw: tuple[float, bytes]) -> Reply:
    """The reply to one request that is answered with these bytes at these times."""
    body = {"messages": [], "stream": True}
    server = server_of(raw)
    return simulate(server, lambda: exchange(ENDPOINT, "/v1/chat/completions", body))


def phase_of(server: SimServer, n: int = 1, concurrency: int = 1, **changes: Any) -> Phase:
    jobs = make_jobs(scenario_from("chat", **changes), "m", "seed")
    return simulate(server, lambda: closed_phase(ENDPOINT, jobs, concurrency, n=n))


def sampled(*raw: tuple[float, bytes], **changes: Any) -> Sample:
    return phase_of(server_of(raw), **changes).samples[0]


def texts(reply: Reply) -> list[str]:
    return [a.text for a in reply.arrivals]


def test_comments_that_keep_a_connection_alive_are_no_output() -> None:
    ping = as_chunk(b": ping\n\n")
    reply = asked(
        (0.0, HEAD), (0.1, ping), (0.5, stream(chat(content="a"))), (0.6, ping),
        (0.7, stream(chat("stop", content="b"))), (0.8, DONE + END),
    )  # fmt: skip
    assert reply.error is None
    assert [a.time for a in reply.arrivals] == pytest.approx([0.5, 0.7])


def test_lines_may_end_as_on_a_teletype_and_lack_the_space() -> None:
    event = json.dumps(chat("stop", content="a")).encode()
    reply = asked((0.1, HEAD + as_chunk(b"id: 1\r\nevent: message\r\ndata:" + event + b"\r\n\r\n")))
    assert (texts(reply), reply.finish) == (["a"], "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_bytes_may_be_cut_anywhere(size: int) -> None:
    """Inside the head, a chunk's length, a line, and a character of three bytes."""
    event = json.dumps(chat("stop", content="日本€"), ensure_ascii=False).encode()
    wire = HEAD + as_chunk(b"data: " + event + b"\n\n") + stream(usage(3)) + DONE + END
    pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
    reply = asked(*((0.01 * i, piece) for i, piece in enumerate(pieces)))
    assert (texts(reply), reply.n_output, reply.error) == (["日本€"], 3, None)


def test_an_interim_answer_is_not_the_answer() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    reply = asked((0.1, interim), (0.2, HEAD + stream(chat("stop", content="a")) + END))
    assert (reply.status, texts(reply)) == (200, ["a"])


def test_a_stream_without_done_is_whole_when_it_says_why_it_ended() -> None:
    whole = stream(chat(content="a"), chat("stop", content="b"), usage(2))
    assert asked((0.1, HEAD + whole + END)).error is None
    event = json.dumps(chat("stop", content="a")).encode()
    assert asked((0.1, PLAIN_HEAD + b"data: " + event + b"\n\n")).error is None


def test_a_last_line_needs_no_newline() -> None:
    event = json.dumps(chat("stop", content="a")).encode()
    reply = asked((0.1, PLAIN_HEAD + b"data: " + event))
    assert (texts(reply), reply.error) == (["a"], None)
    assert asked((0.1, HEAD + as_chunk(b"data: " + event) + END)).error is None


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (HEAD + stream(chat(content="a")), "reset"),
        (HEAD + stream(chat(content="a")) + END, "truncated"),
        (PLAIN_HEAD + b'data: {"choices": [{"text": "a"}]}\n\n', "truncated"),
        (HEAD + stream(chat(content="a"), {"error": {"message": "no"}}) + DONE + END, "stream"),
        (HEAD + stream(chat(content="a"), {"object": "error", "message": "no"}) + DONE, "stream"),
        (HEAD + as_chunk(b"data: {oops\n\n"), "protocol"),
        (HEAD + b"zz\r\n", "protocol"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "reset"),
        (b"HTTP/1.1 307 Temporary Redirect\r\nContent-Length: 0\r\n\r\n", "http_307"),
    ],
)
def test_a_cut_or_broken_answer_has_its_class(wire: bytes, error: str) -> None:
    assert asked((0.1, wire)).error == error


def test_an_answer_that_is_no_stream_is_an_error_that_shows_it() -> None:
    body = json.dumps({"choices": [{"message": {"content": "all at once"}}]}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    sample = sampled((0.1, head % len(body) + body))
    assert sample.error == "empty"
    assert "all at once" in sample.message


def test_thoughts_are_output_and_the_role_is_not() -> None:
    sample = sampled(
        (0.1, HEAD + stream(chat(role="assistant", content=""))),
        (0.5, stream(chat(reasoning_content="hm", reasoning="hm", content=None))),
        (0.6, stream(chat(reasoning="so"))),
        (0.7, stream(chat(content=""))),
        (0.8, stream(chat("stop", content="yes"), usage(3)) + DONE + END),
    )
    assert sample.arrival_times == pytest.approx([0.5, 0.6, 0.8])
    assert (sample.n_output, sample.timings.ttft_s) == (3, pytest.approx(0.5))


def test_every_part_of_an_event_is_its_text_once() -> None:
    parts = [{"type": "text", "text": "b"}]
    calls = [{"index": 0, "function": {"arguments": "{"}}]
    reply = asked(
        (0.1, HEAD + stream(chat(reasoning_content="a", reasoning="a", content=parts))),
        (0.2, stream(chat(content=None, tool_calls=calls), chat(refusal="no"))),
        (0.3, stream(chat("stop", content="", tool_calls=[])) + DONE + END),
    )
    assert texts(reply)[0] == "ab"
    assert json.loads(texts(reply)[1]) == calls
    assert texts(reply)[2:] == ["no"]


@pytest.mark.parametrize(
    "last",
    [
        {"choices": None, "usage": {"prompt_tokens": 10, "completion_tokens": 2}},
        {"choices": [], "usage": {"prompt_tokens": 10.0, "completion_tokens": 2.0}},
        {"usage": {"completion_tokens": 2, "prompt_tokens_details": None}, "error": None},
        {"usage": {"completion_tokens": 2}, "error": {}, "unknown": [1, {"a": None}]},
    ],
)
def test_counts_are_found_in_events_of_many_shapes(last: dict[str, Any]) -> None:
    events = stream(chat(content="a"), chat("stop", content="b"), last)
    reply = asked((0.1, HEAD + events + DONE + END))
    assert (reply.error, reply.n_output) == (None, 2)


def test_a_running_count_ends_at_its_last_value() -> None:
    events = [{**chat(content="ab"), **usage(2 * i)} | chat(content="ab") for i in (1, 2, 3)]
    reply = asked((0.1, HEAD + stream(*events, chat("stop")) + DONE + END))
    assert reply.n_output == 6


@pytest.mark.parametrize("n", [-7, 1e308, 3e9])
def test_a_count_that_cannot_be_is_no_count(n: float) -> None:
    said = stream(chat(content="a"), chat(content="b"), chat("stop"), usage(n, n_prompt=-5))
    sample = sampled((0.1, HEAD + said + DONE + END))
    assert (sample.n_output, sample.counted_by, sample.n_prompt) == (2, "events", None)


def test_a_chunk_of_less_than_nothing_is_a_protocol_error() -> None:
    reply = asked((0.1, HEAD + b"-e\r\nabcdefghijklmnopqrstuvw\r\n"))
    assert (reply.error, reply.message) == ("protocol", "ValueError: a chunk of -14 bytes")


def test_an_answer_that_moved_says_where() -> None:
    head = b"HTTP/1.1 308 X\r\nLocation: /v2/\r\nContent-Length: 2\r\n\r\n{}"
    reply = asked((0.1, head))
    assert (reply.error, reply.message) == ("http_308", "it points to /v2/")


def test_a_stream_without_text_says_so() -> None:
    sample = sampled((0.1, HEAD + stream(chat("stop")) + DONE + END))
    assert (sample.error, sample.message) == ("empty", "the stream held no text")


def test_sizes_at_random_are_not_taken_for_equal_ones() -> None:
    """40 tokens in 14 events: 13 times 3 and a last one would do, but the texts say otherwise."""
    sizes = [5, 1, 2, 5, 1, 3, 5, 2, 1, 5, 1, 3, 5, 1]
    assert share_out(40, ["word" * n for n in sizes]) == sizes
    even = ["six ni", "three four ", "twelve a b ", "wonderful go"] * 3 + ["on"]
    assert share_out(37, even) == [3] * 12 + [1]


def test_a_count_of_zero_beside_text_is_no_count() -> None:
    sample = sampled((0.1, HEAD + stream(chat("stop", content="a"), usage(0)) + DONE + END))
    assert (sample.n_output, sample.counted_by) == (1, "events")


def test_a_server_that_ignores_max_tokens_is_counted_as_it_answered() -> None:
    many = [chat(content="a")] * 9
    told = (0.1, HEAD + stream(*many, chat("length"), usage(9)) + DONE + END)
    untold = (0.1, HEAD + stream(*many, chat("length")) + DONE + END)
    for raw in (told, untold):
        assert sampled(raw, max_tokens=4).n_output == 9


@pytest.mark.parametrize("together", [2, 3, 8])
def test_events_that_one_read_brings_do_not_bend_the_gaps(together: int) -> None:
    """Of a gap of 0 and one of twice the length, neither is a token's."""
    answer = Answer(gaps=(0.02,) * 63, together=together)
    m = phase_metrics(phase_of(SimServer(lambda i, body: answer), n=4))
    for p in (50, 90, 99):
        assert m[f"itl_p{p}_s"] == pytest.approx(0.02, rel=0.02)
    assert m["stall_p50_s"] == pytest.approx(0.02 * together, rel=0.02)


def test_an_answer_in_one_piece_has_no_pace() -> None:
    """A TPOT of 0 ms would be the best there is."""
    answer = Answer(gaps=(0.02,) * 15, together=16)
    m = phase_metrics(phase_of(SimServer(lambda i, body: answer), n=4))
    assert m["ttft_p50_s"] == pytest.approx(0.2 + 15 * 0.02)
    assert not {"tpot_p50_s", "itl_p50_s", "stall_p50_s", "decode_tps_p50"} & set(m)


def test_a_few_tokens_held_back_do_not_bend_the_other_gaps() -> None:
    """64 tokens in 61 events: a character's first bytes and a possible stop string had to wait."""
    sizes = [1] * 20 + [3] + [1] * 20 + [2] + [1] * 19
    answer = Answer(gaps=(0.02,) * 63, per_event=sizes)
    m = phase_metrics(phase_of(SimServer(lambda i, body: answer), n=4))
    assert m["n_output_mean"] == 64
    for p in (50, 90, 99):
        assert m[f"itl_p{p}_s"] == pytest.approx(0.02, rel=0.02)


def test_a_server_that_counts_along_says_which_event_held_what() -> None:
    """A token without text of its own came between: nobody stood still."""
    told = [(0.1, 1), (0.2, 2), (0.4, 4), (0.5, 5)]
    events = [
        (at, as_event(chat(content="long") | {"timings": {"predicted_n": n}})) for at, n in told
    ]
    raw = [(0.05, HEAD), *events, (0.5, stream(chat("stop"), usage(5)) + DONE + END)]
    sample = sampled(*raw)
    assert sample.token_times == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert len(sample.arrival_times) == 4


def test_tokens_held_back_go_where_the_text_is() -> None:
    assert share_out(12, [*"abcdefgh", "bbbbbb", "dddd"]) == [*[1] * 8, 2, 2]
    assert share_out(12, [*"abcdefghi", "€€€"]) == [*[1] * 9, 3]


def test_a_client_that_was_refused_waits_as_it_was_asked() -> None:
    """Two slots' worth of refusals must not use up the requests that the run is about."""

    def answer(i: int, body: dict[str, Any]) -> Answer:
        return Answer(status=429, retry_after="2") if i == 1 else Answer()

    server = SimServer(answer)
    phase = phase_of(server, n=4, concurrency=2)
    assert errors_by_class(phase.samples) == {"http_429": 1}
    assert server.arrivals == pytest.approx([0.0, 0.0, 1.46, 2.0])


def test_a_hail_of_refusals_is_slowed_down() -> None:
    server = SimServer(lambda i, body: Answer(status=503))
    jobs = make_jobs(scenario_from("chat"), "m", "seed")
    phase = simulate(server, lambda: closed_phase(ENDPOINT, jobs, 2, n=2, seconds=10.0))
    assert 100 <= len(phase.samples) <= 220


def test_an_open_loop_never_waits() -> None:
    server = SimServer(lambda i, body: Answer(status=429, retry_after="30"))
    jobs = make_jobs(scenario_from("chat"), "m", "seed")
    phase = simulate(server, lambda: open_phase(ENDPOINT, jobs, 10.0, n=20, seed="s"))
    assert len(phase.samples) == 20
    assert phase.end - phase.begin < 5


def test_prompt_tokens_that_nobody_told_are_left_out() -> None:
    m = phase_metrics(phase_of(SimServer(lambda i, body: Answer(has_usage=False))))
    assert not {"prompt_tps", "n_prompt_mean", "prefill_tps_p50"} & set(m)
