"""A compute graph's shapes: what ggml.c builds, without the numbers.

Only what decides memory is kept: each node's shape, strides, sources, what it views, and which
buffer holds it before the graph runs. Sizes are in ggml's order (row length first).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Dims = tuple[int, int, int, int]

_ELEMENT: Final = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8}
_BLOCKS: Final = {
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}

VIEW_OPS: Final = frozenset({"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"})
"""ggml_is_view_op: no memory of their own, no backend of their own."""
_ARITHMETIC: Final = ("ADD", "ADD_ID", "ADD1", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG")
IN_PLACE: Final = frozenset(
    (*_ARITHMETIC, "FILL", "SCALE", "UNARY", "ROPE", "RMS_NORM", "CLAMP", "SOFT_MAX")
)
"""ggml_op_can_inplace in ggml-alloc.c."""


class Node:
    """One tensor. ``place`` is the backend whose buffer holds it already (weights, caches);
    ``row_pad``: the bytes that CUDA adds to a quantised tensor, to pad its last row."""

    __slots__ = (
        "addr",
        "allocated",
        "backend",
        "buffer",
        "children",
        "is_input",
        "is_output",
        "is_weight",
        "name",
        "nb",
        "ne",
        "nodes",
        "op",
        "pin",
        "place",
        "row_pad",
        "seen",
        "size",
        "src",
        "type",
        "view",
        "views",
    )  # fmt: skip

    def __init__(self, op: str, kind: str, ne: Dims, nb: Dims, size: int) -> None:
        self.op = op
        self.type = kind
        self.ne = ne
        self.nb = nb
        self.size = size
        self.src: list[Node] = []
        self.view: Node | None = None
        self.is_input = False
        self.is_output = False
        self.is_weight = False
        self.row_pad = 0
        self.place: int | None = None
        self.pin: int | None = None
        self.backend = -1
        self.seen = False
        self.name = ""
        # the allocator's own notes
        self.children = self.views = self.addr = 0
        self.buffer = -1
        self.allocated = False


def _strides(kind: str, ne: Dims) -> tuple[Dims, int]:
    """Contiguous strides, and the bytes of the whole."""
    element = _ELEMENT.get(kind)
    if element is not None:
        nb0, nb1 = element, element * ne[0]
    else:
        block, nb0 = _BLOCKS[kind]
        nb1 = -(-ne[0] // block) * nb0
    nb2 = nb1 * ne[1]
    nb3 = nb2 * ne[2]
    return (nb0, nb1, nb2, nb3), nb3 * ne[3]


def row_size(kind: str, n: int) -> int:
    """ggml_row_size."""
    if kind in _ELEMENT:
        return _ELEMENT[kind] * n
    block, size = _BLOCKS[kind]
    return n // block * size


MATRIX_ROW_PADDING: Final = 512
"""[TAG_ALLOC_SIZE_EXPAND] in ggml-cuda.cu: the last row of a quantised tensor ends here."""


def row_pad(kind: str, n: int) -> int:
    """Bytes that CUDA allocates behind a quantised tensor with rows of ``n``."""
    return row_size(kind, -n % MATRIX_ROW_PADDING)


_ONES: Final[tuple[tuple[int, ...], ...]] = ((), (1, 1, 1), (1, 1), (1,), ())


def dims(ne: Sequence[int]) -> Dims:
    a, b, c, d = (*ne, *_ONES[len(ne)])
    return a, b, c, d


def is_contiguous(t: Node) -> bool:
    """ggml_is_contiguous."""
    return t.nb == _strides(t.type, t.ne)[0] or t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3] == t.ne[0]


class Graph:
    """A graph being built, with ggml's operations by ggml's names."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leafs: list[Node] = []

    # --- leaves

    def leaf(self, kind: str, ne: Sequence[int]) -> Node:
        full = dims(ne)
        nb, size = _strides(kind, full)
        return Node("NONE", kind, full, nb, size)

    def input(self, kind: str, *ne: int) -> Node:
        node = self.leaf(kind, ne)
        node.is_input = True
        return node

    def placed(self, kind: str, ne: Sequence[int], place: int, *, weight: bool = False) -> Node:
        """A tensor that exists before the graph: a weight or a cache."""
        node = self.leaf(kind, ne)
        node.place = place
        node.is_weight = weight
        if kind in _BLOCKS:
            node.row_pad = row_pad(kind, node.ne[0])
        return node

    # --- making nodes

    def new(self, op: str, ne: Sequence[int], *src: Node | None, kind: str = "f32") -> Node:
        full = dims(ne)
        nb, size = _strides(kind, full)
        node = Node(op, kind, full, nb, size)
        node.src = [s for s in src if s is not None]
        return node

    def like(self, op: str, a: Node, *src: Node | None) -> Node:
        """A node shaped as ``a``, contiguous (ggml_dup_tensor)."""
        nb, size = _strides(a.type, a.ne)
        node = Node(op, a.type, a.ne, nb, size)
        node.src = [a, *(s for s in src if s is not None)]
        return node

    def _view(self, op: str, a: Node, ne: Dims, nb: Dims) -> Node:
        node = Node(op, a.type, ne, nb, _view_bytes(a.type, ne, nb))
        if a.row_pad:
            node.row_pad = row_pad(a.type, ne[0])
        node.src = [a]
        node.view = a.view if a.view is not None else a
        return node

    def view(self, a: Node, ne: Sequence[int], nb: Sequence[int] = ()) -> Node:
        """ggml_view_*: ``nb`` are the strides of dims 1.., contiguous where not given."""
        full = dims(ne)
        nb1 = nb[0] if nb else row_size(a.type, full[0])
        nb2 = nb[1] if len(nb) > 1 else nb1 * full[1]
        nb3 = nb[2] if len(nb) > 2 else nb2 * full[2]
        return self._view("VIEW", a, full, (a.nb[0], nb1, nb2, nb3))

    def reshape(self, a: Node, *ne: int) -> Node:
        full = dims(ne)
        return self._view("RESHAPE", a, full, _strides(a.type, full)[0])

    def permute(self, a: Node, *axes: int) -> Node:
        ne, nb = [0] * 4, [0] * 4
        for i, axis in enumerate(axes):
            ne[axis], nb[axis] = a.ne[i], a.nb[i]
        return self._view("PERMUTE", a, dims(ne), (nb[0], nb[1], nb[2], nb[3]))

    def transpose(self, a: Node) -> Node:
        ne, nb = a.ne, a.nb
        return self._view(
            "TRANSPOSE", a, (ne[1], ne[0], ne[2], ne[3]), (nb[1], nb[0], nb[2], nb[3])
        )

    # --- operations

    def mul_mat(self, w: Node, x: Node) -> Node:
        return self.new("MUL_MAT", (w.ne[1], x.ne[1], x.ne[2], x.ne[3]), w, x)

    def mul_mat_id(self, w: Node, x: Node, ids: Node) -> Node:
        return self.new("MUL_MAT_ID", (w.ne[1], ids.ne[0], x.ne[2]), w, x, ids)

    def add(self, a: Node, b: Node) -> Node:
        return self.like("ADD", a, b)

    def mul(self, a: Node, b: Node) -> Node:
        return self.like("MUL", a, b)

    def scale(self, a: Node) -> Node:
        return self.like("SCALE", a)

    def unary(self, a: Node) -> Node:
        return self.like("UNARY", a)

    def cont(self, a: Node, *ne: int) -> Node:
        return self.new("CONT", ne or a.ne, a, kind=a.type)

    def cast(self, a: Node, kind: str) -> Node:
        return self.new("CPY", a.ne, a, kind=kind)

    def get_rows(self, a: Node, rows: Node) -> Node:
        kind = "i32" if a.type == "i32" else "f32"
        return self.new(
            "GET_ROWS", (a.ne[0], rows.ne[0], rows.ne[1], rows.ne[2]), a, rows, kind=kind
        )

    def set_rows(self, into: Node, values: Node, rows: Node) -> Node:
        node = self._view("SET_ROWS", into, into.ne, into.nb)
        node.src = [values, rows, into]
        return node

    def cpy(self, a: Node, into: Node) -> Node:
        node = self._view("CPY", into, into.ne, into.nb)
        node.src = [a, into]
        return node

    def in_place(self, op: str, a: Node) -> Node:
        """ggml_*_inplace: a view of its source."""
        return self._view(op, a, a.ne, a.nb)

    def concat(self, a: Node, b: Node, axis: int) -> Node:
        ne = list(a.ne)
        ne[axis] += b.ne[axis]
        return self.new("CONCAT", ne, a, b, kind=a.type)

    def glu(self, a: Node, b: Node | None = None) -> Node:
        """ggml_swiglu and its kin; with ``b`` the gate comes apart (…_split)."""
        ne = a.ne if b is not None else (a.ne[0] // 2, *a.ne[1:])
        return self.new("GLU", ne, a, b)

    def rope(self, a: Node, pos: Node, factors: Node | None = None) -> Node:
        return self.like("ROPE", a, pos, factors)

    def soft_max(self, a: Node, mask: Node | None = None, sinks: Node | None = None) -> Node:
        return self.like("SOFT_MAX", a, mask, sinks)

    def argsort(self, a: Node) -> Node:
        return self.new("ARGSORT", a.ne, a, kind="i32")

    def top_k(self, a: Node, k: int) -> Node:
        """ggml_argsort_top_k: a sort of the whole row, and a view of its start."""
        order = self.argsort(a)
        return self.view(order, (k, *a.ne[1:]), order.nb[1:])

    def flash(self, q: Node, k: Node, v: Node, mask: Node | None, sinks: Node | None) -> Node:
        return self.new(
            "FLASH_ATTN_EXT", (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), q, k, v, mask, sinks
        )

    # --- order

    def expand(self, node: Node) -> None:
        """ggml_build_forward_expand: sources first, each once."""
        if node.seen:
            return
        node.seen = True
        for s in node.src:
            if not s.seen:
                self.expand(s)
        (self.leafs if node.op == "NONE" else self.nodes).append(node)


def _view_bytes(kind: str, ne: Dims, nb: Dims) -> int:
    """ggml_nbytes: from the first byte to the last."""
    element = _ELEMENT.get(kind)
    if element is not None:
        size = element + (ne[0] - 1) * nb[0]
    else:
        block, _ = _BLOCKS[kind]
        size = ne[0] * nb[0] // block
    size += (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]
    return size if min(ne) > 0 else 0
