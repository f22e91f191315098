"""A top-k for attached samplers that computes all rows of a step together.

llama.cpp's own asks for one row after another, and ggml-cuda sorts each by itself: 45 us a row of
128,256 logits on an H200, 1.4 ms for 32. Here the first sampler that a graph is built for adds the
operations for all rows, 17 small kernels, and the others take their part of the result.

The k highest of a row lie in the k groups whose maxima are highest. Groups of 16 logits, and
groups of 16 groups, leave 501 maxima of those 128,256: sort these, look into the best 64 groups,
and again, and no sort has more than the 1,024 columns that ggml-cuda sorts in one kernel.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any, Final

from edgellm.engine.llama.library import ggml_functions, lib

MAX_SORT: Final = 1024
"""Columns that ggml-cuda sorts in shared memory (argsort.cu); more take several passes."""
KINDS: Final = frozenset({"CUDA", "ROCm", "MUSA", "CPU"})
"""Backends whose kernels this was laid out for; Vulkan and Metal have a top-k for all rows."""
F32, I32, MAX, DESC = 0, 26, 0, 1  # ggml.h: ggml_type, ggml_op_pool, ggml_sort_order

log = logging.getLogger(__name__)
_pointer, _i64, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Tensor(ctypes.Structure):
    """ggml_tensor (ggml.h) as far as it is read here."""

    _fields_ = (
        ("type", _int),
        ("buffer", _pointer),
        ("ne", _i64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", _int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", _pointer * 10),
        ("view_src", _pointer),
        ("view_offs", ctypes.c_size_t),
    )


class _Interface(ctypes.Structure):
    """llama_sampler_i (llama.h), with room for functions that later versions add."""

    _fields_ = (
        *((name, _pointer) for name in ("name", "accept", "apply", "reset", "clone", "free")),
        *((f"backend_{name}", _pointer) for name in ("init", "accept", "apply", "set_input")),
        ("backend_reset", _pointer),
        ("later", _pointer * 8),
    )


class _Init(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", _pointer), ("no_alloc", ctypes.c_bool))


_apply_type = ctypes.CFUNCTYPE(None, _pointer, _pointer)
_init_type = ctypes.CFUNCTYPE(ctypes.c_bool, _pointer, _pointer, ctypes.c_uint32)
_build_type = ctypes.CFUNCTYPE(
    None, _pointer, _pointer, _pointer, ctypes.POINTER(lib.llama_sampler_data)
)
_reset_type = ctypes.CFUNCTYPE(None, _pointer)


class Graph:
    """Operations in a ggml_context. Tensors are addresses; shapes are told, not asked."""

    def __init__(self, ctx: int) -> None:
        self.ctx = ctx
        self.made: list[int] = []

    def op(self, name: str, *arguments: Any) -> int:
        """One more operation."""
        tensor: int = _functions[name](self.ctx, *arguments)
        self.made.append(tensor)
        return tensor

    def matrix(self, a: int, *shape: int) -> int:
        """The same values in another shape of two or three dimensions."""
        return self.op(f"ggml_reshape_{len(shape)}d", a, *shape)

    def best(self, a: int, n: int, rows: int, k: int) -> int:
        """Places of the k highest of n in each row, the highest first: [k, rows] of a wider one."""
        order = self.op("ggml_argsort", a, DESC)
        return self.op("ggml_view_2d", order, k, rows, 4 * n, 0)

    def places(self, n: int, size: int) -> int:
        """0 ... n - 1 as rows of ``size``: [size, n / size]."""
        numbers = self.op("ggml_arange", 0.0, float(n), 1.0)
        return self.matrix(self.op("ggml_cast", numbers, I32), size, n // size)


_functions: Final = ggml_functions(
    {
        "ggml_pool_1d": (_pointer, _pointer, _int, _int, _int, _int),
        "ggml_argsort": (_pointer, _pointer, _int),
        "ggml_arange": (_pointer, ctypes.c_float, ctypes.c_float, ctypes.c_float),
        "ggml_cast": (_pointer, _pointer, _int),
        "ggml_cont": (_pointer, _pointer),
        "ggml_get_rows": (_pointer, _pointer, _pointer),
        "ggml_top_k": (_pointer, _pointer, _int),
        "ggml_reshape_1d": (_pointer, _pointer, _i64),
        "ggml_reshape_2d": (_pointer, _pointer, _i64, _i64),
        "ggml_reshape_3d": (_pointer, _pointer, _i64, _i64, _i64),
        "ggml_view_1d": (_pointer, _pointer, _i64, ctypes.c_size_t),
        "ggml_view_2d": (_pointer, _pointer, _i64, _i64, ctypes.c_size_t, ctypes.c_size_t),
        "ggml_new_tensor_2d": (_pointer, _int, _i64, _i64),
        "ggml_set_output": (_pointer,),
        "ggml_init": (_Init,),
        "ggml_free": (_pointer,),
        "ggml_backend_buft_get_device": (_pointer,),
        "ggml_backend_dev_backend_reg": (_pointer,),
        "ggml_backend_reg_name": (_pointer,),
        "ggml_backend_dev_supports_op": (_pointer, _pointer),
    },
    results={
        "ggml_set_output": None,
        "ggml_free": None,
        "ggml_backend_reg_name": ctypes.c_char_p,
        "ggml_backend_dev_supports_op": ctypes.c_bool,
    },
)
"""By name; a library without one of them has an empty table."""


def group_sizes(n_vocab: int, k: int) -> list[int] | None:
    """How many logits, then groups, go into one group; [] sorts the row itself.

    None when the vocabulary does not divide well: some of its logits would be in no group.
    """
    sizes: list[int] = []
    n, most = n_vocab, MAX_SORT // k
    while n > MAX_SORT:
        size = next((s for s in range(most, 1, -1) if n % s == 0), 1)
        if size == 1 or n // size < k:
            break
        sizes.append(size)
        n //= size
    return sizes if k <= n <= 4 * MAX_SORT else None


def add_top_k(graph: Graph, logits: int, n_vocab: int, rows: int, k: int) -> tuple[int, int]:
    """The k highest of each row, the highest first: values (F32) and ids (I32), [k, rows] each.

    ``logits`` is contiguous, [n_vocab, rows]. Equal logits at the end of the k may be any of them.
    """
    sizes = group_sizes(n_vocab, k) or []
    levels, counts = [logits], [n_vocab]
    for size in sizes:
        levels.append(graph.op("ggml_pool_1d", levels[-1], MAX, size, size, 0))
        counts.append(counts[-1] // size)
    best = graph.best(levels[-1], counts[-1], rows, k)
    ids = graph.op("ggml_cont", best)
    values = graph.matrix(levels[-1], 1, counts[-1], rows)
    for size, level, n in zip(sizes[::-1], levels[-2::-1], counts[-2::-1], strict=True):
        inside = graph.op("ggml_get_rows", graph.matrix(level, size, n // size, rows), ids)
        flat = graph.op("ggml_reshape_1d", ids, k * rows)
        names = graph.op("ggml_get_rows", graph.places(n, size), flat)
        best = graph.best(graph.matrix(inside, size * k, rows), size * k, rows, k)
        ids = graph.op("ggml_get_rows", graph.matrix(names, 1, size * k, rows), best)
        ids = graph.matrix(ids, k, rows)
        values = graph.matrix(inside, 1, size * k, rows)
    return graph.matrix(graph.op("ggml_get_rows", values, best), k, rows), ids


class TopK:
    """Makes the attached samplers of one context. Keep it as long as the context lives."""

    def __init__(self, n_vocab: int, k: int) -> None:
        self._n_vocab, self._k = n_vocab, k
        self.is_joined = False
        """All rows are computed together, and a row's candidates come sorted."""
        self._done: tuple[int, int] | None = None
        self._keep = (
            _apply_type(lambda *_: None),
            _init_type(self._init),
            _build_type(self._build),
            _reset_type(self._reset),
        )
        apply, init, build, reset = (ctypes.cast(f, _pointer).value for f in self._keep)
        self._interface = _Interface(
            apply=apply, backend_init=init, backend_apply=build, backend_reset=reset
        )

    def sampler(self) -> Any:
        """One more sampler, for a chain that will own it."""
        if not _functions:
            return lib.llama_sampler_init_top_k(self._k)
        interface = ctypes.cast(ctypes.byref(self._interface), ctypes.POINTER(lib.llama_sampler_i))
        return lib.llama_sampler_init(interface, None)

    def _init(self, _: int, buffer_type: int, __: int) -> bool:
        device = _functions["ggml_backend_buft_get_device"](buffer_type)
        self.is_joined = (
            group_sizes(self._n_vocab, self._k) is not None
            and _kind(device) in KINDS
            and _probe(lambda g: _is_laid_out(g) and self._runs_joined(g, device))
        )
        return self.is_joined or _probe(lambda g: self._runs_alone(g, device))

    def _runs_joined(self, graph: Graph, device: int | None) -> bool:
        logits = graph.op("ggml_new_tensor_2d", F32, self._n_vocab, 2)
        graph.made.clear()
        add_top_k(graph, logits, self._n_vocab, 2, self._k)
        return _runs(graph, device)

    def _runs_alone(self, graph: Graph, device: int | None) -> bool:
        logits = graph.op("ggml_new_tensor_2d", F32, self._n_vocab, 1)
        graph.made.clear()
        self._alone(graph, logits, self._n_vocab)
        return _runs(graph, device)

    def _alone(self, graph: Graph, logits: int, n: int) -> tuple[int, int]:
        """One row by itself, as llama_sampler_top_k_backend_apply (src/llama-sampler.cpp)."""
        ids = graph.op("ggml_top_k", graph.op("ggml_reshape_1d", logits, n), self._k)
        rows = graph.matrix(logits, 1, n)
        values = graph.op("ggml_get_rows", rows, ids)
        return graph.op("ggml_reshape_1d", values, self._k), ids

    def _reset(self, _: int) -> None:
        self._done = None

    def _build(self, _: int, ctx: int, __: int, data: Any) -> None:
        data, graph = data[0], Graph(ctx)
        row = Tensor.from_address(data.logits)
        if not self.is_joined or not row.view_src:  # llama.cpp tries a sampler on a row of its own
            data.logits, data.candidates = self._alone(graph, data.logits, row.ne[0])
            return
        if self._done is None:
            # The context's logits and one row more (llm_graph_context::build_sampling).
            rows = Tensor.from_address(row.view_src).ne[1]
            self._done = add_top_k(graph, row.view_src, self._n_vocab, rows, self._k)
            for whole in self._done:
                _functions["ggml_set_output"](whole)
        at = row.view_offs // self._n_vocab * self._k
        view, (values, ids) = _functions["ggml_view_1d"], self._done
        data.logits = view(ctx, values, self._k, at)
        data.candidates = view(ctx, ids, self._k, at)


def _kind(device: int | None) -> str:
    if not device:
        return "CPU"  # its buffers name none
    name = _functions["ggml_backend_reg_name"](_functions["ggml_backend_dev_backend_reg"](device))
    return str((name or b"").decode())


def _probe(ask: Callable[[Graph], bool]) -> bool:
    """Ask something of operations that are laid out and never computed."""
    ctx = _functions["ggml_init"](_Init(1 << 20, None, True))
    try:
        return ask(Graph(ctx))
    finally:
        _functions["ggml_free"](ctx)


def _is_laid_out(graph: Graph) -> bool:
    """Whether a tensor of this library has its fields where ``Tensor`` reads them."""
    whole = graph.op("ggml_new_tensor_2d", F32, 8, 4)
    view = Tensor.from_address(graph.op("ggml_view_1d", whole, 8, 64))
    shape = tuple(Tensor.from_address(whole).ne)
    return (view.view_src, view.view_offs, shape) == (whole, 64, (8, 4, 1, 1))


def _runs(graph: Graph, device: int | None) -> bool:
    supports = _functions["ggml_backend_dev_supports_op"]
    return not device or all(supports(device, operation) for operation in graph.made)
