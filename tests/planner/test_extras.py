"""A draft model and a projector are in the ledger before the model is placed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgellm.devices import Devices, Host, hypothetical
from edgellm.gguf.shape import ModelShape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import PlanRequest
from edgellm.units import GiB, MiB

Shapes = Callable[[str], ModelShape]
Files = Callable[[str], Path]
HOST = Host(cpu="cpu", n_physical=8, n_logical=16, total=64 * GiB, available=60 * GiB)


def test_a_draft_model_takes_its_weights_cache_and_scratch(
    shape_of: Shapes, model_file: Files
) -> None:
    shape = shape_of("llama-3.1-8b")
    draft = str(model_file("llama-3.2-1b"))
    devices = Devices(host=HOST, gpus=hypothetical([8 * GiB]))
    alone = make_plan(shape, devices, PlanRequest(n_ctx=4096))
    both = make_plan(shape, devices, PlanRequest(n_ctx=4096, draft_model=draft))
    card = both.devices[0]
    small = make_plan(
        shape_of("llama-3.2-1b"), devices, PlanRequest(n_ctx=4096, n_outputs_max=1)
    ).devices[0]
    assert card.extra == small.used - small.overhead
    assert card.used == alone.devices[0].used + card.extra
    assert both.params.draft_n_gpu_layers == -1
    assert both.host.extra > 0
    assert alone.devices[0].extra == alone.host.extra == 0


def test_it_pushes_layers_off_a_small_card(shape_of: Shapes, model_file: Files) -> None:
    shape, draft = shape_of("llama-3.1-8b"), str(model_file("llama-3.2-1b"))
    devices = Devices(host=HOST, gpus=hypothetical([5 * GiB]))
    request = PlanRequest(n_ctx=4096, draft_model=draft)
    plan = make_plan(shape, devices, request)
    assert plan.verdict == "partial"
    assert plan.devices[0].headroom >= 0


def test_a_projector_is_planned_with_the_model(shape_of: Shapes, model_file: Files) -> None:
    projector = model_file("llama-3.2-1b")
    devices = Devices(host=HOST, gpus=hypothetical([12 * GiB]))
    request = PlanRequest(n_ctx=4096, mmproj=str(projector))
    plan = make_plan(shape_of("llama-3.1-8b"), devices, request)
    assert plan.devices[0].extra > projector.stat().st_size - 16 * MiB
    without_a_card = make_plan(shape_of("llama-3.1-8b"), Devices(host=HOST), request)
    assert without_a_card.host.extra == plan.devices[0].extra
