"""``edgellm worker``: this machine's devices, for a model that another machine serves."""

from __future__ import annotations

import json as json_
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from cyclopts import Parameter

from edgellm import paths
from edgellm.cli.errors import UsageError
from edgellm.engine.build import require_engine
from edgellm.engine.rpc_server import Served, ServeJob, start
from edgellm.errors import EngineError
from edgellm.units import format_bytes, parse_bytes
from edgellm.workers import DEFAULT_PORT

_WARNING = """edgellm: warning: {host} can be reached by others.
  The protocol has no authentication and no encryption: whoever reaches this port can read and
  write this process's memory. Keep it on a network of your own, or bind to 127.0.0.1 and tunnel:
    ssh -N -L {port}:127.0.0.1:{port} {user}@this-machine     (on the machine that serves)
  then: edgellm serve MODEL --worker 127.0.0.1:{port}. WireGuard works as well."""


def worker(
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    device: Annotated[list[str] | None, Parameter(consume_multiple=False, negative=())] = None,
    memory: str | None = None,
    cache: Annotated[bool, Parameter(negative="--no-cache")] = True,
    cache_folder: str | None = None,
    threads: int | None = None,
    json: bool = False,
) -> int:
    """Lend this machine's devices to a model that another machine serves.

    The other machine names it: `edgellm serve MODEL --worker HOST:PORT`. One client at a time.
    Without a GPU the CPU and its RAM are lent. Runs until Ctrl-C.

    Examples, one a line:

    * `edgellm worker`
    * `edgellm worker --host 192.168.1.20 --memory 12GiB`
    * `edgellm worker --device CUDA0 --port 50053`

    Parameters
    ----------
    host
        The address to listen on. The protocol has no authentication: see the warning.
    port
        0 takes a free one.
    device
        A device by llama.cpp's name (CUDA0, CPU); repeat it for several. Default: every GPU.
    memory
        The most that is lent of each device, such as 12GiB.
    cache
        Keep weights on this disk, so that they cross the network once.
    cache_folder
        Where; by default in edgellm's cache folder.
    threads
        CPU threads, for a CPU that is lent. Default: its physical cores.
    json
        Print what is lent (edgellm.worker/1).
    """
    require_engine()
    job = ServeJob(
        host=host,
        port=port,
        devices=tuple(device or ()),
        memory=_size(memory),
        cache=_cache(cache, cache_folder),
        n_threads=threads or _cores(),
    )
    if host not in ("127.0.0.1", "localhost"):
        user = os.environ.get("USER", "you")
        print(_WARNING.format(host=host, port=port, user=user), file=sys.stderr)
    child, served = start(job)
    _say(served, json)
    return _wait(child)


def _size(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from error


def _cache(wanted: bool, folder: str | None) -> str | None:
    if not wanted:
        return None
    return folder or str(paths.cache_dir() / "worker")


def _cores() -> int:
    from edgellm.devices import probe

    return probe().host.n_physical


def _say(served: Served, as_json: bool) -> None:
    if as_json:
        data = {"schema": "edgellm.worker/1", **msgspec.to_builtins(served)}
        print(json_.dumps(data), flush=True)
        return
    for d in served.devices:
        print(f"{d.name}: {d.description}, {format_bytes(d.free)} of {format_bytes(d.total)}")
    print(f"lent at {served.endpoint}: edgellm serve MODEL --worker {served.endpoint}", flush=True)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Until Ctrl-C or SIGTERM, which are no failures; EngineError when the child ends by itself."""
    with _ending(child) as asked:
        code = child.wait()
    if asked:
        return 0
    raise EngineError(f"the worker ended by itself (status {code})", hint="edgellm worker")


@contextmanager
def _ending(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the child; the numbers of those that came."""
    asked: list[int] = []

    def end(number: int, _frame: object) -> None:
        asked.append(number)
        child.kill()  # it waits in native code and keeps nothing that could be lost

    before = {n: signal.signal(n, end) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.kill()
            child.wait()
