"""Who may ask: hosts, origins, keys, rates, and what is refused before anything starts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgellm.cli.serve import check_exposure
from edgellm.engine.info import EngineOptions, Script
from edgellm.errors import ConfigError
from edgellm.server import access
from edgellm.server.access import Policy, make_key
from edgellm.server.core import Options
from tests.server.conftest import Running

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def with_policy(**policy: Any) -> Options:
    return Options(log_requests=False, policy=Policy(**policy))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed() -> Any:
    keys = (make_key("work:sk-work"), make_key("sk-home"))
    with Running(options=with_policy(keys=keys, hosts=None, origins=("https://app.test",))) as r:
        yield r


@pytest.mark.parametrize(
    "headers", [bearer("sk-work"), bearer("sk-home"), {"x-api-key": "sk-work"}]
)
def test_each_key_opens(keyed: Running, headers: dict[str, str]) -> None:
    with keyed.client(headers=headers) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("sk-wor"), bearer("work:sk-work"), {"authorization": "sk-work"}],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("POST", "/v1/edgellm/stop"),
        ("POST", "/v1/edgellm/unload"),
        ("GET", "/v1/edgellm/stats"),
        ("GET", "/no/such/path"),
    ],
)
def test_everything_but_health_and_docs_needs_a_key(
    keyed: Running, headers: dict[str, str], method: str, path: str
) -> None:
    with keyed.client(headers=headers) as client:
        answer = client.request(method, path, json=CHAT if method == "POST" else None)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["x-request-id"]


def test_health_and_the_docs_need_no_key(keyed: Running) -> None:
    with keyed.client() as client:
        for path in ("/health", "/v1/health", "/docs", "/openapi.json", "/"):
            assert client.get(path).status_code == 200


def test_an_allowed_origin_is_told_so_and_another_is_not(keyed: Running) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x-y"}
    with keyed.client() as client:
        good = client.options("/v1/chat/completions", headers={"origin": "https://app.test", **ask})
        assert good.headers["access-control-allow-origin"] == "https://app.test"
        assert good.headers["access-control-allow-headers"] == "x-y"
        bad = client.options("/v1/chat/completions", headers={"origin": "https://evil.test", **ask})
        assert "access-control-allow-origin" not in bad.headers
        answer = client.post(
            "/v1/chat/completions",
            json=CHAT,
            headers={"origin": "https://app.test", **bearer("sk-work")},
        )
        assert answer.headers["access-control-allow-origin"] == "https://app.test"


def test_without_keys_another_origin_is_refused_even_where_cors_would_only_hide_the_answer(
    http: httpx.Client,
) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://evil.test"})
    assert answer.status_code == 403
    same = http.post(
        "/v1/chat/completions", json=CHAT, headers={"origin": str(http.base_url).rstrip("/")}
    )
    assert same.status_code == 200


@pytest.mark.parametrize("host", ["evil.test", "evil.test:80", "localhost.evil.test", "", "[::2]"])
def test_a_host_name_that_is_not_this_machines_is_refused(http: httpx.Client, host: str) -> None:
    answer = http.get("/v1/models", headers={"host": host})
    assert answer.status_code == 421
    assert answer.json()["error"]["code"] == "host_not_allowed"


def test_a_load_balancers_check_over_http_1_0_needs_no_host_header(scripted: Running) -> None:
    host, port = scripted.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1", "[::1]:8080"])
def test_loopback_names_are_let_in(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"host": host}).status_code == 200


def test_a_rate_limit_answers_429_with_when_to_come_back(serving: Callable[..., Running]) -> None:
    running = serving(options=with_policy(rate_per_minute=2))
    with running.client() as client:
        answers = [client.post("/v1/chat/completions", json=CHAT) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"
    assert int(answers[2].headers["retry-after"]) > 0
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"


def test_concurrency_is_limited_by_key(serving: Callable[..., Running]) -> None:
    keys = (make_key("a:sk-a"), make_key("b:sk-b"))
    slow = EngineOptions(script=Script(answer_tokens=0, step_s=0.02))
    running = serving(engine=slow, options=with_policy(keys=keys, hosts=None, max_concurrent=1))
    endless = {**CHAT, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with running.client(headers=bearer("sk-a")) as client:
        with client.stream("POST", "/v1/chat/completions", json=endless) as stream:
            chunks = stream.iter_bytes()
            next(chunks)
            second = client.post("/v1/chat/completions", json=CHAT)
            other = client.post("/v1/chat/completions", json=CHAT, headers=bearer("sk-b"))
        assert second.status_code == 429
        assert other.status_code == 200
        deadline = time.monotonic() + 60
        while client.post("/v1/chat/completions", json=CHAT).status_code == 429:
            assert time.monotonic() < deadline


def test_keys_are_compared_without_stopping_at_the_first_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    real = access.hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return real(a, b)

    monkeypatch.setattr(access.hmac, "compare_digest", counting)
    keys = tuple(make_key(f"k{i}:secret-{i}") for i in range(4))

    class Fake:
        def header(self, name: bytes) -> str:
            return "Bearer secret-0" if name == b"authorization" else ""

    found = access.Access(Policy(keys=keys))._key_name(Fake())  # type: ignore[arg-type]
    assert found == "k0"
    assert len(compared) == 4


def test_a_key_file_has_named_keys_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nalice:sk-1\n\nsk-2  # no name\n")
    keys = access.read_keys(file)
    assert keys[0].name == "alice"
    assert keys[1].name.startswith("key-")
    assert b"sk-1" not in keys[0].digest


@pytest.mark.parametrize("content", ["", "# nothing\n"])
def test_an_empty_key_file_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError):
        access.read_keys(file)
    with pytest.raises(ConfigError):
        access.read_keys(tmp_path / "missing")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "box.local"])
def test_an_address_others_reach_needs_a_key_or_insecure(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="API key"):
        check_exposure([host], has_keys=False, insecure=False)
    check_exposure([host], has_keys=True, insecure=False)
    assert capsys.readouterr().err == ""
    check_exposure([host], has_keys=False, insecure=True)
    assert "warning" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.0.1"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure([host], has_keys=False, insecure=False)


def test_localhost_as_an_origin_is_every_port_of_this_machine_and_no_lookalike() -> None:
    gate = access.Access(Policy(origins=("localhost",)))
    assert gate.allows_origin("http://localhost:3000")
    assert gate.allows_origin("http://127.0.0.1")
    assert gate.allows_origin("http://[::1]:3000")
    assert not gate.allows_origin("http://localhost.evil.com")
    assert not gate.allows_origin("http://notlocalhost")
    assert not gate.allows_origin("http://[")


def test_nothing_of_a_prompt_is_logged(
    serving: Callable[..., Running], capfd: pytest.CaptureFixture[str]
) -> None:
    running = serving(options=Options(log_requests=True))
    secret = {"messages": [{"role": "user", "content": "SECRET-TEXT"}], "max_tokens": 2}
    with running.client() as client:
        client.post("/v1/chat/completions", json=secret)
        client.post("/v1/chat/completions", json={**secret, "temperature": 50})
        client.post("/v1/chat/completions", content=b'{"messages": "SECRET-TEXT')
    threading.Event().wait(0.1)
    logged = capfd.readouterr().err
    assert logged.count('"event":"request"') == 3
    assert "SECRET-TEXT" not in logged
    assert '"n_prompt"' in logged
