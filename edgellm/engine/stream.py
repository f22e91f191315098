"""From a token's bytes to text a client may see: whole characters, no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

_DECODER: Final = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Text of one sequence as it grows.

    Bytes that begin a character wait for its end; text that may be the beginning of a stop string
    waits until it is not. A character that never ends comes out as U+FFFD at :meth:`finish`.
    """

    __slots__ = ("_decoder", "_held", "_partial", "_stops", "matched")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = _DECODER(errors="replace")
        self._partial = False
        self._held = ""
        self._stops = tuple(stops)
        self.matched: str | None = None

    def push(self, piece: bytes, *, may_stop: bool = True) -> str:
        """Text that may be sent now; ``matched`` is set once a stop string has come.

        With ``may_stop`` False (min_tokens) stop strings are text like any other.
        """
        if not self._partial and piece.isascii():
            text = piece.decode("ascii")
        else:
            text = self._decoder.decode(piece)
            self._partial = bool(self._decoder.getstate()[0])
        if not (self._stops and text and may_stop):
            return text
        return self._release(text)

    def finish(self) -> str:
        """What was still held, when no stop string came."""
        tail = self._decoder.decode(b"", True)
        self._partial = False
        if self.matched is not None:
            return ""
        text = self._release(tail) if self._stops else tail
        held, self._held = self._held, ""
        return text if self.matched is not None else text + held

    def _release(self, text: str) -> str:
        held = self._held + text
        cut = self._find_stop(held)
        if cut is None:
            keep = _longest_beginning(held, self._stops)
            self._held = held[len(held) - keep :] if keep else ""
            return held[: len(held) - keep]
        self._held = ""
        return held[:cut]

    def _find_stop(self, held: str) -> int | None:
        """Where the earliest stop string begins; of two that begin there, the longer one."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            at = held.find(stop)
            if at >= 0 and (best is None or (at, -len(stop)) < best):
                best = (at, -len(stop))
                self.matched = stop
        return None if best is None else best[0]


def _longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that begins, but does not complete, a stop string."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
