from __future__ import annotations

from pathlib import Path

import pytest

from edgellm import config, runtime
from edgellm.errors import ConfigError, ModelNotFoundError
from edgellm.planner.plan import PlanRequest


def request(**plan: object) -> PlanRequest:
    flags = {f"plan.{name}": value for name, value in plan.items()}
    return runtime.plan_request(config.load(flags, environ={}).settings)


def test_nothing_set_leaves_every_choice_to_the_planner() -> None:
    assert request() == PlanRequest()


@pytest.mark.parametrize(("text", "n"), [("auto", None), ("all", -1), ("0", 0), ("-1", -1)])
def test_layers_may_be_a_number_auto_or_all(text: str, n: int | None) -> None:
    assert request(ngl=text).n_gpu_layers == n


@pytest.mark.parametrize("text", ["most", "-2", "1.5", "", "--1"])
def test_other_layer_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"plan\.ngl"):
        request(ngl=text)


def test_tensor_split_is_a_list_of_shares() -> None:
    assert request(tensor_split="3,1").tensor_split == (3.0, 1.0)


@pytest.mark.parametrize("text", ["a,b", "-1,2", "0,0", ""])
def test_other_tensor_splits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tensor_split"):
        request(tensor_split=text)


def test_kv_unified_off_reaches_the_planner_as_false() -> None:
    assert request(kv_unified="off").kv_unified is False


def test_every_plan_setting_reaches_the_request() -> None:
    changed = {
        "ctx": 1, "parallel": 2, "batch": 3, "ubatch": 4, "outputs": 5, "type_k": "q8_0",
        "type_v": "q4_0", "flash_attn": "on", "n_cpu_moe": 6, "swa_full": True, "main_gpu": 1,
        "split_mode": "row", "threads": 7, "threads_batch": 8, "mmap": False, "mlock": True,
        "margin": 9, "overhead": 10, "objective": "context", "min_ctx": 11, "allow_q4_kv": True,
        "draft_model": "d", "mmproj": "m", "force": True,
    }  # fmt: skip
    for name, value in changed.items():
        assert request(**{name: value}) != PlanRequest(), name


def test_vram_and_backend_decide_the_devices() -> None:
    flags = {"plan.vram": ["6GiB", "4GiB"], "plan.backend": "vulkan"}
    gpus = runtime.plan_devices(config.load(flags, environ={}).settings).gpus
    assert [(g.free, g.backend) for g in gpus] == [(6 * 2**30, "vulkan"), (4 * 2**30, "vulkan")]


@pytest.mark.parametrize(
    "flags", [{"plan.vram": ["six"]}, {"plan.vram": [""]}, {"plan.backend": "opencl"}]
)
def test_impossible_devices_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        runtime.plan_devices(config.load(flags, environ={}).settings)


@pytest.mark.model
def test_plan_model_plans_the_starter_for_a_card_that_need_not_exist() -> None:
    settings = config.load({"plan.vram": ["6GiB"]}, environ={}).settings
    plan = runtime.plan_model("starter", settings=settings)
    assert plan.verdict == "gpu"
    assert plan.model.arch == "llama"
    assert Path(plan.model.path).is_file()


def test_a_model_that_is_elsewhere_says_how_to_fetch_it() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        runtime.plan_model("hf:owner/repo:Q4_K_M")
    assert caught.value.hint == "edgellm pull hf:owner/repo:Q4_K_M"
