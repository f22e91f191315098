"""One model over three workers in network namespaces with shaped links: text, bytes, deaths.

    sudo python benchmarks/pooling.py [--rate 1gbit] [--delay 0.5ms] [--json FILE]

Needs root (namespaces, tc). Where the kernel has no netem, tc limits the rate and slow_link.py, in
each worker's namespace, adds the delay. Everything it makes is removed again. It exits with 1 when
a check fails: the same greedy text as on one machine, measured bytes beside the plan's, a killed
worker that costs only the running requests, and a cut link that is noticed within 5 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from edgellm import devices as devices_
from edgellm.config import PlanSettings, Settings
from edgellm.engine.client import Engine
from edgellm.errors import EngineDeadError
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.request import Request, SamplingParams
from edgellm.runtime import local_shape, replanner, with_workers
from edgellm.workers import Pool

PROMPT = "The capital of France is"
PORT = 50052
NOTICED_S = 5.0
SLOW_LINK = Path(__file__).with_name("slow_link.py")


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def sh(*words: str) -> None:
    """Run a command or stop."""
    subprocess.run(words, check=True, capture_output=True)


class Place:
    """A namespace with one shaped link to this machine."""

    def __init__(self, number: int, rate: str, delay: str) -> None:
        self.name = f"edgellm-w{number}-{os.getpid()}"
        self.outer = f"elw{number}-{os.getpid() % 10000}"
        self.inner = f"eli{number}-{os.getpid() % 10000}"
        self.address = f"10.213.{number}.2"
        self.shape = ""
        sh("ip", "netns", "add", self.name)
        sh("ip", "link", "add", self.outer, "type", "veth", "peer", "name", self.inner)
        sh("ip", "link", "set", self.inner, "netns", self.name)
        sh("ip", "addr", "add", f"10.213.{number}.1/24", "dev", self.outer)
        sh("ip", "link", "set", self.outer, "up")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", self.inner)
        self.inside("ip", "link", "set", self.inner, "up")
        self.inside("ip", "link", "set", "lo", "up")
        self.delay = ""
        """What a process in front of the worker has to add; empty: the kernel does."""
        self.shape = self._shape(rate, delay)

    def inside(self, *words: str) -> None:
        sh("ip", "netns", "exec", self.name, *words)

    def _shape(self, rate: str, delay: str) -> str:
        """Shape both directions; what could be shaped, in words."""
        netem = ("netem", "rate", rate, "delay", delay, "limit", "100000")
        bucket = ("tbf", "rate", rate, "burst", "256k", "latency", "200ms")
        for shape in (netem, bucket):
            try:
                sh("tc", "qdisc", "add", "dev", self.outer, "root", *shape)
                self.inside("tc", "qdisc", "add", "dev", self.inner, "root", *shape)
            except subprocess.CalledProcessError:
                continue
            if shape is bucket:
                self.delay = delay
            return " ".join(shape) + (f", {delay} by slow_link.py" if self.delay else "")
        self.delay = delay
        return "not shaped: this kernel has neither netem nor tbf"

    def cut(self) -> None:
        """As if the cable were pulled there: nothing arrives any more, and nobody says so."""
        self.inside("ip", "link", "set", self.inner, "down")

    def remove(self) -> None:
        subprocess.run(("ip", "netns", "del", self.name), check=False, capture_output=True)
        subprocess.run(("ip", "link", "del", self.outer), check=False, capture_output=True)


@contextmanager
def worker(place: Place, memory: str) -> Iterator[subprocess.Popen[str]]:
    """An ``edgellm worker`` there."""
    there = "127.0.0.1" if place.delay else place.address
    with ExitStack() as stack:
        options = ["--host", there, "--memory", memory, "--no-cache", "--json"]
        started = inside(place, ["-m", "edgellm", "worker", *options])
        stack.callback(end, started)
        if started.stdout is None or not started.stdout.readline():
            raise SystemExit("a worker did not start")
        if place.delay:
            ends = [f"{place.address}:{PORT}", f"{there}:{PORT}"]
            slow = inside(place, [str(SLOW_LINK), *ends, "--delay", place.delay])
            stack.callback(end, slow)
            if slow.stdout is None or not slow.stdout.readline():
                raise SystemExit("a link did not start")
        yield started


def inside(place: Place, words: list[str]) -> subprocess.Popen[str]:
    """A Python program in that namespace."""
    command = ["ip", "netns", "exec", place.name, sys.executable, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def plan_of(pool: Pool, settings: Settings, request: PlanRequest) -> Plan:
    """The plan on the workers that answer now."""
    here = with_workers(devices_.probe(), pool)
    return make_plan(local_shape("starter", settings), here, request)


async def text_of(engine: Engine, n: int, name: str) -> str:
    """A greedy answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
    request = Request(id=name, prompt=PROMPT, sampling=sampling, cache_prompt=False)
    return "".join([event.text async for event in engine.generate(request)])


async def alone(settings: Settings, n: int) -> tuple[str, float]:
    """The text on this machine's CPU, and tokens a second."""
    here = msgspec.structs.replace(devices_.probe(), gpus=())
    request = PlanRequest(n_ctx=2048, flash_attn="on")
    engine = await Engine.load(make_plan(local_shape("starter", settings), here, request))
    try:
        began = time.monotonic()
        text = await text_of(engine, n, "alone")
        return text, n / (time.monotonic() - began)
    finally:
        await engine.close()


async def break_one(engine: Engine, doom: Callable[[], None]) -> tuple[float, str]:
    """Two streams run, ``doom`` falls: seconds until both have failed, and what they were told."""
    running = [asyncio.create_task(text_of(engine, 900, f"doomed{i}")) for i in range(2)]
    await asyncio.sleep(3)
    began = time.monotonic()
    await asyncio.to_thread(doom)
    ended = await asyncio.gather(*running, return_exceptions=True)
    took = time.monotonic() - began
    wrong = [e for e in ended if not isinstance(e, EngineDeadError)]
    if wrong:
        raise SystemExit(f"a stream over a lost worker ended with {wrong[0]!r}")
    return took, str(ended[0]).splitlines()[0]


def ledger(plan: Plan, engine: Engine) -> list[dict[str, Any]]:
    """Planned and measured MiB by device, without the overhead outside llama.cpp's buffers."""
    measured = {m.id: m for m in engine.report.measured}
    rows = []
    for device in plan.devices:
        found = measured.get(device.id)
        planned = device.weights + device.kv_cache + device.compute
        real = 0 if found is None else found.weights + found.kv_cache + found.compute
        rows.append(
            {"device": device.id, "worker": device.name, "planned": planned, "measured": real}
        )
    return rows


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every check, in order."""
    result: dict[str, Any] = {"rate": arguments.rate, "delay": arguments.delay}
    with ExitStack() as stack:
        places = []
        for i in range(3):
            places.append(Place(i, arguments.rate, arguments.delay))
            stack.callback(places[-1].remove)
        result["shape"] = places[0].shape
        workers = [stack.enter_context(worker(p, arguments.memory)) for p in places]
        endpoints = tuple(f"{p.address}:{PORT}" for p in places)
        settings = Settings(plan=PlanSettings(worker=endpoints))
        request = PlanRequest(n_ctx=2048, n_gpu_layers=-1, margin=0, n_ubatch=128, n_seq_max=2)
        pool = Pool(endpoints)
        say(f"three workers behind {places[0].shape}")
        found, notes = await asyncio.to_thread(pool.look)
        result["links"] = msgspec.to_builtins(found)
        result["notes"] = notes
        for worker_ in found:
            gigabits = worker_.link.bandwidth * 8 / 1e9
            milliseconds = worker_.link.latency_s * 1e3
            say(f"{worker_.endpoint}: {milliseconds:.2f} ms and back, {gigabits:.2f} Gbit/s")
        for note in notes:
            say(note)
        plan = await asyncio.to_thread(plan_of, pool, settings, request)
        result["predicted_tps"] = plan.speed.decode_tps
        result["bottleneck"] = plan.speed.bottleneck
        # Half the layers and a shorter context: two workers surely have room for that.
        again = replanner(pool, msgspec.structs.replace(request, n_ctx=512, n_gpu_layers=16))
        say(f"planned: {[(d.id, d.n_layers) for d in plan.devices]}")
        expected, result["alone_tps"] = await alone(settings, arguments.tokens)
        began = time.monotonic()
        say("loading over the links")
        engine = await Engine.load(plan, replan=again)
        result["load_s"] = time.monotonic() - began
        try:
            began = time.monotonic()
            text = await text_of(engine, arguments.tokens, "pooled")
            result["pooled_tps"] = arguments.tokens / (time.monotonic() - began)
            say("killing one")
            result["same_text"] = text == expected
            result["devices"] = ledger(plan, engine)
            result["kill_noticed_s"], result["kill_said"] = await break_one(
                engine, workers[endpoints.index(plan.params.rpc[-1])].terminate
            )
            result["after_kill_same_text"] = (
                await text_of(engine, arguments.tokens, "after") == expected
            )
            result["after_kill_workers"] = engine.plan.params.rpc
            say(f"now on {engine.plan.params.rpc}; cutting a link")
            if engine.plan.params.rpc:
                victim = next(p for p in places if engine.plan.params.rpc[0].startswith(p.address))
                result["cut_noticed_s"], result["cut_said"] = await break_one(engine, victim.cut)
        finally:
            await engine.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="0.25ms", help="one way")
    parser.add_argument("--memory", default="64MiB", help="what each worker lends")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed then too
    result = asyncio.run(run(arguments))
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    cut = result.get("cut_noticed_s", NOTICED_S + 1)
    good = result["same_text"] and result["after_kill_same_text"] and cut <= NOTICED_S
    return 0 if good and result["kill_noticed_s"] <= NOTICED_S else 1


if __name__ == "__main__":
    sys.exit(main())
