"""The models that were measured: their headers, grown to their real size with a hole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgellm.devices import Gpu, Host
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.units import GiB

DATA = Path(__file__).parent.parent / "data" / "planner"
HEADERS = DATA / "headers"
SIZES: dict[str, int] = json.loads((HEADERS / "file_bytes.json").read_text())
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "measured.jsonl").read_text().splitlines()
]


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A measured model's file: real header, sparse data."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> Path:
        path = folder / f"{name}.gguf"
        shutil.copyfile(HEADERS / f"{name}.gguf-header", path)
        os.truncate(path, SIZES[name])
        return path

    return make


@pytest.fixture(scope="session")
def shape_of(model_file: Callable[[str], Path]) -> Callable[[str], ModelShape]:
    return cache(lambda name: model_shape(read_gguf(model_file(name))))


@pytest.fixture(scope="session")
def h200() -> Gpu:
    """The card that was measured on."""
    return Gpu(
        id="CUDA0",
        name="NVIDIA H200",
        backend="cuda",
        total=143771 * 2**20,
        free=143156 * 2**20,
        compute_capability=(9, 0),
    )


@pytest.fixture(scope="session")
def host() -> Host:
    return Host(cpu="cpu", n_physical=16, n_logical=16, total=128 * GiB, available=120 * GiB)
