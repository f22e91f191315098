"""Out of memory on purpose: another process takes the card's memory at the worst moments.

Between plan and load: a plan is made for a card with 8 GiB free, then less is left when it loads;
the engine must step down to something that runs, or say what does not fit. In mid-generation: a
server answers streams while another process takes all that is left; the server must live, and
serve again when the memory is back.

    python benchmarks/gpu/oom.py MODEL.gguf --out results/
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ballast import CudaError, emulated_card
from cards import wait_healthy
from timing import answer, prompt

from edgellm import devices
from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions
from edgellm.errors import EdgeLLMError
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import model_shape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.runtime.opening import replanner
from edgellm.units import GiB, MiB
from edgellm.workers import Pool

PLANNED_FREE = 8 * GiB
LEFT_AT_LOAD = (6 * GiB, 4 * GiB, 2 * GiB, 512 * MiB)
SERVED_FREE = 8 * GiB
LEFT_WHILE_SERVING = 24 * MiB


@dataclass
class Case:
    """One way to run out, and what came of it."""

    name: str
    outcome: str
    steps: list[str] = field(default_factory=list)
    decode_tps: float | None = None
    is_good: bool = False


async def load_with_less(plan: Plan, left: int) -> Case:
    """Load a plan made for more memory than is left now, and answer once."""
    name = f"planned for {PLANNED_FREE // MiB} MiB, {left // MiB} MiB left at load"
    try:
        again = replanner(Pool(()), PlanRequest(n_ctx=plan.params.n_ctx))
        engine = await Engine.load(plan, options=EngineOptions(restart=False), replan=again)
    except EdgeLLMError as error:
        said = f"{type(error).__name__}: {error.message} (try: {error.hint})"
        return Case(name, said, is_good=bool(error.hint))
    try:
        last = await answer(engine, prompt(256, engine.info.n_vocab, 7), 32, "after")
        p = engine.plan.params
        tps = last.timings.decode_tps if last.timings else None
        return Case(
            name,
            f"loaded: {p.n_gpu_layers} layers, ubatch {p.n_ubatch}, KV {p.type_k}",
            list(engine.report.fallbacks),
            tps,
            is_good=tps is not None,
        )
    finally:
        await engine.close()


def between_plan_and_load(path: Path) -> Iterator[Case]:
    shape = model_shape(read_gguf(path))
    with emulated_card(PLANNED_FREE):
        plan = make_plan(shape, devices.probe(), PlanRequest(n_ctx=4096))
        for left in LEFT_AT_LOAD:
            with emulated_card(left):
                yield asyncio.run(load_with_less(plan, left))


@contextmanager
def edgellm_server(path: Path, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "edgellm", "serve", str(path), "--port", str(port)]
    command += ["--ctx", "16384", "--parallel", "4"]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            wait_healthy(url, process)
            yield url, process
        finally:
            process.terminate()


def complete(url: str, n_words: int, n_output: int) -> str:
    """The finish reason, or the error that came instead of an answer."""
    body = {
        "model": "any",
        "prompt": "one two three four " * (n_words // 4),
        "max_tokens": n_output,
        "ignore_eos": True,
    }
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        body["model"] = json.loads(reply.read())["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return str(json.loads(reply.read())["choices"][0]["finish_reason"])
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode(errors='replace')[:200]}"
    except OSError as error:
        return f"no answer: {error}"


def while_serving(path: Path, log: Path) -> Iterator[Case]:
    with emulated_card(SERVED_FREE), edgellm_server(path, log) as (url, process):
        before = complete(url, 64, 16)
        yield Case("served, memory free", before, is_good=before == "length")
        results: list[str] = []
        streams = [
            threading.Thread(target=lambda: results.append(complete(url, 400, 512)))
            for _ in range(4)
        ]
        for stream in streams:
            stream.start()
        time.sleep(1.0)
        with emulated_card(LEFT_WHILE_SERVING):
            for stream in streams:
                stream.join()
            results.append(complete(url, 3000, 64))  # a prompt of full batches
        name = (
            f"{LEFT_WHILE_SERVING // MiB} MiB left in mid-generation, then a prompt of 3,000 words"
        )
        lives = process.poll() is None
        said = ", ".join(results) + ("" if lives else "; the server died")
        yield Case(name, said, is_good=lives and all("no answer" not in r for r in results))
        after = complete(url, 64, 16)
        yield Case("memory back", after, is_good=after == "length")


def table(cases: list[Case]) -> str:
    lines = ["| case | outcome | steps down | decode tok/s |", "|---|---|---|---|"]
    for case in cases:
        tps = "" if case.decode_tps is None else f"{case.decode_tps:.1f}"
        mark = "" if case.is_good else "**bad** "
        lines.append(f"| {case.name} | {mark}{case.outcome} | {'; '.join(case.steps)} | {tps} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = []
    for part in (
        between_plan_and_load(args.model),
        while_serving(args.model, args.out / "oom.log"),
    ):
        try:
            cases.extend(part)
        except (CudaError, RuntimeError) as error:
            cases.append(Case("the script itself", str(error)))
    (args.out / "oom.json").write_text(json.dumps([asdict(case) for case in cases], indent=1))
    (args.out / "oom.md").write_text(table(cases) + "\n")
    print(table(cases))
    return 0 if all(case.is_good for case in cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
