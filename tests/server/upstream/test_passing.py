"""Which server gets a request, and what a client sees when one of them fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from edgellm.cli.serve import upstreams_of
from edgellm.config import ServeSettings
from edgellm.errors import ConfigError
from edgellm.runtime import make_runtime
from edgellm.server.upstream.replicas import Upstreams, UpstreamSpec
from tests.server.conftest import FAST, STARTER, default_settings
from tests.server.upstream.conftest import Front

EVENT = b'data: {"model":"m","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Fake:
    """A server of the model ``m`` that does as it is told. ``behave`` answers a POST."""

    def __init__(self, behave: Callable[[BaseHTTPRequestHandler, bytes], None]) -> None:
        fake = self
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                found = self.path == "/v1/models"
                reply(self, {"data": [{"id": "m", "max_model_len": 77}]}, 200 if found else 404)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                fake.bodies.append(json.loads(body))
                fake.headers.append({k.lower(): v for k, v in self.headers.items()})
                behave(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def reply(handler: BaseHTTPRequestHandler, value: Any, status: int = 200) -> None:
    body = json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def answer(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    reply(handler, {"id": "1", "model": "m", "choices": [], "usage": usage})


def hang_up(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
    handler.close_connection = True


def refuse(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
    reply(handler, {"error": {"message": "loading"}}, 503)


def begin_stream(handler: BaseHTTPRequestHandler, *parts: bytes) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.end_headers()
    for part in parts:
        handler.wfile.write(part)
        handler.wfile.flush()
    handler.close_connection = True


def whole_stream(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
    begin_stream(handler, EVENT, EVENT[:20], EVENT[20:], b"data: [DONE]\n\n")


def cut_stream(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
    handler.wfile.flush()
    handler.close_connection = True


def only_comment(handler: BaseHTTPRequestHandler, _body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"9\r\n: still\n\n\r\n")
    handler.wfile.flush()
    handler.close_connection = True


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    with ExitStack() as stack:

        def make(behave: Callable[[BaseHTTPRequestHandler, bytes], None] = answer) -> Fake:
            made = Fake(behave)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def front() -> Iterator[Callable[..., Front]]:
    with ExitStack() as stack:
        yield lambda *urls, **more: stack.enter_context(Front(urls, **more))


def post(front: Front, **more: Any) -> httpx.Response:
    return httpx.post(f"{front.url}/v1/chat/completions", json={**CHAT, **more}, timeout=60)


def get(front: Front, path: str) -> httpx.Response:
    return httpx.get(front.url + path, timeout=60)


def test_requests_are_spread_over_the_replicas_of_a_model(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    all_are_there = threading.Barrier(8)

    def together(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        all_are_there.wait(60)
        answer(handler, body)

    one, two = fake(together), fake(together)
    running = front(one.url, two.url + "/v1")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(running).status_code, range(8)))
    assert answers == [200] * 8
    assert (len(one.bodies), len(two.bodies)) == (4, 4)


def test_a_conversation_goes_on_where_its_cache_is_when_that_server_is_no_busier(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    one, two = fake(), fake()
    running = front(one.url, two.url)
    turns = [{"role": "user", "content": f"{who} " * 40} for who in ("a", "b")]
    said = {"role": "assistant", "content": "x"}
    for turn in turns:
        post(running, messages=[turn])
    for n in range(1, 4):
        for turn in turns:
            post(running, messages=[turn, *[said, turn] * n])
    for server in (one, two):
        assert len(server.bodies) == 4
        assert len({b["messages"][0]["content"] for b in server.bodies}) == 1


@pytest.mark.parametrize("behave", [hang_up, refuse, only_comment])
def test_a_request_that_was_not_answered_is_asked_of_another(
    behave: Any, fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    bad, good = fake(behave), fake(whole_stream)
    running = front(bad.url, good.url)
    for _ in range(4):
        got = post(running, stream=True)
        assert got.status_code == 200
        assert got.text.count('"content":"x"') == 2
        assert got.text.endswith("data: [DONE]\n\n")
    assert len(bad.bodies) >= 1
    assert len(good.bodies) == 4
    assert running.upstreams.n_retries >= 1


def test_an_answer_that_began_is_never_begun_again_and_ends_with_an_error(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    bad = fake(cut_stream)
    running = front(bad.url)
    events = [line for line in post(running, stream=True).text.split("\n\n") if line]
    assert '"content":"x"' in events[0]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "upstream_failed"
    assert "[DONE]" not in events
    assert len(bad.bodies) == 1


def test_with_no_server_up_the_answer_is_503_and_health_says_which(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    gone = fake()
    running = front(f"m={gone.url}")
    gone.close()
    first, second = post(running), post(running)
    assert first.status_code in (502, 503)
    assert (second.status_code, second.json()["error"]["code"]) == (503, "upstream_down")
    health = get(running, "/health")
    assert (health.status_code, "m" in health.json()["engines"]) == (503, True)


def test_a_server_that_comes_back_is_used_again(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    failures = [True]

    def once(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if failures:
            failures.pop()
            hang_up(handler, body)
        else:
            answer(handler, body)

    running = front(fake(once).url)
    assert post(running).status_code == 502
    deadline = time.monotonic() + 60
    while post(running).status_code != 200:
        assert time.monotonic() < deadline


def test_a_name_of_its_own_hides_the_servers_name_of_the_model(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    there = fake(whole_stream)
    running = front(f"big={there.url}#m")
    got = post(running, model="big", stream=True).text
    assert there.bodies[0]["model"] == "m"
    assert '"model":"big"' in got
    assert '"model":"m"' not in got
    listed = get(running, "/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in listed] == [("big", 77)]
    unknown = post(running, model="m")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_the_clients_key_and_priority_stay_here(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    there = fake()
    running = front(there.url)
    httpx.post(
        f"{running.url}/v1/chat/completions",
        json={**CHAT, "priority": "batch", "top_k": 5},
        headers={"authorization": "Bearer mine", "x-request-id": "req-7"},
        timeout=60,
    )
    assert "authorization" not in there.headers[0]
    assert there.headers[0]["x-request-id"] == "req-7"
    assert "priority" not in there.bodies[0]
    assert there.bodies[0]["top_k"] == 5


def test_beyond_the_limit_requests_wait_and_urgent_ones_go_first(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    gate = threading.Event()
    n_open: list[int] = []
    now_open: set[BaseHTTPRequestHandler] = set()

    def wait(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        now_open.add(handler)
        n_open.append(len(now_open))
        assert gate.wait(60)
        now_open.discard(handler)  # with the answer the next one may come
        answer(handler, body)

    there = fake(wait)
    running = front(there.url, limit=1)
    group = running.upstreams.groups["m"]

    def waits(n: int) -> None:
        while group.n_waiting != n or group.in_flight != 1:
            time.sleep(0.01)

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(post, running, user="first")
        waits(0)
        late = [pool.submit(post, running, user=f"batch{i}", priority="batch") for i in range(3)]
        waits(3)
        urgent = pool.submit(post, running, user="urgent", priority="interactive")
        waits(4)
        gate.set()
        assert [f.result().status_code for f in (first, urgent, *late)] == [200] * 5
    assert [body["user"] for body in there.bodies[:2]] == ["first", "urgent"]
    assert n_open == [1] * 5


def test_metrics_count_requests_tokens_and_servers(
    fake: Callable[..., Fake], front: Callable[..., Front]
) -> None:
    there = fake()
    running = front(there.url)
    post(running)
    page = get(running, "/metrics").text
    assert f'edgellm_upstream_up{{upstream="{there.url}"}} 1' in page
    assert 'edgellm_upstream_requests_total{model="m",outcome="ok"} 1' in page
    assert 'edgellm_prompt_tokens_total{model="m"} 3' in page
    assert 'edgellm_generated_tokens_total{model="m"} 4' in page
    stats = get(running, "/v1/edgellm/stats").json()
    assert stats["upstreams"][0]["n_requests"] == 1


def test_local_models_and_upstreams_are_served_together(fake: Callable[..., Fake]) -> None:
    there = fake()

    with Front([there.url]) as running:
        runtime = make_runtime((STARTER,), default_settings(), backend="scripted", options=FAST)
        running.server.runtime = runtime
        names = [m["id"] for m in get(running, "/v1/models").json()["data"]]
        here = post(running, model="starter", max_tokens=3)
        far = post(running, model="m")
        running.call(runtime.close)
    assert names == ["starter", "m"]
    assert (here.status_code, here.json()["model"]) == (200, "starter")
    assert (far.status_code, len(there.bodies)) == (200, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://a:1", (None, "http://a:1", None)),
        ("big=http://a:1/v1", ("big", "http://a:1/v1", None)),
        ("big=a:8000#org/model", ("big", "a:8000", "org/model")),
        ("https://a/v1?x=1", (None, "https://a/v1?x=1", None)),
    ],
)
def test_an_upstream_is_written_as_url_or_name_and_url(text: str, expected: Any) -> None:
    spec = UpstreamSpec.parse(text)
    assert (spec.name, spec.url, spec.model) == expected


@pytest.mark.parametrize("text", ["", "=http://a", "ftp://a", "big=", "http://a:99999"])
def test_what_is_no_upstream_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        UpstreamSpec.parse(text)


def test_settings_make_upstreams_with_aliases_of_their_models() -> None:
    made = upstreams_of(ServeSettings(upstream=("big=http://a:1",)), ["gpt-4o,*=big", "x"])
    assert isinstance(made, Upstreams)
    assert made.aliases == {"gpt-4o": "big", "*": "big"}
    assert upstreams_of(ServeSettings(), []) is None
