"""Headers made to hurt: each ends at once in GGUFError with the byte where it went wrong."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edgellm.errors import GGUFError
from edgellm.gguf import reader
from edgellm.gguf.reader import parse_header, read_gguf
from edgellm.units import MiB
from tests.gguf.build import (
    ARR,
    F32,
    STR,
    U8,
    U16,
    U32,
    U64,
    array,
    gguf,
    pair,
    small_model,
    tensor,
    text,
)
from tests.gguf.mutate import mutations

HUGE = 2**64 - 1
START = 24  # of the first key: magic, version, two counts


def raw(key: str, kind: int, body: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + body


def raw_array(kind: int, n: int, body: bytes = b"") -> bytes:
    return raw("k", ARR, struct.pack("<IQ", kind, n) + body)


def tensors(*rows: bytes, data: int = 4096) -> bytes:
    return gguf([], list(rows), data=data)


# name -> (bytes, part of the message, byte offset or None where the exact place does not matter)
HOSTILE: dict[str, tuple[bytes, str, int | None]] = {
    "empty": (b"", "magic", 0),
    "three bytes": (b"GGU", "magic", 0),
    "not a GGUF": (b"PK\x03\x04" + b"\0" * 40, "not a GGUF", 0),
    "version 0": (gguf([], version=0), "version 0", 4),
    "version 1": (gguf([], version=1), "version 1", 4),
    "version 4": (gguf([], version=4), "version 4", 4),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian", 4),
    "cut in the counts": (gguf([])[:20], "past the end", 16),
    "tensor count huge": (gguf([], n_tensors=HUGE), "tensors", 8),
    "tensor count over the file": (gguf([], n_tensors=1000), "1000 tensors", 8),
    "key count huge": (gguf([], n_pairs=HUGE), "metadata keys", 16),
    "key count over the file": (gguf([], n_pairs=1000), "1000 metadata keys", 16),
    "key length huge": (gguf([struct.pack("<Q", HUGE) + b"x" * 40]), "length", START),
    "key length past the end": (gguf([struct.pack("<Q", 99) + b"x" * 40]), "past the end", None),
    "key empty": (gguf([pair("", U8, 1)]), "empty metadata key", START),
    "key not UTF-8": (gguf([pair(b"a\xff", U8, 1)]), "not UTF-8", START + 9),
    "key twice": (gguf([pair("a", U8, 1), pair("a", U8, 2)]), "twice", START + 14),
    "value type unknown": (gguf([raw("k", 13, b"\0" * 16)]), "value type 13", START + 9),
    "value length huge": (gguf([raw("k", STR, struct.pack("<Q", HUGE))]), "length", START + 13),
    "value not UTF-8": (gguf([pair("k", STR, b"ok\xc0\xaf")]), "not UTF-8", START + 23),
    "value cut": (gguf([pair("k", U64, 1)])[:-1], "past the end", None),
    "array of arrays": (gguf([raw_array(ARR, 1, b"\0" * 40)]), "holds arrays", START + 13),
    "array of unknown": (gguf([raw_array(99, 1, b"\0" * 40)]), "unknown type 99", START + 13),
    "array length huge": (gguf([raw_array(U32, HUGE)]), "past the end", None),
    "array length overflows": (gguf([raw_array(U64, 2**61)]), "past the end", None),
    "string array length huge": (gguf([raw_array(STR, HUGE)]), "strings", None),
    "string array past the end": (gguf([raw_array(STR, 1000, text("a"))]), "past the end", None),
    "string in array huge": (
        gguf([raw_array(STR, 3, text("a") + struct.pack("<Q", HUGE) + b"\0" * 40)]),
        "string 1 runs past the end",
        START + 25 + 9,
    ),
    "string in array past the end": (
        gguf([raw_array(STR, 2, text("a") + struct.pack("<Q", 999) + b"\0" * 9)]),
        "string 1 runs past the end",
        START + 25 + 9,
    ),
    "alignment 0": (gguf([pair("general.alignment", U32, 0)]), "power of two", START),
    "alignment odd": (gguf([pair("general.alignment", U32, 33)]), "power of two", START),
    "alignment of a wrong type": (gguf([pair("general.alignment", U64, 32)]), "32-bit", START),
    "alignment beyond the file": (
        gguf([pair("general.alignment", U32, 2**31)], [tensor("a", (8,), 0, 0)], data=64),
        "the file at",
        2**31,
    ),
    "tensor name too long": (tensors(tensor("x" * 64, (8,), 0, 0)), "64 letters", START),
    "tensor name not UTF-8": (
        tensors(tensor("ab", (8,), 0, 0).replace(b"ab", b"\xff\xfe")),
        "not UTF-8",
        START + 8,
    ),
    "tensor twice": (
        tensors(tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32)),
        "twice",
        START + 33,
    ),
    "five dimensions": (tensors(tensor("a", (1,) * 5, 0, 0)), "5 dimensions", START + 9),
    "dimensions huge": (
        tensors(text("a") + struct.pack("<I", 2**32 - 1) + b"\0" * 80),
        "dimensions",
        START + 9,
    ),
    "dimension negative": (tensors(tensor("a", (HUGE, 1), 0, 0)), "impossible", START + 13),
    "elements overflow": (tensors(tensor("a", (2**62, 4), 0, 0)), "cannot be", START),
    "bytes overflow": (tensors(tensor("a", (2**62,), 28, 0)), "cannot be", START),
    "tensor type unknown": (tensors(tensor("a", (8,), 43, 0)), "type 43", START + 21),
    "tensor type removed": (tensors(tensor("a", (32,), 31, 0)), "no longer", START + 21),
    "row not whole blocks": (tensors(tensor("a", (31,), 2, 0)), "cannot be", START),
    "first offset not 0": (tensors(tensor("a", (8,), 0, 32)), "gap", None),
    "tensors overlap": (tensors(tensor("a", (32,), 0, 0), tensor("b", (8,), 0, 32)), "over", None),
    "tensors with a gap": (tensors(tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 96)), "gap", None),
    "offset huge": (tensors(tensor("a", (8,), 0, HUGE)), "gap", None),
    "tensor out of the file": (tensors(tensor("a", (2000,), 0, 0)), "incomplete", 64),
    "tensor data missing": (small_model()[:-1], "incomplete", None),
    "split count not a number": (gguf([pair("split.count", STR, "many")]), "split.count", None),
    "split count huge": (gguf([pair("split.count", U32, 2**31)]), "split.count", None),
    "split count negative": (gguf([pair("split.count", F32, -2.0)]), "split.count", None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_where_it_goes_wrong(tmp_path: Path, name: str) -> None:
    data, message, offset = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=message) as caught:
        read_gguf(path)
    assert caught.value.path == str(path)
    if not name.startswith("split"):
        assert caught.value.offset is not None
    if offset is not None:
        assert caught.value.offset == offset


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\n\n<html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS pointer"),
        (b"tjgg" + b"\0" * 30, "before GGUF"),
        (b"PK\x03\x04" + b"\0" * 30, "PyTorch"),
        (b'\x10\0\0\0\0\0\0\0{"__metadata__":{}}', "safetensors"),
    ],
)
def test_a_foreign_file_is_called_what_it_is(data: bytes, hint: str) -> None:
    with pytest.raises(GGUFError) as caught:
        parse_header(data)
    assert hint in (caught.value.hint or "")


def sparse(path: Path, head: bytes, size: int) -> Path:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    "pairs",
    [
        [raw_array(STR, 4_000_001)],
        [raw("k", STR, struct.pack("<Q", 17 * MiB))],
        [raw_array(U8, 100 * MiB)],
        [
            raw("a", STR, struct.pack("<Q", 9 * MiB) + b"\0" * 9 * MiB),
            pair("b", STR, "x" * 8 * MiB),
        ],
    ],
    ids=["strings", "one text", "array", "texts together"],
)
def test_what_would_take_gigabytes_is_refused_in_bounded_memory(
    tmp_path: Path, pairs: list[bytes]
) -> None:
    """The file is large enough (a hole), so only the reader's own limits can stop it."""
    path = sparse(tmp_path / "m.gguf", gguf(pairs), 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 100 * MiB
    finally:
        tracemalloc.stop()


def test_the_limits_leave_room_for_real_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """262k tokens and 514k merges in 16 MiB is the largest header seen."""
    assert 64 * MiB <= reader.MAX_HEADER
    assert reader.MAX_STRINGS >= 4 * (262_144 + 514_906)
    assert reader.MAX_TENSORS >= 60_000  # MoE models with a tensor an expert


def refusals(data: Sequence[bytes], parse: Callable[[bytes], object]) -> int:
    count = 0
    for mutant in data:
        try:
            parse(mutant)
        except GGUFError:
            count += 1
    return count


def test_mutated_headers_raise_nothing_but_gguf_error() -> None:
    """``python -m tests.gguf.fuzz`` runs 20,000 of these on real headers, with a clock."""
    pairs = [
        pair("general.architecture", STR, "llama"),
        pair("general.alignment", U32, 32),
        array("tokenizer.ggml.tokens", STR, ["a", "bc", "def"]),
        array("heads", U32, [1, 2]),
        pair("split.count", U16, 1),
    ]
    seed = gguf(pairs, [tensor("a", (32, 2), 2, 0), tensor("b", (8,), 0, 64)], data=96)
    mutants = list(mutations(seed, random.Random(20_24), 2000))
    refused = refusals(mutants, lambda data: parse_header(data, file_bytes=len(data)))
    # Neither a reader that refuses everything nor one that refuses nothing.
    assert 800 < refused < 1990
