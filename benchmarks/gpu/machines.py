"""Several devices of a wanted size: real cards under ballast, or workers on this machine.

Workers (llama.cpp's RPC backend) stand in where there are no cards: everything but the speed and
the driver's figures can be tried with them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
from ballast import emulated_cards

from edgellm import devices
from edgellm.devices import Devices
from edgellm.engine import rpc_server
from edgellm.engine.client import Engine
from edgellm.errors import EdgeLLMError
from edgellm.runtime.opening import with_workers
from edgellm.units import GiB
from edgellm.workers import Pool

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Machine(Protocol):
    """What the comparison needs of a machine."""

    pool: Pool

    def emulated(self, sizes: Sequence[float]) -> Any:
        """A context in which there are devices with so many GiB free: yields them."""

    def found(self) -> Devices:
        """The devices as they are now."""

    def reversed(self) -> Any:
        """A context in which the devices come in the other order."""

    def without_last(self) -> Any:
        """A context in which the last device is gone."""

    def filled_last(self) -> Any | None:
        """A context in which others hold the last device's memory; None: cannot be had here."""

    def processes(self) -> dict[str, dict[int, int]]:
        """Bytes by device (its UUID) and process, as the driver counts them."""

    def owners(self, engine: Engine) -> frozenset[int] | None:
        """The processes whose memory is the engine's; None: every new one."""

    def server_arguments(self) -> list[str]:
        """What llama-server needs to see the same devices."""


class Cards:
    """The NVIDIA cards of this machine, the first ones of its list."""

    def __init__(self, ram: int | None) -> None:
        self.pool = Pool(())
        self._ram = ram

    @contextmanager
    def emulated(self, sizes: Sequence[float]) -> Iterator[Devices]:
        cards = devices.probe().gpus[: len(sizes)]
        if len(cards) < len(sizes):
            raise SystemExit(f"{len(sizes)} cards are needed; there are {len(cards)}")
        uuids = [str(card.uuid) for card in cards]
        wanted = {u: int(size * GiB) for u, size in zip(uuids, sizes, strict=True)}
        with emulated_cards(wanted), _environment(VISIBLE, ",".join(uuids)):
            yield self.found()

    def found(self) -> Devices:
        return devices.imagine(devices.probe(), ram=self._ram)

    def _uuids(self) -> list[str]:
        return [str(gpu.uuid) for gpu in devices.probe().gpus]

    def reversed(self) -> Any:
        return _environment(VISIBLE, ",".join(reversed(self._uuids())))

    def without_last(self) -> Any:
        return _environment(VISIBLE, ",".join(self._uuids()[:-1]))

    def filled_last(self) -> Any:
        return emulated_cards({self._uuids()[-1]: GiB // 4})

    def processes(self) -> dict[str, dict[int, int]]:
        import pynvml

        pynvml.nvmlInit()
        try:
            found = {}
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid = pynvml.nvmlDeviceGetUUID(handle)
                running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                found[uuid] = {p.pid: int(p.usedGpuMemory or 0) for p in running}
            return found
        finally:
            pynvml.nvmlShutdown()

    def owners(self, engine: Engine) -> frozenset[int] | None:
        return frozenset((engine.pid,))

    def server_arguments(self) -> list[str]:
        return []


class Loopback:
    """Workers on this machine, each of a device's size; they are started and ended here."""

    def __init__(self, ram: int | None) -> None:
        self.pool = Pool(())
        self._ram = ram
        self._children: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def emulated(self, sizes: Sequence[float]) -> Iterator[Devices]:
        endpoints = []
        try:
            for size in sizes:
                job = rpc_server.ServeJob(port=0, memory=int(size * GiB))
                child, served = rpc_server.start(job)
                self._children.append(child)
                endpoints.append(served.endpoint)
            self.pool = Pool(endpoints)
            yield self.found()
        finally:
            for child in self._children:
                child.kill()
                child.wait()
                if child.stdout:
                    child.stdout.close()
            self._children, self.pool = [], Pool(())

    def found(self) -> Devices:
        here = devices.imagine(devices.probe(), ram=self._ram)
        return with_workers(msgspec.structs.replace(here, gpus=()), self.pool)

    @contextmanager
    def reversed(self) -> Iterator[None]:
        kept = self.pool
        self.pool = Pool(tuple(reversed(kept.endpoints)))
        try:
            yield
        finally:
            self.pool = kept

    @contextmanager
    def without_last(self) -> Iterator[None]:
        self._children[-1].kill()
        self._children[-1].wait()
        yield

    def filled_last(self) -> Any | None:
        return None

    def processes(self) -> dict[str, dict[int, int]]:
        return {}

    def owners(self, engine: Engine) -> frozenset[int] | None:  # noqa: ARG002  (the worker's)
        return None

    def server_arguments(self) -> list[str]:
        return ["--rpc", ",".join(self.pool.endpoints)]


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def words(error: BaseException) -> str:
    """An error for a table's cell."""
    text = error.message if isinstance(error, EdgeLLMError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[-200:]
