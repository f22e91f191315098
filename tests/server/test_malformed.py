"""A thousand broken requests: each is answered with a 4xx in the API's own error shape."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest

from edgellm.server.core import Options
from tests.server.conftest import Running, limits

SEED = 20_261_129
N = 1000

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "starter",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
    },
    "/v1/completions": {"model": "starter", "prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"model": "starter", "input": "hello", "max_output_tokens": 2},
    "/v1/messages": {
        "model": "starter",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
    },
    "/v1/embeddings": {"model": "starter", "input": "hello"},
    "/completion": {"prompt": "hello", "n_predict": 2},
    "/tokenize": {"content": "hello"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
NUMBERS = {
    "/v1/chat/completions": (
        "temperature",
        "top_p",
        "max_tokens",
        "n",
        "seed",
        "frequency_penalty",
    ),
    # Not logprobs: true and false are taken there, as chat completions take them.
    "/v1/completions": ("temperature", "top_p", "max_tokens", "n", "best_of"),
    "/v1/responses": ("temperature", "top_p", "max_output_tokens", "top_logprobs"),
    "/v1/messages": ("temperature", "top_p", "max_tokens", "top_k"),
    "/completion": ("temperature", "top_p", "n_probs", "min_p"),
}
REQUIRED = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/embeddings": "input",
    "/completion": "prompt",
    "/tokenize": "content",
    "/detokenize": "tokens",
    "/v1/rerank": "query",
}
Broken = tuple[str, bytes]


def not_json(rng: random.Random) -> Broken:
    path, body = pick(rng)
    data = json.dumps(body).encode()
    junk = [b"", b"null", b"[]", b'"x"', b"{", data[: rng.randrange(1, len(data))], data + b"}"]
    return path, rng.choice([*junk, b"\x00" + data, b"not json", b"{'a': 1}", data + b",1"])


def bytes_flipped(rng: random.Random) -> Broken:
    path, body = pick(rng)
    data = bytearray(json.dumps(body).encode())
    # A quote, brace or colon gone: never JSON again.
    at = rng.choice([i for i, b in enumerate(data) if b in b'{}":'])
    data[at] = 0x07
    return path, bytes(data)


def wrong_type(rng: random.Random) -> Broken:
    path, body = pick(rng)
    key = REQUIRED[path]
    wrong = rng.choice([1.5, {"a": {"b": 1}}, [[["deep"]]], False, [{"role": 7}], [None]])
    return path, json.dumps({**body, key: wrong}).encode()


def missing_field(rng: random.Random) -> Broken:
    path, body = pick(rng)
    return path, json.dumps({k: v for k, v in body.items() if k != REQUIRED[path]}).encode()


def field_twice(rng: random.Random) -> Broken:
    path, body = pick(rng)
    key = rng.choice(list(body))
    again = json.dumps({key: body[key]})[1:]
    return path, (json.dumps(body)[:-1] + "," + again).encode()


def bad_number(rng: random.Random) -> Broken:
    path = rng.choice(list(NUMBERS))
    name = rng.choice(NUMBERS[path])
    text = rng.choice(["NaN", "Infinity", "-Infinity", "1e999", "-1e18", "true", '"hot"', "[]"])
    data = json.dumps({k: v for k, v in GOOD[path].items() if k != name})[:-1]
    return path, f'{data},"{name}":{text}}}'.encode()


def huge_number(rng: random.Random) -> Broken:
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/completion"])
    name = rng.choice(["temperature", "top_p", "min_p", "n", "seed", "top_k", "repeat_penalty"])
    return path, json.dumps({**GOOD[path], name: 10 ** rng.randrange(20, 300)}).encode()


def deep(rng: random.Random) -> Broken:
    path, body = pick(rng)
    n = rng.choice([2_000, 50_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    nested = opening * n + ("1" if opening != "[" else "") + closing * n
    return path, (json.dumps(body)[:-1] + ',"extra":' + nested + "}").encode()


def bad_utf8(rng: random.Random) -> Broken:
    path, body = pick(rng)
    junk = rng.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80", b"\xc0\xaf"])
    return path, json.dumps(body)[:-1].encode() + b',"user":"' + junk + b'"}'


def lone_surrogate(rng: random.Random) -> Broken:
    path = rng.choice([p for p, body in GOOD.items() if "hello" in json.dumps(body)])
    return path, json.dumps(GOOD[path]).replace("hello", "\\ud800").encode()


def impossible_value(rng: random.Random) -> Broken:
    path, change = rng.choice(
        [
            ("/v1/chat/completions", {"messages": []}),
            ("/v1/chat/completions", {"messages": [{"role": "user"}, {}]}),
            ("/v1/chat/completions", {"n": 0}),
            ("/v1/chat/completions", {"stop": [""]}),
            ("/v1/chat/completions", {"stop": ["x"] * 200}),
            ("/v1/chat/completions", {"logit_bias": {"999999999": 1}}),
            ("/v1/chat/completions", {"logit_bias": {"1": 1e9}}),
            ("/v1/chat/completions", {"tools": [{"type": "function"}]}),
            ("/v1/chat/completions", {"tool_choice": "required"}),
            ("/v1/chat/completions", {"response_format": {"type": "sound"}}),
            ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}),
            ("/v1/completions", {"prompt": []}),
            ("/v1/completions", {"prompt": [-1]}),
            ("/v1/completions", {"prompt": [10**9]}),
            ("/v1/completions", {"prompt": ["a", 1]}),
            ("/v1/completions", {"prompt": ""}),
            ("/v1/completions", {"best_of": 1, "n": 4}),
            ("/v1/responses", {"previous_response_id": "resp_nothing"}),
            ("/v1/responses", {"input": []}),
            ("/v1/responses", {"tools": [{"type": "web_search"}]}),
            ("/v1/messages", {"max_tokens": -3}),
            ("/v1/messages", {"messages": [{"role": "user", "content": []}]}),
            ("/detokenize", {"tokens": [-5]}),
            ("/v1/rerank", {"documents": []}),
        ]
    )
    return path, json.dumps({**GOOD[path], **change}).encode()


KINDS: list[Callable[[random.Random], Broken]] = [
    not_json,
    bytes_flipped,
    wrong_type,
    missing_field,
    field_twice,
    bad_number,
    huge_number,
    bad_utf8,
    lone_surrogate,
    impossible_value,
]


def pick(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice([p for p in GOOD if p in REQUIRED])
    return path, GOOD[path]


def check_shape(path: str, status: int, answer: Any, sent: bytes) -> None:
    assert 400 <= status < 500, (path, status, sent[:300], answer)
    error = answer["error"]
    if path.startswith("/v1/messages"):
        assert answer["type"] == "error", (path, sent[:300], answer)
        assert set(error) == {"type", "message"}
    else:
        assert {"message", "type", "param", "code"} <= set(error), (path, sent[:300], answer)
        assert error["type"] in ("invalid_request_error",), (path, sent[:300], answer)
    assert error["message"]


def test_a_thousand_malformed_bodies_are_4xx_and_the_server_stays_healthy(
    scripted: Running,
) -> None:
    rng = random.Random(SEED)
    with scripted.client() as client:
        for i in range(N):
            kind = deep if i % 50 == 0 else KINDS[i % len(KINDS)]
            path, data = kind(rng)
            answer = client.post(path, content=data)
            check_shape(path, answer.status_code, answer.json(), data)
        assert client.get("/health").json() == {"status": "ok"}
        good = client.post("/v1/completions", json=GOOD["/v1/completions"])
        assert good.status_code == 200


def raw(running: Running, data: bytes, *, shut: bool = True, wait: float = 60) -> bytes:
    """What the server answers to these bytes."""
    host, port = running.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=wait) as sock:
        sock.sendall(data)
        if shut:
            sock.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/mod",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\n\r\n{",
    ],
)
def test_what_is_not_http_or_ends_too_soon_is_a_json_4xx(scripted: Running, data: bytes) -> None:
    answer = raw(scripted, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1][:1] == b"4", answer
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_body_that_comes_too_slowly_is_408(serving: Callable[..., Running]) -> None:
    running = serving(options=limits(body_timeout_s=0.3))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\n\r\n{"
    answer = raw(running, head, shut=False)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"request_timeout"' in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413(serving: Callable[..., Running], chunked: bool) -> None:
    running = serving(options=limits(max_body=1000))
    body = json.dumps({"prompt": "x" * 5000}).encode()

    def pieces() -> Any:
        for i in range(0, len(body), 500):
            yield body[i : i + 500]

    with running.client() as client:
        answer = client.post("/v1/completions", content=pieces() if chunked else body)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert client.get("/health").status_code == 200


def test_unknown_paths_and_methods_are_404_and_405(scripted: Running) -> None:
    with scripted.client() as client:
        assert client.get("/nothing").status_code == 404
        assert client.get("/nothing").json()["error"]["code"] == "not_found"
        wrong = client.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert client.request("BREW", "/v1/models").status_code in (400, 405)


def test_an_unexpected_error_is_a_500_in_shape_and_the_server_goes_on(
    serving: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = serving(options=Options(log_requests=False))

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(running.server.runtime, "models", broken)
    with running.client() as client:
        answer = client.get("/v1/models")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "ZeroDivision" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 200
