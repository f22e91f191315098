"""What the terminal interface costs: first paint, key to echo while a model streams, CPU.

    python benchmarks/tui_cost.py [--model starter] [--runs 5] [--rate 200] [--alternate 6]

Runs the real program in a pseudo-terminal of 120x40 with a home of its own, types what a person
would, and reads what the terminal would show. Prints JSON. Run it on a quiet machine.

``--alternate N`` is what drawing takes from the engine: the same answer N times through the
interface and N times from the same engine with nobody drawing, in turns, the first of a pair
changing each time.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
PROMPT = "Write a long story about a lighthouse keeper, with many paragraphs."


class Terminal:
    """A program in a pseudo-terminal; everything it wrote is in ``seen``."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.began = time.perf_counter()
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self._fd = ours
        self.seen = b""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def pump(self, seconds: float) -> None:
        """Read for a while."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self._read(left)

    def wait(self, pattern: str, seconds: float = 60.0) -> float:
        """Read until the pattern appears in new output; return when (perf_counter)."""
        start = len(self.seen)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._read(0.5)
            if re.search(pattern.encode(), self.seen[max(start - 64, 0) :]):
                return time.perf_counter()
        raise TimeoutError(f"{pattern!r} did not appear")

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._fd], [], [], max(seconds, 0))
        if ready:
            try:
                self.seen += os.read(self._fd, 1 << 16)
            except OSError:
                raise SystemExit("the program ended") from None

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        os.close(self._fd)


def environment(home: str, backend: str) -> dict[str, str]:
    return {
        **os.environ, "EDGELLM_HOME": home, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color",
        "COLORTERM": "truecolor", "EDGELLM_ENGINE_BACKEND": backend,
    }  # fmt: skip


def first_paint(backend: str, runs: int) -> tuple[list[float], list[float]]:
    """Seconds from starting the process to the first frame with words on it: wall, and CPU."""
    times, cpu = [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as home:
            terminal = Terminal([sys.executable, "-m", "edgellm"], environment(home, backend))
            times.append(terminal.wait("Models") - terminal.began)
            used = psutil.Process(terminal.process.pid).cpu_times()
            cpu.append(used.user + used.system)
            terminal.close()
    return times, cpu


def inside(rate: float) -> None:
    """The interface over an engine without a model that streams at a chosen speed, for ever."""
    from edgellm.engine.client import Engine
    from edgellm.engine.info import EngineOptions, Script
    from edgellm.tui.app import EdgeApp
    from edgellm.tui.local import LocalEndpoint
    from edgellm.tui.services import LocalServices

    class Paced(LocalServices):
        async def load(self, plan: Any, on_progress: Any) -> Any:  # noqa: ARG002
            script = Script(decode_token_s=1 / rate, answer_tokens=0)
            options = EngineOptions(script=script)
            return LocalEndpoint(await Engine.load(plan, backend="scripted", options=options))

    EdgeApp(Paced(), model="starter").run()


def streaming(model: str, backend: str, seconds: float, rate: float) -> dict[str, Any]:
    """Key to echo and CPU share of the interface while an answer streams."""
    with tempfile.TemporaryDirectory() as home:
        argv = [sys.executable, "-m", "edgellm", "tui", model, "--temp", "0.8", "--seed", "7"]
        if rate:
            argv = [sys.executable, __file__, "--inside", str(rate)]
        terminal = Terminal(argv, environment(home, backend))
        terminal.wait("tokens of context", 120)
        terminal.pump(1.0)
        terminal.type(PROMPT)
        terminal.pump(0.5)
        terminal.type("\r")
        terminal.wait("Write a long", 30)
        terminal.pump(2.0)
        process = psutil.Process(terminal.process.pid)
        quiet = cpu_share(process, terminal, seconds)
        n_before = len(terminal.seen)
        began = time.perf_counter()
        echoes = []
        while time.perf_counter() - began < seconds:
            letter = "QXZJ"[len(echoes) % 4]
            typed = time.perf_counter()
            terminal.type(letter)
            echoes.append(terminal.wait(letter, 5) - typed)
            terminal.pump(0.4)
        wall = time.perf_counter() - began
        terminal.type("\x1b")
        terminal.pump(1.0)
        terminal.close()
        return {
            "key_to_echo_ms": {
                "p50": statistics.median(echoes) * 1000, "max": max(echoes) * 1000,
                "n": len(echoes),
            },
            "interface_cpu_percent_of_a_core": quiet * 100,
            "terminal_kib_per_s": (len(terminal.seen) - n_before) / wall / 1024,
        } | tokens_shown(home)  # fmt: skip


def cpu_share(process: psutil.Process, terminal: Terminal, seconds: float) -> float:
    """The share of one core that drawing takes while nobody types."""
    before = process.cpu_times()
    began = time.perf_counter()
    terminal.pump(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return used / (time.perf_counter() - began)


def tokens_shown(home: str) -> dict[str, Any]:
    """What the conversation's store says of the answer."""
    import sqlite3

    with sqlite3.connect(Path(home) / "state" / "chat.db") as db:
        rows = db.execute("SELECT n_tokens, decode_tps FROM message WHERE role='assistant'")
        n_tokens, decode_tps = rows.fetchone() or (None, None)
    return {"n_tokens": n_tokens, "decode_tps": decode_tps}


ANSWER = {"temperature": 0.8, "seed": 7, "max_tokens": 400}


async def bare(model: str) -> None:
    """The same question to the same engine in a program that draws nothing; prints its speed."""
    from edgellm.planner.plan import PlanRequest
    from edgellm.request import SamplingParams
    from edgellm.tui.services import make_services

    services = make_services()
    endpoint = await services.load(services.plan(model, PlanRequest()), lambda _: None)
    messages = [{"role": "user", "content": PROMPT}]
    last = None
    async for delta in endpoint.chat(messages, SamplingParams(**ANSWER), request_id="bare"):
        last = delta
    await endpoint.close()
    if last is None or last.timings is None or last.usage is None:
        raise SystemExit("the engine said nothing of its speed")
    print(json.dumps({"n_tokens": last.usage.n_output, "decode_tps": last.timings.decode_tps}))


def undrawn(model: str) -> dict[str, Any]:
    """:func:`bare` in a process of its own."""
    with tempfile.TemporaryDirectory() as home:
        out = subprocess.run(
            [sys.executable, __file__, "--bare", "--model", model],
            env=environment(home, "llama"), capture_output=True, check=True,
        )  # fmt: skip
    answer: dict[str, Any] = json.loads(out.stdout)
    return answer


def drawn(model: str) -> dict[str, Any]:
    """One answer through the interface, to its end, nobody typing."""
    with tempfile.TemporaryDirectory() as home:
        flags = [f"--temp={ANSWER['temperature']}", f"--seed={ANSWER['seed']}"]
        flags.append(f"--max-tokens={ANSWER['max_tokens']}")
        argv = [sys.executable, "-m", "edgellm", "tui", model, *flags]
        terminal = Terminal(argv, environment(home, "llama"))
        terminal.wait("tokens of context", 120)
        terminal.pump(0.5)
        terminal.type(PROMPT)
        terminal.pump(0.5)
        terminal.type("\r")
        process, before = psutil.Process(terminal.process.pid), 0.0
        before = sum(process.cpu_times()[:2])
        while not (shown := tokens_shown(home))["decode_tps"]:
            terminal.pump(0.5)
        used = sum(process.cpu_times()[:2]) - before
        terminal.close()
        return shown | {"interface_cpu_s": used}


def alternate(model: str, n_pairs: int) -> dict[str, Any]:
    """Speeds in turns; ``lost_percent`` is the median over the pairs."""
    drawn(model), undrawn(model)  # the files are in memory from here on
    pairs = []
    for i in range(n_pairs):
        first, second = (drawn, undrawn) if i % 2 else (undrawn, drawn)
        one, other = first(model), second(model)
        pairs.append((one, other) if i % 2 else (other, one))
    lost = [100 * (1 - with_["decode_tps"] / without["decode_tps"]) for with_, without in pairs]
    cpu = statistics.median(with_["interface_cpu_s"] for with_, _ in pairs)
    return {
        "n_tokens": pairs[0][0]["n_tokens"],
        "drawn_decode_tps": [round(with_["decode_tps"], 2) for with_, _ in pairs],
        "bare_decode_tps": [round(without["decode_tps"], 2) for _, without in pairs],
        "lost_percent": [round(each, 2) for each in lost],
        "lost_percent_median": round(statistics.median(lost), 2),
        "interface_cpu_s_per_1000_tokens": round(1000 * cpu / pairs[0][0]["n_tokens"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="starter")
    parser.add_argument("--backend", default="llama")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="stream without a model at this many tokens/s"
    )
    parser.add_argument("--alternate", type=int, default=0, help="pairs: drawn and bare in turns")
    parser.add_argument("--inside", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.inside)
        return
    if arguments.bare:
        asyncio.run(bare(arguments.model))
        return
    if arguments.alternate:
        print(json.dumps(alternate(arguments.model, arguments.alternate), indent=1))
        return
    result: dict[str, Any] = {}
    if arguments.runs:
        paints, cpu = first_paint(arguments.backend, arguments.runs)
        result["first_paint_s"] = {"median": statistics.median(paints), "max": max(paints)}
        result["first_paint_cpu_s"] = statistics.median(cpu)
    rate = arguments.rate
    result["streaming"] = streaming(arguments.model, arguments.backend, arguments.seconds, rate)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
