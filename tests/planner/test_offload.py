"""Layers and experts on the host: what llama.cpp's scheduler reserved on the same card, or on a
device that answers as one, with nothing allocated, for the models whose headers are here. Exact,
or the rule is not understood."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from edgellm.devices import Gpu, Host
from edgellm.gguf.shape import ModelShape
from edgellm.planner.estimate import estimate
from edgellm.planner.plan import PlanParams
from edgellm.units import MiB
from tests.planner.conftest import DATA

ROWS: Final[list[dict[str, Any]]] = [
    json.loads(line) for line in (DATA / "offload.jsonl").read_text().splitlines()
]
NAMES: Final = {"ngl": "n_gpu_layers", "ncmoe": "n_cpu_moe"}


def row_id(row: dict[str, Any]) -> str:
    return "-".join([row["model"], *(f"{k}{v}" for k, v in row["set"].items())])


def params_of(row: dict[str, Any]) -> PlanParams:
    given = {NAMES.get(name, name): value for name, value in row["set"].items()}
    defaults = {
        "n_gpu_layers": 99,
        "n_ctx": 4096,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "n_outputs_max": 0,
        "kv_unified": True,
    }
    return PlanParams(n_ctx_seq=0, n_batch=2048, **{**defaults, **given})


@pytest.mark.parametrize("row", [pytest.param(row, id=row_id(row)) for row in ROWS])
def test_compute_buffers_with_a_part_on_the_host(
    row: dict[str, Any], shape_of: Callable[[str], ModelShape], h200: Gpu, host: Host
) -> None:
    ledger = estimate(shape_of(row["model"]), params_of(row), [h200], host, every_block=True)
    assert ledger.flash == row["flash"]
    assert ledger.devices[0].compute / MiB == pytest.approx(row["gpu_compute"], abs=0.06)
    assert ledger.host.compute / MiB == pytest.approx(row["host_compute"], abs=0.06)
