"""How fast this machine's memory is, measured in two seconds without the engine."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Final

from edgellm.units import MiB

# Several times the largest cache of a desktop CPU, so that the memory is what is measured.
_BLOCK: Final = 256 * MiB
_ROUNDS: Final = 4


def measure_bandwidth(n_threads: int, *, block: int = _BLOCK, rounds: int = _ROUNDS) -> float:
    """Bytes a second that ``n_threads`` copies move together, reads and writes counted: the best
    of some rounds. ctypes releases the GIL inside memmove, so the copies really run side by side.
    """
    share = block // n_threads
    pairs = [
        (ctypes.create_string_buffer(share), ctypes.create_string_buffer(share))
        for _ in range(n_threads)
    ]
    # The first round touches the pages and is not counted.
    _round(pairs, share)
    best = min(_round(pairs, share) for _ in range(rounds))
    return 2 * share * n_threads / best


def _round(pairs: list[tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]],
           share: int) -> float:  # fmt: skip
    threads = [
        threading.Thread(target=ctypes.memmove, args=(target, source, share))
        for target, source in pairs
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start
