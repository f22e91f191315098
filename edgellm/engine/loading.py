"""When a plan's memory is not there after all: a fixed ladder of smaller plans, each step said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from edgellm.errors import DoesNotFitError, EdgeLLMError, EngineDeadError
from edgellm.planner.plan import Plan, PlanParams

MAX_TRIES: Final = 3
MIN_UBATCH: Final = 64
MIN_CTX: Final = 2048
_SIGNS: Final = (
    "out of memory",
    "cudamalloc failed",
    "failed to allocate",
    "erroroutofdevicememory",
)


def is_out_of_memory(error: EdgeLLMError) -> bool:
    """Whether a smaller plan could help. A child that died says so only in its log."""
    if isinstance(error, DoesNotFitError):
        return True
    if not isinstance(error, EngineDeadError):
        return False
    # The library aborts in some backends; its last words are all there is to go by.
    text = error.message.lower()
    return any(sign in text for sign in _SIGNS)


Rung = tuple[dict[str, Any], str]


def _smaller_ubatch(p: PlanParams) -> Rung | None:
    if p.n_ubatch <= MIN_UBATCH:
        return None
    n = max(MIN_UBATCH, p.n_ubatch // 4)
    return {"n_ubatch": n}, f"out of memory: n_ubatch {p.n_ubatch} -> {n}"


def _q8_cache(p: PlanParams) -> Rung | None:
    if p.type_k not in ("f16", "f32", "bf16") or p.flash_attn == "off":
        return None
    change = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}
    return change, f"out of memory: KV cache {p.type_k} -> q8_0"


def _fewer_layers(p: PlanParams) -> Rung | None:
    if p.n_gpu_layers == 0:
        return None
    n = 0 if p.n_gpu_layers < 0 else p.n_gpu_layers * 3 // 4
    return {"n_gpu_layers": n}, f"out of memory: GPU layers {p.n_gpu_layers} -> {n}"


def _smaller_context(p: PlanParams) -> Rung | None:
    if p.n_ctx <= MIN_CTX:
        return None
    n = max(MIN_CTX, p.n_ctx // 2 // 256 * 256)
    change = {"n_ctx": n, "n_ctx_seq": min(p.n_ctx_seq, n)}
    return change, f"out of memory: context {p.n_ctx} -> {n}"


_LADDER: Final[tuple[Callable[[PlanParams], Rung | None], ...]] = (
    _smaller_ubatch,
    _q8_cache,
    _fewer_layers,
    _smaller_context,
)


def next_rung(plan: Plan) -> tuple[Plan, str] | None:
    """The next smaller plan and what changed, in words; None at the ladder's end."""
    for step in _LADDER:
        found = step(plan.params)
        if found is not None:
            change, words = found
            params = msgspec.structs.replace(plan.params, **change)
            return msgspec.structs.replace(plan, params=params), words
    return None
