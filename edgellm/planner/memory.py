"""KV cells and recurrent states, by layer (llama-kv-cache*.cpp, llama-memory-recurrent.cpp)."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.gguf.shape import LayerShape, ModelShape
from edgellm.planner.types import pad, row_bytes


@dataclass(frozen=True)
class CacheShape:
    """How many cells each kind of layer keeps; ``n_stream`` is 1 for a unified cache."""

    cells: int
    swa_cells: int
    n_stream: int
    n_rows: int
    """Rows of recurrent state: one a sequence."""


def resolve_ctx(n_ctx: int, n_seq_max: int, kv_unified: bool) -> tuple[int, int]:
    """(n_ctx, n_ctx_seq) as llama_context's constructor makes them: padded to 256 cells."""
    n_ctx = pad(n_ctx, 256)
    if kv_unified:
        return n_ctx, n_ctx
    n_ctx_seq = pad(max(n_ctx // n_seq_max, 1), 256)
    return n_ctx_seq * n_seq_max, n_ctx_seq


def cache_shape(
    shape: ModelShape,
    *,
    n_ctx_seq: int,
    n_ubatch: int,
    n_seq_max: int,
    kv_unified: bool,
    swa_full: bool,
) -> CacheShape:
    """llama_kv_cache_iswa: a window a sequence plus one ubatch, padded to 256, never above full."""
    window = shape.n_swa * (n_seq_max if kv_unified else 1) + n_ubatch
    swa = n_ctx_seq if swa_full else pad(min(n_ctx_seq, window), 256)
    return CacheShape(
        cells=n_ctx_seq,
        swa_cells=swa,
        n_stream=1 if kv_unified else n_seq_max,
        n_rows=max(n_seq_max, 1),
    )


def kv_bytes(
    layer: LayerShape, cache: CacheShape, type_k: str, type_v: str, v_width: int | None = None
) -> int:
    """Bytes of one layer's cells; ``v_width`` overrides where V is padded (no flash attention)."""
    if not layer.has_kv:
        return 0
    cells = (cache.swa_cells if layer.is_swa else cache.cells) * cache.n_stream
    value = layer.v_width if v_width is None or layer.v_width == 0 else v_width
    a_cell = row_bytes(type_k, layer.k_width) + (row_bytes(type_v, value) if value else 0)
    index = row_bytes(type_k, layer.index_width) if layer.index_width else 0
    return cells * a_cell + cache.cells * cache.n_stream * index


def padded_v_width(shape: ModelShape, flash: bool) -> int | None:
    """[TAG_V_CACHE_VARIABLE]: without flash attention a transposed V takes the widest layer's."""
    if flash:
        return None
    return max((layer.head_v * layer.n_head_kv for layer in shape.layers), default=0)


def state_bytes(layer: LayerShape, cache: CacheShape) -> int:
    """llama_memory_recurrent: r and s rows, f32."""
    return 4 * cache.n_rows * (layer.r_width + layer.s_width)
