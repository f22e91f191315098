"""How high in the cache a holder's cells may lie. Pure.

llama.cpp gives a token one of the lowest free cells (llama_kv_cache::find_slot), and every step
attends over all cells up to the highest used one (get_n_kv), empty ones included. So the number of
cells in use when a token was computed bounds where it lies; and a short answer that was written
beside a long prompt, and is kept when that prompt is gone, costs every later step as much as the
prompt did: on two CPU cores 231 ms a token instead of 24.
"""

from __future__ import annotations

from typing import Final

STEP: Final = 64
"""Cells: how exactly heights are remembered."""


class Heights:
    """For each holder marks of (n, top): its first n cells lie below top."""

    def __init__(self) -> None:
        self._marks: dict[int, list[tuple[int, int]]] = {}

    def top(self, holder: int) -> int:
        """All of a holder's cells lie below this one."""
        marks = self._marks.get(holder)
        return marks[-1][1] if marks else 0

    def below(self, holder: int, height: int) -> int:
        """How many of a holder's first cells lie below ``height``."""
        return max((n for n, top in self._marks.get(holder, ()) if top <= height), default=0)

    def grew(self, holder: int, n: int, n_used: int) -> None:
        """A holder has ``n`` cells now, and ``n_used`` are in use by all."""
        marks = self._marks.setdefault(holder, [])
        if marks and n_used <= marks[-1][1]:
            marks[-1] = (n, marks[-1][1])
            return
        below = marks[-2][1] if len(marks) > 1 else 0
        if marks and n_used - below < STEP:
            marks[-1] = (n, n_used)
        else:
            marks.append((n, n_used))

    def copied(self, source: int, target: int, n: int) -> None:
        """``target`` shares the first ``n`` cells of ``source``."""
        marks: list[tuple[int, int]] = []
        for length, top in self._marks.get(source, ()):
            marks.append((min(length, n), top))
            if length >= n:
                break
        self._marks[target] = marks

    def cut(self, holder: int, n: int) -> None:
        """A holder keeps its first ``n`` cells; those that follow are free for others."""
        if n:
            self.copied(holder, holder, n)
        else:
            self.forget(holder)

    def renamed(self, source: int, target: int) -> None:
        """What ``source`` held is ``target``'s."""
        self._marks[target] = self._marks.pop(source, [])

    def forget(self, holder: int) -> None:
        """A holder has no cells any more."""
        self._marks.pop(holder, None)
