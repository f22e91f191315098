"""Prompt speed where weights stay on the host: they cross the bus once a micro batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from edgellm.devices import Devices, Gpu, Host
from edgellm.gguf.shape import ModelShape
from edgellm.planner import search
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.units import GiB

Shapes = Callable[[str], ModelShape]

MEASURED = (
    # model, n_gpu_layers, n_cpu_moe, n_ubatch, type_k, mapped, prompt tok/s, decode tok/s
    ("gemma-3-12b", 18, 0, 512, "q8_0", True, 586, 10.7),
    ("gemma-3-12b", 16, 0, 512, "q8_0", True, 699, 10.6),
    ("gemma-3-12b", 20, 0, 512, "q8_0", True, 834, 11.9),
    ("gemma-3-12b", 18, 0, 64, "q8_0", True, 121, 12.3),
    ("gpt-oss-20b", 25, 20, 512, "f16", False, 2423, 38.8),
    ("gpt-oss-20b", 25, 18, 512, "f16", True, 544, 34.4),
    ("gpt-oss-20b", 25, 22, 512, "f16", True, 437, 35.7),
    ("gpt-oss-20b", 25, 20, 64, "f16", True, 61.6, 37.5),
)
"""An H200 with 8 GiB free, 16 cores, prompts of 512 tokens: as measured."""


def plan_of(shape: ModelShape, gpu: Gpu, host: Host, **asked: Any) -> Plan:
    return make_plan(shape, Devices(gpus=(gpu,), host=host), PlanRequest(**asked))


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(map(str, row[:4])))
def test_prompt_and_decode_speed_are_near_what_was_measured(
    row: tuple[Any, ...], shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    model, n_gpu_layers, n_cpu_moe, n_ubatch, type_k, mapped, prefill, decode = row
    plan = plan_of(
        shape_of(model),
        h200,
        host,
        fixed=True,
        n_ctx=4096,
        n_outputs_max=1,
        n_gpu_layers=n_gpu_layers,
        n_cpu_moe=n_cpu_moe,
        n_ubatch=n_ubatch,
        type_k=type_k,
        type_v=type_k,
        use_mmap=mapped,
    )
    assert prefill / 1.4 < plan.speed.prefill_tps < prefill * 1.4
    assert decode / 1.3 < plan.speed.decode_tps < decode * 1.3


def small(gpu: Gpu, gib: float) -> Gpu:
    return msgspec.structs.replace(gpu, free=int(gib * GiB))


def test_host_weights_are_copied_once_a_micro_batch_so_a_larger_one_is_taken(
    shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    """Scratch memory grows with it, but at most 2 % of the decode speed is given for it."""
    shape, card = shape_of("qwen3-30b-a3b"), small(h200, 8)
    taken = plan_of(shape, card, host)
    kept = plan_of(shape, card, host, n_ubatch=512)
    assert taken.params.n_ubatch > 512
    assert taken.speed.prefill_tps > 1.1 * kept.speed.prefill_tps
    assert taken.speed.decode_tps >= 0.98 * kept.speed.decode_tps


def test_a_model_that_is_whole_on_its_card_keeps_the_usual_micro_batch(
    shape_of: Shapes, h200: Gpu, host: Host
) -> None:
    plan = plan_of(shape_of("llama-3.1-8b"), small(h200, 24), host)
    assert plan.params.n_ubatch == 512


def test_weights_that_batches_copy_are_pinned_where_ram_allows(
    shape_of: Shapes, h200: Gpu, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, card = shape_of("llama-3.1-8b"), small(h200, 4)
    assert plan_of(shape, card, host).params.use_mmap is False
    monkeypatch.setattr(search, "MOST_PINNED", 0.01)
    assert plan_of(shape, card, host).params.use_mmap is True
    monkeypatch.undo()
    assert plan_of(shape, card, host, use_mmap=True).params.use_mmap is True
    assert plan_of(shape, small(h200, 24), host).params.use_mmap is True
