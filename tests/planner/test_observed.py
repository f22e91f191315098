"""What loads showed is remembered per card, backend, build and architecture, and used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from edgellm.devices import Devices, Gpu, Host
from edgellm.gguf.shape import ModelShape
from edgellm.planner import observed
from edgellm.planner.fit import make_plan
from edgellm.planner.overhead import default_margin
from edgellm.planner.plan import LoadReport, MeasuredDevice, Observation, Plan, PlanRequest
from edgellm.units import GiB, MiB

Shapes = Callable[[str], ModelShape]
CARD = Gpu(
    id="CUDA0",
    name="NVIDIA GeForce RTX 2060",
    backend="cuda",
    total=6 * GiB,
    free=int(5.8 * GiB),
    uuid="GPU-1",
    compute_capability=(7, 5),
)
HOST = Host(cpu="cpu", n_physical=6, n_logical=12, total=16 * GiB, available=12 * GiB)
MACHINE = Devices(host=HOST, gpus=(CARD,))


def planned(shape: ModelShape, *seen: Observation, **asked: int) -> Plan:
    return make_plan(shape, MACHINE, PlanRequest(n_ctx=4096, observed=seen, **asked))


def loaded(plan: Plan, overhead: int, build: str = "b1") -> LoadReport:
    """A load whose buffers were as planned, and that took ``overhead`` beside them."""
    card = plan.devices[0]
    taken = card.used - card.overhead + overhead
    measured = MeasuredDevice(
        id="CUDA0",
        weights=card.weights,
        kv_cache=card.kv_cache,
        compute=card.compute,
        used_before=100 * MiB,
        used_after=100 * MiB + taken,
    )
    return LoadReport(measured=(measured,), build=build)


def test_the_next_plan_starts_from_the_overhead_seen(shape_of: Shapes) -> None:
    shape = shape_of("llama-3.1-8b")
    plan = planned(shape)
    seen = observed.observe(plan, loaded(plan, 231 * MiB))
    assert seen[0].device == "GPU-1"
    assert (seen[0].build, seen[0].arch) == ("b1", "llama")
    assert planned(shape, *seen).devices[0].overhead == 231 * MiB
    assert planned(shape, *seen, overhead=7).devices[0].overhead == 7
    elsewhere = [msgspec.structs.replace(seen[0], device="GPU-2")]
    assert planned(shape, *elsewhere).devices[0].overhead == plan.devices[0].overhead


def test_the_margin_is_learned_once_loads_agree_with_their_plans(shape_of: Shapes) -> None:
    shape = shape_of("llama-3.1-8b")
    seen: tuple[Observation, ...] = ()
    margins = []
    for overhead in (231, 233, 230, 232):
        plan = planned(shape, *seen)
        margins.append(plan.devices[0].margin)
        seen = observed.merged(seen, observed.observe(plan, loaded(plan, overhead * MiB)))
    assert margins[0] == default_margin(CARD)
    assert planned(shape, *seen).devices[0].margin == observed.LEAST_MARGIN
    assert planned(shape, *seen, margin=0).devices[0].margin == 0


def test_loads_that_miss_keep_the_margin_large(shape_of: Shapes) -> None:
    shape = shape_of("llama-3.1-8b")
    seen: tuple[Observation, ...] = ()
    for overhead in (231, 431, 231, 431, 231):
        plan = planned(shape, *seen)
        seen = observed.merged(seen, observed.observe(plan, loaded(plan, overhead * MiB)))
    assert planned(shape, *seen).devices[0].margin == 200 * MiB


def test_builds_and_architectures_are_kept_apart() -> None:
    one = Observation(device="GPU-1", backend="cuda", build="b1", arch="llama", overhead=1, at=1)
    two = msgspec.structs.replace(one, build="b2", overhead=2, at=2)
    moe = msgspec.structs.replace(one, arch="qwen3moe", overhead=9, at=3)
    assert len(observed.merged([one], [two, moe])) == 3
    assert observed.overhead([one, two, moe], CARD, "llama") == 2
    assert observed.overhead([one, two, moe], CARD, "gemma3") == 9
    assert observed.overhead([], CARD, "llama") is None


def test_a_measured_speed_replaces_the_table(shape_of: Shapes) -> None:
    shape = shape_of("llama-3.1-8b")
    plan = planned(shape)
    seen = observed.observe_speed(plan, plan.speed.decode_tps / 2)
    again = planned(shape, *seen)
    assert again.speed.decode_tps == pytest.approx(plan.speed.decode_tps / 2)
    assert (plan.speed.basis, again.speed.basis) == ("table", "measured")


def test_the_same_speed_measured_again_changes_nothing(shape_of: Shapes) -> None:
    """The second time the prediction was right: its ratio is still the first one's."""
    shape = shape_of("llama-3.1-8b")
    half = planned(shape).speed.decode_tps / 2
    seen = observed.observe_speed(planned(shape), half)
    again = planned(shape, *observed.observe_speed(planned(shape, *seen), half))
    assert again.speed.decode_tps == pytest.approx(half)


def test_workspaces_of_the_settings_are_not_learned_as_the_cards(shape_of: Shapes) -> None:
    """A load with layers on the host must not raise what a whole one is planned with."""
    shape = shape_of("llama-3.1-8b")
    whole = planned(shape)
    part = planned(shape, n_gpu_layers=8)
    taken = part.devices[0].overhead - part.devices[0].growth
    seen = observed.observe(part, loaded(part, taken))
    assert part.devices[0].workspace > 0
    assert planned(shape, *seen).devices[0].overhead == whole.devices[0].overhead


def test_a_measured_memory_bandwidth_is_used(shape_of: Shapes) -> None:
    shape, slow = shape_of("llama-3.1-8b"), Observation(device="host", bandwidth=5e9)
    cpu = Devices(host=HOST)
    fast = make_plan(shape, cpu, PlanRequest())
    assert make_plan(shape, cpu, PlanRequest(observed=(slow,))).speed.decode_tps < (
        fast.speed.decode_tps / 4
    )


def test_a_dry_run_replaces_compute(shape_of: Shapes) -> None:
    plan = planned(shape_of("llama-3.1-8b"))
    card = plan.devices[0]
    said = MeasuredDevice(id="CUDA0", compute=card.compute + MiB)
    host = MeasuredDevice(id="host", compute=plan.host.compute - 1)
    proved = observed.with_dry_run(plan, LoadReport(measured=(said, host)))
    assert (plan.proof, proved.proof) == ("analytic", "dry_run")
    assert proved.devices[0].compute == card.compute + MiB
    assert proved.devices[0].used == card.used + MiB
    assert proved.devices[0].headroom == card.headroom - MiB
    assert proved.host.used == plan.host.used - 1
    assert proved.verdict == "gpu"
    huge = MeasuredDevice(id="CUDA0", compute=6 * GiB)
    assert observed.with_dry_run(plan, LoadReport(measured=(huge,))).verdict == "does_not_fit"


def test_a_load_replaces_everything(shape_of: Shapes) -> None:
    plan = planned(shape_of("llama-3.1-8b"))
    proved = observed.with_measured(plan, loaded(plan, 250 * MiB))
    assert proved.proof == "measured"
    assert proved.devices[0].overhead == 250 * MiB
    assert proved.devices[0].used == plan.devices[0].used - plan.devices[0].overhead + 250 * MiB


def test_the_file_survives_nonsense_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "observed.json"
    assert observed.load(path) == ()
    observed.remember([Observation(device="host", bandwidth=2e10)], path)
    assert observed.load(path)[0].bandwidth == 2e10
    assert observed.load(path)[0].at > 0
    path.write_text("{")
    assert observed.load(path) == ()


def test_a_load_that_fell_back_teaches_nothing(shape_of: Shapes) -> None:
    plan = planned(shape_of("llama-3.1-8b"))
    report = msgspec.structs.replace(loaded(plan, 0), fallbacks=("n_ubatch 256",))
    assert observed.observe(plan, report) == ()
