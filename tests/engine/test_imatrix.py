"""Importance matrices of both kinds are read, and used."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from edgellm.engine.imatrix import read_imatrix
from edgellm.errors import EngineError, GGUFError
from tests.gguf.build import STR, gguf, pair, tensor


def gguf_imatrix(entries: dict[str, tuple[list[float], list[float]]]) -> bytes:
    """name -> (sums, counts)."""
    rows, data = [], b""
    for name, (sums, counts) in entries.items():
        for suffix, values in ((".in_sum2", sums), (".counts", counts)):
            rows.append(tensor(name + suffix, (len(values),), 0, len(data)))
            raw = struct.pack(f"<{len(values)}f", *values)
            data += raw + b"\0" * (-len(raw) % 32)
    return gguf([pair("general.type", STR, "imatrix")], rows) + data


def legacy(entries: dict[str, tuple[int, list[float]]]) -> bytes:
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", calls, len(values)) + struct.pack(f"<{len(values)}f", *values)
    return data


def test_sums_are_divided_by_their_counts_an_expert_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    path.write_bytes(gguf_imatrix({"w": ([2, 4, 9, 9, 5, 5], [2, 0, 5])}))
    assert list(read_imatrix(path)["w"]) == [1, 2, 1, 1, 1, 1]


def test_the_old_format_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(legacy({"a": (4, [8, 4]), "b": (0, [3])}))
    assert {name: list(v) for name, v in read_imatrix(path).items()} == {"a": [2, 1], "b": [3]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        struct.pack("<i", 2) + struct.pack("<i", 1) + b"a" + struct.pack("<ii", 1, 9),
        legacy({"a": (4, [8, 4])})[:-3],
        gguf([]),
        gguf_imatrix({"w": ([1], [1])}).replace(b"counts", b"kounts"),
    ],
    ids=["empty", "noise", "no values", "cut", "no entries", "no counts"],
)
def test_what_is_no_matrix_is_an_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(data)
    with pytest.raises(GGUFError):
        read_imatrix(path)


@pytest.mark.model
def test_the_quantiser_uses_the_matrix(tmp_path: Path) -> None:
    """One weight whose first inputs alone matter: its bytes change, the others' do not."""
    from edgellm.engine.quantize import QuantizeJob, run
    from edgellm.gguf.reader import GGUFFile, read_gguf
    from edgellm.store.local import starter_path

    starter = starter_path()
    assert starter is not None
    weight = "blk.0.attn_q.weight"
    matrix = tmp_path / "i.gguf"
    matrix.write_bytes(gguf_imatrix({weight: ([1000.0] * 8 + [0.001] * 568, [1.0])}))

    def quantized(name: str, imatrix: str | None) -> tuple[GGUFFile, Path]:
        path = tmp_path / name
        job = QuantizeJob(
            source=str(starter), target=str(path), file_type=2, n_threads=2,
            allow_requantize=True, imatrix=imatrix,
        )  # fmt: skip
        assert len(list(run(job))) == 272
        return read_gguf(path), path

    def bytes_of(found: tuple[GGUFFile, Path], name: str) -> bytes:
        file, path = found
        info = next(t for t in file.tensors if t.name == name)
        with path.open("rb") as stream:
            stream.seek(file.data_offset + info.offset)
            return stream.read(info.n_bytes)

    plain, weighed = quantized("plain.gguf", None), quantized("weighed.gguf", str(matrix))
    assert bytes_of(plain, weight) != bytes_of(weighed, weight)
    other = "blk.1.attn_q.weight"
    assert bytes_of(plain, other) == bytes_of(weighed, other)


@pytest.mark.model
def test_the_quantiser_says_why_it_failed(tmp_path: Path) -> None:
    from edgellm.engine.quantize import QuantizeJob, run

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    job = QuantizeJob(
        source=str(broken), target=str(tmp_path / "out.gguf"), file_type=2, n_threads=1
    )
    with pytest.raises(EngineError, match="fail"):
        list(run(job))
