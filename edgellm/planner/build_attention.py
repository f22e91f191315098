"""Attention blocks: projections, RoPE, the cache's cells, latent attention.

Sources: ``build_qkv``, ``build_attn`` and ``build_attn_mha`` in src/llama-graph.cpp, src/models/.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.planner.blocks import Blocks, Layer
from edgellm.planner.graph import Node, is_contiguous


class AttentionBlocks(Blocks):
    """The part of the builder that attends."""

    caches: dict[int, tuple[Node, Node | None]]
    picked: Sequence[tuple[int, int, int]]
    windowed: bool
    positions: Node
    attn_scale: Node | None
    mask: Node
    swa_mask: Node
    k_idxs: Node
    v_idxs: Node
    swa_k_idxs: Node
    swa_v_idxs: Node
    rotation: dict[tuple[bool, str], Node]

    def layer(self, il: int, place: int, expert_place: int) -> Layer:
        raise NotImplementedError

    def rotations(self) -> dict[tuple[bool, str], Node]:
        """Hadamard matrices for quantised caches (llama_kv_cache: attn_rot_k, attn_rot_v)."""
        g, found = self.graph, dict[tuple[bool, str], Node]()
        if self.shape.is_mla:  # llm_graph_input_attn_k has none
            return found
        for swa in (False, True):
            layers = [x for x in self.shape.layers if x.has_kv and x.is_swa == swa]
            for kind, name in ((self.step.type_k, "k"), (self.step.type_v, "v")):
                sizes = {x.head_k if name == "k" else x.head_v for x in layers}
                if kind in ("f16", "f32", "bf16") or len(sizes) != 1:
                    continue
                size = sizes.pop()
                if size % 64:
                    continue
                n = 64
                while name == "k" and size % (2 * n) == 0:
                    n *= 2
                found[swa, name] = g.input("f32", n, n)
        return found

    def rotate(self, x: Node, rotation: Node) -> Node:
        """llama_mul_mat_hadamard."""
        g = self.graph
        n = rotation.ne[0]
        rows = x.ne[0] * x.ne[1] * x.ne[2] * x.ne[3] // n
        flat = g.reshape(x, n, rows) if is_contiguous(x) else g.cont(x, n, rows)
        return g.reshape(g.mul_mat(rotation, flat), *x.ne)

    def qkv(self, layer: Layer, cur: Node) -> tuple[Node, Node, Node]:
        """build_qkv: one fused matrix, or three."""
        g, s, n = self.graph, layer.shape, self.n_tokens
        if "attn_qkv" in layer:
            both = self._clamped(self.linear(layer, "attn_qkv", cur))
            nb = both.nb[1]
            q = g.view(both, (s.head_k, s.n_head, n), (4 * s.head_k, nb))
            k = g.view(both, (s.head_k, s.n_head_kv, n), (4 * s.head_k, nb))
            v = g.view(both, (s.head_v, s.n_head_kv, n), (4 * s.head_v, nb))
            return q, k, v
        q = g.reshape(self._normed_flat(layer, "attn_q", cur), s.head_k, s.n_head, n)
        k = g.reshape(self._normed_flat(layer, "attn_k", cur), s.head_k, s.n_head_kv, n)
        v_flat = self._clamped(self.linear(layer, "attn_v", cur)) if "attn_v" in layer else k
        return q, k, g.reshape(v_flat, s.head_v, s.n_head_kv, n)

    def _normed_flat(self, layer: Layer, name: str, cur: Node) -> Node:
        """A projection; a norm as wide as the projection comes before the heads (olmo2.cpp)."""
        flat = self.linear(layer, name, cur)
        norm = layer.get(f"{name}_norm")
        if norm is not None and norm.ne[0] == flat.ne[0] != layer.shape.head_k:
            return self.norm(flat, norm)
        return self._clamped(flat)

    def _clamped(self, x: Node) -> Node:
        return self.graph.like("CLAMP", x) if self.shape.hparams.get("clamp_kqv") else x

    def head_norm(self, layer: Layer, name: str, x: Node) -> Node:
        norm = layer.get(f"{name}_norm")
        return self.norm(x, norm) if norm is not None and norm.ne[0] == x.ne[0] else x

    def attention(self, layer: Layer, cur: Node) -> Node:
        """A block's self-attention, output matrix included."""
        g = self.graph
        if self.style.borrows_cache and not layer.shape.has_kv:
            return self._attend_to_earlier(layer, cur)
        q, k, v = self.qkv(layer, cur)
        late = self.style.norms_after_rope
        if not late:
            q, k = self.head_norm(layer, "attn_q", q), self.head_norm(layer, "attn_k", k)
        rotates = self._rotates(layer)
        if rotates:
            factors = self._rope_factors(layer)
            q, k = g.rope(q, self.positions, factors), g.rope(k, self.positions, factors)
        elif self.attn_scale is not None:
            q = g.mul(q, self.attn_scale)
        if late:
            q, k = self._late_norms(layer, q, k, rotates)
        if self.style.normed_v:
            v = g.like("RMS_NORM", v)
        if self.style.scaled_q:
            q = g.scale(q)
        out = self.attend(layer, q, k, v)
        if self.style.gated_output:
            out = g.mul(out, g.unary(g.mul_mat(layer.need("attn_gate"), cur)))
        return self.linear(layer, "attn_output", out)

    def _rotates(self, layer: Layer) -> bool:
        """Whether a block uses RoPE: n_no_rope_layer_step is 4 where only some do."""
        kind, il = self.style.rope, layer.il
        if kind == "swa":
            return layer.shape.is_swa
        if kind == "not_fourth":
            return (il + 1) % 4 != 0
        return kind == "all" or (kind == "not_first_of_four" and il % 4 != 0)

    def _late_norms(self, layer: Layer, q: Node, k: Node, rotates: bool) -> tuple[Node, Node]:
        """Norms behind RoPE (hunyuan-moe.cpp), without weights in llama4.cpp."""
        if self.shape.arch != "llama4":
            return self.head_norm(layer, "attn_q", q), self.head_norm(layer, "attn_k", k)
        if not rotates:
            return q, k
        return self.graph.like("RMS_NORM", q), self.graph.like("RMS_NORM", k)

    def _rope_factors(self, layer: Layer) -> Node | None:
        if self.style.factors_of_full and layer.shape.is_swa:
            return None
        return layer.get("rope_freqs")

    def _attend_to_earlier(self, layer: Layer, cur: Node) -> Node:
        """Q of its own, K and V of an earlier block (llama_model::create_memory: reuse)."""
        g, s, n = self.graph, layer.shape, self.n_tokens
        q = g.reshape(self.linear(layer, "attn_q", cur), s.head_k, s.n_head, n)
        q = self.head_norm(layer, "attn_q", q)
        q = g.rope(q, self.positions, self._rope_factors(layer))
        first = next(il for il, x in enumerate(self.shape.layers) if not x.has_kv)
        lender = first - (2 if s.is_swa else 1)
        place = next((p for il, p, _ in self.picked if il == lender), layer.place)
        out = self.attend(self.layer(lender, place, place), q, None, None, reader=layer)
        return self.linear(layer, "attn_output", out)

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
        if step.v_trans:
            v_width = max(x.head_v * x.n_head_kv for x in self.shape.layers)
        return k, g.placed(step.type_v, (max(v_width, 1), cells, step.n_stream), where)

    def attend(
        self,
        layer: Layer,
        q: Node,
        k: Node | None,
        v: Node | None,
        *,
        v_mla: Node | None = None,
        reader: Layer | None = None,
    ) -> Node:
        """build_attn: store K and V, then attend to the cells; without K and V ``reader`` attends
        to what ``layer`` stored."""
        g, step, s = self.graph, self.step, layer.shape
        k_rot, v_rot = self.rotation.get((s.is_swa, "k")), self.rotation.get((s.is_swa, "v"))
        if k_rot is not None:
            q, k = self.rotate(q, k_rot), self.rotate(k, k_rot) if k is not None else None
        if v_rot is not None and v is not None:
            v = self.rotate(v, v_rot)
        in_order = (q, k, v) if self.windowed else (q, v, k)
        for node in in_order:
            if node is not None:
                g.expand(node)
        if not self.shape.has_memory and k is not None and v is not None:
            return self.mha(layer, q, k, v, v_mla)
        k_cache, v_cache = self.cache(layer)
        if k is not None and v is not None:
            self._store(layer, k, v, k_cache, v_cache)
        cells = step.swa_cells if s.is_swa else step.cells
        head, heads = (k.ne[0], k.ne[1]) if k is not None else (s.head_k, s.n_head_kv)
        keys = g.view(
            k_cache,
            (head, heads, cells, step.n_stream),
            (_row(k_cache, head), k_cache.nb[1], k_cache.nb[2]),
        )
        v_dims = (v.ne[0], v.ne[1]) if v is not None else (s.head_v, s.n_head_kv)
        values = self._values(keys, v_dims, v_cache, cells)
        out = self.mha(reader or layer, q, keys, values, v_mla)
        return self.rotate(out, v_rot) if v_rot is not None else out

    def _store(self, layer: Layer, k: Node, v: Node, k_cache: Node, v_cache: Node | None) -> None:
        """cpy_k and cpy_v; a transposed V goes in element by element."""
        g, s, n = self.graph, layer.shape, self.n_tokens
        k_idxs = self.swa_k_idxs if s.is_swa else self.k_idxs
        v_idxs = self.swa_v_idxs if s.is_swa else self.v_idxs
        flat = g.view(k, (k.ne[0] * k.ne[1], n), (k.nb[2],))
        g.expand(g.set_rows(k_cache, flat, k_idxs))
        if v_cache is None:
            return
        width = v.ne[0] * v.ne[1]
        if not self.step.v_trans:
            g.expand(g.set_rows(v_cache, g.view(v, (width, n), (v.nb[2],)), v_idxs))
            return
        flat = g.reshape(v, width, n) if 4 * width == v.nb[2] else g.cont(v, width, n)
        if width < v_cache.ne[0]:
            flat = g.new("PAD", (v_cache.ne[0], n), flat)
        count = v_cache.ne[0] * v_cache.ne[1] * v_cache.ne[2]
        into = g.view(v_cache, (1, count), (v_cache.nb[0],))
        g.expand(g.set_rows(into, g.reshape(flat, 1, v_cache.ne[0] * n), v_idxs))

    def _values(
        self, keys: Node, v_dims: tuple[int, int], v_cache: Node | None, cells: int
    ) -> Node:
        g, streams = self.graph, self.step.n_stream
        head, heads = v_dims
        if v_cache is None:
            return g.view(keys, (head, *keys.ne[1:]), keys.nb[1:])
        if not self.step.v_trans:
            nb = (_row(v_cache, head), v_cache.nb[1], v_cache.nb[2])
            return g.view(v_cache, (head, heads, cells, streams), nb)
        element = v_cache.nb[0]
        nb = (element * cells * head, element * cells, v_cache.nb[2])
        return g.view(v_cache, (cells, heads, head, streams), nb)

    def mha(self, layer: Layer, q: Node, k: Node, v: Node, v_mla: Node | None) -> Node:
        """build_attn_mha. Without offload_kqv it asks for the CPU behind the attention; what is
        reserved shows that the scheduler does not follow."""
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
        k_pe = g.view(both, (rot, 1, n), (row, row))
        if self.style.rope != "none":
            k_pe = g.rope(k_pe, self.positions)
        compressed = self.norm(compressed, layer.get("attn_kv_a_norm"))
        if not self.shape.is_mla:
            return self._mla_unpacked(layer, q, compressed, k_pe, head_k)
        nope = g.view(q, (head_k - rot, heads, n), q.nb[1:3])
        q_pe = g.view(q, (rot, heads, n), q.nb[1:3])
        if self.style.rope != "none":
            q_pe = g.rope(q_pe, self.positions)
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
        q = g.rope(q, self.positions, layer.get("rope_factors_long"))
        k = g.concat(k_nope, g.new("REPEAT", (rot, s.n_head, n), k_pe), 0)
        return self.linear(layer, "attn_output", self.attend(layer, q, k, v))

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


def _row(cache: Node, n: int) -> int:
    """ggml_row_size of ``n`` elements of a cache's type."""
    width = cache.ne[0]
    return cache.nb[1] * n // width if width else 0
