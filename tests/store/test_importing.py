"""import links or copies, and what it leaves is right or resumable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgellm import paths
from edgellm.config import StoreSettings
from edgellm.errors import ChecksumError, DiskFullError, GGUFError, StoreError
from edgellm.gguf.reader import check_file
from edgellm.store import importing, records, transfer
from edgellm.store.importing import import_model
from edgellm.store.local import find, list_models
from tests.gguf.build import U16, gguf, pair, tensor
from tests.store import layouts
from tests.store.pulling import model

pytestmark = pytest.mark.usefixtures("no_starter")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return layouts.write(tmp_path / "usb" / "x-Q4_0.gguf", model("x"))


def test_a_link_takes_no_room_and_survives_the_original(source: Path) -> None:
    import_model(source, check=check_file)
    target = paths.store_dir() / "x-Q4_0.gguf"
    assert os.path.samefile(source, target)
    source.unlink()
    assert target.read_bytes() == model("x")
    assert [m.owner for m in list_models()] == ["edgellm"]


def test_across_disks_the_link_is_symbolic(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_disk(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    import_model(source, check=check_file)
    assert os.readlink(paths.store_dir() / "x-Q4_0.gguf") == str(source)


def test_a_link_through_the_hubs_cache_is_to_the_bytes(home: Path) -> None:
    link = layouts.hf(home / ".cache/huggingface/hub", "a/b", "t-Q8_0.gguf")
    import_model(link, check=check_file)
    target = paths.store_dir() / "t-Q8_0.gguf"
    assert not target.is_symlink()
    assert os.path.samefile(link, target)


def test_a_copy_is_its_own_file_with_a_digest(source: Path) -> None:
    record = import_model(source, check=check_file, mode="copy", name="mine")
    target = paths.store_dir() / "mine.gguf"
    assert target.read_bytes() == model("x")
    assert not os.path.samefile(source, target)
    with target.open("rb") as file:
        assert record.files[0].sha256 == transfer.file_digest(file)
    assert source.exists()


def test_an_ended_copy_goes_on_where_it_stopped(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = layouts.write(paths.store_dir() / "x-Q4_0.gguf.part", model("x")[:100_000])
    written = []
    monkeypatch.setattr(importing, "_CHUNK", 50_000)

    class Seen(transfer.Listener):
        def progress(self, name: str, done: int, total: int | None) -> None:
            written.append(done)

    import_model(source, check=check_file, mode="copy", listener=Seen())
    assert written[0] == 150_000
    assert (paths.store_dir() / "x-Q4_0.gguf").read_bytes() == model("x")
    assert not part.exists()


def test_a_partial_of_other_bytes_is_found_out(source: Path) -> None:
    layouts.write(paths.store_dir() / "x-Q4_0.gguf.part", b"y" * 1000)
    with pytest.raises(ChecksumError, match="differs"):
        import_model(source, check=check_file, mode="copy")
    import_model(source, check=check_file, mode="copy")
    assert (paths.store_dir() / "x-Q4_0.gguf").read_bytes() == model("x")


def test_importing_twice_changes_nothing(source: Path) -> None:
    for mode in ("link", "link"):
        import_model(source, check=check_file, mode=mode)  # type: ignore[arg-type]
    import_model(source, check=check_file, mode="copy", name="c")
    import_model(source, check=check_file, mode="copy", name="c")
    assert {m.name for m in list_models()} == {"x-Q4_0", "c"}


def test_another_file_of_that_name_is_not_overwritten(source: Path) -> None:
    mine = layouts.write(paths.store_dir() / "x-Q4_0.gguf", b"mine")
    with pytest.raises(StoreError, match="is another file") as caught:
        import_model(source, check=check_file)
    assert "--name" in (caught.value.hint or "")
    assert mine.read_bytes() == b"mine"


def test_what_is_no_gguf_is_not_imported(tmp_path: Path) -> None:
    page = layouts.write(tmp_path / "x.gguf", b"<html>")
    with pytest.raises(GGUFError):
        import_model(page, check=check_file)
    assert records.load_all() == []


def test_all_shards_come_along_from_any(tmp_path: Path) -> None:
    for index in range(2):
        split = [pair("split.no", U16, index), pair("split.count", U16, 2)]
        data = gguf(split, [tensor(f"t{index}", (64,), 24, 0)], data=64)
        layouts.write(tmp_path / f"big-{index + 1:05d}-of-00002.gguf", data)
    import_model(tmp_path / "big-00002-of-00002.gguf", check=check_file, name="mine")
    found = find("mine", list_models())
    assert found is not None
    assert len(found.files) == 2


def test_a_missing_shard_is_said(tmp_path: Path) -> None:
    layouts.write(tmp_path / "big-00001-of-00002.gguf")
    with pytest.raises(GGUFError, match="missing"):
        import_model(tmp_path / "big-00001-of-00002.gguf", check=check_file)


def test_a_copy_needs_room_first(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "DISK_RESERVE", 1 << 60)
    with pytest.raises(DiskFullError):
        import_model(source, check=check_file, mode="copy")
    assert records.load_all() == []


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "x" * 300, "", "..", "a/b"])
def test_a_name_that_no_file_or_terminal_should_see_is_refused_before_anything_is_kept(
    name: str, source: Path
) -> None:
    with pytest.raises(StoreError, match="cannot be the name") as raised:
        import_model(source, check=check_file, name=name)
    assert "--name" in (raised.value.hint or "")
    assert records.load_all() == []


def test_a_file_with_a_line_break_in_its_name_needs_another_one(tmp_path: Path) -> None:
    odd = tmp_path / "a\nb.gguf"
    odd.write_bytes(model("x"))
    with pytest.raises(StoreError, match="cannot be the name"):
        import_model(odd, check=check_file)
    assert import_model(odd, check=check_file, name="fine").name == "fine"


def test_an_import_by_link_leaves_the_model_its_other_names(source: Path) -> None:
    settings = StoreSettings(folders=(str(source.parent),))
    import_model(source, check=check_file, name="mine", settings=settings)
    [found] = list_models(settings)
    assert found.name == "mine"
    assert find("x-Q4_0", [found]) == found
