"""ggml's scheduler and graph allocator on shapes: which backend runs a node, what must be copied,
how much scratch memory each backend needs.

ggml_backend_sched_split_graph in ggml/src/ggml-backend.cpp and ggml_gallocr_alloc_graph_impl in
ggml/src/ggml-alloc.c, pass by pass; what cannot happen here (user assignments, several buffer
types a backend) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from edgellm.planner.graph import IN_PLACE, VIEW_OPS, Graph, Node, row_size

PIPELINE_COPIES: Final = 4
"""GGML_SCHED_MAX_COPIES: inputs kept by several GPUs that work on different ubatches at once."""
OFFLOAD_BATCH: Final = 32
"""Tokens from which a GPU takes over an operation whose weights are on the host."""


@dataclass(frozen=True)
class Backend:
    """What the scheduler asks of a backend. The host is the last of them."""

    is_host: bool = False
    alignment: int = 128
    offloads: bool = True
    """Runs large batches of layers that are on the host (offload_op)."""
    supports: Callable[[Node], bool] = lambda _node: True
    alloc_size: Callable[[Node], int] = lambda node: node.size
    alloc_deps: Callable[[Sequence[Node]], list[tuple[Node, Node]]] = lambda _nodes: []
    """(tensor, until): kept alive for fused kernels (graph_optimize)."""


HOST_BACKEND: Final = Backend(is_host=True, alignment=32, offloads=False)


def compute_sizes(graph: Graph, backends: Sequence[Backend], *, copies: int = 1) -> list[int]:
    """Bytes of each backend's compute buffer for ``graph``, which is used up."""
    assign(graph, backends)
    nodes, leafs = split(graph, backends, copies)
    return Allocator(backends).run(nodes, leafs)


# --- which backend runs what ------------------------------------------------------------------


def assign(graph: Graph, backends: Sequence[Backend]) -> None:
    """Passes 1 to 4 of ggml_backend_sched_split_graph."""
    host = len(backends) - 1
    for node in (*graph.leafs, *graph.nodes):
        node.backend = node.pin if node.pin is not None else _from_current(node, backends, host)
    real = [node for node in graph.nodes if node.op not in VIEW_OPS]
    back = real[::-1]
    for order, skip in ((real, host), (back, host), (real, -2), (back, -2)):
        _spread(order, backends, skip)
    for node in real:
        if node.backend == -1:
            node.backend = _most_inputs(node, backends)
    for node in graph.nodes:
        _assign_sources(node)


def _from_current(node: Node, backends: Sequence[Backend], host: int) -> int:
    """ggml_backend_sched_backend_id_from_cur: -1 where nothing decides yet."""
    where = node.view.place if node.view is not None else node.place
    if where is not None:
        return where
    if node.is_input:
        return host
    if node.op in ("ROPE", "FLASH_ATTN_EXT"):
        return -1
    for s in node.src:
        if s.is_weight and s.place is not None:
            if s.place == host and _batch(node) >= OFFLOAD_BATCH:
                for i in range(host):
                    if backends[i].offloads and backends[i].supports(node):
                        return i
            return s.place
    return -1


def _batch(node: Node) -> int:
    """get_op_batch_size in ggml-cuda.cu."""
    if node.op == "GET_ROWS":
        return 0
    if node.op == "MUL_MAT":
        return node.ne[1]
    if node.op in ("MUL_MAT_ID", "ROPE"):
        return node.ne[2]
    return node.ne[1] * node.ne[2] * node.ne[3]


def _spread(order: Sequence[Node], backends: Sequence[Backend], skip: int) -> None:
    """Give unassigned nodes their neighbour's backend; ``skip`` is the one not to spread."""
    current = -1
    for node in order:
        if node.backend != -1:
            current = -1 if node.backend == skip else node.backend
        elif current != -1 and backends[current].supports(node):
            node.backend = current


def _most_inputs(node: Node, backends: Sequence[Backend]) -> int:
    """Pass 3: the backend that has most of the inputs already."""
    best, count = -1, -1
    for i, backend in enumerate(backends):
        if backend.supports(node):
            held = sum(1 for s in node.src if _home(s) == i)
            if held > count:
                best, count = i, held
    return best


def _home(node: Node) -> int:
    """The backend whose buffer type holds ``node``; -1 while unknown."""
    root = node.view if node.view is not None else node
    if root.place is not None:
        return root.place
    return node.backend if node.backend != -1 else root.backend


def _assign_sources(node: Node) -> None:
    """Pass 4: what is left follows what it views, or its user."""
    if node.view is not None and node.backend == -1:
        node.backend = node.view.backend
    for s in node.src:
        if s.backend == -1:
            s.backend = s.view.backend if s.view is not None else node.backend


# --- splits and copies ------------------------------------------------------------------------


def split(
    graph: Graph, backends: Sequence[Backend], copies: int
) -> tuple[list[tuple[Node, int]], list[tuple[Node, int]]]:
    """Pass 5 and the graph copy: nodes and leafs in order of allocation, each with its backend."""
    splits = _cut(graph, copies)
    nodes: list[tuple[Node, int]] = []
    leafs: list[tuple[Node, int]] = []
    for part in splits:
        for source, copy in part.inputs:
            keep = Node("NONE", source.type, source.ne, source.nb, source.size)
            keep.src, keep.view = [source], source.view or source
            nodes.append((keep, source.backend))
            nodes.append((copy[0], part.backend))
            leafs.extend((c, part.backend) for c in copy if copies > 1)
        until = _dependencies(part.nodes, backends[part.backend])
        for node in part.nodes:
            nodes.append((node, node.backend))
            if node in until:
                nodes.append((_dependency(until[node]), part.backend))
    if copies > 1:
        leafs[:0] = _input_copies(graph, copies)
    leafs.extend((leaf, leaf.backend) for leaf in graph.leafs)
    return nodes, leafs


class _Split:
    __slots__ = ("backend", "inputs", "nodes")

    def __init__(self, backend: int) -> None:
        self.backend = backend
        self.nodes: list[Node] = []
        self.inputs: list[tuple[Node, list[Node]]] = []


def _cut(graph: Graph, copies: int) -> list[_Split]:
    first = next((n.backend for n in graph.nodes if n.op not in VIEW_OPS), 0)
    current = _Split(first)
    splits = [current]
    made: dict[tuple[int, int], list[Node]] = {}
    for node in graph.nodes:
        if node.op in VIEW_OPS:
            current.nodes.append(node)
            continue
        if node.backend != current.backend or (current.inputs and _wants_split(node, current)):
            current = _Split(node.backend)
            splits.append(current)
        for i, s in enumerate(node.src):
            if s.backend == current.backend or _home(s) == current.backend:
                continue
            key = (id(s), current.backend)
            if key not in made:
                made[key] = [_copy(s, copies) for _ in range(copies)]
                current.inputs.append((s, made[key]))
            node.src[i] = made[key][0]
        current.nodes.append(node)
    return splits


def _wants_split(node: Node, current: _Split) -> bool:
    """A weight of another backend starts a new split, so that the last one's copy can be freed."""
    return any(s.is_weight and current.backend not in (s.backend, s.place) for s in node.src)


def _copy(source: Node, copies: int) -> Node:
    """ggml_dup_tensor_layout."""
    copy = Node("NONE", source.type, source.ne, source.nb, source.size)
    copy.is_input = copy.is_output = copies > 1
    copy.row_pad = source.row_pad
    return copy


def _input_copies(graph: Graph, copies: int) -> list[tuple[Node, int]]:
    """Every graph input once more a copy, kept for the ubatches under way."""
    extra = []
    for leaf in graph.leafs:
        if leaf.is_input:
            leaf.is_output = True
            extra.append((leaf, leaf.backend))
            extra.extend((_copy(leaf, copies), leaf.backend) for _ in range(copies - 1))
    return extra


def _dependencies(nodes: Sequence[Node], backend: Backend) -> dict[Node, list[Node]]:
    until: dict[Node, list[Node]] = {}
    for tensor, last in backend.alloc_deps(nodes):
        kept = until.setdefault(last, [])
        if tensor not in kept:
            kept.append(tensor)
    return until


def _dependency(kept: list[Node]) -> Node:
    node = Node("NONE", kept[0].type, kept[0].ne, kept[0].nb, 0)
    node.src, node.view = list(kept), kept[0].view or kept[0]
    return node


# --- allocation -------------------------------------------------------------------------------


class Arena:
    """ggml_dyn_tallocr: best fit among free blocks, the last block growing."""

    __slots__ = ("align", "free", "top")

    def __init__(self, align: int) -> None:
        self.align = align
        self.free: list[list[int]] = [[0, 1 << 62]]
        self.top = 0

    def take(self, size: int) -> int:
        size = -(-size // self.align) * self.align
        blocks = self.free
        best, best_size = -1, 1 << 62
        for i in range(len(blocks) - 1):
            if size <= blocks[i][1] <= best_size:
                best, best_size = i, blocks[i][1]
        block = blocks[best]
        at = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            del blocks[best]
        self.top = max(self.top, at + size)
        return at

    def give(self, at: int, size: int) -> None:
        size = -(-size // self.align) * self.align
        blocks = self.free
        end = at + size
        for i, block in enumerate(blocks):
            if block[0] + block[1] == at:
                block[1] += size
                if i + 1 < len(blocks) and blocks[i + 1][0] == end:
                    block[1] += blocks[i + 1][1]
                    del blocks[i + 1]
                return
            if end == block[0]:
                block[0], block[1] = at, block[1] + size
                return
            if block[0] > at:
                blocks.insert(i, [at, size])
                return
        blocks.append([at, size])


class Allocator:
    """ggml_gallocr_alloc_graph_impl: leafs first, then nodes, each freed after its last use.

    Notes are kept in the nodes: a graph can be allocated once.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.sizes = [backend.alloc_size for backend in backends]
        self.arenas = [Arena(backend.alignment) for backend in backends]

    def run(self, nodes: list[tuple[Node, int]], leafs: list[tuple[Node, int]]) -> list[int]:
        for leaf, backend in leafs:
            self._allocate(leaf, backend)
        for node, backend in nodes:
            if node.view is not None and node.op != "NONE":
                node.view.views += 1
            if node.is_input:
                self._allocate(node, backend)
            for s in node.src:
                s.children += 1
                if s.is_input:
                    self._allocate(s, backend)
        for node, backend in nodes:
            for s in node.src:
                if not s.allocated and s.place is None and s.view is None:
                    self._allocate(s, backend)
            if node.view is None:
                self._allocate(node, backend)
            for s in node.src:
                self._release(s)
        return [arena.top for arena in self.arenas]

    def _allocate(self, node: Node, backend: int) -> None:
        if node.allocated or node.place is not None or node.view is not None:
            return
        node.allocated = True
        if node.op in IN_PLACE:
            for parent in node.src:
                if self._reuse(node, parent):
                    return
        node.buffer = backend
        node.addr = self.arenas[backend].take(self.sizes[backend](node))

    def _reuse(self, node: Node, parent: Node) -> bool:
        """Take over a parent's memory where it is its last user and of the same layout."""
        # a view is never marked allocated, so it is never taken over
        if parent.view is not None or not parent.allocated or parent.is_output:
            return False
        if parent.type != node.type or parent.ne != node.ne or parent.nb != node.nb:
            return False
        if parent.children != 1 or parent.views != 0:
            return False
        owner = parent
        node.buffer, node.addr = owner.buffer, owner.addr
        owner.allocated = False
        self._give_rest(node, owner)
        return True

    def _give_rest(self, node: Node, owner: Node) -> None:
        arena, size = self.arenas[owner.buffer], self.sizes[owner.buffer]
        align = arena.align
        had, has = (-(-size(n) // align) * align for n in (owner, node))
        if had > has:
            arena.give(owner.addr + has, had - has)

    def _release(self, node: Node) -> None:
        node.children -= 1
        if node.children or node.views:
            return
        root = node.view
        if root is None:
            if node.allocated:
                self._free(node)
            return
        root.views -= 1
        if root.views == 0 and root.children == 0 and root.allocated:
            self._free(root)

    def _free(self, node: Node) -> None:
        if node.is_output:
            return
        self.arenas[node.buffer].give(node.addr, self.sizes[node.buffer](node))
        node.allocated = False


__all__ = ["HOST_BACKEND", "Allocator", "Backend", "Node", "compute_sizes", "row_size"]
