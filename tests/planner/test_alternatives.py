"""What else could be done, and how a plan is shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgellm.devices import Devices, Host, hypothetical
from edgellm.gguf.shape import ModelShape
from edgellm.planner.alternatives import with_alternatives
from edgellm.planner.explain import render
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.units import GiB

Shapes = Callable[[str], ModelShape]


def machine(*vram: int) -> Devices:
    host = Host(cpu="cpu", n_physical=8, n_logical=16, total=64 * GiB, available=60 * GiB)
    return Devices(host=host, gpus=hypothetical(vram))


def planned(shape: ModelShape, devices: Devices, request: PlanRequest) -> Plan:
    return with_alternatives(shape, devices, request, make_plan(shape, devices, request))


@pytest.mark.parametrize("gib", [2, 4, 6, 8, 12, 24])
def test_two_to_four_that_differ(shape_of: Shapes, gib: int) -> None:
    plan = planned(shape_of("llama-3.1-8b"), machine(gib * GiB), PlanRequest())
    assert 2 <= len(plan.alternatives) <= 4
    changes = [str(x.change) for x in plan.alternatives]
    assert len(set(changes)) == len(changes)
    assert all(x.gain and x.cost and x.title for x in plan.alternatives)


def test_each_says_what_its_change_gives(shape_of: Shapes) -> None:
    shape, devices = shape_of("llama-3.1-8b"), machine(6 * GiB)
    plan = planned(shape, devices, PlanRequest())
    first = plan.alternatives[0]
    assert first.change == {"n_ctx": 16384, "type_k": "q8_0", "type_v": "q8_0"}
    request = PlanRequest(n_ctx=16384, type_k="q8_0", type_v="q8_0")
    other = make_plan(shape, devices, request)
    assert (other.verdict, other.devices[0].used) == ("gpu", first.used)
    assert other.speed.decode_tps == first.decode_tps


def test_a_fixed_plan_has_none(shape_of: Shapes) -> None:
    plan = planned(shape_of("llama-3.1-8b"), machine(6 * GiB), PlanRequest(fixed=True))
    assert plan.alternatives == ()


def test_a_plan_is_shown_with_bars_ledger_reasons_and_sums(
    shape_of: Shapes, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = shape_of("llama-3.1-8b")
    plan = planned(shape, machine(6 * GiB, 4 * GiB), PlanRequest(n_ctx=4096))
    render(plan, shape)
    out = capsys.readouterr().out
    for text in ("█", "weights", "KV cache", "margin", "binding constraint", "n_gpu_layers", "or "):
        assert text in out
    assert "32 layers x 4096 cells x 1 streams x (2048 + 2048 bytes) = 512.0 MiB" in out
