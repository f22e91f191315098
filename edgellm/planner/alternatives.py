"""Other plans, one change away, and what each trades."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from edgellm.devices import Devices
from edgellm.errors import DoesNotFitError
from edgellm.gguf.shape import ModelShape
from edgellm.planner.fit import make_plan
from edgellm.planner.params import UBATCHES, kv_kinds
from edgellm.planner.plan import Alternative, Plan, PlanRequest
from edgellm.planner.search import SAME
from edgellm.planner.speed import rate
from edgellm.units import format_bytes

MOST = 4
SMALLER = (("Q4_K_M", 4.85), ("IQ4_XS", 4.35), ("Q3_K_M", 3.95), ("IQ3_M", 3.7), ("Q2_K", 3.0))
"""Quantisations people fall back to, and the bits a weight they usually come to."""


def with_alternatives(
    shape: ModelShape, devices: Devices, request: PlanRequest, plan: Plan
) -> Plan:
    """``plan`` with up to four alternatives, the most useful first."""
    if request.fixed:
        return plan
    found: list[Alternative] = []
    for made in (
        _more_context(shape, devices, request, plan),
        _whole_on_the_cards(shape, devices, request, plan),
        _exact_cache(shape, devices, request, plan),
        _less_context(shape, devices, request, plan),
        _smaller_quantisation(shape, plan),
        _shorter_prompts(shape, devices, request, plan),
        _more_at_once(shape, devices, request, plan),
    ):
        if made is not None and made.change not in [x.change for x in found]:
            found.append(made)
    return msgspec.structs.replace(plan, alternatives=tuple(found[:MOST]))


def _try(
    shape: ModelShape, devices: Devices, request: PlanRequest, **change: object
) -> Plan | None:
    wanted = msgspec.structs.replace(request, **{"force": False, **change})
    try:
        return make_plan(shape, devices, wanted)
    except DoesNotFitError:
        return None


def _as_alternative(
    plan: Plan, other: Plan, title: str, gain: str, cost: str, **change: object
) -> Alternative:
    return Alternative(
        title=title,
        change=change,
        gain=gain,
        cost=f"{cost}{_slower(plan, other)}",
        decode_tps=other.speed.decode_tps,
        n_ctx=other.params.n_ctx,
        used=sum(d.used for d in other.devices) or other.host.used,
    )


def _slower(plan: Plan, other: Plan) -> str:
    before, after = plan.speed.decode_tps, other.speed.decode_tps
    if after >= before * (1 - SAME):
        return ""
    return f"; {rate(after)} instead of {rate(before)} tok/s"


def _contexts(plan: Plan) -> Iterator[int]:
    """Twice the context, four times ... to what the model was trained for, the largest first."""
    most = plan.model.n_ctx_train
    sizes = [plan.params.n_ctx * 2**n for n in range(1, 6)]
    yield from reversed([n for n in sizes if n <= most])


def _more_context(
    shape: ModelShape, devices: Devices, request: PlanRequest, plan: Plan
) -> Alternative | None:
    """The largest context that a q8_0 cache makes room for without losing speed."""
    kinds = kv_kinds(shape, msgspec.structs.replace(request, type_k=None, type_v=None))
    kind = "q8_0" if ("q8_0", "q8_0") in kinds else plan.params.type_k
    for n_ctx in _contexts(plan):
        change = {"n_ctx": n_ctx, "type_k": kind, "type_v": kind}
        other = _try(shape, devices, request, **change)
        if other is None or other.speed.decode_tps < plan.speed.decode_tps * (1 - SAME):
            continue
        return _as_alternative(
            plan,
            other,
            f"more context with a {kind} cache",
            f"{n_ctx} cells instead of {plan.params.n_ctx}",
            "the cache is rounded" if kind != plan.params.type_k else "less memory left free",
            **change,
        )
    return None


def _whole_on_the_cards(
    shape: ModelShape, devices: Devices, request: PlanRequest, plan: Plan
) -> Alternative | None:
    """Every layer on the cards, by whatever lever was not to be touched."""
    if plan.verdict != "partial" and not (plan.verdict == "cpu" and devices.gpus):
        return None
    for change, title, cost in (
        ({"n_ubatch": UBATCHES[-1]}, "all layers with n_ubatch 64", "prompts are read slower"),
        (
            {"n_ubatch": UBATCHES[-1], "type_k": "q4_0", "type_v": "q4_0"},
            "all layers with a q4_0 cache",
            "answers over long contexts suffer",
        ),
        ({"margin": 0}, "all layers with no margin", "another program may push it out of memory"),
    ):
        other = _try(shape, devices, request, **change)
        if other is not None and other.verdict == "gpu":
            gain = f"{rate(other.speed.decode_tps)} instead of {rate(plan.speed.decode_tps)} tok/s"
            return _as_alternative(plan, other, title, gain, cost, **change)
    return None


def _exact_cache(
    shape: ModelShape, devices: Devices, request: PlanRequest, plan: Plan
) -> Alternative | None:
    if plan.params.type_k == "f16" or request.type_k is not None:
        return None
    change = {"type_k": "f16", "type_v": "f16"}
    other = _try(shape, devices, request, **change)
    if other is None:
        return None
    cost = f"{format_bytes(_cache(other) - _cache(plan))} more cache"
    return _as_alternative(plan, other, "an exact cache", "nothing is rounded", cost, **change)


def _cache(plan: Plan) -> int:
    return plan.host.kv_cache + sum(d.kv_cache for d in plan.devices)


def _less_context(
    shape: ModelShape, devices: Devices, request: PlanRequest, plan: Plan
) -> Alternative | None:
    """Half the context, or a quarter, when that makes it faster."""
    for part in (2, 4):
        n_ctx = plan.params.n_ctx // part
        if plan.verdict == "gpu" or n_ctx < max(1024, request.min_ctx or 0):
            return None
        other = _try(shape, devices, request, n_ctx=n_ctx)
        if other is None or other.speed.decode_tps <= plan.speed.decode_tps * (1 + SAME):
            continue
        gain = f"{rate(other.speed.decode_tps)} instead of {rate(plan.speed.decode_tps)} tok/s"
        cost = f"{n_ctx} cells instead of {plan.params.n_ctx}"
        return _as_alternative(plan, other, "a shorter context", gain, cost, n_ctx=n_ctx)
    return None


def _smaller_quantisation(shape: ModelShape, plan: Plan) -> Alternative | None:
    """The largest usual quantisation whose weights would fit the cards whole, by size alone."""
    if plan.verdict == "gpu" or not plan.devices or not shape.n_params:
        return None
    weights = plan.host.weights + sum(d.weights for d in plan.devices)
    room = sum(max(d.free - d.margin - d.overhead - d.compute, 0) for d in plan.devices)
    room -= _cache(plan) + plan.host.recurrent_state
    room -= sum(d.recurrent_state for d in plan.devices)
    now = 8 * shape.file_bytes / shape.n_params
    for name, bits in SMALLER:
        size = int(weights * bits / now)
        if bits < now * 0.95 and size <= room:
            speed = plan.speed.decode_tps * max(now / bits, 1.0)
            return Alternative(
                title=f"{name} of the same model",
                change={"quant": name},
                gain=f"about {format_bytes(size)}: all layers on the GPU",
                cost=f"{bits:.1f} bits a weight instead of {now:.1f}",
                decode_tps=speed,
                n_ctx=plan.params.n_ctx,
            )
    return None


def _shorter_prompts(
    shape: ModelShape, devices: Devices, request: PlanRequest, plan: Plan
) -> Alternative | None:
    """Smaller scratch buffers, for who wants the memory for something else."""
    if request.n_ubatch is not None or plan.params.n_ubatch <= UBATCHES[-1]:
        return None
    change = {"n_ubatch": UBATCHES[-1]}
    other = _try(shape, devices, request, **change)
    saved = 0 if other is None else _compute(plan) - _compute(other)
    if other is None or saved <= 0:
        return None
    gain = f"{format_bytes(saved)} less memory"
    return _as_alternative(plan, other, "n_ubatch 64", gain, "prompts are read slower", **change)


def _compute(plan: Plan) -> int:
    return plan.host.compute + sum(d.compute for d in plan.devices)


def _more_at_once(
    shape: ModelShape, devices: Devices, request: PlanRequest, plan: Plan
) -> Alternative | None:
    if request.n_seq_max is not None or plan.model.is_embedding:
        return None
    other = _try(shape, devices, request, n_seq_max=4)
    if other is None:
        return None
    cost = "the sequences share the same cells"
    title = "four conversations at once"
    return _as_alternative(plan, other, title, "nobody waits", cost, n_seq_max=4)
