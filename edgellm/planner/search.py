"""The search on one set of cards. Pure: the same input gives the same plan.

Every combination of KV type and ubatch is placed as well as it can be (experts to the host before
whole layers, layers over the cards) with compute buffers guessed from those already worked out;
the best is then worked out exactly and, when the guess was wrong, searched again with what was
learned. What is returned has been worked out exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final

from edgellm.devices import Devices, Gpu
from edgellm.gguf.shape import ModelShape
from edgellm.planner import observed
from edgellm.planner.estimate import Ledger, estimate, replace, settle, settled_cache
from edgellm.planner.filling import Blocks, Filling, Placement, Sizes, blocks_of
from edgellm.planner.memo import remembered
from edgellm.planner.memory import kv_bytes, state_bytes
from edgellm.planner.overhead import least_workspace
from edgellm.planner.params import LARGE_UBATCHES, UBATCHES, base_params, kv_kinds
from edgellm.planner.placement import HOST
from edgellm.planner.plan import DeviceLedger, PlanParams, PlanRequest, Speed
from edgellm.planner.reasons import left_out
from edgellm.planner.speed import HOST_PART, Card, card, host_card, layer_reads, predict
from edgellm.planner.terms import Terms, terms_of

SAME: Final = 0.02
"""Speeds within 2 % are the same: then the earlier, cheaper lever decides."""
TRIES: Final = 24
"""Exact evaluations at most; a search takes one to four."""
IN_VAIN: Final = 6
"""Layers taken off the cards, one after the other, with nothing gained: more will not help."""
NEXT_TO_NOTHING: Final = 0.005
"""A gain that is not looked for."""
BETTER_PREFILL: Final = 1.1
"""What a larger ubatch must bring to be taken."""
MOST_PINNED: Final = 0.75
"""Share of the free RAM that weights may pin; more stay in the mapped file."""


@dataclass(frozen=True)
class Choice:
    """A placement worked out exactly."""

    ledger: Ledger
    speed: Speed
    notes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Nothing that a token reads is on the host."""
        return HOST not in self.ledger.layer_device and not self.ledger.params.n_cpu_moe


@dataclass
class Combination:
    """One choice of everything but the placement."""

    params: PlanParams
    caches: Sizes
    placement: Placement | None = None
    seconds: float = 0.0
    refused: set[Placement] = field(default_factory=set)
    """Worked out, and found not to fit."""

    @property
    def kinds(self) -> tuple[str, str]:
        return self.params.type_k, self.params.type_v


Scratch = tuple[int, ...]
"""Compute buffer and workspaces of each card."""
REFUSED: Final = 1 << 60
"""Of a combination that llama.cpp refuses: it fits nowhere."""


@dataclass
class Learned:
    """Scratch that was worked out, and guesses at the rest: along a line in the ubatch."""

    slope: int
    """Bytes a token of a ubatch, roughly."""
    known: dict[tuple[bool, tuple[str, str]], dict[int, Scratch]] = field(default_factory=dict)

    def learn(self, whole: bool, combination: Combination, scratch: Scratch) -> None:
        held = self.known.setdefault((whole, combination.kinds), {})
        held[combination.params.n_ubatch] = scratch

    def guess(
        self, whole: bool, kinds: tuple[str, str], n_ubatch: int, *, cautious: bool = False
    ) -> Scratch | None:
        """None: nothing like it was worked out. Other cache types hardly matter."""
        held = self.known.get((whole, kinds)) or self._of_other_kinds(whole)
        if not held or n_ubatch in held:
            return held.get(n_ubatch)
        near = sorted(held, key=lambda u: (abs(u - n_ubatch), u))[:2]
        base = held[near[0]]
        # With one point, more is hoped for of a smaller ubatch than it may bring: it is looked at.
        steep = 2 if cautious or n_ubatch < near[0] else 1
        slopes = [float(self.slope * steep)] * len(base)
        if len(near) == 2 and not cautious:
            rise = zip(held[near[1]], base, strict=True)
            slopes = [(y - x) / (near[1] - near[0]) for y, x in rise]
        moved = n_ubatch - near[0]
        return tuple(max(int(x + m * moved), 0) for x, m in zip(base, slopes, strict=True))

    def _of_other_kinds(self, whole: bool) -> dict[int, Scratch]:
        others = (held for (w, _), held in self.known.items() if w == whole)
        return next((x for x in others if max(map(max, x.values()), default=0) < REFUSED), {})


class Search:
    """One set of cards, and what was learned about it."""

    def __init__(
        self, shape: ModelShape, devices: Devices, request: PlanRequest, gpus: Sequence[Gpu]
    ) -> None:
        self.shape = shape
        self.host = devices.host
        self.request = request
        self.gpus = tuple(gpus)
        self.terms = terms_of(shape, gpus, request)
        self.cards: list[Card] = [card(gpu) for gpu in gpus]
        self.cpu = host_card(devices.host, observed.host_bandwidth(request.observed))
        self.is_pooled = any(c.is_remote for c in self.cards)
        self.all = tuple(devices.gpus)
        self.base = base_params(shape, devices, request)
        self.blocks: Blocks = blocks_of(shape)
        self.learned = Learned(_bytes_a_token(shape, self.base))
        self.combinations = self._combinations()
        for combination in self.combinations:
            self._place(combination)

    # --- the loop

    @property
    def most_tps(self) -> float:
        """What these cards may reach, by guesses where nothing was worked out."""
        placed = [c.seconds for c in self.combinations if c.placement is not None]
        return 1 / max(min(placed), 1e-12) if placed else 0.0

    def run(self, least_tps: float = 0.0) -> Choice | None:
        """The fastest choice; None when none fits that decodes at ``least_tps``."""
        return self._settle(self.combinations, least_tps)

    def with_larger_ubatch(self, choice: Choice, fastest_tps: float) -> Choice:
        """``choice``, or one with a larger ubatch that reads prompts clearly faster (host weights
        are copied to the card once a ubatch) and still decodes as fast as ``fastest_tps``."""
        known = choice.ledger.params
        if self.request.n_ubatch or choice.is_whole or not self.gpus:
            return choice
        least = max(self.most_tps, fastest_tps) / (1 + SAME)
        for n_ubatch in LARGE_UBATCHES:
            if n_ubatch > min(known.n_batch, known.n_ctx):
                continue
            params = replace(self.base, type_k=known.type_k, type_v=known.type_v, n_ubatch=n_ubatch)
            combination = self._combination(params)
            self._place(combination, cautious=True)
            if combination.placement is None or least * combination.seconds > 1:
                continue
            larger = self._work_out(combination)
            if larger is None or larger.speed.decode_tps < least:
                continue
            if larger.speed.prefill_tps > choice.speed.prefill_tps * BETTER_PREFILL:
                return larger
        return choice

    def _settle(self, combinations: Sequence[Combination], least_tps: float) -> Choice | None:
        """Work the best out exactly, learn and place again, until what was worked out is best."""
        best: Choice | None = None
        for _ in range(TRIES):
            pick = self._pick(combinations)
            if pick is None or pick.placement is None or least_tps * pick.seconds > 1:
                break
            if best is not None and best.speed.decode_tps * _enough(pick, combinations) > 1:
                break
            choice = self._work_out(pick)
            if choice is None:
                pick.refused.add(pick.placement)
            elif best is None or choice.speed.decode_tps > best.speed.decode_tps:
                best = choice
            for combination in combinations:
                self._place(combination)
        return best if best is not None and best.speed.decode_tps >= least_tps else None

    def _combinations(self) -> list[Combination]:
        """KV types and ubatches, the cheapest levers first."""
        asked = self.request.n_ubatch
        ubatches = [asked] if asked else [u for u in UBATCHES if u <= max(self.base.n_ctx, 64)]
        return [
            self._combination(replace(self.base, type_k=k, type_v=v, n_ubatch=n_ubatch))
            for k, v in kv_kinds(self.shape, self.request)
            for n_ubatch in ubatches
        ]

    def _combination(self, params: PlanParams) -> Combination:
        n_batch = self.request.n_batch or max(params.n_batch, params.n_ubatch)
        params = settle(self.shape, replace(params, n_batch=n_batch))
        return Combination(params, Sizes.of(self._caches(params)))

    def _pick(self, combinations: Sequence[Combination]) -> Combination | None:
        """The fastest; among equals the cheapest lever."""
        placed = [c for c in combinations if c.placement is not None]
        if not placed:
            return None
        fastest = min(c.seconds for c in placed)
        return next(c for c in placed if c.seconds <= fastest * (1 + SAME))

    def _work_out(self, combination: Combination) -> Choice | None:
        """The exact ledger; None when it does not fit, with what was learned kept."""
        if combination.placement is None:
            return None
        ledger = self._estimate(combination, combination.placement)
        if ledger is None or not ledger.fits:
            return None
        speed = predict(self.shape, ledger.params, ledger.layer_device, self.cards, self.cpu)
        return Choice(self._with_unused(ledger), speed, left_out(self.all, self.gpus))

    def _estimate(self, combination: Combination, placement: Placement) -> Ledger | None:
        """The ledger, its scratch learned; None where V is quantised and flash attention off."""
        params = self.params(combination.params, placement)
        extra = self.request.extra_host
        ledger = estimate(self.shape, params, self.gpus, self.host, self.terms, extra_host=extra)
        refused = params.flash_attn == "auto" and not ledger.flash and params.type_v != "f16"
        scratch = tuple(REFUSED if refused else d.compute + d.workspace for d in ledger.devices)
        self.learned.learn(self._is_whole(placement), combination, scratch)
        return None if refused else ledger

    def _with_unused(self, ledger: Ledger) -> Ledger:
        """Cards that hold nothing stay in the plan, with nothing on them."""
        if len(self.gpus) == len(self.all):
            return ledger
        used = {d.id: d for d in ledger.devices}
        every = zip(self.all, terms_of(self.shape, self.all, self.request), strict=True)
        devices = tuple(used.get(gpu.id) or _empty_ledger(gpu, terms) for gpu, terms in every)
        places = [next(i for i, d in enumerate(devices) if d.id == g.id) for g in self.gpus]
        return Ledger(
            params=replace(ledger.params, devices=tuple(g.id for g in self.gpus)),
            devices=devices,
            host=ledger.host,
            layer_device=tuple(places[d] if d != HOST else HOST for d in ledger.layer_device),
            flash=ledger.flash,
            warnings=ledger.warnings,
        )

    def params(self, params: PlanParams, placement: Placement) -> PlanParams:
        """``params`` with ``placement`` as llama.cpp takes it."""
        split = tuple(float(n) for n in placement.counts) if len(self.gpus) > 1 else ()
        asked = self.request.use_mmap
        return replace(
            params,
            n_gpu_layers=placement.n_gpu_layers,
            n_cpu_moe=placement.n_cpu_moe,
            tensor_split=self.request.tensor_split or split,
            use_mmap=not self._pins(placement) if asked is None else asked,
        )

    def _pins(self, placement: Placement) -> bool:
        """Whether host weights are read into pinned memory, not mapped.

        Batches copy them to the card, five times as fast from pinned memory; llama.cpp itself
        advises load mode none for experts (create_tensor in src/llama-model-loader.cpp).
        """
        if not self.gpus or self.gpus[0].integrated or self.cards[0].is_remote:
            return False
        first = self.blocks.n_all - placement.n_gpu_layers
        held = self.blocks.dense.sums[first]
        held += self.blocks.experts.sums[max(first, placement.n_cpu_moe)]
        return 0 < held <= MOST_PINNED * self.host.available

    def _smaller(self, placement: Placement) -> Placement | None:
        """One layer, or one layer's experts, fewer on the cards."""
        if (
            self.shape.has_experts
            and placement.n_cpu_moe < self.blocks.n_blocks
            and placement.n_gpu_layers
        ):
            return Placement(placement.counts, placement.n_cpu_moe + 1)
        counts = list(placement.counts)
        for i, count in enumerate(counts):
            if count:
                counts[i] -= 1
                return Placement(tuple(counts), placement.n_cpu_moe)
        return None

    # --- placing

    def _caches(self, params: PlanParams) -> list[int]:
        """KV and state bytes of each block (flash attention assumed; the exact ledger checks)."""
        cache = settled_cache(self.shape, params)
        return [
            kv_bytes(x, cache, params.type_k, params.type_v) + state_bytes(x, cache)
            for x in self.shape.layers
        ] + [0]

    def _is_whole(self, placement: Placement) -> bool:
        return placement.n_gpu_layers >= self.blocks.n_all and not placement.n_cpu_moe

    def _budgets(self, combination: Combination, *, whole: bool, cautious: bool) -> list[int]:
        """Bytes for weights and caches on each card, compute and overhead taken off."""
        n_ubatch = combination.params.n_ubatch
        scratch = self.learned.guess(whole, combination.kinds, n_ubatch, cautious=cautious)
        if scratch is None:
            scratch = self._first_guess(combination.params, whole)
        return [
            gpu.free - terms.margin - terms.backend(gpu) - terms.extra - own - self.blocks.shared
            for gpu, terms, own in zip(self.gpus, self.terms, scratch, strict=True)
        ]

    def _first_guess(self, params: PlanParams, whole: bool) -> Scratch:
        """Activations of a ubatch, what cuBLAS takes, and copies of two host tensors."""
        activations = self.learned.slope * params.n_ubatch
        copies = 0 if whole else 2 * self.blocks.largest
        flash = params.flash_attn != "off"

        def of(gpu: Gpu, terms: Terms) -> int:
            asked = terms.overhead is not None
            return activations + (0 if asked else least_workspace(gpu, self.shape, flash))

        each = [of(gpu, terms) for gpu, terms in zip(self.gpus, self.terms, strict=True)]
        return tuple(n + (0 if i else copies) for i, n in enumerate(each))

    def _place(self, combination: Combination, *, cautious: bool = False) -> None:
        """The fastest placement of ``combination`` under its budgets; ``cautious``: as if scratch
        memory grew twice as fast as guessed."""
        found: tuple[float, Placement] | None = None
        in_vain = 0
        for placement, bound in self._placements(combination, cautious):
            if found is not None and (bound >= found[0] or in_vain > IN_VAIN):
                break  # fewer layers on the cards are slower still
            if placement is not None:
                in_vain += 1
                seconds = self._seconds(placement)
                if found is None or seconds < found[0]:
                    found, in_vain = (seconds, placement), 0
        placement, seconds = (found[1], found[0]) if found else (None, 0.0)
        while placement is not None and placement in combination.refused:
            placement = self._smaller(placement)
            seconds = self._seconds(placement) if placement is not None else 0.0
        combination.placement, combination.seconds = placement, seconds

    def _placements(
        self, combination: Combination, cautious: bool
    ) -> Iterator[tuple[Placement | None, float]]:
        """For each number of layers on the cards, the most first, the fewest experts on the host
        that fit (None: none do), and the seconds a token that such a placement takes at least."""
        caches = combination.caches
        if not self.gpus:
            if self.request.n_gpu_layers in (None, 0):
                yield self._if_host_fits(Placement((), 0), caches), 0.0
            return
        filling = Filling(
            blocks=self.blocks,
            caches=caches,
            whole=self._budgets(combination, whole=True, cautious=cautious),
            part=self._budgets(combination, whole=False, cautious=cautious),
            speeds=[c.bandwidth for c in self.cards],
            on_cards=combination.params.offload_kqv,
            forced=self.request.n_cpu_moe,
        )
        n_all, wanted = self.blocks.n_all, self.request.n_gpu_layers
        if wanted is not None:
            tries: Sequence[int] = (n_all if wanted < 0 else min(wanted, n_all),)
        elif self.shape.has_experts:
            tries = range(n_all, -1, -1)
        else:
            tries = (filling.most(),)  # fewer layers are never faster
        dense, experts = self.times[-1]
        for n in tries:
            bound = dense[n_all - n] + experts[n_all - n]
            yield self._if_host_fits(filling.fill(n), caches), bound

    def _if_host_fits(self, placement: Placement | None, caches: Sizes) -> Placement | None:
        """None where the host part outgrows the RAM (a little less than the exact ledger)."""
        if placement is None:
            return None
        first = self.blocks.n_all - placement.n_gpu_layers
        held = self.blocks.mapped_input + self.blocks.dense.sums[first] + caches.sums[first]
        held += self.blocks.experts.sums[max(first, placement.n_cpu_moe)]
        fits = held + self.request.extra_host <= self.host.available
        return placement if fits or self.request.force else None

    # --- speed of a placement, without walking the layers again

    @cached_property
    def times(self) -> list[tuple[list[float], list[float]]]:
        """Prefix sums of seconds a token (dense and cache, experts): each card's, then the host's.

        The same for every combination: depth and cache width do not depend on the levers.
        """
        reads = remembered(
            self.shape,
            ("reads", self.base.n_ctx),
            lambda: [layer_reads(self.shape, self.base, il) for il in range(self.blocks.n_all)],
        )
        made = []
        for unit in (*self.cards, self.cpu):
            both = [(0.0, 0.0) if r is None else unit.seconds(r) for r in reads]
            made.append(
                ([0.0, *accumulate(a for a, _ in both)], [0.0, *accumulate(b for _, b in both)])
            )
        return made

    def _seconds(self, placement: Placement) -> float:
        first = self.blocks.n_all - placement.n_gpu_layers
        host_dense, host_experts = self.times[-1]
        total = host_dense[first] + host_experts[first]
        total += HOST_PART if 0 < first < self.blocks.n_all else 0.0
        for count, (dense, experts) in zip(placement.counts, self.times[:-1], strict=True):
            last = first + count
            total += dense[last] - dense[first]
            turn = min(max(placement.n_cpu_moe, first), last)
            total += host_experts[turn] - host_experts[first] + experts[last] - experts[turn]
            first = last
        return total + self._hops(placement.counts)

    def _hops(self, counts: Sequence[int]) -> float:
        """Seconds a token on the way to other machines."""
        if not self.is_pooled:
            return 0.0
        used = [i for i, count in enumerate(counts) if count]
        n_vocab, n_embd = self.shape.n_vocab, self.shape.n_embd
        return sum(self.cards[i].hop(n_embd, n_vocab if i == used[-1] else 0) for i in used)


def _enough(pick: Combination, combinations: Sequence[Combination]) -> float:
    """Seconds a token at which ``pick`` promises next to nothing more; never further from the
    fastest than speeds that are the same."""
    fastest = min(c.seconds for c in combinations if c.placement is not None)
    return min(pick.seconds / (1 - NEXT_TO_NOTHING), fastest * (1 + SAME) * (1 + 1e-9))


def _bytes_a_token(shape: ModelShape, params: PlanParams) -> int:
    """Roughly what a token of a ubatch adds to scratch memory: the gate, the result and a few
    hidden states of the widest block, and its row of the mask."""
    used = max(shape.n_expert_used, 1)
    widest = max((x.n_ff_exp or x.n_ff for x in shape.layers), default=0)
    return 4 * (used * (2 * widest + shape.n_embd) // 2 + 3 * shape.n_embd) + 2 * params.n_ctx


def _empty_ledger(gpu: Gpu, terms: Terms) -> DeviceLedger:
    return DeviceLedger(
        id=gpu.id,
        name=gpu.name,
        backend=gpu.backend,
        total=gpu.total,
        free=gpu.free,
        margin=terms.margin,
        headroom=max(gpu.free - terms.margin, 0),
        uuid=gpu.uuid,
    )
