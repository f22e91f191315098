"""Plans over other machines: used where they help, left out where the network costs more."""

from __future__ import annotations

import pytest

from edgellm.config import Settings
from edgellm.devices import Devices, Gpu, hypothetical
from edgellm.errors import DoesNotFitError
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.planner.speed import Card, card
from edgellm.runtime import local_shape
from edgellm.units import GiB, MiB
from tests.planner.test_fit import machine, synthetic

FAST = {"link_latency_s": 100e-6, "link_bandwidth": 1.2e9}
SLOW = {"link_latency_s": 0.2, "link_bandwidth": 1e6}
# 3.1 GiB of weights: more than one card of 2 GiB.
BIG = synthetic(n_layer=24, n_embd=4096, n_ff=14336)


def remote(number: int, link: dict[str, float], free: int = 2 * GiB, speed: float = 400e9) -> Gpu:
    return Gpu(
        id=f"RPC{number}",
        name=f"10.0.0.{number}:50052",
        backend="rpc",
        total=free,
        free=free,
        endpoint=f"10.0.0.{number}:50052",
        bandwidth=speed,
        link_latency_s=link["link_latency_s"],
        link_bandwidth=link["link_bandwidth"],
    )


def plan_with(*gpus: Gpu, ram: int = 60 * GiB, **request: object) -> Plan:
    devices = Devices(host=machine(ram=ram).host, gpus=gpus)
    return make_plan(BIG, devices, PlanRequest(n_ctx=2048, **request))  # type: ignore[arg-type]


def test_workers_on_a_fast_link_take_the_layers_the_own_card_has_no_room_for() -> None:
    own = hypothetical([2 * GiB])
    alone = plan_with(*own)
    pooled = plan_with(remote(0, FAST), remote(1, FAST), *own)
    assert pooled.speed.decode_tps > 2 * alone.speed.decode_tps
    assert pooled.params.rpc == ("10.0.0.0:50052", "10.0.0.1:50052")
    assert pooled.params.devices in ((), ("RPC0", "RPC1", "GPU0"))
    assert [d.id for d in pooled.devices] == ["RPC0", "RPC1", "GPU0"]


def test_the_output_layer_stays_on_this_machines_card() -> None:
    slower = remote(0, FAST, speed=100e9)
    pooled = plan_with(slower, *hypothetical([2 * GiB]))
    assert pooled.devices[-1].id == "GPU0"
    assert pooled.devices[-1].weights > 0


def test_a_worker_behind_a_slow_link_is_left_out_and_said_to_be() -> None:
    plan = plan_with(remote(0, SLOW), *hypothetical([2 * GiB]))
    assert plan.params.rpc == ()
    assert [d.id for d in plan.devices] == ["GPU0"]
    assert any("10.0.0.0:50052" in warning and "not used" in warning for warning in plan.warnings)


def test_workers_that_would_only_slow_it_are_not_blamed_for_their_memory() -> None:
    plan = plan_with(remote(0, SLOW), remote(1, SLOW))
    assert (plan.verdict, plan.binding) == ("cpu", "none")
    why = next(reason.why for reason in plan.reasons if reason.param == "n_gpu_layers")
    assert why == "no device there is makes it faster"


def test_the_devices_of_workers_that_stay_are_numbered_as_the_engine_will() -> None:
    plan = plan_with(remote(0, SLOW), remote(1, FAST), *hypothetical([2 * GiB]))
    assert plan.params.rpc == ("10.0.0.1:50052",)
    assert [d.id for d in plan.devices] == ["RPC0", "GPU0"]
    assert plan.devices[0].name == "10.0.0.1:50052"
    assert plan.params.devices == ("RPC0", "GPU0")
    assert len(plan.params.tensor_split) == 2


def test_a_slow_link_is_used_where_the_model_fits_nowhere_else() -> None:
    pool = [remote(i, {"link_latency_s": 0.02, "link_bandwidth": 1e7}) for i in range(3)]
    plan = plan_with(*pool, ram=1 * GiB)
    assert len(plan.params.rpc) >= 2
    assert "network" in plan.speed.bottleneck


def test_one_worker_that_holds_it_all_is_not_helped_by_one_that_seems_a_little_faster() -> None:
    """Two equal machines never measure the same; the pair is no faster than the larger alone."""
    small = remote(0, FAST, free=2 * GiB, speed=404e9)
    large = remote(1, FAST, free=8 * GiB, speed=400e9)
    plan = plan_with(small, large)
    assert [(d.id, d.name) for d in plan.devices] == [("RPC0", "10.0.0.1:50052")]
    assert any("10.0.0.0:50052" in warning and "not used" in warning for warning in plan.warnings)


@pytest.mark.model
@pytest.mark.parametrize(
    ("split", "ubatch", "ctx", "measured"),
    [
        ((16.0, 15.0), 512, 1024, (20.91, 20.91)),
        ((29.0, 2.0), 512, 1024, (20.91, 11.91)),
        ((16.0, 15.0), 128, 1024, (5.23, 5.23)),
        ((10.0, 10.0, 11.0), 128, 2048, (6.23, 6.23, 6.23)),
    ],
)
def test_several_workers_pipeline_ubatches_and_pay_for_the_copies(
    split: tuple[float, ...], ubatch: int, ctx: int, measured: tuple[float, ...]
) -> None:
    """Compute buffers in MiB as llama.cpp allocated them on workers, the starter whole on them."""
    gpus = tuple(remote(i, FAST) for i in range(len(split)))
    request = PlanRequest(
        fixed=True,
        n_ctx=ctx,
        n_ubatch=ubatch,
        n_batch=512,
        n_seq_max=1,
        n_outputs_max=1,
        n_gpu_layers=-1,
        tensor_split=split,
    )
    plan = make_plan(
        local_shape("starter", Settings()), Devices(host=machine().host, gpus=gpus), request
    )
    planned = [d.compute / MiB for d in plan.devices]
    assert planned == pytest.approx(measured, abs=0.1)


def test_layers_asked_for_that_no_worker_holds_name_the_worker_not_the_host_with_room() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan_with(remote(0, FAST, free=1 * GiB), n_gpu_layers=-1)
    assert caught.value.device == "RPC0"
    assert caught.value.required > caught.value.available


def test_plans_without_workers_name_none() -> None:
    plan = plan_with(*hypothetical([2 * GiB, 2 * GiB]))
    assert plan.params.rpc == ()
    assert [d.id for d in plan.devices] == ["GPU0", "GPU1"]


def test_a_hop_costs_an_answers_time_the_hidden_values_and_the_logits_where_they_are_made() -> None:
    far = Card(400e9, 10, latency=0.001, link=1e6)
    assert far.hop(1000) == pytest.approx(0.001 + 8000 / 1e6)
    assert far.hop(1000, 50_000) == pytest.approx(0.001 + 208_000 / 1e6)
    assert Card(400e9, 10).hop(1000, 50_000) == 0.0


def test_a_workers_card_is_as_fast_as_it_was_measured() -> None:
    made = card(remote(0, FAST, speed=321e9))
    assert (made.bandwidth, made.basis) == (321e9, "measured")
    assert made.is_remote
