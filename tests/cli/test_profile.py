"""edgellm profile ls, show, use; every profile that comes along is sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgellm import config, paths
from edgellm.cli import profile as command
from edgellm.errors import ConfigError

SHIPPED = sorted(p.stem for p in paths.shipped("profiles").glob("*.toml"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    return tmp_path


def test_the_classes_of_hardware_are_there() -> None:
    assert {"4gb", "6gb", "8gb", "12gb", "16gb", "24gb"} <= set(SHIPPED)
    assert {"cpu-8gb", "cpu-16gb", "apple", "two-cards"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_holds_differences_only_and_says_why(name: str) -> None:
    profile = config.read_profile(name)
    known = config.known_keys()
    assert profile.about["title"]
    for key, value in profile.values.items():
        assert profile.reasons[key], key
        assert value != known[key].default, key
    config.load({"profile": name}, environ={})


def test_ls_marks_the_one_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    command.use("6gb")
    command.ls()
    out = capsys.readouterr().out
    assert "* 6gb" in out
    assert out.index("4gb") < out.index("12gb")
    command.use("none")
    command.ls(json=True)
    listed = capsys.readouterr().out
    assert not any(p["in_use"] for p in json.loads(listed[listed.index("[") :]))


def test_show_prints_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    command.show("6gb")
    out = capsys.readouterr().out
    assert "plan.ctx = 4096" in out
    assert config.read_profile("6gb").reasons["plan.ctx"] in out


def test_an_unknown_name_is_refused_before_anything_is_written(home: Path) -> None:
    with pytest.raises(ConfigError, match="no profile"):
        command.use("7gb")
    assert not (home / "config").exists()


def test_your_own_is_listed_as_yours(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "config" / "profiles"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('[profile]\ntitle = "Mine"\n[plan]\nctx = 2048\n')
    command.ls()
    assert "Mine  (yours)" in capsys.readouterr().out
