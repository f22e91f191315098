"""Two models that do not fit together, swapped under load: no request lost, no memory kept.

    python benchmarks/swap.py [--swaps 50] [--engine llama] [--json]

Clients ask for one model or the other at random; only one may be loaded. The script ends when that
many loads were made, and compares memory (the server's and its children's) after with before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from edgellm.store.catalog import resolve


def resident(pid: int) -> tuple[int, int]:
    """Bytes of the server, and of its children (proportional: shared pages count once)."""
    server = psutil.Process(pid)
    own = server.memory_full_info().pss
    return own, sum(child.memory_full_info().pss for child in server.children(recursive=True))


async def client(http: httpx.AsyncClient, rng: random.Random, state: dict[str, Any]) -> None:
    while not state["over"]:
        model = rng.choice(["a", "b"])
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8}
        answer = await http.post("/v1/completions", json=body | {"ignore_eos": True})
        state["sent"] += 1
        good = answer.status_code == 200 and answer.json()["model"] == model
        state["lost"] += not (good and answer.json()["usage"]["completion_tokens"] == 8)


async def watch(http: httpx.AsyncClient, state: dict[str, Any], swaps: int, pid: int) -> None:
    while not state["over"]:
        await asyncio.sleep(0.25)
        text = (await http.get("/metrics")).text
        line = next(x for x in text.splitlines() if x.startswith("edgellm_model_loads_total "))
        state["loads"] = int(line.split()[1])
        if state["loads"] >= swaps // 2 and not state["halfway"]:
            state["halfway"] = resident(pid)[0]
        state["over"] = state["loads"] >= swaps


async def drive(url: str, swaps: int, pid: int) -> dict[str, Any]:
    state: dict[str, Any] = {"over": False, "sent": 0, "lost": 0, "loads": 0, "halfway": 0}
    rng = random.Random(50)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        for model in ("a", "b"):  # one of each first: what a library keeps after its first use
            await http.post("/v1/edgellm/load", json={"model": model})
            await http.post("/v1/edgellm/unload", json={"model": model})
        before, began = resident(pid), time.monotonic()
        await asyncio.gather(
            watch(http, state, swaps + 2, pid), *(client(http, rng, state) for _ in range(8))
        )
        seconds = time.monotonic() - began
        for model in ("a", "b"):
            await http.post("/v1/edgellm/unload", json={"model": model})
        after = resident(pid)
    return {
        "swaps": state["loads"] - 2,
        "requests": state["sent"],
        "lost": state["lost"],
        "seconds": round(seconds, 1),
        "server_bytes_before": before[0],
        "server_bytes_halfway": state["halfway"],
        "server_bytes_after": after[0],
        "children_bytes_before": before[1],
        "children_bytes_after": after[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--engine", default="llama")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    starter = resolve("starter").path
    assert starter is not None
    with tempfile.TemporaryDirectory() as home:
        for name in ("a", "b"):
            Path(home, f"{name}.gguf").symlink_to(starter)
        command = [sys.executable, "-m", "edgellm", "serve", f"{home}/a.gguf", f"{home}/b.gguf"]
        command += ["--engine", arguments.engine, "--port", "0", "--max-loaded", "1", "--quiet"]
        process = subprocess.Popen(
            [*command, "--ctx", "2048"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "EDGELLM_HOME": home},
        )
        assert process.stdout is not None
        url = process.stdout.readline().rstrip().rsplit(" ", 1)[1].removesuffix("/v1")
        try:
            result = asyncio.run(drive(url, arguments.swaps, process.pid))
        finally:
            process.terminate()
            process.wait(60)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:24} {value:>14,}")


if __name__ == "__main__":
    main()
