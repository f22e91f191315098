"""Two real servers behind a front, one of which is killed while requests run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from tests.server.upstream.conftest import Front

N_REQUESTS, AT_ONCE = 60, 10


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


class Replica:
    """``edgellm serve`` in a process of its own, with the engine that needs no model's weights."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "edgellm", "serve", "starter", "--port", str(port), "-q"]
        self.process = subprocess.Popen(
            [*command, "--ctx", "2048", "--parallel", "4"],
            env={**os.environ, "EDGELLM_ENGINE_BACKEND": "scripted"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise TimeoutError(f"{self.url} did not start")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    with ExitStack() as stack:
        made = [Replica() for _ in range(2)]
        for replica in made:
            stack.callback(replica.end)
        for replica in made:
            replica.wait()
        yield made


def ask(url: str, number: int) -> str:
    """whole; broken, when the answer had begun and ended with an error; else why it is lost."""
    body = {
        "model": "m",
        "stream": True,
        "max_tokens": 40,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": f"count from {number}"}],
    }
    events: list[str] = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        if answer.status_code != 200:
            return f"lost: {answer.status_code}"
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    if events and events[-1] == "data: [DONE]" and not any('"error"' in e for e in events):
        return "whole"
    last = next((e for e in reversed(events) if e != "data: [DONE]"), "")
    is_error = last.startswith("data: {") and "error" in json.loads(last.removeprefix("data: "))
    return "broken" if len(events) > 1 and is_error else f"lost: {events[-2:]}"


def test_a_replica_killed_under_load_costs_only_answers_that_had_begun(
    replicas: list[Replica],
) -> None:
    doomed, other = replicas
    with Front([f"m={replica.url}" for replica in replicas]) as front:
        done: list[str] = []

        def one(number: int) -> None:
            done.append(ask(front.url, number))
            if len(done) >= N_REQUESTS // 3:
                doomed.process.kill()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, range(N_REQUESTS)))
        served = {r.origin.url: r.n_requests for r in front.upstreams.replicas}
    assert [outcome for outcome in done if outcome.startswith("lost")] == []
    assert len(done) == N_REQUESTS
    assert done.count("broken") <= AT_ONCE
    assert served[doomed.url] >= 1  # how many of the first third depends on who is quicker
    assert served[other.url] >= N_REQUESTS // 2
