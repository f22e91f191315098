"""From a request to a plan: the fastest that fits, over every set of cards. Pure.

The same input gives the same plan. The search on one set of cards is in search.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from edgellm.devices import Devices, Gpu
from edgellm.errors import DoesNotFitError, PlanError
from edgellm.gguf.shape import ModelShape
from edgellm.planner import observed
from edgellm.planner.estimate import Ledger, estimate, replace
from edgellm.planner.extras import with_extras
from edgellm.planner.params import UBATCHES, base_params, default_ctx, fixed_params
from edgellm.planner.plan import Plan, PlanRequest, Speed
from edgellm.planner.pooled import settle_workers
from edgellm.planner.reasons import does_not_fit, finish
from edgellm.planner.search import SAME, Choice, Search
from edgellm.planner.speed import card, host_card, predict
from edgellm.planner.terms import terms_of

GUESSED: Final = 0.1
"""How far guesses at scratch memory may move a speed."""


def make_plan(shape: ModelShape, devices: Devices, request: PlanRequest) -> Plan:
    """The plan for ``request``; raises DoesNotFitError when nothing fits and force is off."""
    return settle_workers(_make_plan(shape, devices, request), devices)


def _make_plan(shape: ModelShape, devices: Devices, request: PlanRequest) -> Plan:
    _refuse_nonsense(devices, request)
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


def _refuse_nonsense(devices: Devices, request: PlanRequest) -> None:
    """Raise PlanError for what no plan can follow."""
    main_gpu, n = request.main_gpu or 0, len(devices.gpus)
    if main_gpu and not 0 <= main_gpu < n:
        there = f"the cards here are 0 to {n - 1}" if n else "there is no card here"
        raise PlanError(f"there is no card {main_gpu}: {there}")
    if request.n_ctx and request.min_ctx and request.min_ctx > request.n_ctx:
        raise PlanError(
            f"a context of {request.n_ctx} is below the least allowed, {request.min_ctx}"
        )


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
    return msgspec.structs.replace(
        speed, decode_tps=speed.decode_tps * ratio, basis="measured", correction=ratio
    )


def best(shape: ModelShape, devices: Devices, request: PlanRequest) -> Choice | None:
    """The fastest placement, over every set of cards; None when none fits.

    Of sets as fast as each other the first counts. One that is clearly slower by guesses than what
    was found is not worked out.
    """
    searches = [Search(shape, devices, request, gpus) for gpus in card_sets(devices.gpus)]
    bounds = [search.most_tps for search in searches]
    found: dict[int, Choice] = {}
    fastest = 0.0
    for i in sorted(range(len(searches)), key=lambda i: (-bounds[i], i)):
        if bounds[i] * (1 + GUESSED) < fastest:
            continue
        choice = searches[i].run(fastest / (1 + SAME))
        if choice is not None:
            found[i] = choice
            fastest = max(fastest, choice.speed.decode_tps)
    fast = [i for i in sorted(found) if found[i].speed.decode_tps >= fastest / (1 + SAME)]
    return searches[fast[0]].with_larger_ubatch(found[fast[0]], fastest) if fast else None


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


# --- context ----------------------------------------------------------------------------------


def _with_ctx(request: PlanRequest, n_ctx: int) -> PlanRequest:
    return msgspec.structs.replace(request, n_ctx=n_ctx)


def _smaller_context(shape: ModelShape, devices: Devices, request: PlanRequest) -> Choice | None:
    """The largest context from ``min_ctx`` up that fits, when a smaller one is allowed."""
    asked = request.n_ctx or default_ctx(shape, request)
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
        # Asked for a number of layers, the host alone is no answer, though it may have room.
        for n in sorted({tight.n_gpu_layers} | ({0} if request.n_gpu_layers is None else set()))
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
