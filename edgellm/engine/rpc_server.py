"""This machine's devices for others: ``python -m edgellm.engine.rpc_server`` is the child.

llama.cpp's own RPC server, opened with ctypes. It serves one client at a time, checks nothing and
nobody, and ends only with its process; so it has one of its own. The job comes on stdin as JSON,
and the first line of stdout says what is served, or why nothing is.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from edgellm.engine.build import BuildDevice, list_devices
from edgellm.engine.rpc import ggml, rpc_function, unreachable
from edgellm.errors import EdgeLLMError, EngineError
from edgellm.units import MiB

_GET_MEMORY: Final = 2
"""Place of get_memory in ggml_backend_device_i (ggml-backend-impl.h): name, description, memory."""
_MemoryFunction: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_START_S: Final = 60.0
_SLACK: Final = 256 * MiB
"""What the process may take beside the buffers of its client: code, graphs, messages."""


class ServeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve. Memory in bytes, for each device."""

    host: str = "127.0.0.1"
    port: int = 50052
    devices: tuple[str, ...] = ()
    """llama.cpp's names; empty: every GPU, or the CPU where there is none."""
    memory: int | None = None
    cache: str | None = None
    """A folder that keeps weights, so that they cross the network once."""
    n_threads: int = 1


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of the child's output."""

    endpoint: str = ""
    """HOST:PORT, for the client."""
    devices: tuple[BuildDevice, ...] = ()
    error: str | None = None
    hint: str | None = None


def choose(devices: tuple[BuildDevice, ...], names: tuple[str, ...]) -> tuple[BuildDevice, ...]:
    """The devices to serve. Raises EngineError for a name that there is not."""
    if not names:
        gpus = tuple(d for d in devices if d.kind in ("gpu", "igpu"))
        return gpus or tuple(d for d in devices if d.kind == "cpu")[:1]
    known = {d.name.lower(): d for d in devices}
    missing = [name for name in names if name.lower() not in known]
    if missing:
        raise EngineError(
            f"no device is called {missing[0]}; there are {', '.join(d.name for d in devices)}",
            hint="edgellm doctor",
        )
    return tuple(known[name.lower()] for name in names)


Ask = Callable[[], tuple[int, int, int]]
"""Free, total, and what this process uses of it, in bytes."""


def memory_function(limit: int | None, ask: Ask) -> Any:
    """A ``get_memory`` that tells of ``limit`` bytes at most, less what this process has taken.

    llama.cpp's own says of a CPU that all of its memory is free.
    """
    _, _, at_start = ask()

    def get_memory(_device: int, free: Any, total: Any) -> None:
        now, all_of_it, used = ask()
        most = all_of_it if limit is None else min(limit, all_of_it)
        used = max(used - at_start, 0)
        free[0] = max(min(now, most - used), 0)
        total[0] = most

    return _MemoryFunction(get_memory)


def _true_memory(device: BuildDevice, pointer: int) -> Ask:
    if device.kind == "cpu":
        import psutil

        from edgellm.devices import probe

        def of_host() -> tuple[int, int, int]:
            host = probe().host
            return host.available, host.total, psutil.Process().memory_info().rss

        return of_host
    original = _MemoryFunction(_slots(pointer)[_GET_MEMORY])

    def of_card() -> tuple[int, int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        original(pointer, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value, total.value - free.value

    return of_card


def _slots(pointer: int) -> Any:
    """The function pointers at the start of a ggml_backend_device."""
    return ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))


def serve(job: ServeJob, say: Callable[[Served], None]) -> None:
    """Serve until the process ends. Raises EngineError when it cannot begin."""
    library = ggml()
    start = rpc_function(
        library,
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    )
    chosen = choose(tuple(list_devices(library)), job.devices)
    pointers = (ctypes.c_void_p * len(chosen))()
    functions, told = [], []
    for i, device in enumerate(chosen):
        pointer: int = library.ggml_backend_dev_by_name(device.name.encode())
        pointers[i] = pointer
        ask = _true_memory(device, pointer)
        functions.append(memory_function(job.memory, ask))
        _slots(pointer)[_GET_MEMORY] = ctypes.cast(functions[-1], ctypes.c_void_p).value
        free, total, _ = ask()
        most = total if job.memory is None else min(job.memory, total)
        told.append(msgspec.structs.replace(device, total=most, free=min(free, most)))
    _limit_process(chosen, job.memory)
    if job.cache is not None:
        os.makedirs(job.cache, exist_ok=True)
    endpoint = free_endpoint(job.host, job.port)
    say(Served(endpoint=endpoint, devices=tuple(told)))
    cache = job.cache.encode() if job.cache is not None else None
    start(endpoint.encode(), cache, job.n_threads, len(chosen), pointers)
    raise EngineError(f"{endpoint} could not be served")


def free_endpoint(host: str, port: int) -> str:
    """The address as llama.cpp takes it, numbers only; port 0 becomes a free one. EngineError."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
            return f"{address}:{trial.getsockname()[1]}"
    except OSError as error:
        raise EngineError(f"{host}:{port} cannot be served: {error}", hint="--port 0") from error


def _limit_process(chosen: tuple[BuildDevice, ...], memory: int | None) -> None:
    """A client that takes more of the RAM than it was told of gets an error, not the machine's."""
    if memory is None or any(d.kind != "cpu" for d in chosen) or sys.platform != "linux":
        return
    import resource

    most = memory + _SLACK
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def start(job: ServeJob) -> tuple[subprocess.Popen[bytes], Served]:
    """Start the child. Raises EngineError with its reason when it serves nothing."""
    child = subprocess.Popen(
        [sys.executable, "-m", "edgellm.engine.rpc_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    if child.stdin is None or child.stdout is None:
        raise EngineError("the worker's pipes could not be opened")
    child.stdin.write(msgspec.json.encode(job))
    child.stdin.close()
    line = child.stdout.readline()
    served = msgspec.json.decode(line, type=Served) if line else Served(error="it ended at once")
    if served.error is not None:
        child.wait()
        child.stdout.close()
        raise EngineError(served.error, hint=served.hint)
    deadline = time.monotonic() + _START_S
    while unreachable((served.endpoint,)):
        if child.poll() is not None or time.monotonic() > deadline:
            child.kill()
            raise EngineError(f"the worker at {served.endpoint} did not start")
        time.sleep(0.02)
    return child, served


def main() -> int:
    """The child."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ServeJob)
    answer = os.dup(1)
    os.dup2(2, 1)  # the library prints to stdout

    def say(served: Served) -> None:
        os.write(answer, msgspec.json.encode(served) + b"\n")

    try:
        serve(job, say)
    except EdgeLLMError as error:
        say(Served(error=error.message, hint=error.hint))
    return 1


if __name__ == "__main__":
    sys.exit(main())
