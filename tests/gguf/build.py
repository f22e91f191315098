"""GGUF bytes for tests, written here so that every field can also be written wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: Any) -> bytes:
    return text(value) if kind == STR else struct.pack("<" + FORMATS[kind], value)


def pair(key: str | bytes, kind: int, value: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(key: str, kind: int, values: Sequence[Any]) -> bytes:
    head = text(key) + struct.pack("<IIQ", ARR, kind, len(values))
    return head + b"".join(scalar(kind, value) for value in values)


def tensor(name: str, dims: Sequence[int], type_id: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", type_id, offset)


def gguf(
    pairs: Sequence[bytes],
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    data: int = 0,
    align: int = 32,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
) -> bytes:
    """A whole file with ``data`` zero bytes of tensor data."""
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align) + b"\0" * data if tensors else head


def small_model(arch: str = "llama", **extra: Any) -> bytes:
    """Two F32 tensors of 8 x 4 under an architecture's name."""
    pairs = [pair("general.architecture", STR, arch)]
    pairs += [
        pair(key, U32 if isinstance(value, int) else STR, value) for key, value in extra.items()
    ]
    tensors = [tensor("a.weight", (8, 4), 0, 0), tensor("b.weight", (8, 4), 0, 128)]
    return gguf(pairs, tensors, data=256)
