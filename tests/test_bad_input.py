"""Every wrong input a person can give, from the outside: one clear line, the documented code, and
the server goes on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.blocks import free_port
from tests.engine.starter import starter_path


def edgellm(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgellm", *argv],
        input=stdin, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What stderr says to a person: without the server's log, which is JSON a line."""
    return [line for line in done.stderr.splitlines() if not line.startswith("{")]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Paths of files that are no usable model, by what is wrong with them."""
    real = Path(starter_path()).read_bytes()
    (tmp_path / "text.gguf").write_text("This is not a model at all.\n" * 50)
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "header-cut.gguf").write_bytes(real[:5000])
    (tmp_path / "data-cut.gguf").write_bytes(real[: len(real) // 2])
    (tmp_path / "folder.gguf").mkdir()
    names = ("text", "empty", "header-cut", "data-cut", "folder", "missing")
    return {name: str(tmp_path / f"{name}.gguf") for name in names}


COMMANDS = (("plan",), ("chat", "-p", "hello"), ("serve", "--port", "0"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("what", "code"),
    [("text", 5), ("empty", 5), ("header-cut", 5), ("data-cut", 5), ("folder", 5), ("missing", 3)],
)
def test_a_file_that_is_no_model_is_one_line_and_its_exit_code(
    command: tuple[str, ...], what: str, code: int, files: dict[str, str]
) -> None:
    name, *flags = command
    done = edgellm(name, files[what], *flags)
    if (name, what) == ("serve", "folder"):
        code = 3  # a folder of models may be served; this one holds none
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    first, *more = said(done)
    assert first.startswith("edgellm: error: ")
    assert files[what] in first
    assert len(more) <= 1
    assert all(line.startswith("  try: ") for line in more)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_an_unknown_model_name_is_exit_code_3_with_a_next_command(
    command: tuple[str, ...],
) -> None:
    name, *flags = command
    done = edgellm(name, "no-such-model", *flags)
    assert done.returncode == 3
    assert "no-such-model" in done.stderr
    assert "  try: edgellm " in done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_a_model_that_cannot_fit_is_exit_code_4_with_the_smallest_fix(
    command: tuple[str, ...],
) -> None:
    name, *flags = command
    done = edgellm(name, "starter", *flags, "--backend", "cpu", "--ram", "16MiB")
    assert done.returncode == 4, done.stderr
    assert "  try: " in done.stderr


def test_a_port_in_use_is_one_line_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = edgellm("serve", "starter", "--engine", "scripted", "--port", str(port))
    assert done.returncode == 2, done.stderr
    error, hint = said(done)
    assert (
        error == f"edgellm: error: cannot listen on 127.0.0.1 port {port}: Address already in use"
    )
    assert hint.startswith("  try: edgellm serve")


# -- the server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """`edgellm serve starter`, and a client of it."""
    home = tmp_path_factory.mktemp("server")
    port = free_port()
    log_path = home / "log"
    environ = {**os.environ, "EDGELLM_HOME": str(home)}
    command = [sys.executable, "-m", "edgellm", "serve", "starter", "--port", str(port)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    base = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(base, process, log_path)
        with httpx.Client(base_url=base, timeout=120) as client:
            yield client
        assert process.poll() is None, "the server ended by itself"
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_ready(base: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        try:
            if httpx.get(f"{base}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def chat(**changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "starter",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 4,
        "temperature": 0,
    }
    return {**body, **changes}


@pytest.mark.model
@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"top_p": 3}, "top_p"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_a_wrong_parameter_is_400_that_names_it(
    server: httpx.Client, changes: dict[str, Any], param: str
) -> None:
    answer = server.post("/v1/chat/completions", json=chat(**changes))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert param in f"{error['param']} {error['message']}"
    assert_goes_on(server)


@pytest.mark.model
def test_an_empty_prompt_of_a_completion_is_400(server: httpx.Client) -> None:
    answer = server.post("/v1/completions", json={"model": "starter", "prompt": ""})
    # A model with a beginning-of-text token can continue from it alone; this one has none to add.
    assert answer.status_code == 400
    assert "prompt" in answer.json()["error"]["message"]
    assert_goes_on(server)


@pytest.mark.model
def test_a_ten_megabyte_prompt_is_a_context_error_with_both_counts(server: httpx.Client) -> None:
    text = "many words " * 1_000_000
    answer = server.post(
        "/v1/chat/completions", json=chat(messages=[{"role": "user", "content": text}])
    )
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert len(error["message"]) < 500
    assert_goes_on(server)


@pytest.mark.model
def test_a_model_served_alone_answers_to_a_name_that_is_not_its_own(server: httpx.Client) -> None:
    answer = server.post("/v1/chat/completions", json=chat(model="no-such-model"))
    assert answer.status_code == 200
    assert_goes_on(server)


@pytest.mark.model
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"null"])
def test_a_body_that_is_no_request_is_400(server: httpx.Client, body: bytes) -> None:
    answer = server.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert_goes_on(server)


@pytest.mark.model
def test_clients_that_vanish_mid_stream_leave_the_others_whole(server: httpx.Client) -> None:
    whole = server.post("/v1/chat/completions", json=chat(max_tokens=24)).json()
    answers: list[str] = []

    def ask() -> None:
        body = chat(max_tokens=24)
        answers.append(server.post("/v1/chat/completions", json=body).json()["choices"][0]
                       ["message"]["content"])  # fmt: skip

    others = [threading.Thread(target=ask) for _ in range(3)]
    for other in others:
        other.start()
    with server.stream(
        "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=500, ignore_eos=True)
    ) as answer:
        next(answer.iter_lines())
    for other in others:
        other.join()
    assert answers == [whole["choices"][0]["message"]["content"]] * 3


def assert_goes_on(server: httpx.Client) -> None:
    assert server.get("/health").status_code == 200
    assert server.post("/v1/chat/completions", json=chat()).status_code == 200
