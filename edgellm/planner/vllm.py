"""How vLLM should be started for a model on a node of equal GPUs. Pure.

vLLM 0.33's own parser accepts every line (benchmarks/vllm_lines.py). It reads safetensors; of a
GGUF only the shape is used here, and the weights are counted as the original ones (two bytes a
parameter, or one in FP8).
"""

from __future__ import annotations

import shlex
from typing import Final

import msgspec

from edgellm.errors import DoesNotFitError
from edgellm.gguf.shape import ModelShape
from edgellm.units import GiB, format_bytes

CHECKED_VERSION: Final = "0.33"
UTILIZATION: Final = 0.92
"""vLLM's own default for --gpu-memory-utilization (config/cache.py)."""
RESERVED: Final = 3 * GiB
"""Activations of a profile run, CUDA graphs and communication buffers on each GPU, inside it."""
MOST_SEQUENCES: Final = 256
TYPICAL_SHARE: Final = 4
"""A running request holds this part of the longest context, on average."""
ROOMY: Final = 4
LONGEST_DEFAULT: Final = 32768
FULL_SPEED_SLOW_LINK: Final = 2
"""GPUs that may share each layer over PCIe: two reductions a layer cross it."""


class VllmModel(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model counts here."""

    name: str
    """As vllm serve takes it: a repository or a folder."""
    weights: int
    """Bytes as they will be on the GPUs."""
    kv_a_token: int
    """Bytes of KV cache a token, f16, whole model."""
    n_layer: int
    n_head: int
    n_head_kv: int
    n_ctx_train: int
    has_experts: bool = False
    is_mla: bool = False
    quantization: str | None = None
    warnings: tuple[str, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Equal GPUs of one machine."""

    n_gpus: int
    memory: int
    """Bytes of each."""
    link: str = "nvlink"
    """nvlink or pcie."""


class VllmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The command, where the bytes of each GPU go, and why."""

    model: VllmModel
    node: Node
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    max_model_len: int
    max_num_seqs: int
    utilization: float
    weights: int
    """Bytes a GPU, as the two below."""
    reserved: int
    kv_cache: int
    kv_tokens: int
    """Tokens that the caches of one replica hold."""
    command: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def model_of(shape: ModelShape, name: str, *, fp8: bool) -> VllmModel:
    """A GGUF's model as vLLM would run the original."""
    layers = [layer for layer in shape.layers if layer.has_kv and not layer.is_nextn]
    kv = sum(2 * (layer.k_width + layer.v_width) for layer in layers)
    return VllmModel(
        name=name,
        weights=shape.n_params * (1 if fp8 else 2),
        kv_a_token=kv,
        n_layer=shape.n_layer,
        n_head=max((layer.n_head for layer in layers), default=1),
        n_head_kv=max((layer.n_head_kv for layer in layers), default=1),
        n_ctx_train=shape.n_ctx_train,
        has_experts=shape.n_expert > 0,
        is_mla=shape.is_mla,
        quantization="fp8" if fp8 else None,
        warnings=(
            f"vLLM {CHECKED_VERSION} reads no GGUF: give it the repository of the original weights",
        ),
    )


def plan_vllm(
    model: VllmModel, node: Node, *, n_ctx: int | None = None, n_seqs: int | None = None
) -> VllmPlan:
    """The smallest split that holds the model and one longest request; the other GPUs are replicas.

    Raises DoesNotFitError.
    """
    wanted = n_ctx or min(model.n_ctx_train or LONGEST_DEFAULT, LONGEST_DEFAULT)
    if model.n_ctx_train and wanted > model.n_ctx_train:
        model = _warned(model, f"vLLM takes no more than the {model.n_ctx_train} of its training")
        wanted = model.n_ctx_train
    # Room for several of the longest requests where there is a split that gives it, else for one.
    for n_longest in (ROOMY, 1):
        for tensor, pipeline in splits(model, node):
            kv = _kv_budget(model, node, tensor, pipeline)
            tokens = _kv_tokens(model, kv, tensor, pipeline)
            if kv > 0 and tokens >= n_longest * wanted:
                return _plan(model, node, (tensor, pipeline), wanted, n_seqs)
    need = model.weights + wanted * model.kv_a_token + node.n_gpus * RESERVED
    have = int(node.n_gpus * node.memory * UTILIZATION)
    raise DoesNotFitError(
        f"{model.name} needs {format_bytes(need)} with {wanted} tokens of context, "
        f"{node.n_gpus} GPUs give {format_bytes(have)}",
        device="GPUs",
        required=need,
        available=have,
        smallest_fix="--fp8 halves the weights" if model.quantization is None else None,
    )


def _warned(model: VllmModel, words: str) -> VllmModel:
    return msgspec.structs.replace(model, warnings=(*model.warnings, words))


def splits(model: VllmModel, node: Node) -> list[tuple[int, int]]:
    """(tensor, pipeline) sizes to try, the least split first."""
    sizes = [n for n in range(1, node.n_gpus + 1) if node.n_gpus % n == 0]
    found = [
        (tensor, used // tensor)
        for used in sizes
        for tensor in range(used, 0, -1)
        if used % tensor == 0 and model.n_head % tensor == 0
    ]
    limit = node.n_gpus if node.link == "nvlink" else FULL_SPEED_SLOW_LINK
    # Within one number of GPUs: tensor parallelism where the link carries it, else stages.
    return sorted(found, key=lambda s: (s[0] * s[1], s[0] > limit, -s[0]))


def _kv_budget(model: VllmModel, node: Node, tensor: int, pipeline: int) -> int:
    return int(node.memory * UTILIZATION) - RESERVED - model.weights // (tensor * pipeline)


def _kv_tokens(model: VllmModel, kv: int, tensor: int, pipeline: int) -> int:
    # KV heads are not cut: beyond their number each GPU holds copies; MLA is never cut.
    cut = 1 if model.is_mla else min(tensor, model.n_head_kv)
    return int(max(kv, 0) * cut * pipeline // max(model.kv_a_token, 1))


def _plan(
    model: VllmModel, node: Node, split: tuple[int, int], n_ctx: int, n_seqs: int | None
) -> VllmPlan:
    tensor, pipeline = split
    kv = _kv_budget(model, node, tensor, pipeline)
    tokens = _kv_tokens(model, kv, tensor, pipeline)
    typical = max(n_ctx // TYPICAL_SHARE, 1)
    sequences = n_seqs or max(1, min(MOST_SEQUENCES, tokens // typical))
    data = node.n_gpus // (tensor * pipeline)
    made = VllmPlan(
        model=model,
        node=node,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=data,
        max_model_len=n_ctx,
        max_num_seqs=sequences,
        utilization=UTILIZATION,
        weights=model.weights // (tensor * pipeline),
        reserved=RESERVED,
        kv_cache=kv,
        kv_tokens=tokens,
        command="",
        reasons=(),
        warnings=model.warnings,
    )
    return msgspec.structs.replace(made, command=_command(made), reasons=_reasons(made))


def arguments(plan: VllmPlan) -> list[str]:
    """What follows ``vllm serve``."""
    words = [plan.model.name, "--max-model-len", str(plan.max_model_len)]
    words += ["--max-num-seqs", str(plan.max_num_seqs)]
    words += ["--gpu-memory-utilization", f"{plan.utilization:g}"]
    for option, size in (
        ("--tensor-parallel-size", plan.tensor_parallel),
        ("--pipeline-parallel-size", plan.pipeline_parallel),
        ("--data-parallel-size", plan.data_parallel),
    ):
        if size > 1:
            words += [option, str(size)]
    if plan.model.has_experts and plan.tensor_parallel * plan.data_parallel > 1:
        words.append("--enable-expert-parallel")
    if plan.model.quantization is not None:
        words += ["--quantization", plan.model.quantization]
    return [*words, "--enable-prefix-caching"]


def _command(plan: VllmPlan) -> str:
    return shlex.join(["vllm", "serve", *arguments(plan)])


def _reasons(plan: VllmPlan) -> tuple[str, ...]:
    tensor, pipeline, data = plan.tensor_parallel, plan.pipeline_parallel, plan.data_parallel
    link = "NVLink" if plan.node.link == "nvlink" else "PCIe"
    found = [
        f"weights: {format_bytes(plan.model.weights)}, {format_bytes(plan.weights)} on each GPU",
        f"gpu-memory-utilization {plan.utilization:g}: of {format_bytes(plan.node.memory)} "
        f"vLLM gets {format_bytes(int(plan.node.memory * plan.utilization))}; "
        f"{format_bytes(plan.reserved)} of it are activations and CUDA graphs",
        f"tensor parallel {tensor}: the fewest GPUs that hold it, each layer shared over {link}"
        if tensor > 1
        else "tensor parallel 1: one GPU holds it, so nothing is exchanged in a layer",
    ]
    if pipeline > 1:
        found.append(
            f"pipeline parallel {pipeline}: {link} carries one hidden state a stage, not "
            "two reductions a layer"
        )
    if data > 1:
        found.append(f"data parallel {data}: the GPUs left over are replicas, which scale best")
    found.append(
        f"max-model-len {plan.max_model_len}: the caches of a replica hold {plan.kv_tokens} tokens"
    )
    found.append(
        f"max-num-seqs {plan.max_num_seqs}: requests of a quarter of that length fill the caches"
    )
    return tuple(found)
