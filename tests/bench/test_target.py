"""Servers are started, waited for, described and ended; failures say what the server said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edgellm.bench.client import Endpoint
from edgellm.bench.target import (
    RunningServer,
    ServerSpec,
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
        ("http://[::1]:9", ("::1", 9, False, "")),
    ],
)
def test_addresses_are_read(url: str, expected: tuple[str, int, bool, str]) -> None:
    found = Endpoint.parse(url)
    assert (found.host, found.port, found.tls, found.base) == expected


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert Endpoint.parse("http://[::1]:9/v1").url == "http://[::1]:9"


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not an http"):
        Endpoint.parse("ftp://h/x")
