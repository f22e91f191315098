"""Hold GPU memory so that only SIZE stays free: a large card stands in for a small one.

Only capacity is emulated; bandwidth and compute stay those of the card that is there.

    python benchmarks/gpu/ballast.py 6GiB          # prints "free 6144 MiB", holds until it is ended
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from edgellm.units import MiB, parse_bytes


class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""


class Driver:
    """The few calls of the CUDA driver that are needed, each checked."""

    def __init__(self, device: int) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        handle = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args: object) -> None:
        code = getattr(self.lib, name)(*args)
        if code != 0:
            raise CudaError(f"{name} failed with code {code}")

    def free(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def hold(self, n_bytes: int) -> None:
        self.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(n_bytes))


def hold_all_but(size: int, device: int) -> int:
    """Allocate until ``size`` bytes are free on ``device``; returns what the driver says then."""
    driver = Driver(device)
    driver.hold(driver.free() - size)
    # The driver hands out pages of 2 MiB: a second, small piece takes up the difference.
    rest = driver.free() - size
    if rest >= 2 * MiB:
        driver.hold(rest)
    return driver.free()


@contextlib.contextmanager
def emulated_card(size: int, device: int = 0) -> Iterator[int]:
    """Within the block only ``size`` bytes of ``device`` are free; yields the driver's figure."""
    command = [sys.executable, str(Path(__file__)), str(size), "--device", str(device)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith("free "):
                raise CudaError(f"the ballast did not settle: {line!r}")
            yield int(line.split()[1]) * MiB
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("free", type=parse_bytes, help="what to leave free, such as 6GiB")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600)
    args = parser.parse_args()
    print(f"free {hold_all_but(args.free, args.device) // MiB} MiB", flush=True)
    time.sleep(args.seconds)


if __name__ == "__main__":
    main()
