"""How many layers, and whose experts, have room on one set of cards. Pure.

Experts go to the host before whole layers; contiguous runs of layers go to the cards, the fastest
as full as can be. Everything is sums over blocks, so that thousands of placements cost little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from edgellm.gguf.shape import ModelShape
from edgellm.planner.memo import remembered
from edgellm.planner.placement import aligned, mapped_bytes


@dataclass(frozen=True)
class Placement:
    """Where the blocks go: ``counts`` per card, the output layer among them."""

    counts: tuple[int, ...]
    n_cpu_moe: int

    @property
    def n_gpu_layers(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class Sizes:
    """Bytes of each block and their sums over the first 0, 1, 2 ... of them."""

    each: list[int]
    sums: list[int]

    @classmethod
    def of(cls, each: list[int]) -> Sizes:
        return cls(each, [0, *accumulate(each)])

    def since(self, first: int) -> int:
        return self.sums[-1] - self.sums[first]


@dataclass(frozen=True)
class Blocks:
    """A model's weights: its blocks, then the output layer."""

    n_blocks: int
    has_experts: bool
    dense: Sizes
    experts: Sizes
    shared: int
    """Tensors that every device with a block holds."""
    mapped_input: int
    """The input layer, always on the host."""
    largest: int
    """The largest tensor that a batch may copy from the host: of the experts where there are."""

    @property
    def n_all(self) -> int:
        return self.n_blocks + 1


def blocks_of(shape: ModelShape) -> Blocks:
    held: Blocks = remembered(shape, "blocks", lambda: _blocks(shape))
    return held


def _blocks(shape: ModelShape) -> Blocks:
    experts = [0 if x.is_nextn else aligned(x.expert_tensors) for x in shape.layers]
    dense = [
        0 if x.is_nextn else aligned(x.tensors) - own
        for x, own in zip(shape.layers, experts, strict=True)
    ]
    tied = (shape.tied_tensor,) if shape.tied_tensor else ()
    movable = [t for x in shape.layers for t in (x.expert_tensors or x.tensors)]
    return Blocks(
        n_blocks=shape.n_layer_all,
        has_experts=shape.has_experts,
        dense=Sizes.of([*dense, aligned((*shape.output_tensors, *tied))]),
        experts=Sizes.of([*experts, 0]),
        shared=aligned(shape.shared_tensors),
        mapped_input=mapped_bytes(shape.input_tensors),
        largest=max((t.n_bytes for t in movable), default=0),
    )


@dataclass(frozen=True)
class Filling:
    """Blocks and caches to put under budgets: one a card, for a whole model and for a part."""

    blocks: Blocks
    caches: Sizes
    whole: Sequence[int]
    part: Sequence[int]
    speeds: Sequence[float]
    on_cards: bool
    """Caches lie with their layers (offload_kqv)."""
    forced: int | None
    """``n_cpu_moe`` as asked."""

    def most(self) -> int:
        """The largest number of layers that fit."""
        n_cpu_moe = self.forced or 0
        if self._exact(self.blocks.n_all, n_cpu_moe) is not None:
            return self.blocks.n_all
        low, high = 0, self.blocks.n_blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self._exact(middle, n_cpu_moe) is not None:
                low = middle
            else:
                high = middle - 1
        return low

    def fill(self, n: int) -> Placement | None:
        """``n`` layers over the cards with as many of their experts as fit; None: no room."""
        if self.forced is not None or not self.blocks.has_experts:
            return self._exact(n, self.forced or 0)
        if n == self.blocks.n_all:
            whole = self._exact(n, 0)
            if whole is not None:
                return whole
        return self._one_card(n) if len(self.part) == 1 else self._several_cards(n)

    def _one_card(self, n: int) -> Placement | None:
        """On a single card: the first layer whose experts have room."""
        least = self._least_moved(n, self.part[0])
        return None if least is None else Placement((n,), least)

    def _least_moved(self, n: int, room: int) -> int | None:
        """The fewest layers whose experts stay on the host when ``room`` is one piece."""
        if not n:
            return 0
        first = self.blocks.n_all - n
        without = self._bytes(first, self.blocks.n_blocks)
        if without > room:
            return None
        experts = self.blocks.experts.sums
        least = bisect_left(experts, experts[-1] - (room - without), first)
        return least if least > first else 0

    def _several_cards(self, n: int) -> Placement | None:
        """From what the cards hold together upwards: cut at layers they hold a little less."""
        least = self._least_moved(n, sum(max(room, 0) for room in self.part))
        if least is None:
            return None
        first, last = self.blocks.n_all - n, self.blocks.n_blocks
        low, step = max(least, first), 1
        tried = self._exact(n, least)
        while tried is None and low < last:
            low, step = min(low + step, last), step * 2
            tried = self._exact(n, low)
        if tried is None:
            return None
        floor = max(low - step // 2, first) + 1
        while floor < low:
            middle = (floor + low) // 2
            fits = self._exact(n, middle)
            tried, low = (fits, middle) if fits is not None else (tried, low)
            floor = floor if fits is not None else middle + 1
        return tried

    def _exact(self, n: int, n_cpu_moe: int) -> Placement | None:
        """``n`` layers in order over the cards, the fastest filled first; None: no room."""
        budgets = self.whole if n == self.blocks.n_all and not n_cpu_moe else self.part
        first = self.blocks.n_all - n
        if len(budgets) == 1:
            fits = not n or self._bytes(first, n_cpu_moe) <= budgets[0]
            return Placement((n,), n_cpu_moe) if fits else None
        if n and self._bytes(first, n_cpu_moe) > sum(max(b, 0) for b in budgets):
            return None
        sizes = [
            self.blocks.dense.each[il]
            + (self.blocks.experts.each[il] if il >= n_cpu_moe else 0)
            + (self.caches.each[il] if self.on_cards else 0)
            for il in range(first, self.blocks.n_all)
        ]
        counts = distribute(sizes, budgets, self.speeds)
        return None if counts is None else Placement(counts, n_cpu_moe)

    def _bytes(self, first: int, n_cpu_moe: int) -> int:
        """Bytes of the blocks from ``first`` on, but for the experts that stay on the host."""
        need = self.blocks.dense.since(first) + self.blocks.experts.since(max(first, n_cpu_moe))
        return need + (self.caches.since(first) if self.on_cards else 0)


def distribute(
    sizes: Sequence[int], budgets: Sequence[int], speeds: Sequence[float]
) -> tuple[int, ...] | None:
    """How many of ``sizes``, in order, go on each card: the fastest cards as full as can be.

    A card with no room for the layer at its place gets none. None when they do not all fit.
    """
    if len(budgets) == 1:
        return (len(sizes),) if sum(sizes) <= budgets[0] or not sizes else None
    if not sizes:
        return (0,) * len(budgets)
    order = sorted(range(len(budgets)), key=lambda i: (-speeds[i], -budgets[i], i))
    for n in range(1, len(order) + 1):
        used = sorted(order[:n])
        counts = _in_order(sizes, [budgets[i] for i in used], [speeds[i] for i in used])
        if counts is not None:
            spread = [0] * len(budgets)
            for i, count in zip(used, counts, strict=True):
                spread[i] = count
            return tuple(spread)
    return None


def _in_order(
    sizes: Sequence[int], budgets: Sequence[int], speeds: Sequence[float]
) -> list[int] | None:
    """Contiguous runs over all these cards; the slowest takes only what the others leave."""
    slowest = min(range(len(budgets)), key=lambda i: (speeds[i], i))
    counts = [0] * len(budgets)
    left, right = 0, len(sizes)
    for i in range(slowest):
        room = budgets[i]
        while left < right and sizes[left] <= room:
            room -= sizes[left]
            left += 1
            counts[i] += 1
    for i in range(len(budgets) - 1, slowest, -1):
        room = budgets[i]
        while right > left and sizes[right - 1] <= room:
            right -= 1
            room -= sizes[right]
            counts[i] += 1
    if sum(sizes[left:right]) > budgets[slowest]:
        return None
    counts[slowest] = right - left
    return counts
