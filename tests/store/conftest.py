"""A home of the test's own: no model of this machine is seen, none is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.store import local

OTHER_PROGRAMS = (
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT"),
    *("XDG_CACHE_HOME", "LLAMA_CACHE", "OLLAMA_MODELS", "all_proxy", "ALL_PROXY"),
    *("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    for variable in OTHER_PROGRAMS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def no_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_STARTER_PACKAGE", "no_such_package")
