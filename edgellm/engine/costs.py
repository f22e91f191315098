"""What steps cost on this machine, learned from the steps themselves: the measure for chunks."""

from __future__ import annotations

from typing import Final

FADE: Final = 0.95
"""Weight of a prefill step against the one after it."""
OUTLIER: Final = 4.0
"""A step that took more than this times what was known counts as this much: graphs are built anew
now and then, and the first step of a shape is no measure for the next."""
SPREAD: Final = 0.05
"""Chunk sizes must vary by so much (variance over squared mean) to tell a fixed part apart."""


SMALL: Final = 0.05
"""A fixed part that is no more of a step's prefill is worth no waiting."""


FEW_SAVES: Final = 3
"""States saved before their cost decides anything: the first ones load code and pages."""
CHEAP: Final = 0.5
"""A state is worth saving on the chance that it is wanted when that takes this part of computing it
again. A 12B model's prompt of 101 tokens takes an H200 27 ms to read and 25 ms to save."""


class Costs:
    """Decode steps by how many sequences they carry; prefill as a fixed part and one a token.

    Seconds. On an H200 a step of an 8B model takes 14 ms with 32 streams; 64 prefill tokens beside
    them cost 10 ms more, 256 cost 28 ms, 8 alone nearly 2 ms.
    """

    def __init__(self) -> None:
        self._decode: dict[int, float] = {}
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._n_saves = 0
        self._saved_n = self._saved_s = 0.0

    def observe(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """A step took ``seconds`` with so many decodes and prefill tokens."""
        if n_prefill:
            calm = self.decode_s(n_decode) if n_decode else 0.0
            self._observe_prefill(n_prefill, max(seconds - calm, seconds * 0.1))
        elif n_decode:
            bucket = n_decode.bit_length()
            old = self._decode.get(bucket, seconds)
            self._decode[bucket] = old + 0.2 * (min(seconds, old * OUTLIER) - old)

    def _observe_prefill(self, n: int, extra: float) -> None:
        if self._w >= 1.0:
            extra = min(extra, OUTLIER * (self.fixed_s + n * self.token_s))
        self._w = self._w * FADE + 1.0
        self._x = self._x * FADE + n
        self._y = self._y * FADE + extra
        self._xx = self._xx * FADE + n * n
        self._xy = self._xy * FADE + n * extra

    def observe_save(self, n: int, seconds: float) -> None:
        """The state of ``n`` tokens was saved."""
        self._n_saves += 1
        self._saved_n = self._saved_n * FADE + n
        self._saved_s = self._saved_s * FADE + seconds

    def save_s(self, n: int) -> float:
        """Saving the state of ``n`` tokens, or putting it back; 0 while that is not known."""
        return n * self._saved_s / self._saved_n if self._n_saves >= FEW_SAVES else 0.0

    def is_worth_saving(self, n: int, n_spared: int) -> bool:
        """Whether copying a state of ``n`` tokens takes much less than computing ``n_spared`` of
        them; True while that is not known."""
        return not self._x or self.save_s(n) <= CHEAP * n_spared * self._y / self._x

    def decode_s(self, n: int) -> float:
        """A step of ``n`` decodes alone; 0 when none was seen yet."""
        if not self._decode:
            return 0.0
        bucket = n.bit_length()
        return self._decode[min(self._decode, key=lambda known: abs(known - bucket))]

    @property
    def token_s(self) -> float:
        """One more prefill token in a step; 0 when none was seen yet."""
        if not self._x:
            return 0.0
        mean = self._y / self._x
        if not self._is_told_apart:
            return mean
        slope = (self._w * self._xy - self._x * self._y) / self._spread
        return min(max(slope, 0.2 * mean), mean)

    @property
    def _spread(self) -> float:
        return self._w * self._xx - self._x * self._x

    @property
    def _is_told_apart(self) -> bool:
        return self._spread > SPREAD * self._x * self._x

    @property
    def fixed_s(self) -> float:
        """What the first prefill token of a step costs beyond :attr:`token_s`."""
        if not self._w:
            return 0.0
        return max(0.0, (self._y - self.token_s * self._x) / self._w)

    @property
    def enough(self) -> int:
        """Prefill tokens a step from which on more of them are no cheaper than in the next step;
        0 while that is not known.

        On two cores a token of a small model costs the same in a step of 30 as of 500; on a large
        GPU a step of 500 costs little more than one of 100.
        """
        if not self._x or not self._is_told_apart:
            return 0
        return max(1, int(self.fixed_s / (SMALL * self.token_s)))
