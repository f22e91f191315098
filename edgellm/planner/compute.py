"""The scratch memory of one step: what ggml's graph allocator reserves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.devices import Gpu
from edgellm.gguf.shape import ModelShape
from edgellm.planner.memory import CacheShape
from edgellm.planner.placement import HOST
from edgellm.planner.plan import PlanParams


@dataclass(frozen=True)
class Compute:
    devices: tuple[int, ...]
    host: int


def compute_bytes(
    shape: ModelShape,
    params: PlanParams,
    cache: CacheShape,
    *,
    devices: Sequence[int],
    flash: bool,
    gpus: Sequence[Gpu],
) -> Compute:
    """Bytes of each GPU's compute buffer and of the host's."""
    tokens = min(params.n_ctx, params.n_ubatch)
    outputs = min(tokens, params.n_outputs_max or params.n_batch)
    cells = cache.cells
    mask = cells * tokens * (2 if flash else 4)
    logits = 4 * outputs * (shape.n_vocab + shape.n_embd)
    widest = max((layer.n_ff for layer in shape.layers), default=0)
    hidden = 4 * tokens * (4 * shape.n_embd + 2 * widest) + mask
    if not flash:
        heads = max((layer.n_head for layer in shape.layers), default=0)
        hidden = max(hidden, 4 * tokens * (heads * cells + 2 * shape.n_embd) + mask)
    body = max(hidden, 4 * tokens * shape.n_embd)
    on = set(devices)
    sizes = [
        max(body, logits if devices[-1] == i else 0) if i in on else 0 for i in range(len(gpus))
    ]
    host = mask + 8 * tokens * shape.n_embd if len(on - {HOST}) else max(body, logits)
    if on == {HOST} and gpus:
        sizes[0] = body
    return Compute(tuple(sizes), host)
