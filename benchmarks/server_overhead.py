"""What the server costs beside the engine: requests a second and streamed tokens a second.

The engine is the scripted one, which computes nothing, so what is measured is HTTP, JSON, the
chat template, the frames between the processes and the events. Client, server and engine share
the machine's cores. The client speaks HTTP over plain sockets, because an SDK would cost more
than the server.

    python benchmarks/server_overhead.py [--seconds 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil


def request(path: str, body: dict[str, Any]) -> bytes:
    """One HTTP request as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class Whole(asyncio.Protocol):
    """Sends a request, waits for the whole answer, sends it again."""

    def __init__(self, message: bytes, until: float) -> None:
        self.message, self.until = message, until
        self.n = 0
        self.errors = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, sep, body = self._buffer.partition(b"\r\n\r\n")
        if not sep:
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(body) < length:
            return
        self.n += 1
        self.errors += not head.startswith(b"HTTP/1.1 200")
        self._buffer = b""
        if time.monotonic() < self.until:
            self.transport.write(self.message)
        else:
            self.transport.close()
            self.done.set_result(None)


class Streamed(Whole):
    """Counts the events of streams until time is up."""

    def data_received(self, data: bytes) -> None:
        self.n += data.count(b'"content":"')
        self._buffer = self._buffer[-16:] + data
        if b"[DONE]" not in self._buffer:
            return
        self._buffer = b""
        if time.monotonic() < self.until:
            self.transport.write(self.message)
        else:
            self.transport.close()
            self.done.set_result(None)


async def drive(kind: type[Whole], port: int, message: bytes, n: int, seconds: float) -> float:
    """How many a second, over ``n`` connections."""
    loop = asyncio.get_running_loop()
    start = time.monotonic()
    clients = []
    for _ in range(n):
        _, client = await loop.create_connection(
            lambda: kind(message, start + seconds), "127.0.0.1", port
        )
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    if errors := sum(client.errors for client in clients):
        raise SystemExit(f"{errors} answers were not 200")
    return sum(client.n for client in clients) / (time.monotonic() - start)


def start_server(home: str) -> tuple[subprocess.Popen[str], int]:
    """``edgellm serve`` over the scripted engine, on a free port."""
    command = [sys.executable, "-m", "edgellm", "serve", "starter", "--engine", "scripted"]
    command += ["--port", "0", "--quiet", "--parallel", "64", "--ctx", "65536"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "EDGELLM_HOME": home},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, int(line.rstrip().rsplit(":", 1)[1].removesuffix("/v1"))


def cpu_seconds(pid: int) -> tuple[float, float]:
    """CPU time so far of the server and of its engine."""
    server = psutil.Process(pid)
    engines = [child.cpu_times() for child in server.children(recursive=True)]
    own = server.cpu_times()
    return own.user + own.system, sum(t.user + t.system for t in engines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    messages = [{"role": "user", "content": "Say one word."}]
    chat = {"model": "starter", "messages": messages, "max_tokens": 1}
    text = {"model": "starter", "prompt": "Say one word.", "max_tokens": 1}
    stream = {**chat, "max_tokens": 500, "stream": True, "ignore_eos": True}
    cases = {
        "chat_requests_per_s": (Whole, request("/v1/chat/completions", chat)),
        "completion_requests_per_s": (Whole, request("/v1/completions", text)),
        "streamed_tokens_per_s": (Streamed, request("/v1/chat/completions", stream)),
    }
    with tempfile.TemporaryDirectory() as home:
        process, port = start_server(home)
        try:
            results: dict[str, float] = {}
            for name, (kind, message) in cases.items():
                asyncio.run(drive(kind, port, message, 4, 0.5))
                before, began = cpu_seconds(process.pid), time.monotonic()
                rate = asyncio.run(
                    drive(kind, port, message, arguments.connections, arguments.seconds)
                )
                after = cpu_seconds(process.pid)
                n = rate * (time.monotonic() - began)
                results[name] = round(rate)
                # What other programs on the machine cannot change.
                results[name + ".server_us"] = round((after[0] - before[0]) / n * 1e6, 1)
                results[name + ".engine_us"] = round((after[1] - before[1]) / n * 1e6, 1)
        finally:
            process.terminate()
            process.wait(30)
    if arguments.json:
        print(json.dumps(results))
    else:
        print(f"cores: {os.cpu_count()}, connections: {arguments.connections}")
        for name, value in results.items():
            print(f"{name:40} {value:>10,}")


if __name__ == "__main__":
    main()
