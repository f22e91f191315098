"""Plans that were loaded on an H200 under ballast, alone and in pairs: what each card then held."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from edgellm.devices import Devices, Gpu, Host
from edgellm.gguf.shape import ModelShape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import PlanRequest
from edgellm.units import MiB
from tests.planner.conftest import DATA

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "loaded.jsonl").read_text().splitlines()
]
PAIRS = [row for row in ROWS if len(row["cards"]) == 2]
SLACK = 16 * MiB

Shapes = Callable[[str], ModelShape]


def named(row: dict[str, Any]) -> str:
    sizes = "+".join(f"{round(card['free'] / 2**30)}" for card in row["cards"])
    return f"{sizes}-{row['model']}-{row['n_ctx']}"


def machine(row: dict[str, Any], card: Gpu, host: Host) -> Devices:
    gpus = tuple(
        msgspec.structs.replace(card, id=f"CUDA{i}", free=held["free"], uuid=f"GPU-{i}")
        for i, held in enumerate(row["cards"])
    )
    return Devices(gpus=gpus, host=msgspec.structs.replace(host, available=row["ram"]))


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_what_each_card_held_is_planned_to_1_percent_and_its_buffers_to_the_mib(
    row: dict[str, Any], shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    used = [card for card in row["cards"] if "taken" in card]
    split = tuple(row["params"]["tensor_split"][: len(used)]) if len(used) > 1 else ()
    request = PlanRequest(fixed=True, force=True, **(row["params"] | {"tensor_split": split}))
    devices = machine(row | {"cards": used}, h200, host)
    plan = make_plan(shape_of(row["model"]), devices, request)
    for planned, held in zip(plan.devices, used, strict=True):
        for entry in ("weights", "kv_cache", "compute"):
            assert abs(getattr(planned, entry) - held[entry]) < MiB
        # No more than 1 % or 16 MiB off.
        assert abs(planned.used - held["taken"]) <= max(held["taken"] // 100, SLACK)


@pytest.mark.parametrize("row", PAIRS, ids=named)
def test_a_pair_is_split_as_it_was_when_no_other_split_was_faster(
    row: dict[str, Any], shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    """The races: within 5 % of the best of the sweep; the second card left out where the larger
    one holds everything (277 tok/s on one, 268 and 271 on two)."""
    request = PlanRequest(n_ctx=row["n_ctx"], n_seq_max=row["n_seq_max"])
    plan = make_plan(shape_of(row["model"]), machine(row, h200, host), request)
    assert [d.n_layers for d in plan.devices] == [card["layers"] for card in row["cards"]]
