"""vllm serve lines: the least split that holds the model, and options that vLLM has."""

from __future__ import annotations

import shlex

import pytest

from edgellm.errors import DoesNotFitError
from edgellm.planner.vllm import Node, VllmModel, arguments, model_of, plan_vllm, splits
from edgellm.units import GiB
from tests.planner.test_fit import synthetic

# Option names of vLLM 0.33 (vllm/engine/arg_utils.py and entrypoints/common/cli_args.py).
KNOWN = {
    "--max-model-len",
    "--max-num-seqs",
    "--gpu-memory-utilization",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--enable-expert-parallel",
    "--quantization",
    "--enable-prefix-caching",
}
NODE = Node(n_gpus=8, memory=80 * GiB)


def model(gib: float, **changes: object) -> VllmModel:
    facts: dict[str, object] = {
        "name": "org/model",
        "weights": int(gib * GiB),
        "kv_a_token": 320 * 1024,
        "n_layer": 80,
        "n_head": 64,
        "n_head_kv": 8,
        "n_ctx_train": 131072,
    }
    return VllmModel(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("gib", "split"), [(15, (1, 1, 8)), (131, (4, 1, 2)), (400, (8, 1, 1))])
def test_the_fewest_gpus_hold_it_and_the_rest_are_replicas(
    gib: float, split: tuple[int, int, int]
) -> None:
    made = plan_vllm(model(gib), NODE)
    assert (made.tensor_parallel, made.pipeline_parallel, made.data_parallel) == split
    assert made.weights + made.reserved + made.kv_cache <= made.utilization * NODE.memory


def test_over_pcie_layers_are_shared_by_two_at_most_and_stages_do_the_rest() -> None:
    made = plan_vllm(model(400), Node(n_gpus=8, memory=80 * GiB, link="pcie"))
    assert (made.tensor_parallel, made.pipeline_parallel) == (2, 4)
    assert "--pipeline-parallel-size 4" in made.command


def test_heads_that_do_not_divide_are_not_split() -> None:
    assert all(28 % tensor == 0 for tensor, _ in splits(model(15, n_head=28), NODE))


def test_what_does_not_fit_says_how_much_is_missing_and_the_smallest_fix() -> None:
    with pytest.raises(DoesNotFitError, match="8 GPUs give 588") as caught:
        plan_vllm(model(1300), NODE)
    assert caught.value.smallest_fix == "--fp8 halves the weights"


def test_every_option_is_one_of_vllms() -> None:
    made = [
        plan_vllm(model(131, has_experts=True, quantization="fp8"), NODE),
        plan_vllm(model(400), Node(n_gpus=8, memory=80 * GiB, link="pcie")),
        plan_vllm(model(15), NODE),
    ]
    used = {word for plan in made for word in arguments(plan) if word.startswith("--")}
    assert used <= KNOWN
    assert used == KNOWN
    assert all(shlex.split(plan.command)[:3] == ["vllm", "serve", "org/model"] for plan in made)


def test_a_context_past_the_training_is_cut_to_it_since_vllm_refuses_more() -> None:
    made = plan_vllm(model(15, n_ctx_train=4096), NODE, n_ctx=32768)
    assert made.max_model_len == 4096
    assert any("4096 of its training" in warning for warning in made.warnings)


def test_a_longer_context_leaves_fewer_sequences() -> None:
    short, long = (plan_vllm(model(400), NODE, n_ctx=n) for n in (4096, 32768))
    assert short.max_num_seqs > long.max_num_seqs >= 1
    assert plan_vllm(model(131), NODE, n_seqs=7).max_num_seqs == 7


def test_a_gguf_gives_the_shape_and_the_original_weights_are_counted() -> None:
    shape = synthetic(n_layer=4)
    whole, half = (model_of(shape, "org/m", fp8=fp8) for fp8 in (False, True))
    assert (whole.weights, half.weights) == (2 * shape.n_params, shape.n_params)
    assert whole.kv_a_token == sum(2 * (x.k_width + x.v_width) for x in shape.layers)
    assert "reads no GGUF" in whole.warnings[0]
