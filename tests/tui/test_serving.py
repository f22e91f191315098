"""A server started from the interface counts as started when it answers."""

from __future__ import annotations

import asyncio
import sys

from edgellm.tui.serving import ServerProcess, _answers, readable

LOADING = b'{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}'


def answer(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


async def test_a_server_that_still_loads_its_model_is_waited_for() -> None:
    answers = [answer("503 Service Unavailable", LOADING)] * 2 + [answer("200 OK", b"{}")]
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answers[len(asked) - 1])
        await writer.drain()
        writer.close()

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(60)", stdout=asyncio.subprocess.PIPE
    )
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        server = ServerProcess(process, f"http://127.0.0.1:{port}")
        try:
            await asyncio.wait_for(_answers(server, None), 60)
        finally:
            await server.stop()
    assert len(asked) == 3
    assert all(each.startswith(b"GET /health") for each in asked)


def test_a_request_in_the_log_is_words_and_not_json() -> None:
    shown = readable(
        '{"ts":"2026-11-30T04:06:20.448Z","event":"request","id":"req_1","method":"POST",'
        '"path":"/v1/chat/completions","status":200,"ms":52.1,"client":"127.0.0.1","n_output":16}'
    )
    assert shown is not None
    clock, said, *figures = shown.split("  ")
    assert clock.count(":") == 2
    assert said == "POST /v1/chat/completions 200"
    assert figures == ["ms 52.1", "client 127.0.0.1", "n_output 16"]


def test_health_checks_are_not_shown_and_other_lines_stay_as_they_are() -> None:
    head = '{"ts":"2026-11-30T04:06:13.459Z","event":'
    assert readable(head + '"request","method":"GET","path":"/health","status":503}') is None
    assert str(readable(head + '"stopped"}')).endswith("  stopped")
    for line in ("serving starter at http://127.0.0.1:8080/v1", '{"model": 1}', "{", "3", ""):
        assert readable(line) == line
