"""How often an answer is drawn while it streams. Pure.

Drawing costs CPU time, and a model that computes on every core of this CPU pays for each
millisecond of it: its threads wait for the one that was pushed aside. So the frames of a stream
are paced by what drawing them really took, against a share of one core it may take.
"""

from __future__ import annotations

from typing import Final

FASTEST_S: Final = 1 / 30
CALM_S: Final = 0.2
"""The first interval where the model computes on every core."""
CALM_EVENTS_S: Final = 0.2
"""How often the engine then sends what it has written; each time wakes this process."""
SLOWEST_S: Final = 0.6
PLENTY: Final = 0.5
"""Share of a core when the model computes elsewhere: on a GPU or on another machine."""
SHARED: Final = 0.1
"""... when it computes here and leaves logical CPUs free."""
SCARCE: Final = 0.02
"""... when it computes on all of them: a frame is then taken from the answer itself."""


class Pacer:
    """Frames at an interval that keeps drawing within its share of a core."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.interval_s = FASTEST_S if share >= SHARED else CALM_S
        self._last: tuple[float, float] | None = None

    def note(self, now: float, cpu: float) -> float:
        """After a frame: wall seconds, and CPU seconds that drawing has taken so far.

        Returns when the next frame is due, from now.

        The interval moves by at most a third a frame, so that one slow frame does not stall it.
        """
        if self._last is not None and now > self._last[0]:
            used = (cpu - self._last[1]) / (now - self._last[0])
            change = min(max(used / self._share, 0.75), 1.33)
            self.interval_s = min(max(self.interval_s * change, FASTEST_S), SLOWEST_S)
        self._last = (now, cpu)
        return self.interval_s


def event_interval_s(share: float) -> float:
    """How often an answer's text is wanted from the engine."""
    return FASTEST_S if share >= SHARED else CALM_EVENTS_S


def share_for(verdict: str | None, n_threads: int, n_logical: int) -> float:
    """What a process that draws may use, by where the model computes (verdict None: elsewhere)."""
    if verdict is None or verdict == "gpu":
        return PLENTY
    return SHARED if n_threads < n_logical else SCARCE
