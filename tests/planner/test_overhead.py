"""What 110 loads on an H200 held beside llama.cpp's buffers, after the warm-up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from edgellm.devices import Devices, Gpu, Host
from edgellm.gguf.shape import ModelShape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import DeviceLedger, PlanRequest
from edgellm.units import MiB
from tests.planner.conftest import DATA

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "overhead.jsonl").read_text().splitlines()
]
UNATTRIBUTED = 18
"""MiB that the driver charges the device, not the process (which is what was measured)."""

Shapes = Callable[[str], ModelShape]


def ledger_of(shape: ModelShape, gpu: Gpu, host: Host, **asked: Any) -> DeviceLedger:
    request = PlanRequest(fixed=True, force=True, **asked)
    return make_plan(shape, Devices(gpus=(gpu,), host=host), request).devices[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['setting']}")
def test_the_overhead_is_right_to_16_mib_and_never_under_by_8(
    row: dict[str, Any], shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    ledger = ledger_of(shape_of(row["model"]), h200, host, **row["request"])
    planned = (ledger.overhead - ledger.growth) / MiB
    assert -8 < planned - UNATTRIBUTED - row["overhead_mib"] < 16


def test_attention_without_flash_attention_is_planned_for_a_full_context(
    shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    """llama.cpp's pool grows with the cells in use: 2 bytes a head, token and cell."""
    shape = shape_of("llama-3.1-8b")
    short = ledger_of(shape, h200, host, n_ctx=4096, flash_attn="off")
    full = ledger_of(shape, h200, host, n_ctx=8192, flash_attn="off")
    assert full.workspace - short.workspace == 32 * 512 * 4096 * 2
    assert full.growth == 32 * 512 * (8192 - 2048) * 2


def test_an_overhead_that_is_asked_for_is_all_of_it(
    shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    ledger = ledger_of(
        shape_of("gpt-oss-20b"), h200, host, n_ctx=4096, flash_attn="off", overhead=5 * MiB
    )
    assert (ledger.overhead, ledger.workspace) == (5 * MiB, 0)


def test_a_card_that_is_not_cuda_has_no_workspaces_of_cuda(
    shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    vulkan = Gpu(id="Vulkan0", name="card", backend="vulkan", total=h200.total, free=h200.free)
    ledger = ledger_of(shape_of("gpt-oss-20b"), vulkan, host, n_ctx=4096, flash_attn="off")
    assert ledger.workspace == 0
