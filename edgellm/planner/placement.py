"""Which device holds what: llama_model_base::load_tensors in src/llama-model.cpp."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from edgellm.gguf.shape import LayerShape, ModelShape, Tensor

HOST = -1
"""The device number of the CPU."""


def _f32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def split_points(shares: Sequence[float]) -> list[float]:
    """Cumulated, normalised shares, in the single precision that llama.cpp uses."""
    points: list[float] = []
    total = 0.0
    for share in shares:
        total = _f32(total + _f32(share))
        points.append(total)
    return [_f32(point / total) if total else 1.0 for point in points]


def layer_devices(shape: ModelShape, n_gpu_layers: int, shares: Sequence[float]) -> list[int]:
    """The device of each block, and of the output layer last; HOST for the CPU.

    ``n_gpu_layers`` counts from the end, the output layer first: block i is on a GPU when
    i >= n_layer_all + 1 - n_gpu_layers; among GPUs the first block whose place passes a split
    point goes to the next.
    """
    n = shape.n_layer_all + 1
    wanted = n if n_gpu_layers < 0 else min(n_gpu_layers, n)
    if not shares or wanted == 0:
        return [HOST] * n
    start = n - wanted
    points = split_points(shares)
    last = len(points) - 1
    gpu = [min(bisect_right(points, _f32(i / wanted)), last) for i in range(wanted)]
    return [HOST] * start + gpu


def loaded(layer: LayerShape) -> bool:
    """Next-token-prediction blocks are skipped unless ``load_mtp`` asks for them."""
    return not layer.is_nextn


def device_tensors(
    shape: ModelShape, devices: Sequence[int], n_cpu_moe: int
) -> dict[int, list[Tensor]]:
    """The tensors on each device, HOST included."""
    held: dict[int, list[Tensor]] = {HOST: list(shape.input_tensors)}
    for il, layer in enumerate(shape.layers):
        if not loaded(layer):
            continue
        here = held.setdefault(devices[il], [])
        if il >= n_cpu_moe or not layer.expert_tensors:
            here.extend(layer.tensors)
            continue
        on_host = set(layer.expert_tensors)
        here.extend(t for t in layer.tensors if t not in on_host)
        held[HOST].extend(layer.expert_tensors)
    for where in {devices[il] for il in range(shape.n_layer)}:
        held.setdefault(where, []).extend(shape.shared_tensors)
    output = held.setdefault(devices[-1], [])
    output.extend(shape.output_tensors)
    if shape.tied_tensor is not None and devices[-1] != HOST:
        output.append(shape.tied_tensor)
    return held


def aligned(tensors: Iterable[Tensor], alignment: int = 128) -> int:
    """Bytes of a GPU's weight buffer: each tensor padded to the backend's alignment."""
    return sum(-(-t.n_bytes // alignment) * alignment for t in tensors)


def mapped_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that mmap maps on the host: one span a shard, first tensor to last.

    llama_model_loader::get_mapping_range; what lies between belongs to it, used or not.
    """
    spans: dict[int, tuple[int, int]] = {}
    for t in tensors:
        first, last = spans.get(t.shard, (t.offset, t.offset + t.n_bytes))
        spans[t.shard] = (min(first, t.offset), max(last, t.offset + t.n_bytes))
    return sum(last - first for first, last in spans.values())
