"""The search: fastest plan, levers in order, and properties over random models and budgets."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.devices import Devices, Gpu, Host, hypothetical
from edgellm.errors import DoesNotFitError
from edgellm.gguf.shape import LayerShape, ModelShape, Tensor
from edgellm.planner.filling import distribute
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.planner.search import SAME
from edgellm.units import GiB, MiB

HOST = Host(cpu="cpu", n_physical=8, n_logical=16, total=64 * GiB, available=60 * GiB)


def machine(*vram: int, ram: int = 60 * GiB) -> Devices:
    host = Host(cpu="cpu", n_physical=8, n_logical=16, total=64 * GiB, available=ram)
    return Devices(host=host, gpus=hypothetical(vram))


def synthetic(
    n_layer: int = 12, n_embd: int = 512, n_ff: int = 2048, n_expert: int = 0, n_vocab: int = 8192
) -> ModelShape:
    """A dense or expert model of Q4_K matrices, sized like its numbers."""

    def tensor(name: str, *dims: int) -> Tensor:
        count = 1
        for dim in dims:
            count *= dim
        return Tensor(name, dims, "Q4_K", count * 144 // 256, 0)

    def layer(il: int) -> LayerShape:
        def own(name: str, *dims: int) -> Tensor:
            return tensor(f"blk.{il}.{name}.weight", *dims)

        parts = [
            own("attn_norm", n_embd),
            own("attn_q", n_embd, n_embd),
            own("attn_k", n_embd, n_embd // 4),
            own("attn_v", n_embd, n_embd // 4),
            own("attn_output", n_embd, n_embd),
            own("ffn_norm", n_embd),
        ]
        names = ("ffn_gate", "ffn_up", "ffn_down")
        experts = []
        if n_expert:
            parts.append(own("ffn_gate_inp", n_embd, n_expert))
            experts = [
                own(
                    f"{name}_exps",
                    *((n_ff, n_embd) if "down" in name else (n_embd, n_ff)),
                    n_expert,
                )
                for name in names
            ]
        else:
            parts += [
                own(name, *((n_ff, n_embd) if "down" in name else (n_embd, n_ff))) for name in names
            ]
        head = 64
        return LayerShape(
            n_head=n_embd // head,
            n_head_kv=n_embd // head // 4,
            n_ff=n_ff,
            n_expert_used=2 if n_expert else 0,
            head_k=head,
            head_v=head,
            k_width=n_embd // 4,
            v_width=n_embd // 4,
            tensors=(*parts, *experts),
            expert_tensors=tuple(experts),
        )

    layers = tuple(layer(il) for il in range(n_layer))
    outside = [tensor("token_embd.weight", n_embd, n_vocab)]
    output = [tensor("output_norm.weight", n_embd), tensor("output.weight", n_embd, n_vocab)]
    return ModelShape(
        name="synthetic",
        path="synthetic.gguf",
        arch="qwen3moe" if n_expert else "llama",
        quant="Q4_K_M",
        file_bytes=sum(x.n_bytes for x in layers),
        n_params=1,
        n_layer_all=n_layer,
        n_ctx_train=32768,
        n_embd=n_embd,
        n_embd_out=n_embd,
        n_vocab=n_vocab,
        n_expert=n_expert,
        n_expert_used=2 if n_expert else 0,
        layers=layers,
        input_tensors=tuple(outside),
        output_tensors=tuple(output),
    )


models = st.builds(
    synthetic,
    n_layer=st.integers(2, 24),
    n_embd=st.sampled_from([256, 512, 1024]),
    n_ff=st.sampled_from([1024, 2048, 4096]),
    n_expert=st.sampled_from([0, 0, 8]),
    n_vocab=st.sampled_from([1024, 32768]),
)
budgets = st.integers(0, 4096).map(lambda mib: mib * MiB)


def on_gpu(plan: Plan) -> int:
    return sum(d.n_layers for d in plan.devices)


def test_an_8b_model_at_4096_fits_whole_in_6_gib(shape_of: Callable[[str], ModelShape]) -> None:
    plan = make_plan(shape_of("llama-3.1-8b"), machine(6 * GiB), PlanRequest(n_ctx=4096))
    assert plan.verdict == "gpu"
    assert (plan.params.n_ctx, plan.params.type_k, plan.params.n_ubatch) == (4096, "f16", 512)


def test_a_card_that_is_too_small_gets_part_of_the_model(
    shape_of: Callable[[str], ModelShape],
) -> None:
    plan = make_plan(shape_of("llama-3.1-8b"), machine(4 * GiB), PlanRequest(n_ctx=4096))
    assert plan.verdict == "partial"
    assert 20 <= plan.params.n_gpu_layers <= 26
    assert plan.binding.startswith("memory of GPU0")


def test_experts_go_to_the_host_before_layers(shape_of: Callable[[str], ModelShape]) -> None:
    plan = make_plan(shape_of("qwen3-30b-a3b"), machine(8 * GiB), PlanRequest())
    assert plan.params.n_gpu_layers == 49
    assert 0 < plan.params.n_cpu_moe < 48


def test_without_a_card_everything_is_on_the_host(shape_of: Callable[[str], ModelShape]) -> None:
    plan = make_plan(shape_of("llama-3.2-1b"), machine(), PlanRequest())
    assert plan.verdict == "cpu"
    assert plan.host.weights > 700 * MiB


def test_a_model_larger_than_everything_is_refused_with_the_numbers() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make_plan(
            synthetic(n_layer=24, n_embd=1024, n_ff=4096), machine(ram=64 * MiB), PlanRequest()
        )
    assert caught.value.device == "host"
    assert caught.value.required > caught.value.available > 0
    assert caught.value.smallest_fix


def test_force_gives_the_nearest_plan() -> None:
    request = PlanRequest(force=True)
    plan = make_plan(synthetic(n_layer=24), machine(ram=16 * MiB), request)
    assert plan.verdict == "does_not_fit"


def test_a_margin_of_zero_is_zero() -> None:
    plan = make_plan(synthetic(), machine(2 * GiB), PlanRequest(margin=0))
    assert plan.devices[0].margin == 0


def test_the_context_objective_grows_to_what_the_card_holds() -> None:
    shape = synthetic(n_layer=24, n_embd=1024, n_ff=4096)
    small = make_plan(shape, machine(1 * GiB), PlanRequest())
    grown = make_plan(shape, machine(1 * GiB), PlanRequest(objective="context"))
    assert grown.params.n_ctx > small.params.n_ctx
    assert grown.speed.decode_tps >= small.speed.decode_tps * 0.98


def test_a_second_card_takes_what_the_first_cannot(shape_of: Callable[[str], ModelShape]) -> None:
    plan = make_plan(shape_of("llama-3.1-8b"), machine(4 * GiB, 4 * GiB), PlanRequest(n_ctx=4096))
    assert plan.verdict == "gpu"
    assert all(d.n_layers for d in plan.devices)
    assert sum(d.n_layers for d in plan.devices) == 33


def test_a_card_with_no_room_for_a_layer_is_left_out(
    shape_of: Callable[[str], ModelShape],
) -> None:
    plan = make_plan(shape_of("llama-3.1-8b"), machine(8 * GiB, 512 * MiB), PlanRequest())
    assert [d.used > 0 for d in plan.devices] == [True, False]
    assert plan.params.devices == ("GPU0",)


def test_distribute_fills_the_fastest_first() -> None:
    assert distribute([1] * 10, [4, 8], [1.0, 9.0]) == (2, 8)
    assert distribute([1] * 10, [4, 8], [9.0, 1.0]) == (4, 6)
    assert distribute([1] * 10, [4, 5], [1.0, 1.0]) is None
    assert distribute([5], [4, 5], [9.0, 1.0]) == (0, 1)


@settings(max_examples=40, deadline=None)
@given(shape=models, vram=budgets, n_ctx=st.sampled_from([512, 2048, 8192]))
def test_no_device_is_ever_over_its_budget(shape: ModelShape, vram: int, n_ctx: int) -> None:
    plan = make_plan(shape, machine(vram), PlanRequest(n_ctx=n_ctx))
    assert plan.params.n_ctx >= n_ctx > 0
    for device in plan.devices:
        assert device.used <= max(device.free - device.margin, 0)
        entries = device.weights + device.kv_cache + device.recurrent_state + device.compute
        assert device.used == entries + device.overhead


@settings(max_examples=40, deadline=None)
@given(shape=models, vram=budgets, more=budgets)
def test_more_vram_is_never_slower_nor_fewer_layers(
    shape: ModelShape, vram: int, more: int
) -> None:
    small = make_plan(shape, machine(vram), PlanRequest())
    large = make_plan(shape, machine(vram + more), PlanRequest())
    assert large.speed.decode_tps >= small.speed.decode_tps * 0.98
    if not shape.n_expert:
        assert on_gpu(large) >= on_gpu(small)


@settings(max_examples=25, deadline=None)
@given(shape=models, vram=budgets)
def test_the_same_input_gives_the_same_plan(shape: ModelShape, vram: int) -> None:
    first = make_plan(shape, machine(vram), PlanRequest())
    assert make_plan(shape, machine(vram), PlanRequest()) == first


@settings(max_examples=25, deadline=None)
@given(shape=models, first=budgets, second=budgets)
def test_another_card_never_makes_it_worse(shape: ModelShape, first: int, second: int) -> None:
    one = make_plan(shape, machine(first), PlanRequest())
    two = make_plan(shape, machine(first, second), PlanRequest())
    assert two.speed.decode_tps >= one.speed.decode_tps * 0.98


NAMES = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce GTX 1060", "NVIDIA GeForce RTX 4060", "a card")


def pair_of(names: tuple[str, str], free: tuple[int, int], link: tuple[float, float]) -> Devices:
    """Two cards of these kinds; the first in another machine where the link has a latency."""
    latency, bandwidth = link
    local = [
        Gpu(id=f"CUDA{i}", name=name, backend="cuda", total=max(size, 1), free=size)
        for i, (name, size) in enumerate(zip(names, free, strict=True))
    ]
    if latency:
        far = {"endpoint": "10.0.0.1:50052", "link_latency_s": latency, "link_bandwidth": bandwidth}
        local[0] = msgspec.structs.replace(local[0], id="RPC0", backend="rpc", **far)
        local[1] = msgspec.structs.replace(local[1], id="CUDA0")
    return Devices(host=HOST, gpus=tuple(local))


@settings(max_examples=60, deadline=None)
@given(
    shape=models,
    names=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
    free=st.tuples(budgets, budgets),
    link=st.sampled_from([(0.0, 0.0), (1e-4, 1.2e9), (3e-3, 2.5e7), (0.2, 1e6)]),
    n_ctx=st.sampled_from([512, 4096, 32768]),
)
def test_a_pair_is_never_slower_than_the_better_card_alone(
    shape: ModelShape,
    names: tuple[str, str],
    free: tuple[int, int],
    link: tuple[float, float],
    n_ctx: int,
) -> None:
    """By the predictor that chose; a card that holds nothing is said to be left out."""
    both, request = pair_of(names, free, link), PlanRequest(n_ctx=n_ctx, n_seq_max=2)
    plan = make_plan(shape, both, request)
    alone = [
        make_plan(shape, msgspec.structs.replace(both, gpus=gpus), request)
        for gpus in (both.gpus[:1], both.gpus[1:])
    ]
    best = max(one.speed.decode_tps for one in alone)
    assert plan.speed.decode_tps >= best / (1 + SAME)
    if sum(1 for d in plan.devices if d.used) == 2:
        assert plan.speed.decode_tps > best * (1 - 1e-9)
