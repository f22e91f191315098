"""What users of other estimators and fitters complain of; none of it may happen here.

A margin of 0 that stays 0, ``--force`` and the projector's place have tests in test_fit.py and
test_extras.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from edgellm.devices import Devices, Host, hypothetical
from edgellm.errors import PlanError
from edgellm.gguf.shape import ModelShape, Tensor
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.units import GiB, MiB

Shapes = Callable[[str], ModelShape]
HOST = Host(cpu="cpu", n_physical=8, n_logical=16, total=64 * GiB, available=60 * GiB)


def planned(shape: ModelShape, *vram: float, **asked: object) -> Plan:
    devices = Devices(host=HOST, gpus=hypothetical([int(v * GiB) for v in vram]))
    return make_plan(shape, devices, msgspec.convert(asked, PlanRequest))


def test_a_quantised_cache_costs_what_its_blocks_cost(shape_of: Shapes) -> None:
    shape = shape_of("llama-3.1-8b")
    sizes = {
        kind: planned(shape, 24, fixed=True, n_ctx=4096, type_k=kind, type_v=kind)
        .devices[0]
        .kv_cache
        for kind in ("f16", "q8_0", "q4_0")
    }
    assert sizes == {"f16": 512 * MiB, "q8_0": 272 * MiB, "q4_0": 144 * MiB}


def test_one_gpu_layer_is_the_output_layer(shape_of: Shapes) -> None:
    shape = shape_of("llama-3.1-8b")
    cards = [
        planned(shape, 24, fixed=True, n_ctx=4096, n_gpu_layers=n).devices[0] for n in (1, 32, 33)
    ]
    output = sum(t.n_bytes for t in shape.output_tensors)
    assert cards[0].weights == pytest.approx(output, abs=MiB)
    assert cards[0].kv_cache == 0
    block = cards[2].weights - cards[1].weights
    assert block == pytest.approx(shape.layers[0].n_bytes, abs=MiB)


def test_a_head_is_as_wide_as_the_file_says(shape_of: Shapes) -> None:
    """Gemma 3 12B: 16 heads of 256 in 3840; its cache is not that of 3840 / 16 = 240."""
    shape = shape_of("gemma-3-12b")
    assert {x.head_k for x in shape.layers} == {256}
    full = [x for x in shape.layers if not x.is_swa]
    card = planned(shape, 80, fixed=True, n_ctx=4096, swa_full=True).devices[0]
    assert card.kv_cache == len(shape.layers) * 4096 * 2 * 2 * full[0].n_head_kv * 256


def test_the_context_trained_for_is_not_assumed(shape_of: Shapes) -> None:
    shape = shape_of("qwen3.5-9b")
    assert shape.n_ctx_train >= 100_000
    assert planned(shape, 24).params.n_ctx == 8192


def test_experts_that_are_not_active_take_memory_too(shape_of: Shapes) -> None:
    shape = shape_of("qwen3-30b-a3b")
    card = planned(shape, 80, n_ctx=4096).devices[0]
    assert card.weights > 0.95 * (shape.file_bytes - 400 * MiB)


def test_one_gib_less_costs_a_few_layers_not_all(shape_of: Shapes) -> None:
    shape = shape_of("llama-3.1-8b")
    layers = [
        planned(shape, vram, n_ctx=8192, type_k="f16", type_v="f16").params.n_gpu_layers
        for vram in (6.5, 6, 5.5, 5, 4.5)
    ]
    assert all(0 <= a - b <= 6 for a, b in pairwise(layers)), layers
    assert layers[-1] >= 15


@pytest.mark.parametrize("vram", [1, 2, 3, 4])
def test_no_plan_has_a_context_of_zero(shape_of: Shapes, vram: int) -> None:
    plan = planned(shape_of("llama-3.1-8b"), vram, min_ctx=512)
    assert plan.params.n_ctx >= 512
    assert plan.params.n_ctx_seq > 0


def test_the_margin_of_a_small_card_is_small(shape_of: Shapes) -> None:
    plan = planned(shape_of("llama-3.2-1b"), 4)
    assert plan.devices[0].margin <= 192 * MiB
    assert plan.verdict == "gpu"


def test_a_changed_model_is_planned_anew(shape_of: Shapes) -> None:
    """Same name, same path, other tensors: nothing remembered of the first counts."""
    shape = shape_of("llama-3.2-1b")
    wider = [
        msgspec.structs.replace(
            layer,
            tensors=(*layer.tensors, Tensor("blk.0.more.weight", (1024, 1024), "F32", MiB * 4, 0)),
        )
        for layer in shape.layers
    ]
    other = msgspec.structs.replace(shape, layers=tuple(wider))
    first, second = planned(shape, 24), planned(other, 24)
    assert second.devices[0].weights - first.devices[0].weights == len(wider) * 4 * MiB


def test_an_unknown_architecture_is_estimated_with_a_warning(shape_of: Shapes) -> None:
    warning = "architecture 'new' is unknown: the estimate is generic"
    shape = msgspec.structs.replace(shape_of("llama-3.2-1b"), arch="new", warnings=(warning,))
    plan = planned(shape, 24)
    assert plan.verdict == "gpu"
    assert warning in plan.warnings


def test_the_least_context_is_held_where_it_is_above_the_default(
    shape_of: Callable[[str], ModelShape],
) -> None:
    """It was ignored, and 8192 planned."""
    shape = shape_of("llama-3.2-1b")
    assert planned(shape, 8, min_ctx=20000).params.n_ctx >= 20000
    past = planned(shape, 24, min_ctx=200000)
    assert past.params.n_ctx >= 200000
    assert any("past the" in warning for warning in past.warnings)
    with pytest.raises(PlanError, match="below the least"):
        planned(shape, 8, n_ctx=4096, min_ctx=8192)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_main_gpu_that_is_not_there_is_refused(
    shape_of: Callable[[str], ModelShape], fixed: bool
) -> None:
    with pytest.raises(PlanError, match="no card 7: the cards here are 0 to 0"):
        planned(shape_of("llama-3.2-1b"), 8, main_gpu=7, fixed=fixed)


def test_latent_attention_gets_one_type_for_k_and_v(shape_of: Shapes) -> None:
    """llama_init_from_model refuses two; one that was asked for stands for both."""
    shape = shape_of("deepseek-v2-lite")
    params = planned(shape, 24, type_k="q8_0").params
    assert (params.type_k, params.type_v) == ("q8_0", "q8_0")
    both = planned(shape, 24, type_k="q8_0", type_v="f16", fixed=True, n_ctx=4096)
    assert any("one type for K and V" in warning for warning in both.warnings)
