"""A home of the test's own: no model of this machine is seen, none is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.store import local, transfer
from edgellm.units import KiB
from tests.hub_server import HubServer, hub_server
from tests.store.pulling import REPO, SIZE, model

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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(transfer, "BACK_OFF_S", (0.001, 0.01))
    monkeypatch.setattr(transfer, "CHUNK", 16 * KiB)
    with hub_server() as hub:
        hub.files[REPO] = {
            "tiny-Q4_K_M.gguf": model("q4"),
            "tiny-Q8_0.gguf": model("q8", 2 * SIZE),
            "mmproj-tiny-F16.gguf": model("see", 20 * KiB),
            "README.md": b"# tiny",
        }
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
