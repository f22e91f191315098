"""What each GPU backend runs, and how much more than a tensor's bytes it allocates for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from edgellm.devices import Gpu
from edgellm.planner.graph import Node
from edgellm.planner.sched import Backend


def gpu_backend(gpu: Gpu) -> Backend:
    """How ``gpu``'s backend allocates and what it runs."""
    return Backend(
        alignment=_ALIGNMENT.get(gpu.backend, 128),
        offloads=gpu.backend in ("cuda", "rocm", "vulkan"),
        supports=_cuda_supports,
        alloc_size=_ALLOC_SIZE.get(gpu.backend, _plain_alloc_size),
        alloc_deps=moe_dependencies if gpu.backend in ("cuda", "rocm") else _no_dependencies,
    )


_OTHER_V: Final = {192: 128, 320: 256, 576: 512}
"""Heads whose K and V differ; every other kernel needs them equal."""
_HEADS: Final = frozenset({40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576})


def _cuda_supports(node: Node) -> bool:
    """ggml_backend_cuda_device_supports_op, where it matters."""
    if node.op == "FLASH_ATTN_EXT":
        k, v = node.src[1].ne[0], node.src[2].ne[0]
        return k in _HEADS and v == _OTHER_V.get(k, k)
    if node.op == "SSM_SCAN":
        return _scans(node)
    if node.op == "SSM_CONV":
        return node.src[0].ne[1] % 128 == 0
    if node.op == "GET_ROWS":
        return not node.src[0].is_weight or node.src[0].size >= 2 * node.src[0].ne[0]
    return True


def _scans(node: Node) -> bool:
    """The state sizes that have a kernel: mamba2's, then mamba's."""
    states, a = node.src[0].ne, node.src[3].ne
    if a[0] == 1:
        return states[0] in (96, 128, 256) and states[1] % 16 == 0
    return states[0] == 16 and states[1] == 1 and states[2] % 128 == 0


def _cuda_alloc_size(node: Node) -> int:
    """ggml_backend_cuda_buffer_type_get_alloc_size: a quantised cache is attended to as f16."""
    size = node.size
    if node.op == "FLASH_ATTN_EXT":
        k, v = node.src[1], node.src[2]
        shared = v.view is not None and v.view is k.view  # MLA: V is a part of K
        for t in (k,) if shared else (k, v):
            if t.type != "f16":
                size = -(-size // 128) * 128
                size += 2 * t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]
    return size + node.row_pad


_REDUCED_EXPERTS = 15
"""MOE_WEIGHTED_REDUCTION_MAX_EXPERTS in ggml-cuda.cu."""


def moe_dependencies(nodes: Sequence[Node]) -> list[tuple[Node, Node]]:
    """What ggml_backend_cuda_graph_optimize keeps for its fused expert kernels."""
    kept: list[tuple[Node, Node]] = []
    for i, node in enumerate(nodes):
        if node.op == "MUL":
            kept.extend(_reduction(nodes, i))
        elif node.op in ("SOFT_MAX", "UNARY", "ARGSORT"):
            kept.extend(_routing(nodes, i))
    return kept


def _reduction(nodes: Sequence[Node], i: int) -> list[tuple[Node, Node]]:
    """ggml_cuda_match_moe_weighted_reduction: experts and weights until their last sum."""
    node = nodes[i]
    used = node.ne[1]
    if not 2 <= used <= _REDUCED_EXPERTS or i + 2 * used > len(nodes):
        return []
    experts, weights = node.src[0], node.src[1]
    if weights.ne != (1, *node.ne[1:]) or experts.ne != node.ne:
        return []
    after = nodes[i + 1 : i + 2 * used]
    if [n.op for n in after] != ["VIEW"] * used + ["ADD"] * (used - 1) or after[0].src[
        0
    ] is not node:
        return []
    return [(experts, after[-1]), (weights, after[-1])]


_AFTER_GATE = (
    ("RESHAPE", "ARGSORT", "VIEW", "GET_ROWS"),
    ("RESHAPE", "ADD", "ARGSORT", "VIEW", "GET_ROWS"),
)
_NORM = ("RESHAPE", "SUM_ROWS", "CLAMP", "DIV", "RESHAPE")


def _routes_fast(n_expert: int) -> bool:
    """ggml_cuda_should_use_topk_moe: the counts of experts that have a kernel."""
    return n_expert in (288, 576) or (n_expert <= 512 and n_expert & (n_expert - 1) == 0)


def _routing(nodes: Sequence[Node], i: int) -> list[tuple[Node, Node]]:
    """ggml_cuda_topk_moe_fusion: the router's nodes until the one after them."""
    ops = tuple(n.op for n in nodes[i + 1 : i + 13])
    pattern = next((p for p in _AFTER_GATE if ops[: len(p)] == p), None)
    if pattern is None or nodes[i].op == "ARGSORT" or not _routes_fast(nodes[i].ne[0]):
        return []
    n = 1 + len(pattern)
    if ops[n - 1 : n - 1 + len(_NORM)] == _NORM:
        n += len(_NORM)
    if ops[n - 1 : n] == ("SCALE",):
        n += 1
    if i + n >= len(nodes):
        return []
    last = nodes[i + n]
    return [(t, last) for node in nodes[i : i + n] for t in (node, *node.src)]


def _no_dependencies(_nodes: Sequence[Node]) -> list[tuple[Node, Node]]:
    return []


def _plain_alloc_size(node: Node) -> int:
    """Vulkan and RPC: scratch memory is outside the graph's buffers."""
    return node.size


def _metal_alloc_size(node: Node) -> int:
    """ggml_backend_metal_buffer_type_get_alloc_size."""
    if node.op == "MUL_MAT_ID":
        experts, tokens = node.src[0].ne[2], node.src[2].ne[1]
        return node.size + 4 * experts * (1 + tokens) + 8 + 4 * 256
    if node.op == "FLASH_ATTN_EXT":
        return node.size + _metal_flash_extra(node)
    return node.size * 2 if node.op in ("CUMSUM", "ARGSORT") else node.size


def _metal_flash_extra(node: Node) -> int:
    """ggml_metal_op_flash_attn_ext_extra_{pad,blk,tmp,kv_f16}."""
    q, k, v = node.src[0], node.src[1], node.src[2]
    mask = node.src[3] if len(node.src) > 3 else None
    shared = v.view is not None and v.view is k.view  # MLA: V is a part of K
    k_row, v_row = k.nb[1], v.nb[1]
    if q.ne[1] >= 32 and k.type.startswith("q"):
        k_row, v_row = 2 * k.ne[0], 2 * (k.ne[0] if shared else v.ne[0])
    pad = k_row * k.ne[2] * k.ne[3] + v_row * v.ne[2] * v.ne[3]
    blocks = 0
    if mask is not None:
        pad += 2 * mask.ne[1] * mask.ne[2] * mask.ne[3]
        rows, columns = -(-q.ne[1] // 8), -(-mask.ne[0] // 64)
        blocks = -(-rows * columns * mask.ne[2] * mask.ne[3] // 32) * 32
    partial = 4 * min(q.ne[1], 32) * q.ne[2] * q.ne[3] * 32 * (v.ne[0] + 2)
    unpacked = 2 * k.ne[0] * k.ne[1] * k.ne[2] * k.ne[3]
    if not shared:
        unpacked += 2 * v.ne[0] * v.ne[1] * v.ne[2] * v.ne[3]
    return 64 * pad + blocks + partial + unpacked


_ALIGNMENT: Final = {"metal": 32}
_ALLOC_SIZE: Final[dict[str, Callable[[Node], int]]] = {
    "cuda": _cuda_alloc_size,
    "rocm": _cuda_alloc_size,
    "metal": _metal_alloc_size,
}
