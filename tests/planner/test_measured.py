"""Every measured allocation, recomputed from the header alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgellm.devices import Gpu, Host
from edgellm.gguf.shape import ModelShape
from edgellm.planner.estimate import Ledger, estimate
from edgellm.planner.plan import PlanParams
from edgellm.planner.terms import Terms
from edgellm.units import MiB
from tests.planner.conftest import ROWS

EXACT = {
    "gpu_model": lambda led: led.devices[0].weights,
    "gpu_kv": lambda led: led.devices[0].kv_cache,
    "gpu_rs": lambda led: led.devices[0].recurrent_state,
    "host_model": lambda led: led.host.weights,
    "host_kv": lambda led: led.host.kv_cache,
    "host_rs": lambda led: led.host.recurrent_state,
    "host_output": lambda led: led.host.output,
}


def row_id(row: dict[str, Any]) -> str:
    keys = ("model", "n_gpu_layers", "n_ctx", "n_ubatch", "n_seq_max", "type_k", "flash_attn")
    return "-".join(str(row[key]) for key in keys)


def params_of(row: dict[str, Any]) -> PlanParams:
    names = (
        "n_gpu_layers n_ctx n_batch n_ubatch n_seq_max n_outputs_max type_k type_v flash_attn "
        "kv_unified swa_full"
    )
    return PlanParams(n_ctx_seq=0, **{name: row[name] for name in names.split()})


@pytest.fixture(params=ROWS, ids=row_id)
def row(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture
def ledger(
    row: dict[str, Any], shape_of: Callable[[str], ModelShape], h200: Gpu, host: Host
) -> Ledger:
    terms = [Terms(overhead=round(row["overhead_mib"] * MiB))]
    shape = shape_of(row["model"])
    return estimate(shape, params_of(row), [h200], host, terms, every_block=True)


def test_weights_and_caches_are_right_to_half_a_mib(row: dict[str, Any], ledger: Ledger) -> None:
    wrong = {
        name: (row["mib"].get(name, 0), of(ledger) / MiB)
        for name, of in EXACT.items()
        if abs(of(ledger) / MiB - row["mib"].get(name, 0)) > 0.5
    }
    assert not wrong


def test_compute_is_right_to_one_and_a_half_percent(row: dict[str, Any], ledger: Ledger) -> None:
    """The allocator is followed step by step: most rows agree to the byte."""
    mib = row["mib"]
    assert ledger.devices[0].compute / MiB == pytest.approx(mib["gpu_compute"], rel=0.015, abs=0.1)
    assert ledger.host.compute / MiB == pytest.approx(mib["host_compute"], rel=0.012, abs=0.1)


def test_used_is_right_to_a_percent_and_never_under_by_8_mib(
    row: dict[str, Any], ledger: Ledger
) -> None:
    measured = row["gpu_used_after_first_decode"] - row["gpu_used_before"]
    used = ledger.devices[0].used / MiB
    assert used == pytest.approx(measured, rel=0.01)
    assert used >= measured - 8
