"""Importance matrices: how much each input of a weight matters, for better quantisation."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path
from typing import BinaryIO, Final

from edgellm.errors import GGUFError
from edgellm.gguf.reader import GGUFFile, TensorInfo, read_gguf

_SUMS: Final = ".in_sum2"
_COUNTS: Final = ".counts"
_MAX_VALUES: Final = 1 << 28
_I32: Final = struct.Struct("<i")


def read_imatrix(path: str | Path) -> dict[str, array[float]]:
    """Mean squares by the name of the weight, from a GGUF or an old ``.dat`` imatrix file.

    Follows ``common_imatrix_load`` (common/imatrix-loader.cpp) and the division of ``load_imatrix``
    (tools/quantize/quantize.cpp). Raises GGUFError.
    """
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            return _from_gguf(read_gguf(path), file)
        file.seek(0)
        try:
            return _from_legacy(file, str(path))
        except struct.error as error:
            raise GGUFError(path, "is no importance matrix: it ends early") from error


def _from_gguf(header: GGUFFile, file: BinaryIO) -> dict[str, array[float]]:
    tensors = {tensor.name: tensor for tensor in header.tensors}
    found = {}
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        weight = name.removesuffix(_SUMS)
        counts = tensors.get(weight + _COUNTS)
        if counts is None or {sums.type_name, counts.type_name} != {"F32"}:
            raise GGUFError(header.path, f"has no counts for {weight}")
        found[weight] = _means(_floats(header, sums, file), _floats(header, counts, file))
    if not found:
        raise GGUFError(header.path, "holds no importance matrix")
    return found


def _floats(header: GGUFFile, tensor: TensorInfo, file: BinaryIO) -> array[float]:
    values = array("f")
    file.seek(header.data_offset + tensor.offset)
    values.frombytes(file.read(tensor.n_bytes))
    return values


def _means(sums: array[float], counts: array[float]) -> array[float]:
    """Sums over their count, an expert at a time; an expert that was never asked counts as 1."""
    if not counts or len(sums) % len(counts):
        return array("f", [1.0]) * len(sums)
    width = len(sums) // len(counts)
    means = array("f")
    for index, count in enumerate(counts):
        part = sums[index * width : (index + 1) * width]
        n = round(count)
        means.extend(array("f", [value / n for value in part] if n > 0 else [1.0] * width))
    return means


def _from_legacy(file: BinaryIO, path: str) -> dict[str, array[float]]:
    n_entries = _int(file)
    if not 0 < n_entries < 1 << 20:
        raise GGUFError(path, "is no importance matrix", offset=0)
    found = {}
    for _ in range(n_entries):
        length = _int(file)
        if not 0 < length < 4096:
            raise GGUFError(path, "is no importance matrix", offset=file.tell() - 4)
        name = file.read(length).decode("utf-8", "replace")
        n_calls, n_values = _int(file), _int(file)
        if not 0 < n_values < _MAX_VALUES:
            raise GGUFError(path, f"claims {n_values} values", offset=file.tell() - 4)
        values = array("f")
        raw = file.read(4 * n_values)
        if len(raw) != 4 * n_values:
            raise GGUFError(path, "is no importance matrix: it ends early", offset=file.tell())
        values.frombytes(raw)
        found[name] = array("f", [v / n_calls for v in values]) if n_calls > 0 else values
    return found


def _int(file: BinaryIO) -> int:
    value: int = _I32.unpack(file.read(4))[0]
    return value
