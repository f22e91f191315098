"""Servers are started, waited for, described and ended; failures say what the server said."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edgellm.bench.client import Endpoint
from edgellm.bench.target import (
    RunningServer,
    ServerSpec,
    find_target,
    free_port,
    llama_server_spec,
)
from edgellm.errors import ConfigError, EdgeLLMError, EngineError

_SERVER = """
import http.server, json, sys, time
time.sleep(0.2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = {"/health": {}, "/v1/models": {"data": [{"id": "the-model"}]},
                 "/props": {"total_slots": 3, "secret": "x"}}.get(self.path)
        data = json.dumps(found).encode()
        self.send_response(200 if found is not None else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args): pass
print("ready", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def spec(code: str = _SERVER) -> ServerSpec:
    port = free_port()
    return ServerSpec(
        name="fake",
        command=(sys.executable, "-c", code, str(port)),
        url=f"http://127.0.0.1:{port}",
    )


async def test_a_server_is_started_described_and_ended() -> None:
    async with RunningServer(spec()) as target:
        assert target.model == "the-model"
        assert target.about == {"kind": "llama-server", "total_slots": 3}
        assert target.pid is not None
        assert psutil.pid_exists(target.pid)
    assert not psutil.pid_exists(target.pid)


async def test_a_server_that_dies_says_its_last_words() -> None:
    with pytest.raises(EngineError, match=r"(?s)ended with 3.*no such model"):
        async with RunningServer(spec("print('no such model'); raise SystemExit(3)")):
            pass


async def test_a_server_that_is_never_ready_is_ended() -> None:
    server = RunningServer(spec("import time; time.sleep(60)"), ready_s=0.5)
    with pytest.raises(EngineError, match=r"not ready after 0\.5 s"):
        async with server:
            pass
    assert server._process is not None
    assert server._process.poll() is not None


async def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(EdgeLLMError, match="cannot start"):
        async with RunningServer(ServerSpec(name="x", command=("/nonesuch",), url="http://h:1")):
            pass


async def test_a_failure_inside_ends_the_server_too() -> None:
    with pytest.raises(ZeroDivisionError):
        async with RunningServer(spec()) as target:
            raise ZeroDivisionError
    assert not psutil.pid_exists(target.pid or 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_server_does_not_outlive_a_killed_benchmark() -> None:
    made = spec()
    code = f"""
import asyncio, time
from edgellm.bench.target import RunningServer, ServerSpec
async def main():
    made = ServerSpec(name="fake", command={made.command!r}, url={made.url!r})
    async with RunningServer(made) as target:
        print(target.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([child], timeout=20)
    assert not alive


def test_llama_server_finds_its_libraries_beside_itself(tmp_path: Path) -> None:
    made = llama_server_spec(str(tmp_path / "llama-server"), "m.gguf", ["-np", "4"])
    assert made.environment["LD_LIBRARY_PATH"].startswith(str(tmp_path))
    assert made.command[-2:] == ("-np", "4")
    assert made.url.endswith(made.command[made.command.index("--port") + 1])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8080/v1", ("h", 8080, False, "")),
        ("https://api.example.com/openai/v1/", ("api.example.com", 443, True, "/openai")),
        ("h:81", ("h", 81, False, "")),
        ("http://h/v1/chat/completions", ("h", 80, False, "")),
        ("http://h/a/v1/models/", ("h", 80, False, "/a")),
        ("http://h/\u00fc", ("h", 80, False, "/%C3%BC")),
        ("http://[::1]:9", ("::1", 9, False, "")),
    ],
)
def test_addresses_are_read(url: str, expected: tuple[str, int, bool, str]) -> None:
    found = Endpoint.parse(url)
    assert (found.host, found.port, found.tls, found.base) == expected


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert Endpoint.parse("http://[::1]:9/v1").url == "http://[::1]:9"


@pytest.mark.parametrize(
    "url", ["http://a..b:80", f"http://{'x' * 80}.com", "http://a b/", "h:9\n"]
)
def test_an_address_that_names_no_host_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Endpoint.parse(url)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n", "without a key"),
        (b"HTTP/1.1 404 X\r\nContent-Length: 2\r\n\r\nno", "http_404 no"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 6\r\n\r\n<html>", "with JSON"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "no HTTP answer"),
    ],
)
async def test_why_a_server_cannot_be_measured_is_said(answer: bytes, said: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EngineError, match=said):
            await find_target(Endpoint.parse(f"127.0.0.1:{port}"))


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not an http"):
        Endpoint.parse("ftp://h/x")
