"""Clients that go away, streams that wait, servers that are told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgellm.engine.info import EngineOptions, Fault, Script
from edgellm.metrics import EngineStats
from edgellm.runtime import make_runtime
from edgellm.server.core import Limits, Options, Server
from edgellm.server.run import Bind, open_sockets, serve
from tests.server.conftest import STARTER, Running, default_settings

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 1500,
    "ignore_eos": True,
}
SLOW = EngineOptions(script=Script(answer_tokens=0, step_s=0.05), max_waiting=64)


def engine_stats(running: Running) -> EngineStats:
    lease = running.server.runtime.loaded()[0]
    found: EngineStats = running.call(lease.engine.stats)
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot_at_once(
    serving: Callable[..., Running], stream: bool, path: str
) -> None:
    running = serving(engine=EngineOptions(script=Script(answer_tokens=0, step_s=0.5)))

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            asking = asyncio.create_task(client.post(path, json={**LONG, "stream": stream}))
            await asyncio.to_thread(wait_for, lambda: engine_stats(running).running == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    n_steps = engine_stats(running).n_steps
    wait_for(lambda: engine_stats(running).running == 0)
    # One step was under way, one may have begun before the news arrived over the socket.
    assert engine_stats(running).n_steps <= n_steps + 5
    assert engine_stats(running).requests_cancelled == 1
    wait_for(lambda: running.server.runtime.models()[0].in_use == 0)


def test_a_queued_client_that_goes_away_is_never_started(serving: Callable[..., Running]) -> None:
    running = serving(engine=SLOW)
    n_places = running.server.runtime.loaded()[0].engine.info.n_seq_max

    async def fill() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            body = {**LONG, "stream": True}
            busy = [
                asyncio.create_task(_drain(client, body, asyncio.Event())) for _ in range(n_places)
            ]
            await asyncio.to_thread(wait_for, lambda: engine_stats(running).running == n_places)
            queued = asyncio.create_task(client.post("/v1/chat/completions", json=LONG))
            await asyncio.to_thread(wait_for, lambda: engine_stats(running).waiting == 1)
            queued.cancel()
            await asyncio.to_thread(wait_for, lambda: engine_stats(running).waiting == 0)
            for task in busy:
                task.cancel()
            await asyncio.gather(queued, *busy, return_exceptions=True)

    asyncio.run(fill())
    wait_for(lambda: engine_stats(running).running == 0)
    assert engine_stats(running).requests_finished == 0


async def _drain(client: httpx.AsyncClient, body: dict[str, Any], seen: asyncio.Event) -> str:
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for chunk in answer.aiter_text():
            seen.set()
            text += chunk
    return text


def test_a_long_prefill_sends_comments_until_the_first_token(
    serving: Callable[..., Running],
) -> None:
    slow = EngineOptions(script=Script(prefill_token_s=0.02, answer_tokens=0))
    running = serving(
        engine=slow, options=Options(log_requests=False, limits=Limits(keepalive_s=0.2))
    )
    body = {
        "messages": [{"role": "user", "content": "word " * 100}],
        "stream": True,
        "max_tokens": 2,
    }
    with (
        running.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        text = "".join(answer.iter_text())
    before = text.split("data: ")[0]
    assert before.count(": keep-alive\n\n") >= 2
    assert text.endswith("data: [DONE]\n\n")


def test_an_error_before_the_first_token_is_a_status_and_after_it_the_last_event(
    serving: Callable[..., Running],
) -> None:
    fault = Fault(kind="exit", at_step=30, times=1)
    dying = EngineOptions(
        script=Script(answer_tokens=0, step_s=0.01, faults=(fault,)), restart=False
    )
    running = serving(engine=dying)
    with running.client() as client:
        with client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as answer:
            text = "".join(answer.iter_text())
        assert answer.status_code == 200
        assert '"content":"' in text
        last = text.rstrip().rsplit("data: ", 1)[1]
        assert '"code":"engine_dead"' in last
        assert "[DONE]" not in text
        # The model is loaded again for the next request.
        after = client.post("/v1/chat/completions", json={**LONG, "max_tokens": 2})
        assert after.status_code == 200


def test_a_request_that_an_operator_cancels_ends_with_an_error(
    serving: Callable[..., Running],
) -> None:
    running = serving(engine=SLOW)
    body = {**LONG, "stream": True}
    with (
        running.client() as client,
        running.client() as operator,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        chunks = answer.iter_text()
        text = next(chunks)
        stats = operator.get("/v1/edgellm/stats").json()
        (request,) = stats["engines"]["starter"]["requests"]
        done = operator.post("/v1/edgellm/cancel", json={"request_id": request["id"]})
        text += "".join(chunks)
        missing = operator.post("/v1/edgellm/cancel", json={"request_id": "nothing"})
    assert done.json() == {"cancelled": request["id"]}
    assert '"code":"cancelled"' in text
    assert "[DONE]" not in text
    assert missing.status_code == 404


def test_health_is_503_when_the_engines_loop_hangs(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.server.endpoints.ops.PING_TIMEOUT_S", 0.3)
    fault = Fault(kind="hang", at_step=5, seconds=8, times=1)
    hanging = EngineOptions(script=Script(answer_tokens=0, faults=(fault,)))
    running = serving(engine=hanging)
    with running.client() as client:
        assert client.get("/health").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}):
            said: list[httpx.Response] = []
            wait_for(lambda: said.append(client.get("/health")) or said[-1].status_code == 503)
            assert "did not answer" in said[-1].json()["engines"]["starter"]


def test_a_request_over_its_time_limit_is_504_or_a_last_event(
    serving: Callable[..., Running],
) -> None:
    options = Options(log_requests=False, limits=Limits(request_timeout_s=0.4))
    running = serving(engine=SLOW, options=options)
    with running.client() as client:
        whole = client.post("/v1/chat/completions", json=LONG)
        assert whole.status_code == 504
        assert whole.json()["error"]["code"] == "timeout"
        with client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as answer:
            text = "".join(answer.iter_text())
    assert '"code":"timeout"' in text
    assert "[DONE]" not in text
    wait_for(lambda: engine_stats(running).running == 0)


def test_too_many_waiting_requests_are_429(serving: Callable[..., Running]) -> None:
    options = EngineOptions(script=Script(answer_tokens=0, step_s=0.05), max_waiting=1)
    running = serving(engine=options)
    n_places = running.server.runtime.loaded()[0].engine.info.n_seq_max

    def is_full() -> bool:
        stats = engine_stats(running)
        return (stats.running, stats.waiting) == (n_places, 1)

    async def one_more() -> int:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            ask = partial(client.post, "/v1/chat/completions", json=LONG)
            tasks = [asyncio.create_task(ask()) for _ in range(n_places + 1)]
            await asyncio.to_thread(wait_for, is_full)
            code = (await ask()).status_code
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return code

    assert asyncio.run(one_more()) == 429


def start_cli(home: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """``edgellm serve`` as a process, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "serve", "starter", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EDGELLM_HOME": str(home)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving "), process.communicate(timeout=60)
    return process, line.rstrip().rsplit(" ", 1)[1].removesuffix("/v1")


def edgellm(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgellm", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "EDGELLM_HOME": str(home)},
    )


def test_sigterm_lets_running_requests_finish_refuses_new_ones_and_exits_0(
    edgellm_home: Path,
) -> None:
    process, url = start_cli(edgellm_home, "--engine", "scripted")
    body = {**LONG, "max_tokens": 1800, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=60) as client,
        httpx.Client(base_url=url, timeout=60) as other,
    ):
        assert other.get("/health").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            chunks = answer.iter_text()
            text = next(chunks)
            process.send_signal(signal.SIGTERM)
            text += "".join(chunks)
        assert text.endswith("data: [DONE]\n\n")
        codes = _until_gone(other)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    # The stream may end before the signal is heard.
    assert set(dropwhile(lambda code: code == 200, codes)) <= {503}
    assert '"event":"stopped"' in err


def _until_gone(client: httpx.Client) -> list[int]:
    """Ask until nobody answers; what was answered meanwhile."""
    codes = []
    while True:
        try:
            codes.append(client.get("/v1/models").status_code)
        except httpx.TransportError:
            return codes
        time.sleep(0.02)


def loading_server() -> tuple[asyncio.Task[None], Server, str, list[str]]:
    """A server whose first load takes three seconds, started on the running loop."""
    engine = EngineOptions(script=Script(answer_tokens=0, load_s=3.0))
    runtime = make_runtime((STARTER,), default_settings(), backend="scripted", options=engine)
    server, bind = Server(runtime, Options(log_requests=False)), Bind(port=0, drain_s=5)
    sockets = open_sockets(bind)
    ready: list[str] = []
    task = asyncio.create_task(
        serve(server, bind, sockets=sockets, on_ready=ready.append, preload=["starter"])
    )
    return task, server, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", ready


async def test_while_the_first_model_loads_health_says_so_and_requests_wait() -> None:
    task, server, url, ready = loading_server()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        early = await client.get("/health")
        assert (early.status_code, early.json()["error"]["message"]) == (503, "Loading model")
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert model["status"]["value"] in ("unloaded", "loading")
        assert not ready
        answer = await client.post("/v1/chat/completions", json={**LONG, "max_tokens": 2})
        assert answer.status_code == 200
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert ready == [url]
    assert server.on_stop is not None
    server.on_stop()
    await task


async def test_a_server_that_is_stopped_while_it_loads_ends_at_once_and_was_never_ready() -> None:
    task, server, url, ready = loading_server()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.get("/health")).status_code == 503
    assert server.on_stop is not None
    server.on_stop()
    await asyncio.wait_for(task, 60)
    assert not ready


def test_ps_shows_a_server_and_stop_unloads_its_model_and_ends_it(edgellm_home: Path) -> None:
    process, url = start_cli(edgellm_home, "--engine", "scripted", "--api-key", "sk-secret")
    try:
        shown = edgellm(edgellm_home, "ps")
        assert url in shown.stdout
        assert "starter" in shown.stdout
        assert "loaded" in shown.stdout
        unloaded = edgellm(edgellm_home, "stop", "starter")
        assert unloaded.stdout.strip() == "starter is unloaded"
        assert "unloaded" in edgellm(edgellm_home, "ps").stdout
        missing = edgellm(edgellm_home, "stop", "nonsense")
        assert missing.returncode == 3
        stopped = edgellm(edgellm_home, "stop")
        assert stopped.returncode == 0, stopped.stderr
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
    assert "no server runs" in edgellm(edgellm_home, "ps").stdout
    assert edgellm(edgellm_home, "stop").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nonsense.gguf",), 3, "nonsense.gguf"),
        (("starter", "--host", "0.0.0.0"), 2, "no API key"),
        (("starter", "--tls-cert", "x.pem"), 2, "--tls-key"),
        (("starter", "--alias", "a=b"), 2, "no model 'b'"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_the_documented_exit_code(
    edgellm_home: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = edgellm(edgellm_home, "serve", "--engine", "scripted", "--port", "0", *arguments)
    assert done.returncode == code, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("edgellm: error: ")
    assert says in first


def test_a_worker_that_is_dead_at_the_start_is_named_with_the_next_step(edgellm_home: Path) -> None:
    command = ("serve", "starter", "--engine", "scripted", "--port", "0")
    done = edgellm(edgellm_home, *command, "--worker", "127.0.0.1:9")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("edgellm: error: the worker 127.0.0.1:9 cannot be reached")
    assert second == "  try: edgellm worker, on that machine"
    assert "serving" not in done.stdout


def test_a_port_in_use_is_said_before_anything_is_loaded(
    scripted: Running, edgellm_home: Path
) -> None:
    port = scripted.url.rsplit(":", 1)[1]
    done = edgellm(edgellm_home, "serve", "starter", "--port", port)
    assert done.returncode == 2
    assert "in use" in done.stderr
