"""A plan in llama.cpp's words: llama_model_params and llama_context_params."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from edgellm.engine.llama.library import device_list, ggml, lib
from edgellm.planner.plan import Plan, PlanParams

TYPES: Final = {
    "f32": lib.GGML_TYPE_F32,
    "f16": lib.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, ggml.h; the bindings leave it out
    "q8_0": lib.GGML_TYPE_Q8_0,
    "q5_1": lib.GGML_TYPE_Q5_1,
    "q5_0": lib.GGML_TYPE_Q5_0,
    "q4_1": lib.GGML_TYPE_Q4_1,
    "q4_0": lib.GGML_TYPE_Q4_0,
    "iq4_nl": lib.GGML_TYPE_IQ4_NL,
}
POOLING: Final = {
    "none": lib.LLAMA_POOLING_TYPE_NONE,
    "mean": lib.LLAMA_POOLING_TYPE_MEAN,
    "cls": lib.LLAMA_POOLING_TYPE_CLS,
    "last": lib.LLAMA_POOLING_TYPE_LAST,
    "rank": lib.LLAMA_POOLING_TYPE_RANK,
}
FLASH: Final = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
}
SPLIT: Final = {
    "none": lib.LLAMA_SPLIT_MODE_NONE,
    "layer": lib.LLAMA_SPLIT_MODE_LAYER,
    "row": lib.LLAMA_SPLIT_MODE_ROW,
    "tensor": lib.LLAMA_SPLIT_MODE_TENSOR,
}


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def _expert_overrides(n_cpu_moe: int) -> Any:
    """Overrides that keep the first n layers' expert tensors on the host, an empty one last.

    One pattern for all (LLM_FFN_EXPS_REGEX, common/common.h): llama.cpp compiles each pattern
    anew for every tensor.
    """
    layers = "|".join(map(str, range(n_cpu_moe)))
    pattern = rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    table = (_Override * 2)()
    table[0] = _Override(pattern.encode(), ggml("ggml_backend_cpu_buffer_type", ctypes.c_void_p))
    return table


def _devices_for(plan: Plan) -> Any:
    """The devices llama.cpp may use, or None: those it would take by itself.

    A plan for the CPU gives an empty list: with a GPU present even n_gpu_layers 0 would take
    memory there.
    """
    if plan.verdict == "cpu":
        return device_list((), must_exist=True)
    if plan.params.devices:
        return device_list(plan.params.devices, must_exist=True)
    if plan.devices:
        return device_list([device.id for device in plan.devices], must_exist=False)
    return None


def model_params(plan: Plan, keep: list[Any]) -> Any:
    """llama_model_params; ``keep`` gets what must live until the model is loaded."""
    p = plan.params
    params = lib.llama_model_default_params()
    params.n_gpu_layers = p.n_gpu_layers
    params.split_mode = SPLIT[p.split_mode]
    params.main_gpu = p.main_gpu
    params.load_mode = (lib.LLAMA_LOAD_MODE_MMAP if p.use_mmap else lib.LLAMA_LOAD_MODE_NONE) | (
        lib.LLAMA_LOAD_MODE_MLOCK if p.use_mlock else 0
    )
    devices = _devices_for(plan)
    if devices is not None:
        keep.append(devices)
        params.devices = ctypes.addressof(devices)
    if p.tensor_split:
        split = (ctypes.c_float * lib.llama_max_devices())(*p.tensor_split)
        keep.append(split)
        params.tensor_split = split
    if p.n_cpu_moe:
        overrides = _expert_overrides(p.n_cpu_moe)
        keep.append(overrides)
        params.tensor_buft_overrides = ctypes.addressof(overrides)
    return params


def context_params(p: PlanParams, n_outputs_per_seq: int) -> Any:
    """llama_context_params; a sequence gives at most ``n_outputs_per_seq`` rows of logits where
    samplers are attached to it."""
    params = lib.llama_context_default_params()
    params.n_ctx = p.n_ctx
    params.n_batch = p.n_batch
    params.n_ubatch = p.n_ubatch
    params.n_seq_max = p.n_seq_max
    params.n_outputs_max = 0 if p.embeddings else max(p.n_outputs_max, p.n_seq_max)
    params.n_outputs_max_per_seq = n_outputs_per_seq
    params.n_threads = p.n_threads
    params.n_threads_batch = p.n_threads_batch
    params.type_k = TYPES[p.type_k]
    params.type_v = TYPES[p.type_v]
    params.flash_attn_type = FLASH[p.flash_attn]
    params.offload_kqv = p.offload_kqv
    params.kv_unified = p.kv_unified
    params.swa_full = p.swa_full
    params.embeddings = p.embeddings
    params.no_perf = True
    if p.embeddings and p.pooling in POOLING:
        params.pooling_type = POOLING[p.pooling] if p.pooling != "none" else -1
    return params
