"""What leaves on a connection, and who hears that it is lost."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from edgellm.server.http import CLIENT, Call, Client
from edgellm.server.run import Joined
from tests.server.conftest import Running


class Recorder:
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def joined(recorder: Any) -> Joined:
    return Joined(recorder, asyncio.get_running_loop())


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def test_head_and_body_of_an_answer_leave_in_one_write() -> None:
    async def main() -> list[bytes]:
        recorder = Recorder()
        connection = joined(recorder)
        connection.write(HEAD)
        connection.write(b"body")
        connection.write(b"more")
        await asyncio.sleep(0)
        return recorder.written

    assert asyncio.run(main()) == [HEAD + b"body", b"more"]


def test_a_head_that_nothing_follows_leaves_by_itself() -> None:
    async def main() -> list[bytes]:
        recorder = Recorder()
        joined(recorder).write(HEAD)
        await asyncio.sleep(0)
        return recorder.written

    assert asyncio.run(main()) == [HEAD]


def test_closing_sends_the_head_first() -> None:
    async def main() -> Recorder:
        recorder = Recorder()
        connection = joined(recorder)
        connection.write(HEAD)
        connection.close()
        return recorder

    recorder = asyncio.run(main())
    assert recorder.written == [HEAD]
    assert recorder.is_closed


def test_100_continue_does_not_wait() -> None:
    async def main() -> list[bytes]:
        recorder = Recorder()
        joined(recorder).write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return recorder.written

    assert asyncio.run(main()) == [b"HTTP/1.1 100 Continue\r\n\r\n"]


@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_client_that_leaves_cancels_what_watches_it(leaves_first: bool) -> None:
    client = Client()
    scope: dict[str, Any] = {"method": "POST", "path": "/", "headers": [], CLIENT: client}

    async def main() -> bool:
        call = Call(scope, None, None)  # type: ignore[arg-type]
        if leaves_first:
            client.leave()
        call.watch()
        if not leaves_first:
            asyncio.get_running_loop().call_soon(client.leave)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(60)
        return call.gone

    assert asyncio.run(main())
    client.on_leave.clear()


def test_a_watch_that_ended_hears_nothing() -> None:
    client = Client()
    scope: dict[str, Any] = {"method": "POST", "path": "/", "headers": [], CLIENT: client}

    async def main() -> bool:
        call = Call(scope, None, None)  # type: ignore[arg-type]
        call.watch()()
        client.leave()
        await asyncio.sleep(0)
        return call.gone

    assert not asyncio.run(main())


def test_header_names_are_written_as_other_servers_write_them(scripted: Running) -> None:
    head = exchange(
        scripted, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    ).split(b"\r\n\r\n")[0]
    names = [line.split(b":")[0] for line in head.split(b"\r\n")[1:]]
    assert {b"Content-Type", b"Content-Length", b"X-Request-Id"} <= {*names}


def exchange(running: Running, message: bytes) -> bytes:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(message)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
    return answer


def test_head_answers_without_a_body(scripted: Running) -> None:
    answer = exchange(
        scripted, b"HEAD /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


def test_pipelined_requests_are_answered_in_order(scripted: Running) -> None:
    body = b'{"content":"a"}'
    one = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(body)
    last = b"GET /v1/health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = exchange(scripted, (one + b"\r\n" + body) * 3 + last)
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.rfind(b'"tokens"') < answer.rfind(b'"status"')
