from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import paths

FOLDERS = ("store_dir", "cache_dir", "config_dir", "state_dir", "runtime_dir")


@pytest.mark.parametrize("name", FOLDERS)
def test_edgellm_home_holds_every_folder(name: str, edgellm_home: Path) -> None:
    assert getattr(paths, name)().parent == edgellm_home


def test_each_kind_of_file_has_its_own_folder() -> None:
    assert len({getattr(paths, name)() for name in FOLDERS}) == len(FOLDERS)


def test_without_edgellm_home_the_system_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGELLM_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere/data")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/somewhere/config")
    assert paths.store_dir() == Path("/somewhere/data/edgellm/models")
    assert paths.config_file() == Path("/somewhere/config/edgellm/config.toml")


def test_asking_for_a_folder_creates_nothing(edgellm_home: Path) -> None:
    for name in FOLDERS:
        getattr(paths, name)()
    assert not edgellm_home.exists()


def test_edgellm_config_names_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_CONFIG", "~/other.toml")
    assert paths.config_file() == Path.home() / "other.toml"


def test_what_runs_is_kept_in_the_sessions_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGELLM_HOME")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert paths.runtime_dir() == tmp_path / "edgellm"


def test_without_a_session_folder_nothing_is_shared_with_other_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EDGELLM_HOME")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert paths.runtime_dir() == paths.state_dir() / "run"


def test_shipped_profiles_are_found_in_a_checkout() -> None:
    assert paths.shipped("profiles").is_dir()
