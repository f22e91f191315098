"""A front before two llama-server processes and one edgellm, one of which is killed under load.

    python benchmarks/upstream.py MODEL.gguf --llama-server PATH [--requests 24] [--streams 6]
    python benchmarks/upstream.py MODEL.gguf --llama-server PATH --sdk

Exits with 1 when a request is lost that had not begun to answer. With ``--sdk`` the tests of the
OpenAI and Anthropic clients run against one llama-server itself and through the front instead: what
passes there must pass here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def start(stack: ExitStack, command: list[str]) -> subprocess.Popen[bytes]:
    """A server that ends with this script."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end() -> None:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()

    stack.callback(end)
    return server


def wait_for(url: str, timeout_s: float = 120) -> None:
    """Return when /health is 200."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise SystemExit(f"{url} did not become ready")


async def ask(client: httpx.AsyncClient, url: str, number: int) -> str:
    """whole, broken (after it had begun), or why it was lost."""
    body: dict[str, Any] = {
        "model": "m",
        "stream": True,
        "max_tokens": 24,
        "messages": [{"role": "user", "content": f"Count from {number}."}],
    }
    n_events = 0
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"lost: {answer.status_code}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "whole"
                if '"error"' in line:
                    return "broken" if n_events else f"lost: {line}"
                n_events += line.startswith("data: ")
    except httpx.HTTPError as error:
        return "broken" if n_events else f"lost: {error!r}"
    return "broken" if n_events else "lost: it ended"


async def load(url: str, n: int, streams: int, doom: subprocess.Popen[bytes]) -> list[str]:
    """``n`` requests, ``streams`` at a time; after a third of them ``doom`` is killed."""
    slots = asyncio.Semaphore(streams)
    done: list[str] = []
    async with httpx.AsyncClient(timeout=240) as client:

        async def one(number: int) -> None:
            async with slots:
                done.append(await ask(client, url, number))
                if len(done) == n // 3:
                    doom.kill()

        await asyncio.gather(*(one(i) for i in range(n)))
    return done


SDK_TESTS = ("test_openai_sdk.py", "test_anthropic_sdk.py")


def sdk_outcomes(**environment: str) -> dict[str, bool]:
    """Each client test and whether it passed with these servers (tests/server/upstream)."""
    folder = Path(__file__).parents[1] / "tests" / "server" / "upstream"
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    command += [str(folder / name) for name in SDK_TESTS]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=folder.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\S+)", done.stdout, re.MULTILINE)
    return {name: outcome == "PASSED" for outcome, name in found}


def compare_sdk(urls: list[str]) -> int:
    """The client tests directly and through a front; 1 when the front breaks one."""
    direct = sdk_outcomes(TEST_DIRECT=urls[0])
    through = sdk_outcomes(TEST_UPSTREAMS=",".join(urls))
    broken = [name for name, is_good in direct.items() if is_good and not through.get(name)]
    shown = {
        "tests": len(through),
        "llama-server itself passes": sum(direct.values()),
        "through the front": sum(through.values()),
        "broken by the front": broken,
    }
    print(json.dumps(shown, indent=1))
    return 1 if broken or not through else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--sdk", action="store_true", help="run the client tests through the front")
    arguments = parser.parse_args()
    ports = [free_port() for _ in range(4)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    edgellm = [sys.executable, "-m", "edgellm", "serve"]
    with ExitStack() as stack:
        peers = []
        for port in ports[:2]:
            command = [arguments.llama_server, "-m", arguments.model, "--port", str(port)]
            command += ["--alias", "starter", "--temp", "0", "--jinja"]
            peers.append(start(stack, [*command, "-np", "2", "-c", "4096", "-t", "1"]))
        one = [*edgellm, arguments.model, "--port", str(ports[2]), "--ctx", "4096", "-q"]
        start(stack, [*one, "--parallel", "2"])
        for url in urls[:3]:
            wait_for(url)
        if arguments.sdk:
            return compare_sdk(urls[:3])
        front = [*edgellm, "--port", str(ports[3]), "-q"]
        for url in urls[:3]:
            front += ["--upstream", f"m={url}"]
        start(stack, front)
        wait_for(urls[3])
        done = asyncio.run(load(urls[3], arguments.requests, arguments.streams, peers[0]))
        stats = httpx.get(f"{urls[3]}/v1/edgellm/stats").json()["upstreams"]
    lost = [outcome for outcome in done if outcome.startswith("lost")]
    shown = {
        "whole": done.count("whole"),
        "broken": done.count("broken"),
        "lost": lost,
        "upstreams": [{k: u[k] for k in ("url", "is_up", "n_requests", "n_failed")} for u in stats],
    }
    print(json.dumps(shown, indent=1))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
