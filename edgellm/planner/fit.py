"""The search for the fastest plan that fits. Pure: the same input gives the same plan.

Every combination of KV type and ubatch is placed as well as it can be (experts to the host before
whole layers, layers over the cards) with compute buffers guessed from those already worked out;
the best is then worked out exactly and, when the guess was wrong, searched again with what was
learned. What is returned has been worked out exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final

import msgspec

from edgellm.devices import Devices, Gpu
from edgellm.errors import DoesNotFitError
from edgellm.gguf.shape import ModelShape
from edgellm.planner import observed
from edgellm.planner.estimate import (
    Ledger,
    Terms,
    estimate,
    replace,
    settle,
    settled_cache,
    terms_overhead,
)
from edgellm.planner.extras import with_extras
from edgellm.planner.memo import remembered
from edgellm.planner.memory import kv_bytes, state_bytes
from edgellm.planner.overhead import default_margin, least_workspace
from edgellm.planner.params import (
    DEFAULT_CTX,
    LARGE_UBATCHES,
    UBATCHES,
    base_params,
    fixed_params,
    kv_kinds,
)
from edgellm.planner.placement import HOST, aligned, mapped_bytes
from edgellm.planner.plan import DeviceLedger, Plan, PlanParams, PlanRequest, Speed
from edgellm.planner.pooled import settle_workers
from edgellm.planner.reasons import does_not_fit, finish, left_out
from edgellm.planner.speed import (
    Card,
    card,
    host_card,
    layer_reads,
    predict,
)

SAME: Final = 0.02
"""Speeds within 2 % are the same: then the earlier, cheaper lever decides."""
TRIES: Final = 24
"""Exact evaluations at most; a search takes one to four."""
BETTER_PREFILL: Final = 1.1
"""What a larger ubatch must bring to be taken."""
MOST_PINNED: Final = 0.75
"""Share of the free RAM that weights may pin; more stay in the mapped file."""


def make_plan(shape: ModelShape, devices: Devices, request: PlanRequest) -> Plan:
    """The plan for ``request``; raises DoesNotFitError when nothing fits and force is off."""
    return settle_workers(_make_plan(shape, devices, request), devices)


def _make_plan(shape: ModelShape, devices: Devices, request: PlanRequest) -> Plan:
    request = with_extras(shape, devices, request)
    if request.fixed:
        return _fixed(shape, devices, request)
    choice = best(shape, devices, request)
    if choice is None:
        choice = _smaller_context(shape, devices, request)
    if choice is None:
        return _nothing_fits(shape, devices, request)
    if request.objective == "context" and request.n_ctx is None:
        choice = _grow_context(shape, devices, request, choice)
    speed = as_observed(shape, request, choice.ledger, choice.speed)
    return finish(shape, devices, request, choice.ledger, speed, notes=choice.notes)


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


def _fixed(shape: ModelShape, devices: Devices, request: PlanRequest) -> Plan:
    params = fixed_params(request)
    terms = terms_of(shape, devices.gpus, request)
    ledger = estimate(
        shape,
        params,
        devices.gpus,
        devices.host,
        terms,
        extra_host=request.extra_host,
        every_block=True,
    )
    speed = _speed(shape, devices, request, ledger)
    return finish(shape, devices, request, ledger, speed)


def terms_of(shape: ModelShape, gpus: Sequence[Gpu], request: PlanRequest) -> list[Terms]:
    """Margin and overhead of each card: as asked, else as seen here, else the defaults."""
    seen, arch = request.observed, shape.arch
    return [
        Terms(
            margin=observed.margin(seen, gpu, arch, default_margin(gpu))
            if request.margin is None
            else request.margin,
            overhead=request.overhead,
            base=observed.overhead(seen, gpu, arch),
            extra=0 if i else request.extra_gpu,
        )
        for i, gpu in enumerate(gpus)
    ]


def _speed(shape: ModelShape, devices: Devices, request: PlanRequest, ledger: Ledger) -> Speed:
    by_id = {gpu.id: gpu for gpu in devices.gpus}
    used = [by_id[d.id] for d in ledger.devices]
    host = host_card(devices.host, observed.host_bandwidth(request.observed))
    cards = [card(gpu) for gpu in used]
    speed = predict(shape, ledger.params, ledger.layer_device, cards, host)
    return as_observed(shape, request, ledger, speed)


def as_observed(shape: ModelShape, request: PlanRequest, ledger: Ledger, speed: Speed) -> Speed:
    """``speed`` corrected by what these devices did with this architecture before."""
    names = [d.uuid or d.name for d in ledger.devices if d.used] or ["host"]
    ratio = observed.decode_ratio(request.observed, names, shape.arch) if request.observed else None
    if ratio is None:
        return speed
    return msgspec.structs.replace(speed, decode_tps=speed.decode_tps * ratio, basis="measured")


def best(shape: ModelShape, devices: Devices, request: PlanRequest) -> Choice | None:
    """The fastest placement, over every set of cards; None when none fits."""
    found: Choice | None = None
    for gpus in card_sets(devices.gpus):
        choice = Search(shape, devices, request, gpus).run()
        if choice is not None and (
            found is None or choice.speed.decode_tps > found.speed.decode_tps * (1 + SAME)
        ):
            found = choice
    return found


def card_sets(gpus: Sequence[Gpu]) -> Iterator[tuple[Gpu, ...]]:
    """Each card alone, the fastest first; then the fastest two, three, and so on; no card last.

    Fewer cards first: another one is taken only where it makes the plan faster.
    """
    order = sorted(range(len(gpus)), key=lambda i: _preference(gpus[i], i))
    for i in order:
        yield (gpus[i],)
    for n in range(2, len(order) + 1):
        yield tuple(gpus[i] for i in sorted(order[:n]))
    yield ()


def _preference(gpu: Gpu, place: int) -> tuple[float, float, int, int]:
    """Cards of this machine first, then the nearest workers; the fastest of each."""
    made = card(gpu)
    return made.latency, -made.bandwidth, -gpu.free, place


def prefix(values: Sequence[int]) -> list[int]:
    """Sums of the first 0, 1, 2 ... values."""
    return [0, *accumulate(values)]


@dataclass(frozen=True)
class Caches:
    """KV and state bytes of each block, and their prefix sums."""

    sizes: list[int]
    sums: list[int]

    @classmethod
    def of(cls, sizes: list[int]) -> Caches:
        return cls(sizes, prefix(sizes))


def _dense_bytes(shape: ModelShape) -> list[int]:
    blocks = [
        0 if x.is_nextn else aligned(x.tensors) - aligned(x.expert_tensors) for x in shape.layers
    ]
    tied = (shape.tied_tensor,) if shape.tied_tensor else ()
    return [*blocks, aligned((*shape.output_tensors, *tied))]


@dataclass
class Combination:
    """One choice of everything but the placement."""

    params: PlanParams
    order: int
    scratch: dict[bool, tuple[int, ...]] = field(default_factory=dict)
    """Compute buffers and workspaces of the cards, by whether every layer and expert is on one."""
    caches: Caches | None = None
    placement: Placement | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Placement:
    """Where the blocks go: ``counts`` per card, the output layer among them."""

    counts: tuple[int, ...]
    n_cpu_moe: int

    @property
    def n_gpu_layers(self) -> int:
        return sum(self.counts)


class Search:
    """The search on one set of cards."""

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

    # --- the loop

    def run(self) -> Choice | None:
        """The fastest choice, with a larger ubatch where that costs no decode speed."""
        combinations = self._combinations()
        choice = self._settle(combinations)
        if choice is None or self.request.n_ubatch or choice.is_whole or not self.gpus:
            return choice
        fastest = 1 / min(c.seconds for c in combinations if c.placement is not None)
        return self._with_larger_ubatch(choice, fastest * (1 - SAME)) or choice

    def _with_larger_ubatch(self, choice: Choice, least_tps: float) -> Choice | None:
        """The largest ubatch that decodes at ``least_tps`` and reads prompts clearly faster."""
        known = choice.ledger.params
        for n_ubatch in LARGE_UBATCHES:
            if n_ubatch > min(known.n_batch, known.n_ctx):
                continue
            params = replace(self.base, type_k=known.type_k, type_v=known.type_v, n_ubatch=n_ubatch)
            larger = self._settle([Combination(settle(self.shape, params), 0)])
            if larger is None or larger.speed.decode_tps < least_tps:
                continue
            if larger.speed.prefill_tps > choice.speed.prefill_tps * BETTER_PREFILL:
                return larger
        return None

    def _settle(self, combinations: Sequence[Combination]) -> Choice | None:
        """Place, work the best out exactly, learn, and place again until the best holds."""
        checked: dict[tuple[int, Placement], Choice | None] = {}
        for combination in combinations:
            self._place(combination)
        for _ in range(TRIES):
            pick = self._pick(combinations)
            if pick is None or pick.placement is None:
                return None
            key = (pick.order, pick.placement)
            if key not in checked:
                checked[key] = self._work_out(pick)
            choice = checked[key]
            if choice is not None:
                return choice
            self._place(pick)
            if pick.placement is not None and (pick.order, pick.placement) in checked:
                pick.placement = self._smaller(pick.placement)
        return None

    def _combinations(self) -> list[Combination]:
        """KV types and ubatches, the cheapest levers first."""
        asked = self.request.n_ubatch
        ubatches = [asked] if asked else [u for u in UBATCHES if u <= max(self.base.n_ctx, 64)]
        made: list[Combination] = []
        for type_k, type_v in kv_kinds(self.shape, self.request):
            for n_ubatch in ubatches:
                params = replace(
                    self.base,
                    type_k=type_k,
                    type_v=type_v,
                    n_ubatch=n_ubatch,
                    n_batch=self.request.n_batch or max(self.base.n_batch, n_ubatch),
                )
                made.append(Combination(settle(self.shape, params), len(made)))
        return made

    def _pick(self, combinations: Sequence[Combination]) -> Combination | None:
        """The fastest; among equals the cheapest lever."""
        placed = [c for c in combinations if c.placement is not None]
        if not placed:
            return None
        fastest = min(c.seconds for c in placed)
        return next(c for c in placed if c.seconds <= fastest * (1 + SAME))

    def _work_out(self, combination: Combination) -> Choice | None:
        """The exact ledger; None when it does not fit, with what was learned kept."""
        placement = combination.placement
        if placement is None:
            return None
        params = self.params(combination.params, placement)
        extra = self.request.extra_host
        ledger = estimate(self.shape, params, self.gpus, self.host, self.terms, extra_host=extra)
        combination.scratch[self._is_whole(placement)] = tuple(
            d.compute + d.workspace for d in ledger.devices
        )
        if params.flash_attn == "auto" and not ledger.flash and params.type_v != "f16":
            combination.scratch[self._is_whole(placement)] = (1 << 60,) * len(self.gpus)
            return None
        if not ledger.fits:
            return None
        speed = predict(self.shape, ledger.params, ledger.layer_device, self.cards, self.cpu)
        return Choice(self._with_unused(ledger), speed, left_out(self.all, self.gpus))

    def _with_unused(self, ledger: Ledger) -> Ledger:
        """Cards that hold nothing stay in the plan, with nothing on them."""
        if len(self.gpus) == len(self.all):
            return ledger
        used = {d.id: d for d in ledger.devices}
        margins = {
            g.id: t.margin
            for g, t in zip(self.all, terms_of(self.shape, self.all, self.request), strict=True)
        }
        devices = tuple(used.get(gpu.id) or _empty_ledger(gpu, margins[gpu.id]) for gpu in self.all)
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
        maps = not self._pins(placement) if asked is None else asked
        return replace(
            params,
            n_gpu_layers=placement.n_gpu_layers,
            n_cpu_moe=placement.n_cpu_moe,
            tensor_split=self.request.tensor_split or split,
            use_mmap=maps,
        )

    def _pins(self, placement: Placement) -> bool:
        """Whether host weights are read into pinned memory, not mapped.

        Batches copy them to the card, five times as fast from pinned memory; llama.cpp itself
        advises load mode none for experts (create_tensor in src/llama-model-loader.cpp).
        """
        if not self.gpus or self.gpus[0].integrated or self.cards[0].is_remote:
            return False
        first = self.shape.n_layer_all + 1 - placement.n_gpu_layers
        dense, experts = self.sums
        held = dense[first] + experts[max(first, placement.n_cpu_moe)]
        return 0 < held <= MOST_PINNED * self.host.available

    def _smaller(self, placement: Placement) -> Placement | None:
        """One layer, or one layer's experts, fewer on the cards."""
        n_blocks = self.shape.n_layer_all
        if self.shape.has_experts and placement.n_cpu_moe < n_blocks and placement.n_gpu_layers:
            return Placement(placement.counts, placement.n_cpu_moe + 1)
        counts = list(placement.counts)
        for i, count in enumerate(counts):
            if count:
                counts[i] -= 1
                return Placement(tuple(counts), placement.n_cpu_moe)
        return None

    # --- placing

    @cached_property
    def dense(self) -> list[int]:
        """Bytes of each block without its experts, then of the output layer."""
        held: list[int] = remembered(self.shape, "dense bytes", lambda: _dense_bytes(self.shape))
        return held

    @cached_property
    def experts(self) -> list[int]:
        """Bytes of each block's experts."""

        def make() -> list[int]:
            layers = self.shape.layers
            return [0 if x.is_nextn else aligned(x.expert_tensors) for x in layers] + [0]

        held: list[int] = remembered(self.shape, "expert bytes", make)
        return held

    @cached_property
    def sums(self) -> tuple[list[int], list[int]]:
        """Prefix sums of ``dense`` and ``experts``."""
        return prefix(self.dense), prefix(self.experts)

    @cached_property
    def shared(self) -> int:
        return aligned(self.shape.shared_tensors)

    def _caches(self, params: PlanParams) -> list[int]:
        """KV and state bytes of each block (flash attention assumed; the exact ledger checks)."""
        cache = settled_cache(self.shape, params)
        return [
            kv_bytes(x, cache, params.type_k, params.type_v) + state_bytes(x, cache)
            for x in self.shape.layers
        ] + [0]

    def _is_whole(self, placement: Placement) -> bool:
        n_all = self.shape.n_layer_all + 1
        return placement.n_gpu_layers >= n_all and not placement.n_cpu_moe

    def _budgets(self, combination: Combination, whole: bool) -> list[int]:
        """Bytes for weights and caches on each card, compute and overhead taken off."""
        scratch = self._scratch_guess(combination, whole)
        return [
            gpu.free - terms.margin - terms_overhead(gpu, terms) - terms.extra - own - self.shared
            for gpu, terms, own in zip(self.gpus, self.terms, scratch, strict=True)
        ]

    def _scratch_guess(self, combination: Combination, whole: bool) -> tuple[int, ...]:
        """What was worked out for this combination, else a little less than it can be."""
        known = combination.scratch.get(whole)
        if known is not None:
            return known
        params = combination.params
        hidden = 4 * params.n_ubatch * self.shape.n_embd
        flash = params.flash_attn != "off"
        return tuple(
            2 * hidden
            + (0 if terms.overhead is not None else least_workspace(gpu, self.shape, flash))
            for gpu, terms in zip(self.gpus, self.terms, strict=True)
        )

    def _place(self, combination: Combination) -> None:
        """The fastest placement of ``combination`` under its budgets."""
        if combination.caches is None:
            combination.caches = Caches.of(self._caches(combination.params))
        found: tuple[float, Placement] | None = None
        for placement, bound in self._placements(combination, combination.caches):
            if found is not None and bound >= found[0]:
                break  # fewer layers on the cards are slower still
            if placement is not None:
                seconds = self._seconds(placement)
                if found is None or seconds < found[0]:
                    found = (seconds, placement)
        combination.placement = found[1] if found else None
        combination.seconds = found[0] if found else 0.0

    def _placements(
        self, combination: Combination, caches: Caches
    ) -> Iterator[tuple[Placement | None, float]]:
        """For each number of layers on the cards, the most first, the fewest experts on the host
        that fit (None: none do), and the seconds a token that such a placement takes at least."""
        n_all = self.shape.n_layer_all + 1
        if not self.gpus:
            if self.request.n_gpu_layers in (None, 0):
                yield self._if_host_fits(Placement((), 0), caches), 0.0
            return
        wanted = self.request.n_gpu_layers
        if wanted is not None:
            tries: Sequence[int] = (n_all if wanted < 0 else min(wanted, n_all),)
        elif self.shape.has_experts:
            tries = range(n_all, -1, -1)
        else:
            tries = self._most(combination, caches)  # fewer layers are never faster
        dense, experts = self.times[-1]
        for n in tries:
            bound = dense[n_all - n] + experts[n_all - n]
            yield self._if_host_fits(self._fill(combination, caches, n), caches), bound

    def _most(self, combination: Combination, caches: Caches) -> tuple[int, ...]:
        """The largest number of layers that fit."""
        n_all = self.shape.n_layer_all + 1
        n_cpu_moe = self.request.n_cpu_moe or 0
        if self._fill_exact(combination, caches, n_all, n_cpu_moe) is not None:
            return (n_all,)
        low, high = 0, n_all - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._fill_exact(combination, caches, middle, n_cpu_moe) is not None:
                low = middle
            else:
                high = middle - 1
        return (low,)

    def _fill(self, combination: Combination, caches: Caches, n: int) -> Placement | None:
        """``n`` layers over the cards with as many of their experts as fit."""
        n_all = self.shape.n_layer_all + 1
        forced = self.request.n_cpu_moe
        first = n_all - n
        if forced is not None or not self.shape.has_experts:
            return self._fill_exact(combination, caches, n, forced or 0)
        if n == n_all:
            whole = self._fill_exact(combination, caches, n, 0)
            if whole is not None:
                return whole
        if len(self.gpus) == 1:
            return self._fill_one(combination, caches, n)
        low, high = first, self.shape.n_layer_all
        if self._fill_exact(combination, caches, n, high) is None:
            return None
        while low < high:
            middle = (low + high) // 2
            if self._fill_exact(combination, caches, n, middle) is not None:
                high = middle
            else:
                low = middle + 1
        return self._fill_exact(combination, caches, n, low if low > first else 0)

    def _fill_one(self, combination: Combination, caches: Caches, n: int) -> Placement | None:
        """As :meth:`_fill` on a single card: the first layer whose experts have room."""
        if not n:
            return Placement((0,), 0)
        first = self.shape.n_layer_all + 1 - n
        room = self._budgets(combination, whole=False)[0]
        without = self._bytes(caches, first, self.shape.n_layer_all, combination.params.offload_kqv)
        if without > room:
            return None
        experts = self.sums[1]
        least = bisect_left(experts, experts[-1] - (room - without), first)
        return Placement((n,), least if least > first else 0)

    def _fill_exact(
        self, combination: Combination, caches: Caches, n: int, n_cpu_moe: int
    ) -> Placement | None:
        """``n`` layers in order over the cards, the fastest filled first; None: no room."""
        n_all = self.shape.n_layer_all + 1
        whole = n == n_all and not n_cpu_moe
        budgets = self._budgets(combination, whole)
        on_cards = combination.params.offload_kqv
        if len(budgets) == 1:
            need = self._bytes(caches, n_all - n, n_cpu_moe, on_cards)
            return Placement((n,), n_cpu_moe) if need <= budgets[0] or not n else None
        sizes = [
            self.dense[il]
            + (self.experts[il] if il >= n_cpu_moe else 0)
            + (caches.sizes[il] if on_cards else 0)
            for il in range(n_all - n, n_all)
        ]
        counts = distribute(sizes, budgets, [c.bandwidth for c in self.cards])
        return None if counts is None else Placement(counts, n_cpu_moe)

    def _bytes(self, caches: Caches, first: int, n_cpu_moe: int, on_cards: bool) -> int:
        """Bytes of the blocks from ``first`` on, but for the experts that stay on the host."""
        dense, experts = self.sums
        need = dense[-1] - dense[first] + experts[-1] - experts[max(first, n_cpu_moe)]
        return need + (caches.sums[-1] - caches.sums[first] if on_cards else 0)

    def _if_host_fits(self, placement: Placement | None, caches: Caches) -> Placement | None:
        """None where the host part outgrows the RAM (a little less than the exact ledger)."""
        if placement is None:
            return None
        first = self.shape.n_layer_all + 1 - placement.n_gpu_layers
        dense, experts = self.sums
        held = mapped_bytes(self.shape.input_tensors) + dense[first] + caches.sums[first]
        held += experts[max(first, placement.n_cpu_moe)] + self.request.extra_host
        return placement if held <= self.host.available or self.request.force else None

    # --- speed of a placement, without walking the layers again

    @cached_property
    def times(self) -> list[tuple[list[float], list[float]]]:
        """Prefix sums of seconds a token (dense and cache, experts): each card's, then the host's.

        The same for every combination: depth and cache width do not depend on the levers.
        """
        reads = remembered(
            self.shape,
            ("reads", self.base.n_ctx),
            lambda: [
                layer_reads(self.shape, self.base, il) for il in range(self.shape.n_layer_all + 1)
            ],
        )
        made = []
        for unit in (*self.cards, self.cpu):
            both = [(0.0, 0.0) if r is None else unit.seconds(r) for r in reads]
            made.append(
                ([0.0, *accumulate(a for a, _ in both)], [0.0, *accumulate(b for _, b in both)])
            )
        return made

    def _seconds(self, placement: Placement) -> float:
        first = self.shape.n_layer_all + 1 - placement.n_gpu_layers
        host_dense, host_experts = self.times[-1]
        total = host_dense[first] + host_experts[first]
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


def _empty_ledger(gpu: Gpu, margin: int) -> DeviceLedger:
    return DeviceLedger(
        id=gpu.id,
        name=gpu.name,
        backend=gpu.backend,
        total=gpu.total,
        free=gpu.free,
        margin=margin,
        headroom=max(gpu.free - margin, 0),
        uuid=gpu.uuid,
    )


# --- context ----------------------------------------------------------------------------------


def _with_ctx(request: PlanRequest, n_ctx: int) -> PlanRequest:
    return msgspec.structs.replace(request, n_ctx=n_ctx)


def _smaller_context(shape: ModelShape, devices: Devices, request: PlanRequest) -> Choice | None:
    """The largest context from ``min_ctx`` up that fits, when a smaller one is allowed."""
    asked = request.n_ctx or min(DEFAULT_CTX, shape.n_ctx_train or DEFAULT_CTX)
    if request.min_ctx is None or request.min_ctx >= asked:
        return None
    return _largest_context(shape, devices, request, (request.min_ctx, asked), 0.0)


def _grow_context(
    shape: ModelShape, devices: Devices, request: PlanRequest, choice: Choice
) -> Choice:
    """The largest context that costs no speed."""
    most = max(shape.n_ctx_train, choice.ledger.params.n_ctx)
    least = choice.speed.decode_tps * (1 - SAME)
    bounds = (choice.ledger.params.n_ctx, most)
    grown = _largest_context(shape, devices, request, bounds, least)
    return grown or choice


def _largest_context(
    shape: ModelShape,
    devices: Devices,
    request: PlanRequest,
    bounds: tuple[int, int],
    least_tps: float,
) -> Choice | None:
    """The choice with the most cells within ``bounds`` of at least ``least_tps``."""
    low, high = bounds
    found: Choice | None = None
    step = 1024 if high > 4096 else 256
    low, high = low // step, -(-high // step)
    while low <= high:
        middle = (low + high) // 2
        n_ctx = max(middle * step, 256)
        choice = best(shape, devices, _with_ctx(request, n_ctx))
        if choice is not None and choice.speed.decode_tps >= least_tps:
            found, low = choice, middle + 1
        else:
            high = middle - 1
    return found


def _nothing_fits(shape: ModelShape, devices: Devices, request: PlanRequest) -> Plan:
    """The error, or with force the plan that misses by least."""
    base = base_params(shape, devices, request)
    tight = replace(
        base, n_ubatch=UBATCHES[-1], n_gpu_layers=0 if not devices.gpus else base.n_gpu_layers
    )
    terms = terms_of(shape, devices.gpus, request)
    candidates = [
        estimate(shape, replace(tight, n_gpu_layers=n), devices.gpus, devices.host, terms)
        for n in sorted({tight.n_gpu_layers, 0})
    ]
    nearest = min(candidates, key=_missing)
    if request.force:
        return finish(shape, devices, request, nearest, _speed(shape, devices, request, nearest))
    raise _error(shape, devices, request, nearest)


def _error(
    shape: ModelShape, devices: Devices, request: PlanRequest, nearest: Ledger
) -> DoesNotFitError:
    fix = None
    for n_ctx in (4096, 2048, 1024, 512):
        if n_ctx < nearest.params.n_ctx:
            choice = best(shape, devices, _with_ctx(request, n_ctx))
            if choice is not None:
                fix = f"--ctx {n_ctx} fits ({choice.speed.decode_tps:.0f} tok/s)"
                break
    return does_not_fit(shape, nearest, fix)


def _missing(ledger: Ledger) -> int:
    gpu = sum(max(-d.headroom, 0) for d in ledger.devices)
    return gpu + max(ledger.host.used - ledger.host.available, 0)
