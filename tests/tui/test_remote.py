"""Chat and stats of a running server, over a socket: what arrives, what breaks, what is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from edgellm.errors import (
    ContextOverflowError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
)
from edgellm.planner.plan import PlanRequest
from edgellm.request import SamplingParams
from edgellm.tui.demo import DemoServices
from edgellm.tui.http import Http
from edgellm.tui.ports import ServerLostError
from edgellm.tui.remote import RemoteEndpoint, find_stats

Answer = Callable[[str, Any, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """A server on a port of its own; ``answer(path, body, writer)`` writes raw HTTP."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        await answer(head.split(" ")[1], json.loads(body) if body else None, writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        listening.close()


def reply(writer: asyncio.StreamWriter, value: Any, status: str = "200 OK") -> None:
    body = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def chunks(writer: asyncio.StreamWriter, *events: Any, end: bool = True) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for event in events:
        data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode())
        data += b"\n\n"
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    if end:
        writer.write(b"0\r\n\r\n")


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


STATS = {"models": {"m": {"n_steps": 7, "running": 1, "decode_tps": 50.5, "requests": []}}}
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


async def ours(path: str, body: Any, writer: asyncio.StreamWriter) -> None:
    """A server of this program, as far as this client looks."""
    if path == "/v1/models":
        reply(writer, {"data": [{"id": "m"}]})
    elif path.startswith("/v1/edgellm/plan"):
        plan = DemoServices().plan("starter", PlanRequest())
        reply(writer, plan.to_json())
    elif path == "/v1/edgellm/stats":
        reply(writer, STATS)
    elif path == "/tokenize":
        reply(writer, {"tokens": list(range(len(body["content"].split())))})
    else:
        assert body["model"] == "m"
        assert body["temperature"] == 0.1
        assert "top_k" not in body  # a default is not sent
        chunks(
            writer, {"choices": [{"delta": {"reasoning_content": "hm"}}]}, piece("Hel"),
            piece("lo", "stop"),
            {"choices": [], "usage": USAGE, "timings": {"predicted_per_second": 40.0}}, b"[DONE]",
        )  # fmt: skip


async def test_an_answer_its_thinking_its_usage_and_its_speed_arrive() -> None:
    async with server(ours) as url:
        endpoint = await RemoteEndpoint.attach(url)
        assert (endpoint.name, endpoint.n_ctx) == ("m", 8192)
        deltas = [
            delta
            async for delta in endpoint.chat(
                [{"role": "user", "content": "hi"}],
                SamplingParams(temperature=0.1),
                request_id="1",
            )
        ]
        assert "".join(d.text for d in deltas) == "Hello"
        assert "".join(d.reasoning for d in deltas) == "hm"
        last = deltas[-1]
        assert last.finish == "stop"
        assert last.usage is not None
        assert (last.usage.n_prompt, last.usage.n_cached) == (9, 4)
        assert last.timings is not None
        assert last.timings.decode_tps == 40.0


async def test_stats_and_token_counts_of_a_server() -> None:
    async with server(ours) as url:
        endpoint = await RemoteEndpoint.attach(url + "/v1")
        stats = await endpoint.stats()
        assert (stats.n_steps, stats.decode_tps) == (7, 50.5)
        assert await endpoint.count([{"role": "user", "content": "one two three"}]) == 8


async def test_another_program_s_server_chats_without_a_plan() -> None:
    async def theirs(path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            reply(writer, {"data": [{"id": "other"}]})
        else:
            reply(writer, {"error": {"message": "no", "code": None}}, "404 Not Found")

    async with server(theirs) as url:
        endpoint = await RemoteEndpoint.attach(url)
        assert (endpoint.plan, endpoint.n_ctx) == (None, 0)
        assert await endpoint.count([{"role": "user", "content": "x" * 40}]) == 15


async def test_a_server_that_dies_in_mid_answer_never_looks_finished() -> None:
    async def dying(path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        chunks(writer, piece("Hel"), end=False)

    async with server(dying) as url:
        endpoint = RemoteEndpoint(Http(url), "m", None, None)
        stream = endpoint.chat([], SamplingParams(), request_id="1")
        assert (await anext(stream)).text == "Hel"
        with pytest.raises(ServerLostError, match="in the middle"):
            await anext(stream)
        assert not endpoint.is_alive


async def test_an_answer_cut_without_its_end_mark_is_an_error() -> None:
    async def cut(path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        chunks(writer, piece("Hel"))

    async with server(cut) as url:
        stream = Http(url).events("/v1/chat/completions", {})
        assert (await anext(stream))["choices"]
        with pytest.raises(ServerLostError, match="in the middle"):
            await anext(stream)


async def test_nothing_listening_names_the_next_command() -> None:
    with pytest.raises(ServerLostError) as caught:
        await RemoteEndpoint.attach("127.0.0.1:9")
    assert "edgellm serve" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("400 Bad Request", "context_length_exceeded", ContextOverflowError),
        ("400 Bad Request", None, InvalidRequestError),
        ("401 Unauthorized", "invalid_api_key", InvalidRequestError),
        ("429 Too Many Requests", None, QueueFullError),
    ],
)
async def test_what_a_server_refuses_is_an_error_of_ours(
    status: str, code: str | None, kind: type[Exception]
) -> None:
    async def refuse(path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        reply(writer, {"error": {"message": "because", "code": code}}, status)

    async with server(refuse) as url:
        with pytest.raises(kind) as caught:
            await Http(url).get("/v1/models")
        assert caught.value.message == "because"  # type: ignore[attr-defined]


async def test_an_error_event_in_mid_stream_is_raised() -> None:
    async def failing(path: str, body: Any, writer: asyncio.StreamWriter) -> None:
        chunks(writer, piece("a"), {"error": {"message": "out of cells", "code": "x"}})

    async with server(failing) as url:
        endpoint = RemoteEndpoint(Http(url), "m", None, None)
        stream = endpoint.chat([], SamplingParams(), request_id="1")
        assert (await anext(stream)).text == "a"
        with pytest.raises(EngineError, match="out of cells"):
            await anext(stream)


def test_stats_are_found_at_any_depth_and_by_the_model_s_name() -> None:
    data = {"models": [{"a": {"n_steps": 1}}, {"b": {"n_steps": 2}}]}
    assert find_stats(data)["n_steps"] == 1
    assert find_stats({"x": {"n_steps": 1}, "m": {"n_steps": 3}}, "m")["n_steps"] == 3
    assert find_stats({"nothing": 1}) == {}
