"""Asking workers: what they say, and what is said of those that do not."""

from __future__ import annotations

import importlib.util
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgellm import workers
from edgellm.engine.rpc_server import ServeJob, start
from edgellm.errors import ConfigError, EngineError
from edgellm.units import GiB
from edgellm.workers import Link, Pool, Worker, WorkerBusyError, WorkerDevice, as_gpus, endpoint_of


@contextmanager
def answering(hello: bytes | None) -> Iterator[str]:
    """Something that takes a connection and answers a HELLO with these bytes, or not at all."""
    server = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def serve() -> None:
        link, _ = server.accept()
        taken.append(link)
        link.recv(33)
        if hello is not None:
            link.sendall(struct.pack("<Q", len(hello)) + hello)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    thread.join()
    for opened in (server, *taken):
        opened.close()


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="a real worker needs the engine"
)
def test_a_real_worker_tells_its_memory_its_speed_and_the_link() -> None:
    child, served = start(ServeJob(port=0, memory=2 * GiB))
    try:
        worker = workers.probe(served.endpoint)
        again = workers.probe(served.endpoint, with_speed=False)
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    (device,) = worker.devices
    assert (device.total, served.devices[0].total) == (2 * GiB, 2 * GiB)
    assert 0 < device.free <= 2 * GiB
    assert device.bandwidth is not None
    assert 1e8 < device.bandwidth < 1e12
    assert 0 < worker.link.latency_s < 1
    assert worker.link.bandwidth > 1e6
    assert again.devices[0].bandwidth is None


def test_a_worker_that_takes_connections_and_is_silent_is_busy() -> None:
    with answering(None) as endpoint, pytest.raises(WorkerBusyError, match="one client at a time"):
        workers.probe(endpoint, timeout_s=0.2)


def test_another_version_of_the_protocol_is_named() -> None:
    said = bytes([6, 1, 0]) + bytes(25)
    with answering(said) as endpoint, pytest.raises(EngineError, match=r"version 6 .*, not 7"):
        workers.probe(endpoint)


def test_something_that_is_no_worker_is_not_believed() -> None:
    said = b"SSH-2.0-OpenSSH"
    with answering(said) as endpoint, pytest.raises(EngineError, match="another protocol"):
        workers.probe(endpoint)


def test_a_worker_that_is_not_there_is_an_error_with_the_next_command() -> None:
    with pytest.raises(EngineError, match="cannot be reached") as caught:
        workers.probe("127.0.0.1:9")
    assert caught.value.hint == "edgellm worker, on that machine"


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [("box:50053", "box:50053"), ("10.0.0.2", "10.0.0.2:50052"), (" box ", "box:50052")],
)
def test_a_worker_is_named_by_host_and_port(text: str, endpoint: str) -> None:
    assert endpoint_of(text) == endpoint


@pytest.mark.parametrize("text", ["", ":50052", "box:", "box:99999", "http://box:50052"])
def test_what_is_no_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        endpoint_of(text)


def test_every_device_of_every_worker_is_numbered_through() -> None:
    one, two = WorkerDevice(total=8, free=4), WorkerDevice(total=16, free=9, bandwidth=5e9)
    link = Link(latency_s=0.001, bandwidth=1e8)
    found = as_gpus(
        [
            Worker(endpoint="a:1", devices=(one, two), link=link),
            Worker(endpoint="b:2", devices=(one,), link=link),
        ]
    )
    assert [(g.id, g.endpoint, g.free) for g in found] == [
        ("RPC0", "a:1", 4),
        ("RPC1", "a:1", 9),
        ("RPC2", "b:2", 4),
    ]
    assert {g.backend for g in found} == {"rpc"}


def test_a_busy_worker_is_as_it_was_last_and_one_that_is_gone_becomes_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link(latency_s=0.001, bandwidth=1e8)
    seen = Worker(endpoint="a:1", devices=(WorkerDevice(total=8, free=4),), link=link)
    answers: list[Worker | Exception] = [seen, EngineError("gone"), WorkerBusyError("busy")]
    answers += [WorkerBusyError("busy")]

    def probe(_endpoint: str) -> Worker:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(workers, "probe", probe)
    pool = Pool(["a:1", "b:2", "a:1"])
    assert pool.look() == ((seen,), ("gone",))
    assert pool.look() == ((seen,), ("busy",))
    assert pool.look(without=("a:1", "b:2")) == ((), ())
