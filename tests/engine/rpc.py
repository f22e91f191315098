"""RPC servers on the loopback: devices that layers offload to, on a machine without a GPU."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

_SERVER = """
import ctypes, resource, sys
from edgellm.engine.build import library_folder, open_library
endpoint, limit = sys.argv[1].encode(), int(sys.argv[2])
ggml = open_library(library_folder(), "ggml")
rpc = open_library(library_folder(), "ggml-rpc")
ggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
cpu = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_name(b"CPU"))
if limit:
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + limit, held + limit))
start = rpc.ggml_backend_rpc_start_server
text, size, pointer = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
start.argtypes = (text, pointer, size, size, pointer)
start(endpoint, None, 1, 1, cpu)
"""


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def rpc_server(limit: int = 0) -> Iterator[str]:
    """One server with one device (this machine's CPU); its address. ``limit``: bytes it may take
    beyond what it starts with."""
    endpoint = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-c", _SERVER, endpoint, str(limit)]
    # One arena: each thread's own would reserve 64 MiB of the limit.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=environment) as process:
        try:
            _wait_for(endpoint)
            yield endpoint
        finally:
            process.kill()


def _wait_for(endpoint: str) -> None:
    host, port = endpoint.split(":")
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"no RPC server at {endpoint}")
