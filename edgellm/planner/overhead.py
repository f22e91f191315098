"""What a backend takes outside llama.cpp's buffers: contexts, kernels, library workspaces.

Measured on the cards named beside each number; replaced by what was measured on this machine. The
part that depends on the settings (:func:`workspace`) was fitted to 110 loads of 14 architectures
on an H200; tests/planner/test_overhead.py holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgellm.devices import Gpu
from edgellm.gguf.shape import LayerShape, ModelShape, Tensor
from edgellm.planner.memo import remembered
from edgellm.planner.memory import CacheShape
from edgellm.planner.placement import HOST, loaded
from edgellm.planner.plan import PlanParams
from edgellm.units import MiB

_CUDA_BY_GENERATION: Final = (
    ((12, 0), 705),  # RTX PRO 6000 Blackwell: 703-712
    ((9, 0), 625),  # H200: 593-610 by the process's account, 18 more by the device's
    ((8, 9), 300),  # RTX 4090 and the laptops below it
    ((8, 0), 300),  # RTX 3080: up to 559 with 20 GB cards
    ((7, 0), 200),  # Turing, Volta
    ((0, 0), 180),
)
_BY_BACKEND: Final = {"cuda": 300, "rocm": 250, "vulkan": 250, "metal": 8, "rpc": 8}
_CUBLAS: Final = 96 * MiB
"""Kernels and workspace of cuBLAS: taken where a product is of floats (expert routers, attention
without flash attention, unquantised weights). Quantised products use llama.cpp's own kernels."""
_POOL: Final = 12 * MiB
"""What the scratch pool holds in any case; part of the table's bytes."""
_COPIED: Final = 115 * 1024
"""A host tensor that batches are multiplied with on the card: a graph of its own and its copy."""
_WARM_UBATCHES: Final = 4
"""Micro batches deep that the engine's warm-up goes."""

MARGIN_SHARE: Final = 0.03
MARGIN_LEAST: Final = 160 * MiB


def default_margin(gpu: Gpu) -> int:
    """What is kept free on a card nobody measured: 3 % of what is free, 160 MiB at least.

    Of what is free, not of the card: 3 % of a large card that others nearly fill is most of what
    they leave.
    """
    return max(int(gpu.free * MARGIN_SHARE), MARGIN_LEAST)


def default_overhead(gpu: Gpu) -> int:
    """The table's bytes for ``gpu``: its context, kernels and least workspaces."""
    base = _BY_BACKEND.get(gpu.backend, 300)
    if gpu.backend == "cuda" and gpu.compute_capability is not None:
        base = next(mib for since, mib in _CUDA_BY_GENERATION if gpu.compute_capability >= since)
    return base * MiB


@dataclass(frozen=True)
class Workspace:
    """Bytes beyond the table's that a plan's settings take on a card."""

    total: int = 0
    growth: int = 0
    """Of ``total``: what only a full context takes, after the engine's warm-up."""


def least_workspace(gpu: Gpu, shape: ModelShape, flash: bool) -> int:
    """What :func:`workspace` is at least, wherever the layers go."""
    if gpu.backend != "cuda":
        return 0
    return _CUBLAS if shape.has_experts or not flash else 0


def workspace(
    gpu: Gpu,
    shape: ModelShape,
    params: PlanParams,
    cache: CacheShape,
    devices: Sequence[int],
    *,
    card: int,
    flash: bool,
) -> Workspace:
    """The workspaces of ``card``, the number of ``gpu`` in ``devices``.

    ggml-cuda's pool (ggml_cuda_pool in common.cuh) only grows: its size is the largest operation's.
    """
    if gpu.backend != "cuda":
        return Workspace()
    here = [x for il, x in enumerate(shape.layers) if devices[il] == card and loaded(x)]
    wide: list[_Widths] = remembered(
        shape, "widths", lambda: [_widths(shape, x) for x in shape.layers]
    )
    own = [wide[il] for il, x in enumerate(shape.layers) if devices[il] == card and loaded(x)]
    floats = any(w.floats for w in own) or (shape.has_experts and bool(own))
    pool = warm = params.n_ubatch * max((w.a_token for w in own), default=0)
    if not flash:
        floats = floats or any(x.has_kv for x in here)
        pool = max([pool, *(_attention_pool(x, params, _cells(x, cache)) for x in here)])
        depth = _WARM_UBATCHES * params.n_ubatch
        warm = max(
            [warm, *(_attention_pool(x, params, min(_cells(x, cache), depth)) for x in here)]
        )
    fixed = _CUBLAS if floats else 0
    if card == 0:
        fixed += _COPIED * _n_copied(shape, params, devices)
    total, after_warmup = max(pool - _POOL, 0), max(warm - _POOL, 0)
    return Workspace(fixed + total, total - after_warmup)


def _cells(layer: LayerShape, cache: CacheShape) -> int:
    return cache.swa_cells if layer.is_swa else cache.cells


def _attention_pool(layer: LayerShape, params: PlanParams, cells: int) -> int:
    """ggml_cuda_mul_mat_cublas_impl without flash attention: K is unpacked to f32 for the scores,
    which are multiplied with V as f16, the result f16 too."""
    if not layer.has_kv:
        return 0
    scores = 2 * params.n_ubatch * layer.n_head * (cells + layer.head_v)
    return max(4 * cells * layer.k_width, scores)


_FLOATS: Final = ("F16", "BF16")


@dataclass(frozen=True)
class _Widths:
    """Of a block: elements of its 16-bit matrices' input and output, bytes a token of the largest
    product's input as q8_1 blocks (mmq.cu: for experts a row each that a token uses)."""

    floats: int
    a_token: int


def _widths(shape: ModelShape, layer: LayerShape) -> _Widths:
    rows = max(layer.n_expert_used, 1)
    widest = max(rows * shape.n_embd if layer.expert_tensors else layer.n_ff, shape.n_embd)
    floats = max((t.dims[0] + t.dims[1] for t in layer.tensors if _is_float(t)), default=0)
    return _Widths(floats, max(widest * 36 // 32, 2 * floats))


def _is_float(tensor: Tensor) -> bool:
    return tensor.type in _FLOATS and len(tensor.dims) == 2 and min(tensor.dims) > 16


def _n_copied(shape: ModelShape, params: PlanParams, devices: Sequence[int]) -> int:
    """Host tensors that a batch of 32 tokens or more takes to the first card."""
    if params.n_ubatch < 32:
        return 0
    return sum(
        len(x.tensors) if devices[il] == HOST else len(x.expert_tensors) * (il < params.n_cpu_moe)
        for il, x in enumerate(shape.layers)
        if loaded(x)
    )
