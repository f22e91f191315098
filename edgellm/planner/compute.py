"""The scratch memory of one step: what ggml's graph allocator reserves. Pure.

``llama_context::sched_reserve`` reserves for the largest prompt step; the graph is built on shapes
(build.py), given to backends and allocated (sched.py) as llama.cpp does it. Blocks that repeat are
built a few times only: the allocator's state repeats with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgellm.devices import Gpu
from edgellm.gguf.shape import LayerShape, ModelShape
from edgellm.planner.backends import gpu_backend
from edgellm.planner.blocks import Step
from edgellm.planner.build import Builder
from edgellm.planner.memo import remembered
from edgellm.planner.memory import CacheShape
from edgellm.planner.placement import HOST
from edgellm.planner.plan import PlanParams
from edgellm.planner.sched import HOST_BACKEND, PIPELINE_COPIES, Backend, assign, compute_sizes
from edgellm.planner.types import is_quantized

NO_GRAPH: Final = (LookupError, ArithmeticError, ValueError, AttributeError, TypeError)
"""What building a graph of tensors that do not belong together may end in."""


ROUGH: Final = {
    "rwkv6": (1.0, 14.4),
    "rwkv7": (1.0, 18.4),
}
"""Graphs not followed step by step: (hidden states more, hidden states at least), as measured."""


ASYNCHRONOUS: Final = frozenset({"cuda", "rocm", "vulkan", "metal", "rpc"})
"""Backends whose devices compute and signal events by themselves (caps.async, caps.events)."""


@dataclass(frozen=True)
class Compute:
    devices: tuple[int, ...]
    host: int


def compute_bytes(
    shape: ModelShape,
    params: PlanParams,
    cache: CacheShape,
    *,
    devices: Sequence[int],
    flash: bool,
    gpus: Sequence[Gpu],
    every_block: bool = False,
) -> Compute:
    """Bytes of each GPU's compute buffer and of the host's.

    ``every_block`` builds all of them: exacter where layers are on the host, and much slower.
    """
    n_seqs = params.n_seq_max
    tokens = min(params.n_ctx, params.n_ubatch)
    outputs = min(tokens, params.n_outputs_max or params.n_batch)
    if tokens % n_seqs:
        tokens = -(-tokens // n_seqs) * n_seqs
    step = Step(
        n_tokens=tokens,
        n_seqs=n_seqs,
        n_outputs=outputs,
        cells=cache.cells,
        swa_cells=cache.swa_cells,
        n_stream=cache.n_stream,
        flash=flash,
        v_trans=params.flash_attn == "off",
        type_k=params.type_k,
        type_v=params.type_v,
        offload_kqv=params.offload_kqv,
    )
    host = len(gpus)
    places = [host if d == HOST else d for d in devices]
    experts = [host if il < params.n_cpu_moe else places[il] for il in range(shape.n_layer)]
    backends = [*(gpu_backend(gpu) for gpu in gpus), HOST_BACKEND]
    full = bool(gpus) and HOST not in devices
    copies = PIPELINE_COPIES if full and runs_pipelined(params, gpus) else 1
    if every_block:
        picked = [(il, places[il], experts[il]) for il in range(shape.n_layer)]
    else:
        picked = representative(shape, places, experts, host)
    sizes = step_sizes(shape, step, places, picked, backends=backends, full=full, copies=copies)
    hidden = 4 * tokens * shape.n_embd
    more, least = ROUGH.get(shape.arch, (0.0, 0.0))
    cards = [max(int(n + more * hidden), int(least * hidden)) if n else n for n in sizes[:-1]]
    return Compute(tuple(cards), sizes[-1])


def runs_pipelined(params: PlanParams, gpus: Sequence[Gpu]) -> bool:
    """Several ubatches under way on several GPUs (llama_context: pipeline_parallel)."""
    return (
        len(gpus) > 1
        and params.split_mode == "layer"
        and params.offload_kqv
        and not params.n_cpu_moe
        and all(gpu.backend in ASYNCHRONOUS for gpu in gpus)
    )


def flash_resolves(
    shape: ModelShape, params: PlanParams, devices: Sequence[int], gpus: Sequence[Gpu]
) -> bool:
    """What ``flash_attn`` becomes: ``auto`` is on when every attention runs where its block is.

    llama_context::resolve_fused_ops tries it with one token a sequence.
    """
    if params.flash_attn != "auto" or not gpus:
        return params.flash_attn != "off"
    if is_quantized(params.type_v):  # llama_init_from_model: it is required, so it is on
        return True
    host = len(gpus)
    places = [host if d == HOST else d for d in devices]
    experts = [host if il < params.n_cpu_moe else places[il] for il in range(shape.n_layer)]
    n = params.n_seq_max
    step = Step(
        n_tokens=n,
        n_seqs=n,
        n_outputs=n,
        cells=256,
        swa_cells=256,
        n_stream=1 if params.kv_unified else n,
        flash=True,
        type_k=params.type_k,
        type_v=params.type_v,
        offload_kqv=params.offload_kqv,
    )
    picked = representative(shape, places, experts, host)

    def work_out() -> bool:
        try:
            graph = Builder(shape, step, picked, host).build(places[-1], [p for _, p, _ in picked])
        except NO_GRAPH:
            return True
        assign(graph, [*(gpu_backend(gpu) for gpu in gpus), HOST_BACKEND])
        wanted = {f"flash-{il}": place for il, place, _ in picked}
        return all(wanted.get(n.name, n.backend) == n.backend for n in graph.nodes)

    kinds = tuple((kind_of(shape.layers[il], False), a, b) for il, a, b in picked)
    return bool(remembered(shape, ("flash", step, kinds, places[-1]), work_out))


def step_sizes(
    shape: ModelShape,
    step: Step,
    places: Sequence[int],
    picked: Sequence[tuple[int, int, int]],
    *,
    backends: Sequence[Backend],
    full: bool,
    copies: int = 1,
) -> list[int]:
    """Bytes a backend of one step's graph."""
    host = len(backends) - 1
    pins = [place if full or step.n_tokens < 32 else None for _, place, _ in picked]

    def work_out() -> list[int]:
        try:
            graph = Builder(shape, step, picked, host).build(places[-1], pins)
        except NO_GRAPH:
            return generic_sizes(shape, step, places, host)
        return compute_sizes(graph, backends, copies=copies)

    kinds = tuple((kind_of(shape.layers[il], True), a, b) for il, a, b in picked)
    traits = tuple((b.alignment, b.offloads, b.alloc_size) for b in backends)
    sizes: list[int] = remembered(shape, (step, kinds, places[-1], full, copies, traits), work_out)
    return sizes


def generic_sizes(shape: ModelShape, step: Step, places: Sequence[int], host: int) -> list[int]:
    """What any transformer needs: logits, a few hidden states, a mask. For tensors that make no
    graph we know: a file with some missing, or of a new kind."""
    widest = max((max(x.n_ff, x.n_head * x.head_k) for x in shape.layers), default=0)
    hidden = 4 * step.n_tokens * (4 * shape.n_embd + 3 * widest)
    mask = step.n_tokens * step.cells * (2 if step.flash else 4)
    logits = 4 * step.n_outputs * shape.n_vocab
    scores = 0
    if not step.flash:
        heads = max((x.n_head for x in shape.layers), default=0)
        scores = 2 * 4 * step.n_tokens * step.cells * heads
    need = max(hidden + mask + scores, logits + 4 * step.n_tokens * shape.n_embd)
    sizes = [need if i in places else 0 for i in range(host)]
    return [*sizes, need if host in places or not sizes else mask + hidden // 4]


def representative(
    shape: ModelShape, places: Sequence[int], experts: Sequence[int], host: int
) -> list[tuple[int, int, int]]:
    """Blocks that stand for all: of like neighbourhoods the two with most weights on the host.

    The allocator's state repeats with the blocks; what is copied to a GPU for a step does not.
    """
    n = shape.n_layer
    kinds = [(kind_of(shape.layers[il], False), places[il], experts[il]) for il in range(n)]
    groups: dict[object, list[int]] = {}
    for il in range(n):
        groups.setdefault(tuple(kinds[max(il - 1, 0) : il + 2]), []).append(il)
    chosen = {n - 1, n - 2} & set(range(n))
    for members in groups.values():
        heaviest = members
        if host in (places[members[0]], experts[members[0]]):
            heaviest = sorted(members, key=lambda il: -shape.layers[il].n_bytes)
        chosen.update(heaviest[:2])
    return [(il, places[il], experts[il]) for il in sorted(chosen)]


_kinds: dict[int, tuple[LayerShape, tuple[int, int]]] = {}


def kind_of(layer: LayerShape, with_bytes: bool) -> int:
    """A number for what the graph of a block depends on; its tensors' bytes too when asked."""
    held = _kinds.get(id(layer))
    if held is None or held[0] is not layer:
        key = (
            (layer.n_head, layer.n_head_kv, layer.is_swa, layer.is_recurrent, layer.has_kv),
            tuple((t.name.split(".", 2)[-1], t.dims) for t in layer.tensors),
        )
        both = (hash(key), hash((key, tuple(t.n_bytes for t in layer.tensors))))
        if len(_kinds) > 4096:
            _kinds.clear()
        held = _kinds[id(layer)] = (layer, both)
    return held[1][with_bytes]
