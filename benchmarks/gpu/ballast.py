"""Hold GPU memory so that only SIZE stays free: a large card stands in for a small one.

Only capacity is emulated; bandwidth and compute stay those of the card that is there.

    python benchmarks/gpu/ballast.py 6GiB          # prints "free 6144 MiB", holds until it is ended
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
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
    with _settled([_start(size, str(device))]) as free:
        yield free[0]


@contextlib.contextmanager
def emulated_cards(sizes: Mapping[str, int]) -> Iterator[list[int]]:
    """As :func:`emulated_card` for several cards at once, each named by its UUID: whatever
    CUDA_VISIBLE_DEVICES and the order of the devices are here, a ballast holds the card it should.
    """
    with _settled([_start(size, uuid) for uuid, size in sizes.items()]) as free:
        yield free


def _start(size: int, card: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), str(size)]
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if card.isdigit():
        command += ["--device", card]
    else:  # the only card that process sees is its number 0
        environment["CUDA_VISIBLE_DEVICES"] = card
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def _settled(processes: list[subprocess.Popen[str]]) -> Iterator[list[int]]:
    """Wait until each says what it left free; end all of them afterwards."""
    try:
        yield [_free_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            if process.stdout:
                process.stdout.close()


def _free_of(process: subprocess.Popen[str]) -> int:
    line = process.stdout.readline() if process.stdout else ""
    if not line.startswith("free "):
        raise CudaError(f"the ballast did not settle: {line!r}")
    return int(line.split()[1]) * MiB


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
