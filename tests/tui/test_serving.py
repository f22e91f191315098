"""A server started from the interface counts as started when it answers."""

from __future__ import annotations

import asyncio
import sys

from edgellm.tui.serving import ServerProcess, _answers

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
