"""RAM beside the caches: host weights, their repacked copies, what loading takes for a moment.

On a CPU without a GPU's host buffers in the way, llama.cpp copies matrices into a layout that
its kernels like (make_cpu_buft_list in src/llama-model.cpp puts a GPU's host buffer first).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from edgellm.devices import Gpu, Host
from edgellm.gguf.shape import ModelShape, Tensor
from edgellm.planner.placement import mapped_bytes
from edgellm.planner.plan import HostLedger, PlanParams
from edgellm.units import MiB

_PROCESS: Final = 28 * MiB
"""Python, the engine and llama.cpp's libraries."""
_A_TOKEN: Final = 430
"""Bytes a vocabulary's token takes there (128,256 tokens: 52 MiB)."""
_STATE_COPIES: Final = 512 * MiB
"""Checkpoints that the engine keeps at most (EngineOptions.checkpoint_bytes)."""
_HOST_BUFFERS: Final = ("cuda", "rocm", "vulkan")
"""Backends whose pinned host buffers come before repacking."""

_REPACKED: Final[dict[str, tuple[tuple[frozenset[str], int], ...]]] = {
    "Q4_0": ((frozenset({"avx2"}), 8), (frozenset({"dotprod"}), 4)),
    "Q4_K": ((frozenset({"avx2"}), 8), (frozenset({"dotprod"}), 8)),
    "Q2_K": ((frozenset({"avx512"}), 8),),
    "Q5_K": ((frozenset({"dotprod"}), 8),),
    "Q6_K": ((frozenset({"dotprod"}), 8),),
    "Q8_0": ((frozenset({"dotprod"}), 4),),
    "IQ4_NL": ((frozenset({"avx2"}), 8), (frozenset({"dotprod"}), 4)),
    "MXFP4": ((frozenset({"avx2"}), 8), (frozenset({"dotprod"}), 4)),
}
"""By type: features of the CPU, and what the rows must be a multiple of
(ggml_repack_get_optimal_repack_type in ggml-cpu/repack.cpp)."""


@dataclass(frozen=True)
class HostWeights:
    """Bytes: what llama.cpp reports as mapped (or read), its copies, and pages nobody reads."""

    weights: int
    repacked: int = 0
    idle: int = 0
    largest: int = 0
    """The largest tensor that passes through a buffer while loading."""


def is_repacked(tensor: Tensor, features: Iterable[str]) -> bool:
    """Whether the CPU's kernels want a copy of ``tensor``, a matrix or a stack of experts."""
    n_dims = len(tensor.dims)
    if n_dims not in (2, 3) or (n_dims == 3 and "_exps." not in tensor.name):
        return False
    has = frozenset(features)
    rules = _REPACKED.get(tensor.type, ())
    return any(needs <= has and tensor.dims[1] % rows == 0 for needs, rows in rules)


def host_weights(
    shape: ModelShape,
    params: PlanParams,
    tensors: Sequence[Tensor],
    gpus: Sequence[Gpu],
    host: Host,
    *,
    output_here: bool,
) -> HostWeights:
    """Of ``tensors``, those on the host; ``output_here``: the output layer is among them."""
    copied: list[Tensor] = []
    if not any(gpu.backend in _HOST_BUFFERS for gpu in gpus):
        inputs = set(shape.input_tensors)
        copied = [t for t in tensors if t not in inputs and is_repacked(t, host.features)]
    kept = tensors
    if copied:
        moved = set(copied)
        kept = [t for t in tensors if t not in moved]
    tied = shape.tied_tensor
    if copied and output_here and tied is not None and is_repacked(tied, host.features):
        copied.append(tied)
    repacked = sum(t.n_bytes for t in copied)
    if not params.use_mmap:
        largest = max((t.n_bytes for t in copied), default=0)
        return HostWeights(sum(t.n_bytes for t in kept), repacked, largest=largest)
    span = mapped_bytes(kept)
    return HostWeights(span, repacked, idle=max(span - sum(t.n_bytes for t in kept), 0))


def host_ledger(
    shape: ModelShape, params: PlanParams, host: Host, held: HostWeights, **entries: int
) -> HostLedger:
    """The host's ledger; ``entries``: caches, compute and output buffers, extra."""
    process = _PROCESS + _A_TOKEN * shape.n_vocab
    resident = held.weights - held.idle + held.repacked + process
    used = resident + sum(entries.values())
    wants = _STATE_COPIES if _keeps_states(shape, params) else 0
    return HostLedger(
        total=host.total,
        available=host.available,
        weights=held.weights,
        repacked=held.repacked,
        idle=held.idle,
        process=process,
        prompt_cache=max(min(wants, host.available - used), 0),
        page_cache=shape.file_bytes,
        load_peak=max(resident + held.largest, used),
        used=used,
        **entries,
    )


def _keeps_states(shape: ModelShape, params: PlanParams) -> bool:
    """Prefixes of window, recurrent and divided caches are kept as copies, not as cells."""
    slides = shape.n_swa > 0 and not params.swa_full
    recurs = any(layer.is_recurrent for layer in shape.layers)
    return slides or recurs or not params.kv_unified
