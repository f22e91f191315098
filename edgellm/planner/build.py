"""The graphs that llama.cpp builds, on shapes: one block at a time, driven by the tensors a layer
has.

Sources: src/llama-graph.cpp (``build_attn``, ``build_ffn``, ``build_moe_ffn``, ``build_rs``) and
src/models/<arch>.cpp. A tensor that is there is used, so most architectures need nothing of their
own; what an architecture does differently with the same tensors is its style (styles.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.gguf.shape import ModelShape
from edgellm.planner.blocks import Layer, Step, weight
from edgellm.planner.build_altup import AltupBlocks
from edgellm.planner.build_recurrent import RecurrentBlocks
from edgellm.planner.graph import Graph, Node, is_contiguous
from edgellm.planner.styles import style_of


class Builder(RecurrentBlocks, AltupBlocks):
    """Builds one graph. ``places[i]`` is the backend of block i, the output layer's last."""

    def __init__(
        self, shape: ModelShape, step: Step, layers: Sequence[tuple[int, int, int]], host: int
    ) -> None:
        """``layers``: (block, backend, backend of its experts) of each block to build."""
        self.shape = shape
        self.step = step
        self.host = host
        self.graph = Graph()
        self.style = style_of(shape)
        self.n_embd = shape.n_embd
        self.n_tokens = step.n_tokens
        self.picked = layers
        self.caches: dict[int, tuple[Node, Node | None]] = {}
        self.shared: dict[tuple[str, int], Node] = {}
        self.router: Node | None = None
        self.windowed = not shape.has_memory or any(x.is_swa for x in shape.layers)
        """Which of llm_graph_context's build_attn: K is computed before V (iswa, no cache)."""

    # --- inputs

    def inputs(self) -> Node:
        """Positions, masks, indices and the embedded tokens (build_inp_*)."""
        g, step, shape = self.graph, self.step, self.shape
        n = self.n_tokens
        tokens = g.input("i32", n)
        self.deepstack = int(shape.hparams.get("n_deepstack", 0))
        wide = self.n_embd * (1 + self.deepstack)
        embd = g.input("f32", wide, n)
        table = shape.token_embd
        rows = g.get_rows(weight(g, table, self.host), tokens) if table else embd
        if self.deepstack:
            rows = g.new("PAD", (wide, n), rows)
        g.expand(rows)
        g.expand(embd)
        cur = g.scale(rows) if self.style.scaled_input else rows
        if self.deepstack:
            cur = g.view(rows, (self.n_embd, n), (rows.nb[1],))
        g.expand(cur if self.style.expanded_input else rows)
        self.embedded = rows
        self.positions = g.input("i32", n * self.style.positions)
        self.attn_scale = g.input("f32", 1, 1, n) if shape.arch == "llama4" else None
        cur = self._positions_table(cur)
        self._attention_inputs()
        self.out_ids = g.input("i32", step.n_outputs)
        return cur

    def _positions_table(self, cur: Node) -> Node:
        """Learned positions (gpt2.cpp, starcoder.cpp)."""
        g = self.graph
        table = next(
            (t for t in self.shape.input_tensors if t.name == "position_embd.weight"), None
        )
        if table is None or self.style.embed_norm:
            return cur
        return g.add(cur, g.get_rows(weight(g, table, self.host), self.positions))

    def _attention_inputs(self) -> None:
        g, step, n = self.graph, self.step, self.n_tokens
        mask = "f16" if step.flash else "f32"
        per = n // step.n_stream
        wide = max((x.head_v * x.n_head_kv for x in self.shape.layers), default=1)
        n_v = n * wide if step.v_trans else n
        self.k_idxs, self.v_idxs = g.input("i64", n), g.input("i64", n_v)
        self.swa_k_idxs, self.swa_v_idxs = g.input("i64", n), g.input("i64", n_v)
        if self.shape.has_memory:
            self.mask = g.input(mask, step.cells, per, 1, step.n_stream)
            self.swa_mask = g.input(mask, step.swa_cells, per, 1, step.n_stream)
        else:
            self.mask = g.input(mask, n, n)
            self.swa_mask = g.input(mask, n, n)
        self.rotation = self._rotations()
        s_copy = g.input("i32", step.n_seqs)  # build_rs_inp: two views, shared by all blocks
        self.s_main, self.s_extra = g.view(s_copy, (step.n_seqs,), ()), g.view(s_copy, (0,), ())

    def _rotations(self) -> dict[tuple[bool, str], Node]:
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

    # --- pieces

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

    def moe(self, layer: Layer, cur: Node, logits: Node | None = None) -> Node:
        """build_moe_ffn."""
        g, s, n = self.graph, layer.shape, cur.ne[1]
        used = s.n_expert_used or self.shape.n_expert_used or 1
        if logits is None:
            logits = self.linear(layer, "ffn_gate_inp", cur)
        n_expert = logits.ne[0]
        chosen, weights = self._route(layer, logits, n_expert, used)
        g.expand(weights)
        x = g.reshape(cur, cur.ne[0], 1, n)
        if self.style.weighed_input:
            x = g.mul(g.new("REPEAT", (cur.ne[0], used, n), x), weights)
        hidden = self._experts(layer, x, chosen)
        out = self._expert_linear(layer, "ffn_down_exps", hidden, chosen)
        if not self.style.weighed_input:
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
        if int(self.shape.hparams.get("n_expert_groups", 0)) > 1:
            order = self._grouped(order, n_expert)
        chosen = g.top_k(order, used)
        weights = g.get_rows(g.reshape(probs, 1, n_expert, n), chosen)
        if gating == "softmax_weight":
            weights = g.reshape(g.soft_max(g.reshape(weights, used, n)), 1, used, n)
        if self.style.norm_weights:
            flat = g.reshape(weights, used, n)
            total = g.like("CLAMP", g.new("SUM_ROWS", (1, n), flat))
            weights = g.reshape(g.like("DIV", flat, total), 1, used, n)
        if self.shape.hparams.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
            weights = g.scale(weights)
        return chosen, weights

    def _grouped(self, probs: Node, n_expert: int) -> Node:
        """Only the best groups of experts may be chosen from (DeepSeek V3)."""
        g, n, h = self.graph, probs.ne[1], self.shape.hparams
        groups, used = int(h["n_expert_groups"]), int(h.get("n_group_used", 1))
        each = n_expert // groups
        grouped = g.reshape(probs, each, groups, n)
        best = g.top_k(grouped, 2)
        scores = g.get_rows(g.reshape(grouped, 1, each, groups, n), best)
        scores = g.new("SUM_ROWS", (1, groups, n), g.reshape(scores, 2, groups, n))
        top = g.top_k(g.reshape(scores, groups, n), used)
        picked = g.get_rows(grouped, top)
        masked = g.set_rows(g.like("FILL", grouped), picked, top)
        return g.reshape(masked, n_expert, n)

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
        out = self.moe(layer, cur, self.router)
        if "ffn_up_shexp" not in layer:
            return out
        shared = self.ffn(layer, cur, "_shexp")
        gate = layer.get("ffn_gate_inp_shexp")
        if gate is not None:
            shared = g.mul(shared, g.unary(g.mul_mat(gate, cur)))
        return g.add(out, shared)

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

    def mixer(self, layer: Layer, cur: Node, x: Node) -> Node:
        """Attention or what stands in its place; ``x`` is the block's input before its norm."""
        if layer.shape.is_recurrent and not layer.shape.has_kv:
            return self.recurrent(layer, cur)
        if layer.shape.is_recurrent:  # falcon-h1: both, each from a norm of its own
            out = self.attention(layer, cur)
            again = self.norm(x, layer.get("attn_norm"))
            return self.graph.add(out, self.recurrent(layer, again))
        if "attn_kv_a_mqa" in layer:
            return self.mla(layer, cur)
        if self.style.gated_q:
            return self.gated_attention(layer, cur)
        return self.attention(layer, cur)

    def block(self, layer: Layer, x: Node, last: bool, pin: int | None) -> Node:
        """One block, residuals included."""
        g, style = self.graph, self.style
        norm = layer.get("attn_norm")
        cur = self.norm(x, norm, layer.get("attn_norm.bias"), pin=pin) if norm is not None else x
        if style.gated_q or style.expanded_norm:
            g.expand(cur)
        normed, early = cur, last and not style.late_outputs
        if style.router_first:
            self.router = g.mul_mat(layer.need("ffn_gate_inp"), x)
        if style.one_part:
            return self._one_part(layer, cur, x, early)
        cur = self.mixer(layer, cur, x)
        if layer.shape.is_recurrent and layer.shape.has_kv:
            x = g.add(cur, x)
            return self._after_mixer(layer, g.get_rows(x, self.out_ids) if early else x, pin)
        if early:
            cur, x = g.get_rows(cur, self.out_ids), g.get_rows(x, self.out_ids)
            if self.router is not None:
                self.router = g.get_rows(self.router, self.out_ids)
            if style.parallel in ("norm", "attn", "phi"):
                normed = g.get_rows(normed, self.out_ids)
        if style.parallel:
            return self._parallel(layer, cur, x, normed)
        after_attn = layer.get("post_attention_norm")
        if after_attn is not None and (layer.get("ffn_norm") is not None or style.post_norm):
            cur = self.norm(cur, after_attn, pin=pin)
        if style.scaled_residual:
            cur = g.scale(cur)
        first = style.residual_first or style.attn_residual_first
        cur = g.add(x, cur) if first else g.add(cur, x)
        return self._after_mixer(layer, cur, pin)

    def _one_part(self, layer: Layer, cur: Node, x: Node, early: bool) -> Node:
        """A block that does one thing (mamba, nemotron_h)."""
        g = self.graph
        mixes = layer.shape.has_kv or layer.shape.is_recurrent
        cur = self.mixer(layer, cur, x) if mixes else self.feed_forward(layer, cur)
        if early:
            cur, x = g.get_rows(cur, self.out_ids), g.get_rows(x, self.out_ids)
        return g.add(cur, x)

    def _after_mixer(self, layer: Layer, residual: Node, pin: int | None) -> Node:
        """Norm, feed-forward, residual, and what some architectures add behind."""
        g, style = self.graph, self.style
        before = layer.get("ffn_norm") or layer.get("attn_output_norm")
        if before is None and not style.post_norm:
            before = layer.get("post_attention_norm")
        if "pre_ffw_norm_2" in layer:
            cur = self.gemma_moe(layer, residual)
        else:
            bias = layer.get("ffn_norm.bias")
            cur = residual if before is None else self.norm(residual, before, bias, pin=pin)
            cur = self.feed_forward(layer, cur)
        after = layer.get("post_ffw_norm")
        if after is not None:
            cur = self.norm(cur, after)
        if style.scaled_residual:
            cur = g.scale(cur)
        flip = style.residual_first or style.ffn_residual_first
        cur = g.add(residual, cur) if flip else g.add(cur, residual)
        if self.per_layer is not None and "inp_gate" in layer:
            cur = self._per_layer(layer, cur, self.per_layer)
        if layer.il < self.deepstack:
            cur = g.add(cur, g.view(self.embedded, (self.n_embd, cur.ne[1]), self.embedded.nb[1:2]))
        scale = layer.get("layer_output_scale")
        return g.mul(cur, scale) if scale is not None else cur

    def _parallel(self, layer: Layer, attn: Node, x: Node, normed: Node) -> Node:
        """Attention and feed-forward side by side (command-r, falcon, gptneox, phi2)."""
        g, kind = self.graph, self.style.parallel
        if kind == "input":
            normed = self.norm(x, layer.get("ffn_norm"), layer.get("ffn_norm.bias"))
        out = self.feed_forward(layer, normed)
        if kind == "phi":
            return g.add(g.add(attn, out), x)
        return g.add(g.add(out, attn), x) if kind == "attn" else g.add(g.add(out, x), attn)

    def gemma_moe(self, layer: Layer, x: Node) -> Node:
        """A dense part and experts, each with norms of its own (gemma4.cpp)."""
        g = self.graph
        mlp = self.ffn(layer, self.norm(x, layer.get("ffn_norm")))
        mlp = self.norm(mlp, layer.get("post_ffw_norm_1"))
        cur = self.norm(x, layer.get("pre_ffw_norm_2"))
        router = g.scale(g.like("RMS_NORM", x))
        scale = layer.get("ffn_gate_inp.scale")
        router = g.mul(router, scale) if scale is not None else router
        logits = g.mul_mat(layer.need("ffn_gate_inp"), router)
        experts = self.norm(self.moe(layer, cur, logits), layer.get("post_ffw_norm_2"))
        return g.add(mlp, experts)

    def _per_layer_inputs(self, cur: Node) -> Node | None:
        """Embeddings a block and token (gemma4.cpp: build_inp_per_layer, project_...)."""
        g, n, shape = self.graph, self.n_tokens, self.shape
        table = next((t for t in shape.input_tensors if t.name.startswith("per_layer_tok")), None)
        first = {t.name: t for t in shape.layers[0].tensors}
        proj = first.get("per_layer_model_proj.weight")
        if table is None or proj is None:
            return None
        blocks = shape.n_layer
        width = table.dims[0] // blocks
        rows = g.get_rows(weight(g, table, self.host), g.input("i32", n))
        rows = g.scale(g.reshape(rows, width, blocks, n))
        g.expand(rows)
        place = self.picked[0][1]
        mixed = g.reshape(g.scale(g.mul_mat(weight(g, proj, place), cur)), width, blocks, n)
        norm = first.get("per_layer_proj_norm.weight")
        mixed = self.norm(mixed, weight(g, norm, place) if norm else None)
        both = g.scale(g.add(mixed, rows))
        return g.cont(g.permute(both, 0, 2, 1, 3))

    def _per_layer(self, layer: Layer, cur: Node, inputs: Node) -> Node:
        g, n = self.graph, cur.ne[1]
        gate = g.unary(g.mul_mat(layer.need("inp_gate"), cur))
        own = g.view(inputs, (inputs.ne[0], n), inputs.nb[1:2])
        out = g.mul_mat(layer.need("proj"), g.mul(gate, own))
        return g.add(cur, self.norm(out, layer.get("post_norm")))

    def build(self, output_place: int, pins: Sequence[int | None]) -> Graph:
        """The whole graph: inputs, the picked blocks, the output layer."""
        cur = self.inputs()
        self.per_layer = self._per_layer_inputs(cur)
        if self.style.embed_norm:
            own = {t.name: t for t in (*self.shape.output_tensors, *self.shape.input_tensors)}
            norm, bias = own.get("token_embd_norm.weight"), own.get("token_embd_norm.bias")
            cur = self.norm(
                cur,
                weight(self.graph, norm, self.host) if norm else None,
                weight(self.graph, bias, self.host) if bias else None,
            )
        altup = [t for t in self.shape.output_tensors if t.name.startswith("altup_")]
        inputs = self.per_layer if len(altup) == 2 else None
        if inputs is not None:
            cur = self.stack(cur, altup[0], output_place)
        for i, (il, place, expert_place) in enumerate(self.picked):
            layer = self.layer(il, place, expert_place)
            if inputs is not None:
                cur = self.altup_block(layer, cur, inputs, pins[i])
                continue
            cur = self.block(layer, cur, i == len(self.picked) - 1, pins[i])
        if inputs is not None:
            cur = self.unstack(cur, altup[1], output_place)
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
        bias = own.get("output_norm.bias")
        cur = self.norm(
            cur,
            weight(g, norm, place) if norm else None,
            weight(g, bias, place) if bias else None,
        )
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
