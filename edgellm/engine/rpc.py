"""Devices of other machines, through llama.cpp's RPC backend. In the child only.

The libraries are opened with ctypes, as engine/build.py does: the registry of devices is theirs, so
what is registered here is there for every other user of them in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from edgellm.engine.build import library_folder, open_library
from edgellm.errors import EngineError
from edgellm.workers import Connection, WorkerBusyError

NOTICE_S: Final = 3
"""Seconds after which a worker that no longer answers the network counts as lost."""
BUSY_S: Final = 15
"""Seconds that a worker may take to answer a new client."""
LOST: Final = "edgellm: lost the worker "
_LOOK_S: Final = 0.5
_HIGHEST_FD: Final = 512


def ggml() -> ctypes.CDLL:
    """The library with the registry, its functions typed."""
    library = open_library(library_folder(), "ggml")
    for name in ("ggml_backend_reg_by_name", "ggml_backend_dev_by_name"):
        getattr(library, name).restype = ctypes.c_void_p
        getattr(library, name).argtypes = (ctypes.c_char_p,)
    library.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    library.ggml_backend_reg_get_proc_address.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    library.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_reg_dev_count.argtypes = (ctypes.c_void_p,)
    library.ggml_backend_register.restype = None
    library.ggml_backend_register.argtypes = (ctypes.c_void_p,)
    return library


def rpc_function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """A function of the RPC backend (ggml-rpc.h). Raises EngineError when it was not built in."""
    backend = library.ggml_backend_reg_by_name(b"RPC")
    address = backend and library.ggml_backend_reg_get_proc_address(backend, name.encode())
    if not address:
        raise EngineError(
            "this build of the engine cannot use other machines (no RPC backend)",
            hint="edgellm setup --rebuild",
        )
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def register(endpoints: Sequence[str]) -> dict[str, str]:
    """Make the devices of each HOST:PORT known as RPC0, RPC1, ... in the order given.

    Returns the name of each one's buffers (``RPC0[HOST:PORT]``, counted in each worker) -> the
    device's. llama.cpp ends the process when it cannot connect, so that is tried first.
    """
    if not endpoints:
        return {}
    library = ggml()
    add = rpc_function(library, "ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    names: dict[str, str] = {}
    for endpoint in endpoints:
        _reach(endpoint)
        found = add(endpoint.encode())
        if not found:
            raise EngineError(f"the worker {endpoint} has no devices")
        library.ggml_backend_register(found)
        for i in range(library.ggml_backend_reg_dev_count(found)):
            names[f"RPC{i}[{endpoint}]"] = f"RPC{len(names)}"
    return names


def _reach(endpoint: str) -> None:
    """Raise EngineError unless a worker answers there. One whose last client has just died may
    have to finish what it computes for it first."""
    with Connection(endpoint, NOTICE_S) as link:
        link.wait_at_most(BUSY_S)
        link.hello()


def connections(endpoints: Sequence[str]) -> Iterator[tuple[str, socket.socket]]:
    """This process's own connections to these endpoints, one at a time, each closed again.

    They are duplicates of the library's descriptors: one that stayed open would keep a connection
    alive that the library has closed, and a worker serves only one.
    """
    peers = {address: e for e in endpoints for address in _addresses(e)}
    for fd in range(3, _HIGHEST_FD):
        copy = _duplicate(fd)
        if copy is None:
            continue
        with copy:
            endpoint = peers.get(_peer(copy))
            if endpoint is not None:
                yield endpoint, copy


def _duplicate(fd: int) -> socket.socket | None:
    try:
        is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
        return socket.socket(fileno=os.dup(fd)) if is_socket else None
    except OSError:
        return None


def _peer(link: socket.socket) -> tuple[str, int]:
    """Address and port of the other side; of one that is gone, nothing that anybody is called."""
    try:
        peer = link.getpeername()
    except OSError:
        return "", 0
    return (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else ("", 0)


def _addresses(endpoint: str) -> list[tuple[str, int]]:
    host, _, port = endpoint.rpartition(":")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return [(str(address[0]), int(address[1])) for *_, address in found]


def keep_alive(link: socket.socket) -> None:
    """Ask the kernel to end a connection whose other side is silent for NOTICE_S.

    llama.cpp waits without a limit, so a cut cable would hang the engine until TCP gives up (15
    minutes). An idle connection is asked every second; data that nobody acknowledges ends it too.
    """
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPALIVE": 1,  # the name of TCP_KEEPIDLE on macOS
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": NOTICE_S - 1,
        "TCP_USER_TIMEOUT": NOTICE_S * 1000,
    }
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                link.setsockopt(socket.IPPROTO_TCP, option, value)


def is_lost(link: socket.socket) -> bool:
    """Whether the other side is gone; reads nothing away."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    events = poll.poll(0)
    if not events:
        return False
    if events[0][1] & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
        return True
    try:
        return link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def watch(endpoints: Sequence[str], on_lost: Callable[[str], None]) -> None:
    """Call ``on_lost`` with the endpoint, from a thread, as soon as a worker is gone."""

    def look() -> None:
        while True:
            for endpoint, link in connections(endpoints):
                keep_alive(link)
                if is_lost(link):
                    on_lost(endpoint)
                    return
            time.sleep(_LOOK_S)

    threading.Thread(target=look, name="engine-workers", daemon=True).start()


def end_process(endpoint: str) -> None:
    """What the child does without a worker: llama.cpp can neither go on nor give an error."""
    sys.stderr.write(f"{LOST}{endpoint}\n")
    sys.stderr.flush()
    os._exit(1)


def lost_worker(log: Sequence[str]) -> str | None:
    """The worker whose loss a child's log tells of."""
    found = (line.removeprefix(LOST) for line in reversed(log) if line.startswith(LOST))
    return next(found, None)


def unreachable(endpoints: Sequence[str], timeout_s: float = 1.0) -> tuple[str, ...]:
    """The workers that are not there: nobody takes the connection, or what takes it (a tunnel) has
    no worker behind it. One that is busy is there. Blocks up to ``timeout_s`` for each."""
    return tuple(e for e in endpoints if not _is_there(e, timeout_s))


def _is_there(endpoint: str, timeout_s: float) -> bool:
    try:
        with Connection(endpoint, timeout_s) as link:
            link.hello()
    except WorkerBusyError:
        return True
    except EngineError:
        return False
    return True
