"""A terminal that is gone ends the interface.

Usually SIGHUP does. Where the signal does not come (no controlling terminal, or it is ignored as
under nohup) Textual's writer thread ends at its first failed write, and whatever draws next waits
for it for ever, with the engine and its memory behind it.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

EXIT_CODE: Final = 129
"""What a shell shows for a program that SIGHUP ended."""
GRACE_S: Final = 2.0


def watch(fd: int, end: Callable[[], object]) -> None:
    """When the terminal behind ``fd`` is gone: call ``end``, and be gone after a grace period.

    ``end`` runs on a thread of its own and must not wait. Does nothing where terminals cannot be
    polled (Windows, macOS).
    """
    if hasattr(select, "poll"):
        threading.Thread(target=_wait, args=(fd, end), name="hangup", daemon=True).start()


def _wait(fd: int, end: Callable[[], object]) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # nothing to read or write: errors and hang-ups are always told
    events = [event for _, event in poller.poll()]
    if not any(event & select.POLLHUP for event in events):
        return
    end()
    time.sleep(GRACE_S)
    os._exit(EXIT_CODE)  # the main thread waits for a writer that is no more
