"""A header is parsed once, and the cache never changes what is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgellm.errors import GGUFError
from edgellm.gguf import cache, reader
from edgellm.gguf.reader import read_gguf
from tests.gguf.build import STR, array, gguf, pair, small_model, tensor


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    pairs = [pair("general.architecture", STR, "llama"), array("tokens", STR, ["ab"] * 9000)]
    path.write_bytes(gguf(pairs, [tensor("a", (32, 2), 2, 0)], data=36))
    return path


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were really parsed."""
    seen = []
    real = reader._parse

    def counting(cursor: reader._Cursor) -> reader.Header:
        seen.append(cursor.path)
        return real(cursor)

    monkeypatch.setattr(reader, "_parse", counting)
    return seen


def entry(home: Path) -> Path:
    (path,) = (home / "cache" / "headers").iterdir()
    return path


def test_the_second_read_parses_nothing_and_gives_the_same(model: Path, parses: list[str]) -> None:
    first, second = read_gguf(model), read_gguf(model)
    assert first == second
    assert parses == [str(model)]
    assert second.metadata["tokens"].decode() == ["ab"] * 9000  # type: ignore[union-attr]


def test_a_changed_file_is_parsed_again(model: Path, parses: list[str]) -> None:
    read_gguf(model)
    stat = model.stat()
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    read_gguf(model)
    model.write_bytes(small_model("other"))
    os.utime(model, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert read_gguf(model).arch == "other"
    assert len(parses) == 3


def test_another_file_moved_into_its_place_is_parsed(
    model: Path, tmp_path: Path, parses: list[str]
) -> None:
    """Same path, size and time of change, as a tool that preserves times would leave it."""
    read_gguf(model)
    stat = model.stat()
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes().replace(b"llama", b"qwen3"))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, model)
    assert read_gguf(model).arch == "qwen3"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text", "folder"])
def test_a_damaged_entry_is_as_if_absent(
    model: Path, edgellm_home: Path, parses: list[str], damage: str
) -> None:
    sound = read_gguf(model)
    path = entry(edgellm_home)
    data = bytearray(path.read_bytes())
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        data[len(data) // 2] ^= 4
        damaged = {"flip": data, "cut": data[:20], "empty": b"", "text": b"hello, world"}
        path.write_bytes(damaged[damage])
    assert read_gguf(model) == sound
    assert len(parses) == 2


def test_every_single_damaged_byte_is_noticed(model: Path, edgellm_home: Path) -> None:
    read_gguf(model)
    path, stat = entry(edgellm_home), model.stat()
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        assert cache.load(str(model), cache.stamp(stat)) is None


def test_an_entry_of_another_schema_is_not_used(
    model: Path, parses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_gguf(model)
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    read_gguf(model)
    assert len(parses) == 2


def test_a_cache_that_cannot_be_written_is_no_error(
    model: Path, edgellm_home: Path, parses: list[str]
) -> None:
    edgellm_home.write_text("a file where a folder should be")
    assert read_gguf(model) == read_gguf(model)
    assert len(parses) == 2


def test_a_bad_file_is_not_remembered(tmp_path: Path, edgellm_home: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(GGUFError):
        read_gguf(path)
    assert not edgellm_home.exists()


def test_the_oldest_entries_go_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 8)
    for index in range(10):
        path = tmp_path / f"{index}"
        path.write_bytes(b"")
        os.utime(path, (index, index))
    folder = tmp_path / "entries"
    folder.mkdir()
    for index in range(10):
        os.replace(tmp_path / f"{index}", folder / f"{index}")
    cache._prune(folder)
    assert sorted(path.name for path in folder.iterdir()) == [f"{i}" for i in range(2, 10)]
