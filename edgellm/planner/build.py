"""The graphs that llama.cpp builds, on shapes: one block at a time, driven by the tensors a layer
has.

Sources: src/llama-graph.cpp (``build_attn``, ``build_ffn``, ``build_moe_ffn``, ``build_rs``) and
src/models/<arch>.cpp. A tensor that is there is used, so most architectures need nothing of their
own; what an architecture does differently with the same tensors is in :data:`STYLES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from edgellm.gguf.shape import LayerShape, ModelShape, Tensor
from edgellm.planner.graph import Graph, Node, is_contiguous


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
    type_k: str = "f16"
    type_v: str = "f16"
    embeddings: bool = False
    pooling: str = "none"
    offload_kqv: bool = True


@dataclass(frozen=True)
class Style:
    """What an architecture does with its tensors that the tensors do not tell."""

    late_outputs: bool = False
    """Every token goes through the last block; rows are chosen before the output matrix."""
    keeps_hidden: bool = False
    """The hidden state of every token is an output (for next-token prediction)."""
    rope: str = "all"
    """all, none, or swa (only sliding layers)."""
    scaled_q: bool = False
    scaled_input: bool = False
    parallel: bool = False
    """Attention and feed-forward from the same norm, added together."""
    gated_q: bool = False
    """The Q projection holds a gate beside it (qwen3next, qwen35)."""
    gating: str = "softmax"
    """How experts are weighed: softmax, sigmoid, softmax_weight (after the choice)."""
    norm_weights: bool = True
    positions: int = 1
    """4 for multi-section RoPE."""


_GEMMA: Final = Style(scaled_q=True, scaled_input=True)
_NEXT: Final = Style(late_outputs=True, keeps_hidden=True, gated_q=True, positions=4)
STYLES: Final[dict[str, Style]] = {
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": Style(late_outputs=True, keeps_hidden=True, scaled_input=True),
    "gpt-oss": Style(
        late_outputs=True, keeps_hidden=True, gating="softmax_weight", norm_weights=False
    ),
    "qwen35": _NEXT,
    "qwen35moe": _NEXT,
    "qwen3next": Style(late_outputs=True, keeps_hidden=True, gated_q=True),
    "deepseek2": Style(keeps_hidden=True, norm_weights=False),
    "cohere2": Style(rope="swa", parallel=True),
    "command-r": Style(parallel=True),
}


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
    return node


class Builder:
    """Builds one graph. ``places[i]`` is the backend of block i, the output layer's last."""

    def __init__(
        self, shape: ModelShape, step: Step, layers: Sequence[tuple[int, int, int]], host: int
    ) -> None:
        """``layers``: (block, backend, backend of its experts) of each block to build."""
        self.shape = shape
        self.step = step
        self.host = host
        self.graph = Graph()
        self.style = STYLES.get(shape.arch, Style())
        self.n_embd = shape.n_embd
        self.n_tokens = step.n_tokens
        self.picked = layers
        self.caches: dict[int, tuple[Node, Node | None]] = {}
        self.shared: dict[tuple[str, int], Node] = {}

    # --- inputs

    def inputs(self) -> Node:
        """Positions, masks, indices and the embedded tokens (build_inp_*)."""
        g, step, shape = self.graph, self.step, self.shape
        n = self.n_tokens
        tokens = g.input("i32", n)
        embd = g.input("f32", self.n_embd, n)
        table = shape.token_embd
        rows = g.get_rows(weight(g, table, self.host), tokens) if table else embd
        g.expand(rows)
        g.expand(embd)
        cur = g.scale(rows) if self.style.scaled_input else rows
        g.expand(rows)
        self.positions = g.input("i32", n * self.style.positions)
        self._attention_inputs()
        self.out_ids = g.input("i32", step.n_outputs)
        return cur

    def _attention_inputs(self) -> None:
        g, step, n = self.graph, self.step, self.n_tokens
        mask = "f16" if step.flash else "f32"
        per = n // step.n_stream
        wide = max((x.head_v * x.n_head_kv for x in self.shape.layers), default=1)
        n_v = n if step.flash else n * wide
        self.k_idxs, self.v_idxs = g.input("i64", n), g.input("i64", n_v)
        self.swa_k_idxs, self.swa_v_idxs = g.input("i64", n), g.input("i64", n_v)
        if self.shape.has_memory:
            self.mask = g.input(mask, step.cells, per, 1, step.n_stream)
            self.swa_mask = g.input(mask, step.swa_cells, per, 1, step.n_stream)
        else:
            self.mask = g.input(mask, n, n)
            self.swa_mask = g.input(mask, n, n)
        self.rotation = self._rotations()
        self.s_copy = g.input("i32", step.n_seqs)

    def _rotations(self) -> dict[tuple[bool, str], Node]:
        """Hadamard matrices for quantised caches (llama_kv_cache: attn_rot_k, attn_rot_v)."""
        g, found = self.graph, {}
        for swa in (False, True):
            layers = [x for x in self.shape.layers if x.has_kv and x.is_swa == swa]
            for kind, name in ((self.step.type_k, "k"), (self.step.type_v, "v")):
                sizes = {x.head_k if name == "k" else x.head_v for x in layers}
                if kind in ("f16", "f32", "bf16") or len(sizes) != 1:
                    continue
                size = sizes.pop()
                if (name == "v" and self.shape.is_mla) or size % 64:
                    continue
                n = 64
                while name == "k" and size % (2 * n) == 0:
                    n *= 2
                found[swa, name] = g.input("f32", n, n)
        return found

    # --- pieces

    def norm(
        self, x: Node, w: Node | None, bias: Node | None = None, *, pin: int | None = None
    ) -> Node:
        g = self.graph
        cur = g.like("RMS_NORM", x)
        cur.pin = pin
        if w is not None:
            cur = g.mul(cur, w)
        return g.add(cur, bias) if bias is not None else cur

    def linear(self, layer: Layer, name: str, x: Node) -> Node:
        """A matrix product, and its bias where the file has one."""
        cur = self.graph.mul_mat(layer.need(name), x)
        bias = layer.get(f"{name}.bias")
        return self.graph.add(cur, bias) if bias is not None else cur

    def rotate(self, x: Node, rotation: Node) -> Node:
        """llama_mul_mat_hadamard."""
        g = self.graph
        n = rotation.ne[0]
        rows = x.ne[0] * x.ne[1] * x.ne[2] * x.ne[3] // n
        flat = g.reshape(x, n, rows) if is_contiguous(x) else g.cont(x, n, rows)
        return g.reshape(g.mul_mat(rotation, flat), *x.ne)

    # --- attention

    def qkv(self, layer: Layer, cur: Node) -> tuple[Node, Node, Node]:
        """build_qkv: one fused matrix, or three."""
        g, s, n = self.graph, layer.shape, self.n_tokens
        if "attn_qkv" in layer:
            both = self.linear(layer, "attn_qkv", cur)
            nb = both.nb[1]
            q = g.view(both, (s.head_k, s.n_head, n), (4 * s.head_k, nb))
            k = g.view(both, (s.head_k, s.n_head_kv, n), (4 * s.head_k, nb))
            v = g.view(both, (s.head_v, s.n_head_kv, n), (4 * s.head_v, nb))
            return q, k, v
        q = g.reshape(self._normed_flat(layer, "attn_q", cur), s.head_k, s.n_head, n)
        k = g.reshape(self._normed_flat(layer, "attn_k", cur), s.head_k, s.n_head_kv, n)
        v_flat = self.linear(layer, "attn_v", cur) if "attn_v" in layer else k
        return q, k, g.reshape(v_flat, s.head_v, s.n_head_kv, n)

    def _normed_flat(self, layer: Layer, name: str, cur: Node) -> Node:
        """A projection; a norm as wide as the projection comes before the heads (olmo2.cpp)."""
        flat = self.linear(layer, name, cur)
        norm = layer.get(f"{name}_norm")
        if norm is not None and norm.ne[0] == flat.ne[0] != layer.shape.head_k:
            return self.norm(flat, norm)
        return flat

    def head_norm(self, layer: Layer, name: str, x: Node) -> Node:
        norm = layer.get(f"{name}_norm")
        return self.norm(x, norm) if norm is not None and norm.ne[0] == x.ne[0] else x

    def attention(self, layer: Layer, cur: Node) -> Node:
        """A block's self-attention, output matrix included."""
        g = self.graph
        q, k, v = self.qkv(layer, cur)
        q, k = self.head_norm(layer, "attn_q", q), self.head_norm(layer, "attn_k", k)
        if self.style.rope == "all" or (self.style.rope == "swa" and layer.shape.is_swa):
            factors = layer.get("rope_freqs")
            q, k = g.rope(q, self.positions, factors), g.rope(k, self.positions, factors)
        if self.style.scaled_q:
            q = g.scale(q)
        cur = self.attend(layer, q, k, v)
        return self.linear(layer, "attn_output", cur)

    def cache(self, layer: Layer) -> tuple[Node, Node | None]:
        """The K and V caches of a layer."""
        made = self.caches.get(layer.il)
        if made is None:
            made = self._make_cache(layer)
            self.caches[layer.il] = made
        return made

    def _make_cache(self, layer: Layer) -> tuple[Node, Node | None]:
        g, step, s = self.graph, self.step, layer.shape
        cells = step.swa_cells if s.is_swa else step.cells
        where = layer.cache_place
        width = max(s.head_k * s.n_head_kv, 1)
        k = g.placed(step.type_k, (width, cells, step.n_stream), where)
        if self.shape.is_mla:
            return k, None
        v_width = s.head_v * s.n_head_kv
        if not step.flash:
            v_width = max(x.head_v * x.n_head_kv for x in self.shape.layers)
        return k, g.placed(step.type_v, (max(v_width, 1), cells, step.n_stream), where)

    def attend(self, layer: Layer, q: Node, k: Node, v: Node, *, v_mla: Node | None = None) -> Node:
        """build_attn: store K and V, then attend to the cells."""
        g, step, s = self.graph, self.step, layer.shape
        k_rot, v_rot = self.rotation.get((s.is_swa, "k")), self.rotation.get((s.is_swa, "v"))
        if k_rot is not None:
            q, k = self.rotate(q, k_rot), self.rotate(k, k_rot)
        if v_rot is not None:
            v = self.rotate(v, v_rot)
        for node in (q, v, k):
            g.expand(node)
        if not self.shape.has_memory:
            return self.mha(layer, q, k, v, v_mla)
        k_cache, v_cache = self.cache(layer)
        self._store(layer, k, v, k_cache, v_cache)
        cells = step.swa_cells if s.is_swa else step.cells
        keys = g.view(
            k_cache,
            (k.ne[0], k.ne[1], cells, step.n_stream),
            (_row(k_cache, k.ne[0]), k_cache.nb[1], k_cache.nb[2]),
        )
        values = self._values(keys, v, v_cache, cells)
        out = self.mha(layer, q, keys, values, v_mla)
        return self.rotate(out, v_rot) if v_rot is not None else out

    def _store(self, layer: Layer, k: Node, v: Node, k_cache: Node, v_cache: Node | None) -> None:
        """cpy_k and cpy_v; without flash attention V goes in element by element."""
        g, s, n = self.graph, layer.shape, self.n_tokens
        k_idxs = self.swa_k_idxs if s.is_swa else self.k_idxs
        v_idxs = self.swa_v_idxs if s.is_swa else self.v_idxs
        flat = g.view(k, (k.ne[0] * k.ne[1], n), (k.nb[2],))
        g.expand(g.set_rows(k_cache, flat, k_idxs))
        if v_cache is None:
            return
        width = v.ne[0] * v.ne[1]
        if self.step.flash:
            g.expand(g.set_rows(v_cache, g.view(v, (width, n), (v.nb[2],)), v_idxs))
            return
        flat = g.reshape(v, width, n) if 4 * width == v.nb[2] else g.cont(v, width, n)
        if width < v_cache.ne[0]:
            flat = g.new("PAD", (v_cache.ne[0], n), flat)
        count = v_cache.ne[0] * v_cache.ne[1] * v_cache.ne[2]
        into = g.view(v_cache, (1, count), (v_cache.nb[0],))
        g.expand(g.set_rows(into, g.reshape(flat, 1, v_cache.ne[0] * n), v_idxs))

    def _values(self, keys: Node, v: Node, v_cache: Node | None, cells: int) -> Node:
        g, streams = self.graph, self.step.n_stream
        if v_cache is None:
            return g.view(keys, (v.ne[0], *keys.ne[1:]), keys.nb[1:])
        if self.step.flash:
            nb = (_row(v_cache, v.ne[0]), v_cache.nb[1], v_cache.nb[2])
            return g.view(v_cache, (v.ne[0], v.ne[1], cells, streams), nb)
        element = v_cache.nb[0]
        nb = (element * cells * v.ne[0], element * cells, v_cache.nb[2])
        return g.view(v_cache, (cells, v.ne[1], v.ne[0], streams), nb)

    def mha(self, layer: Layer, q: Node, k: Node, v: Node, v_mla: Node | None) -> Node:
        """build_attn_mha."""
        g, streams = self.graph, k.ne[3]
        mask = self.swa_mask if layer.shape.is_swa else self.mask
        per = q.ne[2] // streams
        q = g.view(q, (q.ne[0], q.ne[1], per, streams), (q.nb[1], q.nb[2], q.nb[2] * per))
        transposed = v.nb[1] > v.nb[2]
        q, k, v = (g.permute(t, 0, 2, 1, 3) for t in (q, k, v))
        sinks = layer.get("attn_sinks")
        if self.step.flash:
            k = g.cast(k, "f16") if k.type == "f32" else k
            v = g.cast(v, "f16") if v.type == "f32" else v
            cur = g.flash(q, k, v, mask, sinks)
            cur.name = f"flash-{layer.il}"
            if v_mla is not None:
                cur = g.mul_mat(v_mla, g.permute(cur, 0, 2, 1, 3))
                cur = g.cont(g.permute(cur, 0, 2, 1, 3))
            cur = g.reshape(cur, cur.ne[0] * cur.ne[1], cur.ne[2] * cur.ne[3])
        else:
            kq = g.mul_mat(k, q)
            if self.shape.hparams.get("attn_softcap"):
                kq = g.scale(g.unary(g.scale(kq)))
            kq = g.soft_max(kq, mask, sinks)
            if not transposed:
                v = g.cont(g.transpose(v))
            out = g.mul_mat(v, kq)
            if v_mla is not None:
                out = g.mul_mat(v_mla, out)
            out = g.permute(out, 0, 2, 1, 3)
            cur = g.cont(out, out.ne[0] * out.ne[1], out.ne[2] * out.ne[3])
            if not self.step.offload_kqv:
                cur.pin = self.host
        g.expand(cur)
        return cur

    def mla(self, layer: Layer, cur: Node) -> Node:
        """Multi-head latent attention: the cache holds one compressed head (deepseek2.cpp)."""
        g, n, h = self.graph, self.n_tokens, self.shape.hparams
        heads, rank = layer.shape.n_head, int(h.get("n_lora_kv", 0))
        rot = int(h.get("n_rot", 0))
        head_k = int(h.get("head_k_mla", 0)) or layer.shape.head_k
        if "attn_q_a" in layer:
            q = self.norm(g.mul_mat(layer.need("attn_q_a"), cur), layer.get("attn_q_a_norm"))
            q = g.mul_mat(layer.need("attn_q_b"), q)
        else:
            q = g.mul_mat(layer.need("attn_q"), cur)
        q = g.reshape(q, head_k, heads, n)
        both = g.mul_mat(layer.need("attn_kv_a_mqa"), cur)
        row = 4 * (rank + rot)
        compressed = g.view(both, (rank, n), (row,))
        k_pe = g.rope(g.view(both, (rot, 1, n), (row, row)), self.positions)
        compressed = self.norm(compressed, layer.get("attn_kv_a_norm"))
        if not self.shape.is_mla:
            return self._mla_unpacked(layer, q, compressed, k_pe, head_k)
        nope = g.view(q, (head_k - rot, heads, n), q.nb[1:3])
        q_pe = g.rope(g.view(q, (rot, heads, n), q.nb[1:3]), self.positions)
        absorbed = g.mul_mat(layer.need("attn_k_b"), g.permute(nope, 0, 2, 1, 3))
        queries = g.concat(g.permute(absorbed, 0, 2, 1, 3), q_pe, 0)
        compressed = g.reshape(compressed, rank, 1, n)
        keys = g.concat(compressed, k_pe, 0)
        out = self.attend(layer, queries, keys, compressed, v_mla=layer.get("attn_v_b"))
        return self.linear(layer, "attn_output", out)

    def _mla_unpacked(self, layer: Layer, q: Node, kv: Node, k_pe: Node, head_k: int) -> Node:
        """Without absorption: full heads again (deepseek2.cpp, files before MLA)."""
        g, n, s = self.graph, self.n_tokens, layer.shape
        rot = k_pe.ne[0]
        nope, head_v = head_k - rot, s.head_v
        both = g.mul_mat(layer.need("attn_kv_b"), kv)
        head = 4 * (nope + head_v)
        k_nope = g.view(both, (nope, s.n_head, n), (head, head * s.n_head))
        v = g.cont(g.view(both, (head_v, s.n_head, n), (head, head * s.n_head)))
        q = g.rope(q, self.positions)
        k = g.concat(k_nope, g.new("REPEAT", (rot, s.n_head, n), k_pe), 0)
        return self.linear(layer, "attn_output", self.attend(layer, q, k, v))

    # --- feed-forward

    def ffn(self, layer: Layer, cur: Node, suffix: str = "") -> Node:
        """build_ffn: gate and up at once, then down."""
        g = self.graph
        up = self.linear(layer, f"ffn_up{suffix}", cur)
        down = layer.need(f"ffn_down{suffix}")
        if f"ffn_gate{suffix}" in layer:
            hidden = g.glu(self.linear(layer, f"ffn_gate{suffix}", cur), up)
        elif up.ne[0] == 2 * down.ne[0]:
            hidden = g.glu(up)
        else:
            hidden = g.unary(up)
        out = g.mul_mat(down, hidden)
        bias = layer.get(f"ffn_down{suffix}.bias")
        return g.add(out, bias) if bias is not None else out

    def moe(self, layer: Layer, cur: Node) -> Node:
        """build_moe_ffn."""
        g, s, n = self.graph, layer.shape, cur.ne[1]
        used = s.n_expert_used or self.shape.n_expert_used or 1
        logits = self.linear(layer, "ffn_gate_inp", cur)
        n_expert = logits.ne[0]
        chosen, weights = self._route(layer, logits, n_expert, used)
        g.expand(weights)
        x = g.reshape(cur, cur.ne[0], 1, n)
        hidden = self._experts(layer, x, chosen)
        out = self._expert_linear(layer, "ffn_down_exps", hidden, chosen)
        out = g.mul(out, weights)
        g.expand(out)
        parts = [g.view(out, (out.ne[0], n), (out.nb[2],)) for _ in range(used)]
        for part in parts:
            g.expand(part)
        total = parts[0]
        for part in parts[1:]:
            total = g.add(total, part)
            g.expand(total)
        return total if used > 1 else g.cont(total)

    def _route(self, layer: Layer, logits: Node, n_expert: int, used: int) -> tuple[Node, Node]:
        """The chosen experts and their weights."""
        g, n = self.graph, logits.ne[1]
        gating = self.style.gating
        probs = logits
        if gating == "softmax":
            probs = g.soft_max(logits)
        elif gating == "sigmoid":
            probs = g.unary(logits)
        bias = layer.get("exp_probs_b.bias") or layer.get("exp_probs_b")
        order = g.add(probs, bias) if bias is not None else probs
        chosen = g.top_k(order, used)
        weights = g.get_rows(g.reshape(probs, 1, n_expert, n), chosen)
        if gating == "softmax_weight":
            weights = g.reshape(g.soft_max(g.reshape(weights, used, n)), 1, used, n)
        if self.style.norm_weights:
            flat = g.reshape(weights, used, n)
            total = g.like("CLAMP", g.new("SUM_ROWS", (1, n), flat))
            weights = g.reshape(g.like("DIV", flat, total), 1, used, n)
        return chosen, weights

    def _experts(self, layer: Layer, x: Node, chosen: Node) -> Node:
        g = self.graph
        if "ffn_gate_up_exps" in layer:
            both = g.mul_mat_id(layer.need("ffn_gate_up_exps"), x, chosen)
            half = (both.ne[0] // 2, both.ne[1], both.ne[2])
            return g.glu(g.view(both, half, both.nb[1:3]), g.view(both, half, both.nb[1:3]))
        up = self._expert_linear(layer, "ffn_up_exps", x, chosen)
        if "ffn_gate_exps" not in layer:
            return g.unary(up)
        return g.glu(self._expert_linear(layer, "ffn_gate_exps", x, chosen), up)

    def _expert_linear(self, layer: Layer, name: str, x: Node, chosen: Node) -> Node:
        g = self.graph
        cur = g.mul_mat_id(layer.need(name), x, chosen)
        bias = layer.get(f"{name}.bias")
        return g.like("ADD_ID", cur, bias, chosen) if bias is not None else cur

    def feed_forward(self, layer: Layer, cur: Node) -> Node:
        """Dense, or experts with whatever is shared beside them."""
        g = self.graph
        if "ffn_gate_inp" not in layer:
            return self.ffn(layer, cur)
        out = self.moe(layer, cur)
        if "ffn_up_shexp" not in layer:
            return out
        shared = self.ffn(layer, cur, "_shexp")
        gate = layer.get("ffn_gate_inp_shexp")
        if gate is not None:
            shared = g.mul(shared, g.unary(g.mul_mat(gate, cur)))
        return g.add(out, shared)

    # --- recurrent layers

    def state(self, cache: Node) -> Node:
        """build_rs: the rows of the sequences of this step."""
        g, seqs = self.graph, self.step.n_seqs
        rows = g.reshape(cache, *cache.ne[:2])
        g.expand(g.in_place("SCALE", g.view(rows, (0,), ())))
        ids = g.view(self.s_copy, (seqs,), ())
        out = g.get_rows(rows, ids)
        g.expand(out)
        extra = g.get_rows(rows, g.view(self.s_copy, (0,), ()))
        g.expand(g.cpy(extra, g.view(cache, (cache.ne[0], 0), (cache.nb[1],))))
        return out

    def recurrent(self, layer: Layer, cur: Node) -> Node:
        """A layer without cells, by the tensors it has."""
        if "shortconv.conv" in layer:
            return self.shortconv(layer, cur)
        if "ssm_beta" in layer or "ssm_ba" in layer:
            return self.delta_net(layer, cur)
        return cur

    def shortconv(self, layer: Layer, cur: Node) -> Node:
        """lfm2.cpp: build_shortconv_block."""
        g, seqs = self.graph, self.step.n_seqs
        per = self.n_tokens // seqs
        cur = g.reshape(cur, cur.ne[0], per, seqs)
        bcx = g.mul_mat(layer.need("shortconv.in_proj"), cur)
        chunk = (bcx.ne[0] // 3, per, seqs)
        b, c, x = (g.view(bcx, chunk, bcx.nb[1:3]) for _ in range(3))
        bx = g.transpose(g.mul(b, x))
        cache = g.placed("f32", (layer.shape.r_width, seqs), layer.cache_place)
        taps = max(layer.shape.r_width // chunk[0], 1)
        conv = g.reshape(self.state(cache), taps, chunk[0], seqs)
        bx = g.concat(conv, bx, 0)
        last = g.view(bx, (taps, chunk[0], seqs), bx.nb[1:3])
        g.expand(g.cpy(last, g.view(cache, (layer.shape.r_width, seqs), (cache.nb[1],))))
        out = g.new("SSM_CONV", (chunk[0], per, seqs), bx, layer.need("shortconv.conv"))
        y = g.mul_mat(layer.need("shortconv.out_proj"), g.mul(c, out))
        return g.reshape(y, y.ne[0], per * seqs)

    def delta_net(self, layer: Layer, cur: Node) -> Node:
        """Gated delta net (qwen35.cpp build_layer_attn_linear, delta-net-base.cpp, fused)."""
        g, h, seqs = self.graph, self.shape.hparams, self.step.n_seqs
        n, per = self.n_tokens, self.n_tokens // seqs
        k_heads, v_heads = int(h["ssm_n_group"]), int(h["ssm_dt_rank"])
        head_k, inner = int(h["ssm_d_state"]), int(h["ssm_d_inner"])
        head_v = inner // v_heads
        mixed = g.mul_mat(layer.need("attn_qkv"), cur)
        mixed = g.reshape(mixed, mixed.ne[0], per, seqs)
        z = g.mul_mat(layer.need("attn_gate"), cur)
        beta = g.mul_mat(layer.need("ssm_beta"), cur)
        beta = g.unary(g.reshape(beta, 1, v_heads, per, seqs))
        alpha = g.reshape(g.mul_mat(layer.need("ssm_alpha"), cur), v_heads, per, seqs)
        gate = g.mul(g.unary(g.add(alpha, layer.need("ssm_dt.bias"))), layer.need("ssm_a"))
        gate = g.reshape(gate, 1, v_heads, per, seqs)
        conv_in = self._conv_state(layer, mixed)
        states = g.placed("f32", (layer.shape.s_width, seqs), layer.cache_place)
        state = g.reshape(self.state(states), head_v, head_v, v_heads, seqs)
        channels = conv_in.ne[1]
        conv = g.unary(g.new("SSM_CONV", (channels, per, seqs), conv_in, layer.need("ssm_conv1d")))
        row = conv.nb[1]
        q, k = (
            g.scale(
                g.like(
                    "RMS_NORM",
                    g.view(conv, (head_k, k_heads, per, seqs), (4 * head_k, row, row * per)),
                )
            )
            for _ in range(2)
        )
        v = g.view(conv, (head_v, v_heads, per, seqs), (4 * head_v, row, row * per))
        rows = n + head_v * seqs
        out = g.new("GATED_DELTA_NET", (head_v * v_heads, rows), q, k, v, gate, beta, state)
        result = g.view(out, (head_v, v_heads, per, seqs))
        new = g.view(out, (head_v, head_v, v_heads, seqs))
        g.expand(g.cpy(new, g.view(states, (layer.shape.s_width, seqs), (states.nb[1],))))
        z = g.reshape(z, head_v, v_heads, per, seqs)
        normed = g.mul(self.norm(result, layer.get("ssm_norm")), g.unary(z))
        cur = g.mul_mat(layer.need("ssm_out"), g.reshape(normed, inner, per, seqs))
        return g.reshape(cur, self.n_embd, n)

    def _conv_state(self, layer: Layer, mixed: Node) -> Node:
        """llm_build_delta_net_base::build_conv_state: the last inputs before this step's."""
        g, seqs = self.graph, self.step.n_seqs
        cache = g.placed("f32", (layer.shape.r_width, seqs), layer.cache_place)
        channels = mixed.ne[0]
        taps = layer.shape.r_width // channels
        before = g.reshape(self.state(cache), taps, channels, seqs)
        joined = g.concat(before, g.transpose(mixed), 0)
        last = g.view(joined, (taps, channels, seqs), joined.nb[1:3])
        g.expand(g.cpy(last, g.view(cache, (layer.shape.r_width, seqs), (cache.nb[1],))))
        return joined

    def gated_attention(self, layer: Layer, cur: Node) -> Node:
        """Attention whose Q projection holds a gate (qwen35.cpp build_layer_attn)."""
        g, s, n = self.graph, layer.shape, self.n_tokens
        both = g.mul_mat(layer.need("attn_q"), cur)
        k = g.mul_mat(layer.need("attn_k"), cur)
        v = g.mul_mat(layer.need("attn_v"), cur)
        nb = (8 * s.head_k, 8 * s.head_k * s.n_head)
        q = self.head_norm(layer, "attn_q", g.view(both, (s.head_k, s.n_head, n), nb))
        k = self.head_norm(layer, "attn_k", g.reshape(k, s.head_k, s.n_head_kv, n))
        gate = g.cont(g.view(both, (s.head_k, s.n_head, n), nb), s.head_k * s.n_head, n)
        v = g.reshape(v, s.head_v, s.n_head_kv, n)
        out = self.attend(layer, g.rope(q, self.positions), g.rope(k, self.positions), v)
        return self.linear(layer, "attn_output", g.mul(out, g.unary(gate)))

    # --- blocks

    def mixer(self, layer: Layer, cur: Node) -> Node:
        """Attention or what stands in its place."""
        if layer.shape.is_recurrent and not layer.shape.has_kv:
            return self.recurrent(layer, cur)
        if "attn_kv_a_mqa" in layer:
            return self.mla(layer, cur)
        if self.style.gated_q:
            return self.gated_attention(layer, cur)
        return self.attention(layer, cur)

    def block(self, layer: Layer, x: Node, last: bool, pin: int | None) -> Node:
        """One block, residuals included."""
        g, late = self.graph, self.style.late_outputs
        norm = layer.get("attn_norm")
        cur = self.norm(x, norm, layer.get("attn_norm.bias"), pin=pin) if norm is not None else x
        if self.style.gated_q:
            g.expand(cur)
        normed = cur
        cur = self.mixer(layer, cur)
        if last and not late:
            cur, x = g.get_rows(cur, self.out_ids), g.get_rows(x, self.out_ids)
            if self.style.parallel:
                normed = g.get_rows(normed, self.out_ids)
        if self.style.parallel:
            return g.add(g.add(self.feed_forward(layer, normed), x), cur)
        before_ffn = layer.get("ffn_norm")
        after_attn = layer.get("post_attention_norm")
        if before_ffn is not None and after_attn is not None:
            cur = self.norm(cur, after_attn, pin=pin)
        cur = g.add(cur, x)
        residual = cur
        cur = self.norm(cur, before_ffn or after_attn, layer.get("ffn_norm.bias"), pin=pin)
        cur = self.feed_forward(layer, cur)
        after = layer.get("post_ffw_norm")
        if after is not None:
            cur = self.norm(cur, after)
        cur = g.add(cur, residual)
        scale = layer.get("layer_output_scale")
        return g.mul(cur, scale) if scale is not None else cur

    def build(self, output_place: int, pins: Sequence[int | None]) -> Graph:
        """The whole graph: inputs, the picked blocks, the output layer."""
        cur = self.inputs()
        for i, (il, place, expert_place) in enumerate(self.picked):
            layer = self.layer(il, place, expert_place)
            cur = self.block(layer, cur, i == len(self.picked) - 1, pins[i])
        return self._head(cur, output_place)

    def layer(self, il: int, place: int, expert_place: int) -> Layer:
        shape = self.shape.layers[il]
        prefix = f"blk.{il}."
        tensors = {t.name.removeprefix(prefix): t for t in shape.tensors}
        cache = place if self.step.offload_kqv else self.host
        layer = Layer(self.graph, il, shape, place, expert_place, cache, tensors)
        for t in self.shape.shared_tensors:
            # one copy a device, shared by its blocks (TENSOR_DUPLICATED)
            tensors[t.name] = t
            node = self.shared.setdefault((t.name, place), weight(self.graph, t, place))
            layer.nodes[t.name] = node
        return layer

    def _head(self, cur: Node, place: int) -> Graph:
        g, shape, late = self.graph, self.shape, self.style.late_outputs
        own = {t.name: t for t in shape.output_tensors}
        norm = own.get("output_norm.weight") or own.get("token_embd_norm.weight")
        if late and shape.arch == "gpt-oss":
            cur.is_output = True
            cur = g.get_rows(cur, self.out_ids)
        cur = self.norm(cur, weight(g, norm, place) if norm else None)
        if late and shape.arch != "gpt-oss":
            cur.is_output = self.style.keeps_hidden
            cur = g.get_rows(cur, self.out_ids)
        cur.is_output = True
        matrix = own.get("output.weight") or shape.tied_tensor
        if matrix is not None:
            cur = g.mul_mat(weight(g, matrix, place), cur)
            if shape.hparams.get("final_softcap"):
                cur = g.scale(g.unary(g.scale(cur)))
            cur.is_output = True
        g.expand(cur)
        return g


def _row(cache: Node, n: int) -> int:
    """ggml_row_size of ``n`` elements of a cache's type."""
    width = cache.ne[0]
    return cache.nb[1] * n // width if width else 0
