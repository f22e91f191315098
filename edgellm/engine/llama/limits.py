"""What a plan's context will hold: slots, cells, rows of logits, and how prefixes are shared."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import msgspec

from edgellm.engine.backend import Limits
from edgellm.engine.info import EngineOptions
from edgellm.engine.llama.library import MAX_SEQ, ggml, lib
from edgellm.engine.retention import first_budget
from edgellm.planner.plan import Plan

ATTACHED_TOP_K: Final = 64
# ggml-backend.h, GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU.
_GPU_TYPES: Final = (1, 2)


def is_on_gpu(plan: Plan) -> bool:
    """Whether any layer is; without a card all of them are computed here, whatever the plan says.

    llama_supports_gpu_offload says yes for every library with the RPC backend, cards or not.
    """
    return plan.params.n_gpu_layers != 0 and any(
        ggml("ggml_backend_dev_by_type", ctypes.c_void_p, kind) for kind in _GPU_TYPES
    )


def is_whole_on_gpu(plan: Plan) -> bool:
    """Whether nothing but the token embedding is computed here."""
    p = plan.params
    n = p.n_gpu_layers
    return is_on_gpu(plan) and (n < 0 or n > plan.model.n_layer) and p.n_cpu_moe == 0


def _keeps_states(model: Any) -> bool:
    """Whether some layers keep a state of a sequence instead of its tokens' cells."""
    return bool(lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model))


def _can_rewind(plan: Plan, model: Any) -> bool:
    """Whether every token of a sequence has cells of its own, the old ones too."""
    has_window = lib.llama_model_n_swa(model) > 0 and not plan.params.swa_full
    return not (has_window or _keeps_states(model))


def _sharing(plan: Plan, model: Any) -> str:
    return "cells" if _can_rewind(plan, model) and plan.params.kv_unified else "checkpoint"


def _attached_top_k(plan: Plan, options: EngineOptions, sharing: str, n_vocab: int) -> int:
    p = plan.params
    # What needs all logits runs in sequences beside the attached ones; where sequences have cells
    # of their own these would cost memory, or stand idle.
    if sharing != "cells" or p.embeddings:
        return 0
    if p.split_mode == "tensor":  # llama_context::set_sampler refuses it
        return 0
    if p.n_outputs_max > 2 * p.n_seq_max:  # a vocabulary on the GPU for each output: 0.5 GiB
        return 0
    top_k = options.attach_top_k
    if top_k is None:
        top_k = ATTACHED_TOP_K if is_on_gpu(plan) else 0
    return top_k if top_k <= n_vocab else 0  # ggml_top_k ends the process for more


def n_outputs(plan: Plan, options: EngineOptions, n_seq: int) -> int:
    """Rows of logits a step: the plan's, one a sequence at least, and some to guess with."""
    p = plan.params
    guesses = options.spec_max if options.spec != "off" else 0
    return min(max(p.n_outputs_max, n_seq + guesses), p.n_batch)


def planned_limits(plan: Plan, options: EngineOptions, model: Any) -> Limits:
    """The limits as planned; the context may round some of them."""
    p = plan.params
    n = p.n_seq_max
    sharing = _sharing(plan, model)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    top_k = _attached_top_k(plan, options, sharing, n_vocab)
    n_plain = min(n, options.n_plain, MAX_SEQ - n) if top_k else 0
    first = n + n_plain
    return Limits(
        n_cells=p.n_ctx,
        n_ctx_seq=p.n_ctx_seq,
        n_batch=p.n_batch,
        n_ubatch=p.n_ubatch,
        n_prefill=min(p.n_batch, p.n_ubatch * max(1, len(p.tensor_split))),
        n_running=n,
        n_outputs_max=n_outputs(plan, options, n),
        slot_ids=tuple(range(n)),
        plain_ids=tuple(range(n, first)),
        retained_ids=tuple(range(first, MAX_SEQ)) if sharing == "cells" else (),
        retain_cells=_retain_cells(plan),
        sharing=sharing,
        can_rewind=_can_rewind(plan, model),
        is_split=n > 1 and (not p.kv_unified or _keeps_states(model)),
        attached_top_k=top_k,
        is_async=is_whole_on_gpu(plan),
    )


def _retain_cells(plan: Plan) -> int:
    weights = sum(d.weights for d in plan.devices) + plan.host.weights
    kv_cache = sum(d.kv_cache for d in plan.devices) + plan.host.kv_cache
    return first_budget(weights, kv_cache // max(1, plan.params.n_ctx))


def true_limits(planned: Limits, ctx: Any, can_shift: bool) -> Limits:
    """The limits of the context that was made."""
    return msgspec.structs.replace(
        planned,
        n_cells=lib.llama_n_ctx(ctx),
        n_ctx_seq=min(planned.n_ctx_seq, lib.llama_n_ctx_seq(ctx)),
        n_batch=lib.llama_n_batch(ctx),
        n_ubatch=lib.llama_n_ubatch(ctx),
        can_shift=can_shift,
    )
