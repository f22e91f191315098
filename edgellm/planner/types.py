"""Bytes an element of the types that a KV cache may have (ggml's block sizes)."""

from __future__ import annotations

from typing import Final

KV_BLOCK: Final = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""type -> (elements a block, bytes a block), as llama-server's --cache-type-k accepts them."""


def row_bytes(kv_type: str, n_elements: int) -> int:
    """ggml_row_size: bytes of a row; a row that is no whole number of blocks is rounded up."""
    block, size = KV_BLOCK[kv_type]
    return -(-n_elements // block) * size


def is_quantized(kv_type: str) -> bool:
    return KV_BLOCK[kv_type][0] > 1


def pad(n: int, to: int) -> int:
    """GGML_PAD."""
    return -(-n // to) * to
