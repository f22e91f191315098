"""One process at a time, by a lock on a file that the system releases when the process dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold ``path`` exclusively; ``on_wait`` is called once when another process has it.

    ``flock``, as ``filelock`` does, so that the hub library's locks and these exclude one another.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _wait(handle, on_wait)
        yield
    finally:
        os.close(handle)


def _wait(handle: int, on_wait: Callable[[], None] | None) -> None:
    told = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if on_wait is not None and not told:
                on_wait()
                told = True
            time.sleep(_POLL_S)
