"""The bound on where cells lie holds for a cache that gives out its lowest free cells."""

from __future__ import annotations

import random
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.heights import STEP, Heights
from edgellm.engine.info import EngineOptions
from edgellm.engine.ops import Copy, Remove
from edgellm.engine.scheduler import Scheduler, Step
from tests.engine.factories import limits, sequence


class Cache:
    """Lowest free cell first; who holds what is counted."""

    def __init__(self) -> None:
        self.cells: list[set[int]] = []
        self.held: dict[int, list[int]] = {}

    @property
    def n_used(self) -> int:
        return sum(map(bool, self.cells))

    def grow(self, holder: int, n: int) -> None:
        for _ in range(n):
            free = next((i for i, who in enumerate(self.cells) if not who), len(self.cells))
            if free == len(self.cells):
                self.cells.append(set())
            self.cells[free].add(holder)
            self.held.setdefault(holder, []).append(free)

    def copy(self, source: int, target: int, n: int) -> None:
        self.held[target] = self.held[source][:n]
        for cell in self.held[target]:
            self.cells[cell].add(target)

    def cut(self, holder: int, n: int) -> None:
        held = self.held.pop(holder, [])
        for cell in held[n:]:
            self.cells[cell].discard(holder)
        if held[:n]:
            self.held[holder] = held[:n]

    def release(self, holder: int) -> None:
        self.cut(holder, 0)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_no_cell_lies_above_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    cache, heights, n_holders = Cache(), Heights(), 0
    for _ in range(60):
        holders = list(cache.held)
        what = rng.choice(("new", "grow", "grow", "copy", "release"))
        if what == "new" or not holders:
            holder, n_holders = n_holders, n_holders + 1
            cache.grow(holder, n := rng.randint(1, 200))
            heights.grew(holder, n, cache.n_used)
        elif what == "grow":
            cache.grow(holder := rng.choice(holders), rng.choice((1, 1, 30)))
            heights.grew(holder, len(cache.held[holder]), cache.n_used)
        elif what == "copy":
            source, target, n_holders = rng.choice(holders), n_holders, n_holders + 1
            n = rng.randint(1, len(cache.held[source]))
            cache.copy(source, target, n)
            heights.copied(source, target, n)
        else:
            cache.release(holder := rng.choice(holders))
            heights.forget(holder)
        for holder, cells in cache.held.items():
            assert max(cells) < heights.top(holder)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_no_cell_lies_above_the_bound_where_sequences_guess(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        limits(n_cells=2048, n_ctx_seq=512, n_outputs_max=24), EngineOptions(prefix_min=4)
    )
    cache = Cache()
    for _ in range(60):
        if rng.random() < 0.3:
            scheduler.add([sequence([rng.randrange(3)] * rng.randrange(1, 90))])
        for seq in scheduler.running:
            seq.draft = [7] * rng.randrange(9) if seq.is_decoding else []
        step = scheduler.schedule(0.0)
        apply(cache, step)
        heights = scheduler.cells.heights
        for holder in scheduler.cells.tree.holders:
            held = cache.held[holder][: scheduler.cells.tree.length(holder)]
            assert max(held) < heights.top(holder)
        compute(scheduler, cache, step, rng)


def apply(cache: Cache, step: Step) -> None:
    for op in step.ops:
        if isinstance(op, Copy):
            cache.copy(op.source, op.target, op.n)
        else:
            assert isinstance(op, Remove)
            cache.cut(op.seq_id, op.start)


def compute(scheduler: Scheduler, cache: Cache, step: Step, rng: random.Random) -> None:
    """Every token of the step and every guess takes a cell; some sequences end, some guesses
    are right."""
    for w in step.work:
        cache.grow(w.seq.slot, w.n + len(w.draft))
        scheduler.computed(w)
    for w in step.work:
        for i in range(w.n_out and 1 + rng.randint(0, len(w.draft))):
            if i:
                scheduler.accepted(w.seq, array("i", [7]))
            w.seq.tokens.append(7)
        if w.draft:
            scheduler.reject(w.seq)
        if w.n_out and rng.random() < 0.1:
            scheduler.finish(w.seq)


def test_a_beginning_that_is_shared_is_as_low_as_it_was_written() -> None:
    heights = Heights()
    heights.grew(1, 100, 100)
    heights.grew(1, 120, 5000)
    heights.copied(1, 2, 100)
    assert heights.top(2) == 100
    heights.copied(1, 3, 101)
    assert heights.top(3) == 5000


def test_what_grows_token_by_token_takes_few_marks() -> None:
    heights = Heights()
    for n in range(1, 10_000):
        heights.grew(1, n, n)
    assert heights.top(1) == 9_999
    assert len(heights._marks[1]) <= 2 * 10_000 / STEP


def test_a_renamed_holder_keeps_its_height() -> None:
    heights = Heights()
    heights.grew(1, 10, 700)
    heights.renamed(1, 2)
    assert (heights.top(1), heights.top(2)) == (0, 700)
    heights.forget(2)
    assert heights.top(2) == 0


def test_what_is_cut_is_as_low_as_its_beginning() -> None:
    heights = Heights()
    heights.grew(1, 100, 100)
    heights.grew(1, 200, 5000)
    heights.cut(1, 90)
    assert heights.top(1) == 100
    heights.grew(1, 150, 3000)
    heights.copied(1, 2, 120)
    assert heights.top(2) == 3000
    heights.cut(1, 0)
    assert heights.top(1) == 0


def test_the_beginning_below_a_height_is_told() -> None:
    heights = Heights()
    heights.grew(1, 100, 100)
    heights.grew(1, 140, 1000)
    assert [heights.below(1, at) for at in (99, 100, 999, 1000)] == [0, 100, 100, 140]
    assert heights.below(2, 1000) == 0
