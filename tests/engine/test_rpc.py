"""Devices of other machines: the same text as on one, and what happens when one goes away."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from edgellm.engine.build import BuildDevice
from edgellm.engine.client import Engine
from edgellm.engine.rpc import LOST, connections, is_lost, lost_worker, unreachable
from edgellm.engine.rpc_server import ServeJob, choose, free_endpoint, memory_function, start
from edgellm.errors import EngineDeadError, EngineError
from edgellm.planner.plan import DeviceLedger, Plan
from edgellm.request import Request
from edgellm.units import GiB
from tests.engine.factories import request
from tests.engine.starter import library_greedy, starter_plan

PROMPT = "The capital of France is"


class Worker:
    """A worker of this machine, in a process of its own."""

    def __init__(self) -> None:
        self.process, served = start(ServeJob(port=0, memory=2 * GiB))
        self.endpoint = served.endpoint
        self.devices = served.devices

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    started = [Worker(), Worker(), Worker()]
    yield started
    for worker in started:
        worker.end()


def pooled_plan(endpoints: Sequence[str]) -> Plan:
    """All 31 layers over the workers, in equal parts."""
    n = len(endpoints)
    split = (1.0,) * n if n > 1 else ()
    made = starter_plan(n_gpu_layers=31, rpc=tuple(endpoints), tensor_split=split)
    devices = tuple(
        DeviceLedger(id=f"RPC{i}", name=e, backend="rpc", total=2 * GiB, free=2 * GiB, margin=0)
        for i, e in enumerate(endpoints)
    )
    return msgspec.structs.replace(made, devices=devices, verdict="gpu")


async def collect(engine: Engine, r: Request) -> tuple[int, ...]:
    return tuple([token async for event in engine.generate(r) for token in event.token_ids])


@pytest.mark.model
@pytest.mark.asyncio
async def test_three_workers_give_the_text_of_one_machine(workers: list[Worker]) -> None:
    engine = await Engine.load(pooled_plan([w.endpoint for w in workers]))
    try:
        tokens = await collect(engine, request(PROMPT, max_tokens=24))
    finally:
        await engine.close()
    assert tokens == library_greedy(PROMPT, 24)
    assert engine.report.offloaded == "31/31"
    assert {m.id for m in engine.report.measured} == {"host", "RPC0", "RPC1", "RPC2"}


@pytest.mark.model
@pytest.mark.asyncio
async def test_a_worker_killed_in_mid_stream_fails_that_stream_and_the_rest_goes_on(
    workers: list[Worker],
) -> None:
    first, second = workers[:2]
    lost: list[tuple[str, ...]] = []

    def without(plan: Plan, gone: tuple[str, ...]) -> Plan:
        lost.append(gone)
        return pooled_plan([e for e in plan.params.rpc if e not in gone])

    engine = await Engine.load(pooled_plan([first.endpoint, second.endpoint]), replan=without)
    try:
        stream = engine.generate(request(PROMPT, max_tokens=400, ignore_eos=True))
        await stream.__anext__()
        second.end()
        with pytest.raises(EngineDeadError, match=f"the worker {second.endpoint} was lost"):
            async for _ in stream:
                pass
        tokens = await collect(engine, request(PROMPT, max_tokens=24))
    finally:
        await engine.close()
    assert lost == [(second.endpoint,)]
    assert tokens == library_greedy(PROMPT, 24)


@pytest.mark.model
@pytest.mark.asyncio
async def test_without_another_plan_a_lost_worker_ends_the_engine(workers: list[Worker]) -> None:
    engine = await Engine.load(pooled_plan([workers[0].endpoint]))
    try:
        workers[0].end()
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=f"the worker {workers[0].endpoint}"):
                await collect(engine, request(PROMPT))
    finally:
        await engine.close()


@pytest.mark.model
@pytest.mark.asyncio
async def test_a_worker_lost_between_plan_and_load_is_planned_without(
    workers: list[Worker],
) -> None:
    endpoints = [w.endpoint for w in workers[:2]]
    planned = pooled_plan(endpoints)
    workers[1].end()
    asked: list[tuple[str, ...]] = []

    def without(plan: Plan, gone: tuple[str, ...]) -> Plan:
        asked.append(gone)
        return pooled_plan([e for e in plan.params.rpc if e not in gone])

    engine = await Engine.load(planned, replan=without)
    try:
        tokens = await collect(engine, request(PROMPT, max_tokens=24))
    finally:
        await engine.close()
    assert (asked, engine.plan.params.rpc) == ([(endpoints[1],)], (endpoints[0],))
    said = f"the worker {endpoints[1]} does not answer; planned again"
    assert engine.report.fallbacks == (said,)
    assert tokens == library_greedy(PROMPT, 24)


@pytest.mark.asyncio
async def test_a_worker_that_is_not_there_is_named_in_the_error() -> None:
    with pytest.raises(EngineError, match=r"the worker 127\.0\.0\.1:9 does not answer"):
        await Engine.load(pooled_plan(["127.0.0.1:9"]))


def test_a_tunnel_with_nobody_behind_it_is_no_worker() -> None:
    """ssh -L takes connections for a worker that is gone, and closes them."""

    def hang_up(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    with (
        socket.create_server(("127.0.0.1", 0)) as tunnel,
        socket.create_server(("127.0.0.1", 0)) as busy,
    ):
        threading.Thread(target=hang_up, args=(tunnel,), daemon=True).start()
        gone, there = (f"127.0.0.1:{s.getsockname()[1]}" for s in (tunnel, busy))
        # The kernel takes the connection to the busy one, as it does for a worker that computes.
        assert unreachable((gone, there), timeout_s=2.0) == (gone,)
        tunnel.shutdown(socket.SHUT_RDWR)


def test_a_worker_tells_of_no_more_memory_than_its_limit() -> None:
    used = [GiB, GiB, 2 * GiB]
    tell = memory_function(4 * GiB, lambda: (10 * GiB, 16 * GiB, used.pop(0)))
    told = [ask(tell), ask(tell)]
    assert told == [(4 * GiB, 4 * GiB), (3 * GiB, 4 * GiB)]


def test_a_worker_without_a_limit_tells_what_is_free() -> None:
    tell = memory_function(None, lambda: (10 * GiB, 16 * GiB, GiB))
    assert ask(tell) == (10 * GiB, 16 * GiB)


def ask(tell: Any) -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    tell(0, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"127.0.0.1:{port} cannot be served"):
            free_endpoint("127.0.0.1", port)


def test_gpus_are_served_before_the_cpu_and_names_decide() -> None:
    cpu = BuildDevice(name="CPU", description="", kind="cpu")
    gpu = BuildDevice(name="CUDA0", description="", kind="gpu")
    assert choose((cpu, gpu), ()) == (gpu,)
    assert choose((cpu,), ()) == (cpu,)
    assert choose((cpu, gpu), ("cpu", "cuda0")) == (cpu, gpu)
    with pytest.raises(EngineError, match="no device is called CUDA1"):
        choose((cpu, gpu), ("CUDA1",))


def test_a_connection_whose_other_side_closed_is_lost_and_an_open_one_is_not() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not is_lost(ours)
        theirs.send(b"x")
        assert not is_lost(ours)
        assert ours.recv(1) == b"x"
        theirs.close()
        assert is_lost(ours)


def test_only_connections_to_the_workers_are_watched_and_they_stay_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as link:
            other, _ = server.accept()
            with other:
                found = [endpoint for endpoint, _ in connections([f"127.0.0.1:{port}"])]
                assert found == [f"127.0.0.1:{port}"]
                link.send(b"y")
                assert other.recv(1) == b"y"


def test_the_log_of_a_child_tells_which_worker_it_lost() -> None:
    assert lost_worker(["loading", f"{LOST}a:1", "bye"]) == "a:1"
    assert lost_worker(["loading"]) is None
