"""When a plan's memory is not there after all: a fixed ladder of smaller plans, each step said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from edgellm.devices import Gpu
from edgellm.errors import DoesNotFitError, EdgeLLMError, EngineDeadError, EngineError
from edgellm.planner.plan import Plan

MAX_STEPS: Final = 3
"""Smaller plans that are tried; the error after them is the caller's."""
MIN_UBATCH: Final = 64
_SIGNS: Final = (
    "out of memory",
    "cudamalloc failed",
    "failed to allocate",
    "unable to allocate",
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


def lost_cards(plan: Plan, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Cards that the plan uses and ``gpus``, those there are now, do not have in their place."""
    here = {gpu.id: gpu.uuid for gpu in gpus}
    return tuple(
        f"{d.id} ({d.name})"
        for d in plan.devices
        if d.used and d.uuid is not None and here.get(d.id) != d.uuid
    )


def nothing_smaller(plan: Plan, error: EdgeLLMError, said: Sequence[str]) -> EdgeLLMError:
    """``error``, after which there is no smaller plan, as the person should read it: which device
    ran out, what was tried and what to do. An error of another kind stays what it is."""
    if not is_out_of_memory(error):
        return error
    used = [d for d in plan.devices if d.used]
    card = next((d for d in used if d.id in error.message), used[0] if used else None)
    device = getattr(error, "device", card.id if card else "host")
    tried = f" after {len(said)} smaller plans" if said else ""
    free_it = f"free memory on {device}, or load less: edgellm plan {plan.model.path or 'MODEL'}"
    why = _last_line(error.message)
    return DoesNotFitError(
        f"{device} ran out of memory while the model was loaded{tried}: {why}",
        device=device,
        required=getattr(error, "required", card.used if card else plan.host.used),
        available=getattr(error, "available", card.free if card else plan.host.available),
        smallest_fix=error.hint or free_it,
    )


def _last_line(message: str) -> str:
    """What was said of memory, last: a child's last words are many lines of its log."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    about = [line for line in lines if any(sign in line.lower() for sign in _SIGNS)]
    return (about or lines or ["no reason given"])[-1]


Rung = tuple[dict[str, Any], str]


def _smaller_ubatch(plan: Plan) -> Rung | None:
    n_ubatch = plan.params.n_ubatch
    if n_ubatch <= MIN_UBATCH:
        return None
    n = max(MIN_UBATCH, n_ubatch // 4)
    return {"n_ubatch": n}, f"n_ubatch {n_ubatch} -> {n}"


def _q8_cache(plan: Plan) -> Rung | None:
    p = plan.params
    if p.type_k not in ("f16", "f32", "bf16") or p.flash_attn == "off":
        return None
    change = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}
    return change, f"KV cache {p.type_k} -> q8_0"


def _more_on_the_host(plan: Plan) -> Rung | None:
    """A quarter of the layers' experts, or a quarter of the layers."""
    p, n_layer = plan.params, plan.model.n_layer
    if p.n_gpu_layers == 0:
        return None
    if plan.model.n_expert and p.n_cpu_moe < n_layer:
        n = min(n_layer, p.n_cpu_moe + max(1, n_layer // 4))
        return {"n_cpu_moe": n, "use_mmap": False}, f"n_cpu_moe {p.n_cpu_moe} -> {n}"
    n_now = n_layer + 1 if p.n_gpu_layers < 0 else p.n_gpu_layers
    n = n_now * 3 // 4
    return {"n_gpu_layers": n}, f"n_gpu_layers {p.n_gpu_layers} -> {n}"


def _smaller_context(plan: Plan, min_ctx: int) -> Rung | None:
    p = plan.params
    n = max(min_ctx, p.n_ctx // 2 // 256 * 256)
    if n >= p.n_ctx:
        return None
    return {"n_ctx": n, "n_ctx_seq": min(p.n_ctx_seq, n)}, f"n_ctx {p.n_ctx} -> {n}"


class Ladder:
    """The plan to load now, and the smaller ones after it. Each rung is taken once.

    ``min_ctx``: the smallest context it may come to; None leaves the context alone.
    """

    def __init__(self, plan: Plan, min_ctx: int | None) -> None:
        self.plan = plan
        self.said: list[str] = []
        self._before: Plan | None = None
        self._rungs: list[Callable[[Plan], Rung | None]] = [
            _smaller_ubatch,
            _q8_cache,
            _more_on_the_host,
        ]
        if min_ctx is not None:
            self._rungs.append(lambda plan: _smaller_context(plan, min_ctx))

    def step_down(self, error: EdgeLLMError) -> str | None:
        """Go to the next smaller plan and say what changed; None when ``error`` is the caller's.

        A rung that the library refuses for another reason (heads that are no whole blocks of
        q8_0) is taken back.
        """
        if not is_out_of_memory(error):
            if self._before is None or not isinstance(error, EngineError):
                return None
            self.plan, self._before = self._before, None
            self.said[-1] += " (refused)"
        found = self._next() if len(self.said) < MAX_STEPS else None
        if found is None:
            return None
        change, words = found
        self._before = self.plan
        self.plan = _changed(self.plan, change)
        self.said.append(f"out of memory: {words}")
        return self.said[-1]

    def restart(self, plan: Plan, words: str) -> None:
        """Begin again from another plan; ``words`` say why."""
        self.plan, self._before = plan, None
        self.said.append(words)

    def _next(self) -> Rung | None:
        while self._rungs:
            found = self._rungs.pop(0)(self.plan)
            if found is not None:
                return found
        return None


def _changed(plan: Plan, change: dict[str, Any]) -> Plan:
    params = msgspec.structs.replace(plan.params, **change)
    verdict = plan.verdict
    if "n_gpu_layers" in change:
        verdict = "partial" if params.n_gpu_layers else "cpu"
    return msgspec.structs.replace(plan, params=params, verdict=verdict)
