"""What every part of the graph builder shares: the step, a block's tensors, small pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from edgellm.gguf.shape import LayerShape, ModelShape, Tensor
from edgellm.planner.graph import MATRIX_ROW_PADDING, Graph, Node
from edgellm.planner.styles import Style

_PLAIN: Final = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})


@dataclass(frozen=True)
class Step:
    """The step that memory is reserved for (llama_context::sched_reserve)."""

    n_tokens: int
    n_seqs: int
    n_outputs: int
    cells: int
    swa_cells: int
    n_stream: int
    flash: bool
    v_trans: bool = False
    """V is kept transposed: the cache is made before ``auto`` is found to be off."""
    type_k: str = "f16"
    type_v: str = "f16"
    embeddings: bool = False
    pooling: str = "none"
    offload_kqv: bool = True


@dataclass
class Layer:
    """One block's tensors as nodes, made when they are first used."""

    graph: Graph
    il: int
    shape: LayerShape
    place: int
    expert_place: int
    cache_place: int
    tensors: dict[str, Tensor]
    nodes: dict[str, Node] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or f"{name}.weight" in self.tensors

    def get(self, name: str) -> Node | None:
        """The tensor called ``name`` (``.weight`` may be left out); None where there is none."""
        if name not in self.tensors:
            name = f"{name}.weight"
            if name not in self.tensors:
                return None
        node = self.nodes.get(name)
        if node is None:
            tensor = self.tensors[name]
            place = self.expert_place if tensor in self.shape.expert_tensors else self.place
            node = weight(self.graph, tensor, place)
            self.nodes[name] = node
        return node

    def need(self, *names: str) -> Node:
        """The first of ``names`` that is there; an empty stand-in keeps a strange file going."""
        for name in names:
            node = self.get(name)
            if node is not None:
                return node
        return self.graph.placed("f32", (1, 1), self.place, weight=True)


def weight(graph: Graph, tensor: Tensor, place: int) -> Node:
    """A weight as a node: f32 strides, its own size in bytes (what a copy of it takes)."""
    node = graph.placed("f32", tensor.dims, place, weight=True)
    node.size = tensor.n_bytes
    if tensor.type not in _PLAIN and tensor.dims:
        node.row_pad = -tensor.dims[0] % MATRIX_ROW_PADDING * tensor.n_bytes // tensor.n_elements
    return node


class Blocks:
    """The state of a build, and pieces that any block uses."""

    shape: ModelShape
    step: Step
    graph: Graph
    style: Style
    host: int
    n_embd: int
    n_tokens: int
    s_main: Node
    s_extra: Node
    out_ids: Node

    def norm(
        self, x: Node, w: Node | None, bias: Node | None = None, *, pin: int | None = None
    ) -> Node:
        """build_norm; ``pin`` keeps it on the block's device."""
        g = self.graph
        cur = g.like(self.style.norm, x)
        cur.pin = pin
        if w is not None:
            cur = g.mul(cur, w)
        return g.add(cur, bias) if bias is not None else cur

    def linear(self, layer: Layer, name: str, x: Node) -> Node:
        """A matrix product, and its bias where the file has one."""
        cur = self.graph.mul_mat(layer.need(name), x)
        bias = layer.get(f"{name}.bias")
        return self.graph.add(cur, bias) if bias is not None else cur
