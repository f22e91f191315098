"""States saved for caches that cannot share cells: which there are, and where the next are. Pure.

A window or recurrent cache holds what its whole sequence left there, so a prompt can begin only
where a state was saved, and only with all of it. A cache that can take tokens back (each sequence
has cells of its own) lets a prompt begin with as much of a state as it has in common with it.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from typing import Final

import msgspec

from edgellm.engine.backend import State
from edgellm.engine.costs import Costs
from edgellm.engine.info import EngineOptions
from edgellm.engine.ops import Op, Restore
from edgellm.engine.prefix import common_prefix
from edgellm.engine.sequence import Sequence

N_RECENT: Final = 32
"""Prompts that a new one is compared with, to find what they begin with alike."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A saved state: the tokens it was computed from."""

    key: int
    tokens: array[int]
    state: State


class Checkpoints:
    """Saved states of caches that cannot share cells, the least recently used forgotten first."""

    def __init__(
        self, options: EngineOptions, ops: list[Op], costs: Costs, *, can_rewind: bool
    ) -> None:
        self._costs = costs
        self._can_rewind = can_rewind
        self._max = options.checkpoint_bytes
        self._least = options.prefix_min
        self._ops = ops
        self._recent: deque[array[int]] = deque(maxlen=N_RECENT)
        """Tokens of the sequences that started last."""
        self._saved: dict[int, Checkpoint] = {}
        self._next = 0
        self.n_bytes = 0
        self.n_most = sys.maxsize
        """States of more tokens than this were too large to be saved: reading one takes as long
        as it takes to copy it, and prompts that wait for it would wait one after another."""

    def __len__(self) -> int:
        return len(self._saved)

    def match(self, tokens: array[int], limit: int) -> tuple[Checkpoint, int] | None:
        """The saved state with the longest usable beginning of ``tokens``, and how long that is."""
        best, n_best = None, 0
        for saved in self._saved.values():
            n = self._usable(saved, tokens, limit)
            is_smaller = best is not None and len(saved.state) < len(best.state)
            if n > n_best or (n and n == n_best and is_smaller):
                best, n_best = saved, n
        if best is None:
            return None
        self._saved[best.key] = self._saved.pop(best.key)
        return best, n_best

    def _usable(self, saved: Checkpoint, tokens: array[int], limit: int) -> int:
        n = len(saved.tokens)
        if not self._can_rewind:
            return n if n <= limit and tokens[:n] == saved.tokens else 0
        same = min(common_prefix(saved.tokens, tokens), limit)
        is_enough = same >= self._least and self._costs.is_worth_saving(n, same)
        return same if is_enough else 0

    def coming(self, other: Sequence, tokens: array[int], limit: int) -> int:
        """How many of the first tokens will be saved once ``other`` has computed them; 0: none."""
        at = other.checkpoint_at
        if not other.n_computed < at <= self.n_most:
            return 0
        same = min(common_prefix(other.tokens, tokens), at, limit)
        if not self._can_rewind:
            return at if same == at else 0
        # It is saved with the whole of the other's prompt: not too long a wait for what it spares.
        return same if same >= max(self._least, at - same) else 0

    def cached(self, tokens: array[int], limit: int) -> int:
        """How many of the first tokens are saved, where others may be saved soon."""
        found = self.match(tokens, min(limit, self.n_most))
        return found[1] if found else 0

    def share(self, seq: Sequence, limit: int) -> tuple[int, str]:
        """Put a saved state back into a sequence's slot: how many tokens, or why none."""
        found = self.match(seq.tokens, limit)
        self._plan(seq, limit, found[1] if found else 0)
        if found is None:
            return 0, "no_checkpoint"
        saved, n = found
        self._ops.append(Restore(seq.slot, saved.key, n, seq))
        return n, ""

    def _plan(self, seq: Sequence, limit: int, n_saved: int) -> None:
        """Save the prompt's end, for the conversation's next turn, where that is cheap; and where
        it parts from another prompt, for a third that begins like both, if that is not the same.
        """
        # Where the last token can be taken back, the whole prompt is saved: no step for that one.
        end = len(seq.tokens) if self._can_rewind else limit
        ends = self._costs.is_worth_saving(end, end - n_saved)
        alike = [common_prefix(other, seq.tokens) for other in self._recent]
        # One that holds all of this prompt (itself, when it was preempted) parts nowhere from it.
        same = max((n for n in alike if n <= limit), default=0)
        wanted = [end] if ends else []
        if not (ends and self._can_rewind):
            wanted.insert(0, same)
        points = [n for n in wanted if max(self._least, n_saved + 1) <= n <= self.n_most]
        seq.checkpoint_at, seq.checkpoint_next = (*dict.fromkeys(points), 0, 0)[:2]
        if not any(other is seq.tokens for other in self._recent):
            self._recent.append(seq.tokens)

    def lacks(self, seq: Sequence) -> bool:
        """Whether what a sequence has computed is worth a state beside those there are."""
        n = seq.n_computed
        if not self._least <= n <= self.n_most:
            return False
        return self._costs.is_worth_saving(n, n - self.cached(seq.tokens, n))

    def get(self, key: int) -> Checkpoint | None:
        return self._saved.get(key)

    def add(self, tokens: array[int], state: State) -> None:
        """Save a state; older ones go until all fit."""
        if len(state) > self._max:
            self.n_most = min(self.n_most, len(tokens) - 1)
            return
        if any(s.tokens == tokens for s in self._saved.values()):
            return
        if self._can_rewind:
            self._forget_beginnings(tokens)
        self._saved[self._next] = Checkpoint(self._next, tokens, state)
        self._next += 1
        self.n_bytes += len(state)
        while self.n_bytes > self._max:
            oldest = self._saved.pop(next(iter(self._saved)))
            self.n_bytes -= len(oldest.state)

    def _forget_beginnings(self, tokens: array[int]) -> None:
        """States that the one of ``tokens`` stands in for. Much shorter ones stay: they are quicker
        to put back."""
        for key, saved in list(self._saved.items()):
            n = len(saved.tokens)
            if len(tokens) < 2 * n and tokens[:n] == saved.tokens:
                self.n_bytes -= len(self._saved.pop(key).state)
