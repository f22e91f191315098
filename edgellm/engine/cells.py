"""Cells that sequences share: who holds which, and what stays when a sequence is gone. Pure.

A finished sequence may leave its cells behind for the next prompt that begins alike ("retained"),
under a seq_id of their own. A pinned prefix stays until an answer would be cut for want of cells.
Where sequences have cells of their own nothing is held here.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from edgellm.engine.backend import Limits
from edgellm.engine.heights import Heights
from edgellm.engine.info import EngineOptions
from edgellm.engine.ops import Copy, Op, Remove, Shift
from edgellm.engine.prefix import PrefixTree, common_prefix
from edgellm.engine.retention import Retention
from edgellm.engine.sequence import Sequence


class Cells:
    """Cells by holder: a running sequence's slot, or the seq_id of a retained prefix.

    What has to be done to the cache for it is appended to ``ops``.
    """

    def __init__(self, limits: Limits, options: EngineOptions, ops: list[Op]) -> None:
        self.tree = PrefixTree()
        self.heights = Heights()
        self.retention = Retention(limits.retain_cells, limits.n_cells)
        self.are_shared = limits.sharing == "cells"
        self.n_guessed = 0
        """Cells that the step being computed fills with guesses: who comes after them lies above,
        also where they are given back with the step."""
        self._limits = limits
        self._options = options
        self._ops = ops
        self._free_retained = list(reversed(limits.retained_ids))
        self._retained: dict[int, None] = {}  # seq_ids, least recently used first
        self._pinned: set[int] = set()

    @property
    def n_retained(self) -> int:
        """Cells that only retained prefixes hold, shared among themselves or not."""
        return self.tree.held_by(self._retained.keys())

    # -- prefixes ----------------------------------------------------------------------------

    def coming(self, other: Sequence, tokens: array[int], limit: int) -> int:
        """How many of the first tokens ``other`` is about to compute; 0: none, or too few."""
        if other.n_pending <= 1:
            return 0
        same = min(common_prefix(other.tokens, tokens), limit)
        return same if same > max(other.n_computed, self._options.prefix_min) else 0

    def cached(self, tokens: array[int], limit: int) -> int:
        """How many of the first tokens somebody holds."""
        found = self.tree.match(tokens, limit)
        return found.n if found else 0

    def share(self, seq: Sequence, limit: int) -> tuple[int, str]:
        """Let a sequence's slot hold what others have of its tokens: how many, or why none."""
        found = self.tree.match(seq.tokens, limit)
        if found is None or found.n < min(self._options.prefix_min, limit):
            self.retention.looked_up(seq.tokens, 0, retained=False)
            return 0, "no_common_prefix" if found is None else "too_short"
        retained = found.holder in self._retained
        self.retention.looked_up(seq.tokens, found.n, retained=retained)
        self._copy(found.holder, seq.slot, found.n)
        if retained:
            del self._retained[found.holder]
            self._retained[found.holder] = None
        return found.n, ""

    def _copy(self, source: int, target: int, n: int) -> None:
        self.tree.share(source, target, n)
        self.heights.copied(source, target, n)
        self._ops.append(Copy(source, target, n))

    # -- a holder's cells --------------------------------------------------------------------

    def grow(self, holder: int, tokens: array[int]) -> None:
        """A holder has computed these tokens after what it had."""
        if self.are_shared and tokens:
            self.tree.extend(holder, tokens)
            n_used = self.tree.n_cells + self.n_guessed
            self.heights.grew(holder, self.tree.length(holder), n_used)

    def shift(self, holder: int, n_keep: int, n_drop: int) -> None:
        """Drop ``n_drop`` cells after the first ``n_keep``; the rest moves down."""
        self._ops.append(Shift(holder, n_keep, n_drop))
        n_moved = self.tree.length(holder) - n_keep - n_drop
        self.tree.truncate(holder, n_keep)
        # What moved was computed in sight of what was dropped: -1 is never matched.
        self.tree.extend(holder, array("i", [-1]) * n_moved)

    def shorten(self, holder: int, n: int) -> None:
        """A holder keeps its first ``n`` cells."""
        self._ops.append(Remove(holder, n))
        self.cut(holder, n)

    def cut(self, holder: int, n: int) -> None:
        """The same for one whose cells are released next: the cache need not know."""
        self.tree.truncate(holder, n)
        self.heights.cut(holder, n)

    def release(self, holder: int) -> None:
        """A holder gives everything back."""
        self.tree.release(holder)
        self.heights.forget(holder)
        self._ops.append(Remove(holder, 0))

    # -- what stays --------------------------------------------------------------------------

    def retain(self, slot: int) -> None:
        """Keep a slot's cells under a seq_id of their own, when they are worth it."""
        if not self._worth_keeping(slot):
            return
        target = self._retained_id()
        if target is None:
            return
        self._ops.append(Copy(slot, target, self.tree.length(slot)))
        self.tree.rename(slot, target)
        self.heights.renamed(slot, target)
        self._retained[target] = None
        for inner in self.tree.subsumed(target):
            if inner in self._retained and inner not in self._pinned:
                self._forget(inner)
        self._keep_to_budget()

    def _worth_keeping(self, slot: int) -> bool:
        if not (self.are_shared and self._options.retain_prefixes):
            return False
        return self.tree.exclusive(slot) > 0 and self.tree.length(slot) >= self._options.prefix_min

    def _retained_id(self) -> int | None:
        if not self._free_retained and not self.evict():
            return None
        return self._free_retained.pop() if self._free_retained else None

    def _loose(self) -> list[int]:
        return [holder for holder in self._retained if holder not in self._pinned]

    def _keep_to_budget(self) -> None:
        """Let go of the least recently used prefixes beyond the budget, never of the newest."""
        for holder in self._loose()[:-1]:
            if self.n_retained <= self.retention.cells:
                break
            self._let_go(holder)
        self._keep_low()

    def _keep_low(self) -> None:
        """Let go of what lies far above everything else, of the newest prefix too: empty cells
        below it cost a step what full ones do. A beginning that lies low stays."""
        while loose := self._loose():
            highest = max(loose, key=self.heights.top)
            others = [self.heights.top(h) for h in self.tree.holders if h != highest]
            # A long one may have as many empty cells below it as it has itself: the next prompt
            # fills them.
            spare = max(self.retention.cells, self.tree.length(highest))
            most = max([self.tree.n_cells, *others]) + spare
            if self.heights.top(highest) <= most:
                return
            n = self.heights.below(highest, most)
            if n < self._options.prefix_min:  # not worth a seq_id
                self._let_go(highest)
            else:
                self.retention.let_go(self.tree.tokens(highest))
                self.shorten(highest, n)

    def evict(self, *, pinned: bool = False) -> bool:
        """Forget the least recently used prefix; a pinned one only where an answer would be cut."""
        for holder in self._retained:
            if pinned or holder not in self._pinned:
                self._let_go(holder)
                return True
        return False

    def _let_go(self, holder: int) -> None:
        """Forget a prefix for want of room, which is remembered should it be asked for."""
        self.retention.let_go(self.tree.tokens(holder))
        self._forget(holder)

    def _forget(self, holder: int) -> None:
        del self._retained[holder]
        self._pinned.discard(holder)
        self.release(holder)
        self._free_retained.append(holder)

    def drop_retained(self) -> None:
        """Forget every retained prefix."""
        for holder in list(self._retained):
            self._forget(holder)

    # -- pins --------------------------------------------------------------------------------

    def pin(self, slot: int, tokens: array[int]) -> int | None:
        """Keep a slot's first tokens, these, for good: the seq_id that holds them now.

        None when they are pinned already, when no seq_id is left, or when pins would take more
        than half of the cells.
        """
        n = len(tokens)
        if any(self.tree.tokens(h)[:n] == tokens for h in self._pinned):
            return None
        target = self._reserve_pin(n)
        if target is not None:
            self._copy(slot, target, n)
        return target

    def adopt_pin(self, tokens: array[int]) -> int | None:
        """A seq_id for pinned tokens whose state comes from a file."""
        target = self._reserve_pin(len(tokens))
        if target is not None:
            self.grow(target, tokens)
        return target

    def drop_pin(self, holder: int) -> None:
        """Forget a pin (its state could not be put back)."""
        self._forget(holder)

    def _reserve_pin(self, n: int) -> int | None:
        pinned = sum(self.tree.length(h) for h in self._pinned)
        enough = n >= self._options.prefix_min and pinned + n <= self._limits.n_cells // 2
        target = self._retained_id() if self.are_shared and enough else None
        if target is not None:
            self._retained[target] = None
            self._pinned.add(target)
        return target

    def check(self, slots: Collection[int]) -> None:
        """Raise ValueError when holders or cells contradict one another, or the running slots."""
        self.tree.check()
        retained = sorted([*self._retained, *self._free_retained])
        if retained != sorted(self._limits.retained_ids):
            raise ValueError("retained ids leaked")
        if self.tree.holders - set(slots) - set(self._retained):
            raise ValueError("cells are held by nobody")
        if self.tree.n_cells > self._limits.n_cells:
            raise ValueError("more cells than there are")
