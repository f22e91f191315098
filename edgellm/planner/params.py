"""Requests as parameters: llama.cpp's defaults, or edgellm's own."""

from __future__ import annotations

from typing import Final

from edgellm.devices import Devices
from edgellm.gguf.shape import ModelShape
from edgellm.planner.estimate import replace
from edgellm.planner.plan import PlanParams, PlanRequest

DEFAULT_CTX: Final = 8192
UBATCHES: Final = (512, 256, 128, 64)
"""Largest first: a smaller ubatch costs prefill speed and frees compute memory."""
LARGE_UBATCHES: Final = (2048, 1024)
"""Tried where weights stay on the host: a ubatch copies them to the card once, large or small."""


def fixed_params(request: PlanRequest) -> PlanParams:
    """``request`` as given, llama.h's defaults where it says nothing."""
    return PlanParams(
        n_gpu_layers=-1 if request.n_gpu_layers is None else request.n_gpu_layers,
        n_ctx=request.n_ctx or 512,
        n_ctx_seq=0,
        n_batch=request.n_batch or 2048,
        n_ubatch=request.n_ubatch or 512,
        n_seq_max=request.n_seq_max or 1,
        n_outputs_max=request.n_outputs_max or 0,
        type_k=request.type_k or "f16",
        type_v=request.type_v or "f16",
        flash_attn=request.flash_attn or "auto",
        offload_kqv=request.offload_kqv is not False,
        kv_unified=bool(request.kv_unified),
        swa_full=bool(request.swa_full),
        n_cpu_moe=request.n_cpu_moe or 0,
        tensor_split=request.tensor_split or (),
        main_gpu=request.main_gpu or 0,
        split_mode=request.split_mode or "layer",
        n_threads=request.n_threads or 4,
        n_threads_batch=request.n_threads_batch or 4,
        use_mmap=request.use_mmap is not False,
        use_mlock=bool(request.use_mlock),
        embeddings=bool(request.embeddings),
        pooling=request.pooling or "none",
        draft_model=request.draft_model,
        draft_n_gpu_layers=-1 if request.draft_model and request.extra_gpu else 0,
        mmproj=request.mmproj,
    )


def base_params(shape: ModelShape, devices: Devices, request: PlanRequest) -> PlanParams:
    """``request`` with edgellm's own defaults: outputs for the sequences only, one cache for all,
    a thread a physical core, a context of 8192 or the model's own where that is smaller."""
    n_seq = request.n_seq_max or 1
    n_ctx = request.n_ctx or default_ctx(shape, request)
    threads = max(devices.host.n_physical, 1)
    embeds = shape.is_encoder if request.embeddings is None else request.embeddings
    return replace(
        fixed_params(request),
        n_ctx=n_ctx,
        n_outputs_max=request.n_outputs_max if request.n_outputs_max is not None else n_seq,
        kv_unified=request.kv_unified is not False,
        n_threads=request.n_threads or threads,
        n_threads_batch=request.n_threads_batch or threads,
        embeddings=embeds,
    )


def default_ctx(shape: ModelShape, request: PlanRequest) -> int:
    """8192, or what the model was trained for where that is less; never below ``min_ctx``."""
    return max(min(DEFAULT_CTX, shape.n_ctx_train or DEFAULT_CTX), request.min_ctx or 0)


def kv_kinds(shape: ModelShape, request: PlanRequest) -> list[tuple[str, str]]:
    """The KV types to try, the most exact first; q4_0 only when asked for.

    A quantised V needs flash attention, and a head that is whole blocks of 32
    (llama_init_from_model refuses others). Latent attention has one cache, and one type.
    """
    if request.type_k is not None or request.type_v is not None:
        other = (request.type_k or request.type_v or "f16") if shape.is_mla else "f16"
        return [(request.type_k or other, request.type_v or other)]
    kinds = [("f16", "f16")]
    cached = [layer for layer in shape.layers if layer.has_kv]
    whole = all(x.head_k % 32 == 0 and x.head_v % 32 == 0 for x in cached)
    if cached and whole and request.flash_attn != "off":
        kinds.append(("q8_0", "q8_0"))
        if request.allow_q4_kv:
            kinds.append(("q4_0", "q4_0"))
    return kinds
