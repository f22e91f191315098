"""Workers as seen from here: their devices, free memory and speed, and the link to them.

Speaks llama.cpp's RPC protocol itself (ggml/src/ggml-rpc/ggml-rpc.cpp, version 7), so that a plan
needs no engine. A worker serves one client at a time: while an engine uses it, it does not answer.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final

import msgspec

from edgellm.devices import Gpu
from edgellm.errors import ConfigError, EngineError
from edgellm.units import MiB

VERSION: Final = (7, 0, 0)
DEFAULT_PORT: Final = 50052
TIMEOUT_S: Final = 3.0

_ALLOC, _ALIGNMENT, _BASE, _FREE, _CLEAR, _SET = 0, 1, 3, 4, 5, 6
_COMPUTE, _MEMORY, _HELLO, _COUNT, _RECOMPUTE = 10, 11, 14, 15, 16
_TENSOR: Final = struct.Struct("<QIQ4I4II16ii10QQQQ64si")
"""rpc_tensor, packed."""
_F32, _F16 = 0, 1
_NONE, _MUL_MAT = 0, 29  # enum ggml_op; the protocol's version changes with it
_COMPUTED: Final = 16  # GGML_TENSOR_FLAG_COMPUTE

_FIRST_SEND: Final = 64 * 1024
_LAST_SEND: Final = 16 * MiB
_LONG_ENOUGH_S: Final = 0.05
_COLUMNS: Final = 4096
_ROWS: Final = 8192
"""A matrix of 64 MiB: more than a cache, little beside a model."""
_SHARE: Final = 4
"""The matrix may take this part of what is free."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured between here and a worker."""

    latency_s: float
    """There and back."""
    bandwidth: float
    """Bytes a second towards the worker."""


class WorkerDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a worker. Memory in bytes."""

    total: int
    free: int
    bandwidth: float | None = None
    """Bytes a second that a matrix-vector product read; None: not measured."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that answered."""

    endpoint: str
    devices: tuple[WorkerDevice, ...]
    link: Link


class WorkerBusyError(EngineError):
    """It takes connections but does not answer: it serves another client."""


def endpoint_of(text: str) -> str:
    """``HOST`` or ``HOST:PORT`` as HOST:PORT. Raises ConfigError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host, port = text.strip(), str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in host:
        raise ConfigError(
            f"{text!r} is not HOST:PORT", hint=f"--worker 192.168.1.20:{DEFAULT_PORT}"
        )
    return f"{host}:{port}"


class Connection:
    """One conversation with a worker. Raises EngineError when it breaks."""

    def __init__(self, endpoint: str, timeout_s: float = TIMEOUT_S) -> None:
        self.endpoint = endpoint
        host, _, port = endpoint.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout_s)
        except OSError as error:
            raise EngineError(
                f"the worker {endpoint} cannot be reached: {error}",
                hint="edgellm worker, on that machine",
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._socket.close()

    def wait_at_most(self, seconds: float) -> None:
        """For answers from now on."""
        self._socket.settimeout(seconds)

    def tell(self, command: int, *parts: bytes) -> None:
        """Send a command that has no answer."""
        size = sum(map(len, parts))
        try:
            self._socket.sendall(struct.pack("<BQ", command, size))
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise EngineError(f"the worker {self.endpoint} broke off: {error}") from error

    def ask(self, command: int, body: bytes, layout: str) -> tuple[int, ...]:
        """Send a command and read its answer, a struct of ``layout``."""
        self.tell(command, body)
        expected = struct.calcsize(layout)
        (size,) = struct.unpack("<Q", self._read(8))
        if size != expected:
            raise EngineError(f"the worker {self.endpoint} speaks another protocol")
        return struct.unpack(layout, self._read(expected))

    def _read(self, n: int) -> bytes:
        data = b""
        try:
            while len(data) < n:
                part = self._socket.recv(n - len(data))
                if not part:
                    raise EngineError(f"the worker {self.endpoint} broke off")
                data += part
        except OSError as error:
            raise EngineError(f"the worker {self.endpoint} does not answer: {error}") from error
        return data

    def hello(self) -> tuple[int, int, int]:
        """The protocol's version. WorkerBusyError when nothing comes back."""
        try:
            answer = self.ask(_HELLO, bytes(24), "<4B24B")
        except EngineError as error:
            if not isinstance(error.__cause__, TimeoutError):
                raise
            raise WorkerBusyError(
                f"the worker {self.endpoint} is busy: it serves one client at a time",
                hint="stop the other client, or start a second worker on another port",
            ) from error
        major, minor, patch = answer[:3]
        if major != VERSION[0]:
            raise EngineError(
                f"the worker {self.endpoint} speaks version {major} of the protocol, not "
                f"{VERSION[0]}",
                hint="install the same edgellm on both machines",
            )
        return major, minor, patch

    def wait(self) -> None:
        """Return when everything sent so far has been done."""
        self.ask(_ALIGNMENT, struct.pack("<I", 0), "<Q")


def probe(endpoint: str, *, with_speed: bool = True, timeout_s: float = TIMEOUT_S) -> Worker:
    """Ask a worker. Takes under a second on a local network. Raises EngineError (and its
    WorkerBusyError)."""
    with Connection(endpoint, timeout_s) as link:
        version = link.hello()
        (count,) = link.ask(_COUNT, b"", "<I")
        devices = [_device(link, i) for i in range(count)]
        if not devices:
            raise EngineError(f"the worker {endpoint} has no devices")
        latency = _latency(link)
        found = Link(latency_s=latency, bandwidth=_bandwidth(link, latency))
        if with_speed and version == VERSION:
            devices = [_with_speed(link, i, d, latency) for i, d in enumerate(devices)]
    return Worker(endpoint=endpoint, devices=tuple(devices), link=found)


def _device(link: Connection, index: int) -> WorkerDevice:
    free, total = link.ask(_MEMORY, struct.pack("<I", index), "<QQ")
    return WorkerDevice(total=total, free=free)


def _latency(link: Connection) -> float:
    took = []
    for _ in range(5):
        began = time.perf_counter()
        link.wait()
        took.append(time.perf_counter() - began)
    return min(took)


def _allocate(link: Connection, device: int, size: int) -> tuple[int, int]:
    """A buffer's handle and its address there."""
    pointer, given = link.ask(_ALLOC, struct.pack("<IQ", device, size), "<QQ")
    if not pointer or given < size:
        raise EngineError(f"the worker {link.endpoint} has no memory for a measurement")
    (base,) = link.ask(_BASE, struct.pack("<Q", pointer), "<Q")
    return pointer, base


def _bandwidth(link: Connection, latency: float) -> float:
    """Bytes a second towards the worker: more and more of them until it takes a while."""
    pointer, base = _allocate(link, 0, _LAST_SEND)
    size = _FIRST_SEND
    while True:
        vector = _tensor(1, _F32, (size // 4, 1), (pointer, base))
        began = time.perf_counter()
        link.tell(_SET, vector, bytes(9), bytes(size))
        link.wait()
        took = max(time.perf_counter() - began - latency, 1e-6)
        if took >= _LONG_ENOUGH_S or size >= _LAST_SEND:
            link.tell(_FREE, struct.pack("<Q", pointer))
            return size / took
        size *= 4


def _tensor(
    number: int,
    kind: int,
    shape: tuple[int, int],
    at: tuple[int, int],
    *,
    op: int = _NONE,
    sources: Sequence[int] = (),
) -> bytes:
    """An rpc_tensor; ``at`` is its buffer's handle and its address."""
    columns, rows = shape
    width = 2 if kind == _F16 else 4
    row, whole = columns * width, columns * rows * width
    return _TENSOR.pack(
        number,
        kind,
        at[0],
        *(columns, rows, 1, 1),
        *(width, row, whole, whole),
        op,
        *(0,) * 16,
        _COMPUTED,
        *(*sources, *(0,) * (10 - len(sources))),
        0,
        0,
        at[1],
        b"probe",
        1,
    )


def _with_speed(link: Connection, index: int, device: WorkerDevice, latency: float) -> WorkerDevice:
    """The device with what a matrix-vector product reads a second; as it is where that does not
    fit."""
    matrix = 2 * _COLUMNS * _ROWS
    size = matrix + 4 * (_COLUMNS + _ROWS)
    if device.free < _SHARE * size:
        return device
    pointer, base = _allocate(link, index, size)
    # Pages that were never written would all be read from one page of zeros.
    link.tell(_CLEAR, struct.pack("<QB", pointer, 0x11))
    vector = base + matrix
    result = vector + 4 * _COLUMNS
    tensors = (
        _tensor(1, _F16, (_COLUMNS, _ROWS), (pointer, base)),
        _tensor(2, _F32, (_COLUMNS, 1), (pointer, vector)),
        _tensor(3, _F32, (_ROWS, 1), (pointer, result), op=_MUL_MAT, sources=(1, 2)),
    )
    link.tell(_COMPUTE, struct.pack("<IIQI", index, 1, 3, 3), *tensors)
    link.wait()  # the first run loads kernels
    seconds = _timed(link, index, 4, latency)
    if seconds < _LONG_ENOUGH_S / 10:
        seconds = _timed(link, index, 64, latency) / 16
    link.tell(_FREE, struct.pack("<Q", pointer))
    return msgspec.structs.replace(device, bandwidth=4 * matrix / seconds)


def _timed(link: Connection, index: int, n: int, latency: float) -> float:
    """Seconds for the last graph, ``n`` times."""
    began = time.perf_counter()
    for _ in range(n):
        link.tell(_RECOMPUTE, struct.pack("<I", index))
    link.wait()
    return max(time.perf_counter() - began - latency, 1e-6)


def as_gpus(workers: Sequence[Worker]) -> tuple[Gpu, ...]:
    """The workers' devices as the planner takes them: RPC0, RPC1, ... in the workers' order."""
    return tuple(
        Gpu(
            id=f"RPC{number}",
            name=worker.endpoint,
            backend="rpc",
            total=device.total,
            free=device.free,
            endpoint=worker.endpoint,
            bandwidth=device.bandwidth,
            link_latency_s=worker.link.latency_s,
            link_bandwidth=worker.link.bandwidth,
        )
        for number, (worker, device) in enumerate((w, d) for w in workers for d in w.devices)
    )


class Pool:
    """The workers somebody named, with what they last said of themselves."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.endpoints = tuple(dict.fromkeys(endpoint_of(text) for text in endpoints))
        self._known: dict[str, Worker] = {}

    def require(self) -> None:
        """Ask every worker. Raises the EngineError of the first that cannot be used. Blocks."""
        for endpoint in self.endpoints:
            self._known[endpoint] = probe(endpoint)

    def look(self, without: Sequence[str] = ()) -> tuple[tuple[Worker, ...], tuple[str, ...]]:
        """The workers that can be used, and a note for each that cannot. Blocks.

        One that is busy (this process's own engine may be what it serves) is as it was last.
        """
        found: list[Worker] = []
        notes: list[str] = []
        for endpoint in self.endpoints:
            if endpoint in without:
                continue
            try:
                self._known[endpoint] = probe(endpoint)
            except WorkerBusyError as error:
                if endpoint not in self._known:
                    notes.append(error.message)
                    continue
            except EngineError as error:
                notes.append(error.message)
                continue
            found.append(self._known[endpoint])
        return tuple(found), tuple(notes)
