"""How many cells finished sequences may leave behind for the next request. Pure.

A retained prefix is not free: with one cache for all, every step attends over all cells up to the
highest used one (llama_kv_cache::get_n_kv), retained or not. A cell costs a step its bytes over
the memory bandwidth, and more with many streams: 65,000 retained cells of an 8B model took one
stream from 245 to 162 tok/s and 32 streams from 2,200 to 1,300 on an H200. So the budget begins
at a few percent of the weights' bytes, shrinks while nothing that was kept is asked for again, and
doubles whenever something that was let go would have been.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

WEIGHTS_SHARE: Final = 0.05
"""Retained bytes that slow a step of one stream by 5 %: it reads all weights once."""
MIN_CELLS: Final = 256
"""The budget begins here beside a model so small that a twentieth of it is less (2,048 cells of a
135M model are half its weights again, and took one stream on two cores from 170 to 137 tok/s), and
never shrinks below."""
LOOKUPS: Final = 32
"""After so many prompts without one hit the budget halves."""
MAX_GHOSTS: Final = 4096
FIRST_MARK: Final = 64


def first_budget(weights: int, cell_bytes: int) -> int:
    """Cells to begin with: a share of the weights' bytes, a prompt's length at least."""
    if cell_bytes <= 0:
        return MIN_CELLS
    return max(MIN_CELLS, int(weights * WEIGHTS_SHARE / cell_bytes))


class Retention:
    """The budget in cells, moved by hits, misses and the ghosts of what was let go."""

    def __init__(self, cells: int, n_cells: int) -> None:
        self.cells = min(cells, n_cells)
        self._most = n_cells
        self._since_hit = 0
        self._ghosts: dict[tuple[int, int], None] = {}

    def looked_up(self, tokens: array[int], n_shared: int, *, retained: bool) -> None:
        """A prompt shared ``n_shared`` cached tokens; ``retained`` when nobody runs with them."""
        if retained and n_shared:
            self._since_hit = 0
        else:
            self._since_hit += 1
        if any(mark > n_shared and key in self._ghosts for mark, key in _marks(tokens)):
            self.cells = min(self._most, self.cells * 2)
            self._since_hit = 0
        elif self._since_hit >= LOOKUPS:
            self.cells = min(self.cells, max(MIN_CELLS, self.cells // 2))
            self._since_hit = 0

    def let_go(self, tokens: array[int]) -> None:
        """A retained prefix was evicted; asking for it again is a ghost's hit."""
        for _, key in _marks(tokens):
            self._ghosts.pop(key, None)
            self._ghosts[key] = None
        while len(self._ghosts) > MAX_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]


def _marks(tokens: array[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """(n, key) of the first 64, 128, 256 ... tokens, as far as there are so many."""
    n = FIRST_MARK
    while n <= len(tokens):
        yield n, (n, hash(tokens[:n].tobytes()))
        n *= 2
