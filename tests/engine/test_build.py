from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from edgellm.engine import build
from edgellm.engine.build import BuildDevice, EngineBuild, inspect_build, require_engine
from edgellm.errors import EngineError

ROOT = Path(__file__).parents[2]


@pytest.mark.model
def test_the_installed_library_lists_its_devices_and_backends() -> None:
    found = inspect_build()
    assert found.problem == ""
    assert found.build is not None
    assert found.build.version == build.installed_version()
    assert found.build.commit.startswith(build.ENGINE_COMMIT[:7])
    assert re.fullmatch(r"[\d.]+", found.build.ggml)
    assert "CPU" in found.build.backends
    assert [d.kind for d in found.build.devices if d.name == "CPU"] == ["cpu"]
    assert all(d.total >= d.free >= 0 for d in found.build.devices)


def test_the_pinned_version_is_pyprojects() -> None:
    pinned = re.findall(
        r'"llama-cpp-python==([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert set(pinned) == {build.ENGINE_VERSION}


@pytest.mark.parametrize(
    ("told", "package", "commit"),
    [
        ("0c1e570-dirty", "0.3.36", "0c1e570-dirty"),
        ("abc1234", build.ENGINE_VERSION, "abc1234"),
        ("unknown", build.ENGINE_VERSION, build.ENGINE_COMMIT),
        ("", build.ENGINE_VERSION, build.ENGINE_COMMIT),
        ("unknown", "0.0.1", ""),
    ],
)
def test_sources_in_no_repository_are_those_of_the_pinned_version(
    told: str, package: str, commit: str
) -> None:
    assert build._commit(told, package) == commit


def environ(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}


def test_libraries_that_cannot_be_opened_are_a_broken_build(tmp_path: Path) -> None:
    found = inspect_build(environ=environ(LLAMA_CPP_LIB_PATH=str(tmp_path)))
    assert found.problem == "broken"
    assert "libggml" in found.detail


def test_a_child_that_says_nothing_in_time_is_a_broken_build() -> None:
    found = inspect_build(environ=environ(), timeout_s=0.001)
    assert (found.problem, found.detail) == ("broken", "no answer within 0 s")


def test_a_child_that_crashes_is_told_by_its_signal() -> None:
    assert build._last_line(b"", -11) == "it was ended by signal 11"
    assert build._last_line(b"", 3) == "it exited with code 3"
    assert build._last_line(b"Traceback\n\nImportError: no\n", 1) == "ImportError: no"


def test_no_engine_is_missing_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_installed", lambda: False)
    assert inspect_build().problem == "missing"
    with pytest.raises(EngineError) as caught:
        require_engine()
    assert caught.value.hint == "edgellm setup"
    assert build.ENGINE_VERSION in caught.value.message


def test_only_graphics_devices_can_hold_layers() -> None:
    kinds = ("cpu", "gpu", "igpu", "accel")
    devices = tuple(BuildDevice(name=k, description=k, kind=k) for k in kinds)
    assert [d.name for d in EngineBuild(version="1", devices=devices).gpus] == ["gpu", "igpu"]
