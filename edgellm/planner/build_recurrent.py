"""Blocks that keep a state instead of cells: mamba, delta nets, short convolutions.

Sources: src/models/mamba-base.cpp, delta-net-base.cpp, qwen35.cpp, qwen3next.cpp, kimi-linear.cpp,
lfm2.cpp, and ``build_rs`` in src/llama-graph.cpp.
"""

from __future__ import annotations

from edgellm.planner.blocks import Blocks, Layer
from edgellm.planner.graph import Node


class RecurrentBlocks(Blocks):
    """The recurrent half of the builder."""

    def state(self, cache: Node) -> Node:
        """build_rs: the rows of the sequences of this step."""
        g = self.graph
        rows = g.reshape(cache, *cache.ne[:2])
        g.expand(g.in_place("SCALE", g.view(rows, (0,), ())))
        out = g.get_rows(rows, self.s_main)
        g.expand(out)
        extra = g.get_rows(rows, self.s_extra)
        g.expand(g.cpy(extra, g.view(cache, (cache.ne[0], 0), (cache.nb[1],))))
        return out

    def recurrent(self, layer: Layer, cur: Node) -> Node:
        """A layer without cells, by the tensors it has."""
        if "shortconv.conv" in layer:
            return self.shortconv(layer, cur)
        if "ssm_f_a" in layer:
            return self.kimi_delta(layer, cur)
        if "ssm_beta" in layer or "ssm_ba" in layer:
            return self.delta_net(layer, cur)
        if "ssm_x" in layer and self.shape.arch == "plamo2":
            return self.plamo_mamba(layer, cur)
        if "ssm_x" in layer:
            return self.mamba(layer, cur)
        return self.mamba2(layer, cur) if "ssm_in" in layer else cur

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
        beta, alpha = self._gates(layer, cur, v_heads, per)
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

    def _gates(self, layer: Layer, cur: Node, v_heads: int, per: int) -> tuple[Node, Node]:
        """Beta and alpha: two products, or one (qwen3next.cpp)."""
        g, seqs = self.graph, self.step.n_seqs
        if "ssm_ba" in layer:
            groups = int(self.shape.hparams["ssm_n_group"])
            both = g.mul_mat(layer.need("ssm_ba"), cur)
            each = both.ne[0] // groups
            both = g.reshape(both, each, groups, per, seqs)
            half = g.view(both, (each // 2, groups, per, seqs), both.nb[1:])
            return g.unary(g.cont(half, 1, v_heads, per, seqs)), g.cont(half, v_heads, per, seqs)
        beta = g.mul_mat(layer.need("ssm_beta"), cur)
        beta = g.unary(g.reshape(beta, 1, v_heads, per, seqs))
        return beta, g.reshape(g.mul_mat(layer.need("ssm_alpha"), cur), v_heads, per, seqs)

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

    def mamba(self, layer: Layer, cur: Node) -> Node:
        """build_mamba_layer."""
        g, h, seqs = self.graph, self.shape.hparams, self.step.n_seqs
        per = self.n_tokens // seqs
        inner, state, rank = int(h["ssm_d_inner"]), int(h["ssm_d_state"]), int(h["ssm_dt_rank"])
        cache = g.placed("f32", (layer.shape.r_width, seqs), layer.cache_place)
        taps = layer.shape.r_width // inner
        conv = g.reshape(self.state(cache), taps, inner, seqs)
        xz = g.mul_mat(layer.need("ssm_in"), g.reshape(cur, cur.ne[0], per, seqs))
        x, z = (g.view(xz, (inner, per, seqs), xz.nb[1:3]) for _ in range(2))
        x = self._convolve(layer, g.concat(conv, g.transpose(x), 0), cache)
        x_db = g.mul_mat(layer.need("ssm_x"), x)
        dt = g.view(x_db, (rank, per, seqs), x_db.nb[1:3])
        b, c = (g.view(x_db, (state, 1, per, seqs), (4 * state, *x_db.nb[1:3])) for _ in range(2))
        norms = [layer.get(f"ssm_{name}_norm") for name in ("dt", "b", "c")]
        if all(norm is not None for norm in norms):
            dt, b, c = (self.norm(t, w) for t, w in zip((dt, b, c), norms, strict=True))
        else:
            dt = g.cont(dt)
        dt = g.add(g.mul_mat(layer.need("ssm_dt"), dt), layer.need("ssm_dt.bias"))
        heads = g.reshape(x, 1, inner, per, seqs)
        y_ssm = self._scan(layer, heads, (dt, b, c), state * inner)
        y = g.view(y_ssm, (inner, per, seqs), heads.nb[2:4])
        y = g.add(y, g.mul(x, layer.need("ssm_d")))
        y = g.glu(g.cont(z), y)
        out = g.mul_mat(layer.need("ssm_out"), y)
        return g.reshape(out, out.ne[0], per * seqs)

    def _convolve(self, layer: Layer, joined: Node, cache: Node) -> Node:
        """Keep the last inputs, then the convolution, its bias and its activation."""
        g, seqs = self.graph, self.step.n_seqs
        channels = joined.ne[1]
        taps = layer.shape.r_width // channels
        last = g.view(joined, (taps, channels, seqs), joined.nb[1:3])
        g.expand(g.cpy(last, g.view(cache, (layer.shape.r_width, seqs), (cache.nb[1],))))
        per = joined.ne[0] - taps
        out = g.new("SSM_CONV", (channels, per, seqs), joined, layer.need("ssm_conv1d"))
        bias = layer.get("ssm_conv1d.bias")
        return g.unary(g.add(out, bias) if bias is not None else out)

    def _scan(
        self,
        layer: Layer,
        x: Node,
        rest: tuple[Node, Node, Node],
        size: int,
        a: Node | None = None,
    ) -> Node:
        """build_rs with ggml_ssm_scan in place of the row copy; the new states kept."""
        g, seqs = self.graph, self.step.n_seqs
        cache = g.placed("f32", (layer.shape.s_width, seqs), layer.cache_place)
        rows = g.reshape(cache, *cache.ne[:2])
        g.expand(g.in_place("SCALE", g.view(rows, (0,), ())))
        count = x.ne[0] * x.ne[1] * x.ne[2] * x.ne[3] + size * seqs
        dt, b, c = rest
        states = g.reshape(rows, size // (x.ne[0] * x.ne[1]), x.ne[0], x.ne[1], seqs)
        out = g.new(
            "SSM_SCAN", (count,), states, x, dt, a or layer.need("ssm_a"), b, c, self.s_main
        )
        g.expand(out)
        extra = g.get_rows(rows, self.s_extra)
        g.expand(g.cpy(extra, g.view(cache, (cache.ne[0], 0), (cache.nb[1],))))
        states = g.view(out, (size, seqs))
        g.expand(g.cpy(states, g.view(cache, (size, seqs), (cache.nb[1],))))
        return out

    def plamo_mamba(self, layer: Layer, cur: Node) -> Node:
        """build_plamo2_mamba_layer (plamo2.cpp)."""
        g, h, seqs = self.graph, self.shape.hparams, self.step.n_seqs
        per = self.n_tokens // seqs
        inner, state, heads = int(h["ssm_d_inner"]), int(h["ssm_d_state"]), int(h["ssm_dt_rank"])
        head = inner // heads
        cache = g.placed("f32", (layer.shape.r_width, seqs), layer.cache_place)
        conv = g.reshape(self.state(cache), layer.shape.r_width // inner, inner, seqs)
        zx = g.mul_mat(layer.need("ssm_in"), g.reshape(cur, cur.ne[0], per, seqs))
        zx = g.cont(g.permute(zx, 0, 2, 1, 3), 2 * head, heads, per, seqs)
        x, z = (g.view(zx, (head, heads, per, seqs), zx.nb[1:]) for _ in range(2))
        x = g.cont(x, inner, per, seqs)
        x = self._convolve(layer, g.concat(conv, g.transpose(x), 0), cache)
        bcdt = g.mul_mat(layer.need("ssm_x"), x)
        row = bcdt.nb[1:3]
        b, c = (g.view(bcdt, (state, per, seqs), row) for _ in range(2))
        dt = g.view(bcdt, (max(64, self.n_embd // 16), per, seqs), row)
        b, c = self.norm(b, layer.get("ssm_b_norm")), self.norm(c, layer.get("ssm_c_norm"))
        dt = g.mul_mat(layer.need("ssm_dt"), self.norm(dt, layer.get("ssm_dt_norm")))
        dt = g.add(dt, layer.need("ssm_dt.bias"))
        x = g.view(x, (head, heads, per, seqs))
        b, c = (g.view(t, (state, 1, per, seqs), (4 * state, *t.nb[1:3])) for t in (b, c))
        a = g.reshape(layer.need("ssm_a"), 1, heads)
        y_ssm = self._scan(layer, x, (dt, b, c), state * inner, a)
        y = g.view(y_ssm, (head, heads, per, seqs))
        y = g.add(y, g.mul(x, g.reshape(layer.need("ssm_d"), 1, heads)))
        y = g.glu(g.cont(z), y)
        out = g.mul_mat(layer.need("ssm_out"), g.view(y, (inner, per, seqs), y.nb[2:4]))
        return g.reshape(out, out.ne[0], per * seqs)

    def mamba2(self, layer: Layer, cur: Node) -> Node:
        """build_mamba2_layer."""
        g, h, seqs = self.graph, self.shape.hparams, self.step.n_seqs
        n, per = self.n_tokens, self.n_tokens // seqs
        inner, state = int(h["ssm_d_inner"]), int(h["ssm_d_state"])
        heads, groups = int(h["ssm_dt_rank"]), max(int(h.get("ssm_n_group", 1)), 1)
        head, channels = inner // heads, inner + 2 * groups * state
        cache = g.placed("f32", (layer.shape.r_width, seqs), layer.cache_place)
        conv = g.reshape(self.state(cache), layer.shape.r_width // channels, channels, seqs)
        mixed = g.mul_mat(layer.need("ssm_in"), cur)
        mixed = g.reshape(mixed, mixed.ne[0], per, seqs)
        nb = mixed.nb
        z = g.view(mixed, (head, heads, per, seqs), (4 * head, nb[1], nb[2]))
        x_bc = g.view(mixed, (channels, per, seqs), nb[1:3])
        dt = g.view(mixed, (heads, per, seqs), nb[1:3])
        x_bc = self._convolve(layer, g.concat(conv, g.transpose(x_bc), 0), cache)
        row = x_bc.nb[1:3]
        x = g.view(x_bc, (head, heads, per, seqs), (4 * head, *row))
        b, c = (g.view(x_bc, (state, groups, per, seqs), (4 * state, *row)) for _ in range(2))
        dt = g.add(g.cont(dt), layer.need("ssm_dt.bias"))
        y_ssm = self._scan(layer, x, (dt, b, c), state * inner)
        y = g.view(y_ssm, (head, heads, per, seqs))
        y = g.add(y, g.mul(x, layer.need("ssm_d")))
        y = g.glu(g.cont(z), y)
        norm = layer.get("ssm_norm")
        if norm is not None:
            y = self.norm(g.reshape(y, inner // groups, groups, per, seqs), norm)
        return g.mul_mat(layer.need("ssm_out"), g.reshape(y, inner, n))

    def kimi_delta(self, layer: Layer, cur: Node) -> Node:
        """Kimi delta attention (kimi-linear.cpp)."""
        g, seqs, n = self.graph, self.step.n_seqs, self.n_tokens
        per = n // seqs
        head = int(self.shape.hparams["kda_head_dim"])
        heads = max(layer.shape.s_width // (head * head), 1)
        inner = head * heads
        cache = g.placed("f32", (layer.shape.r_width, seqs), layer.cache_place)
        kept = (self.state(cache), cache, layer.shape.r_width // (3 * inner))
        q, k, v = (self._kimi_conv(layer, cur, name, kept, head) for name in "qkv")
        g1 = g.mul_mat(layer.need("ssm_f_b"), g.mul_mat(layer.need("ssm_f_a"), cur))
        g1 = g.reshape(g.unary(g.add(g1, layer.need("ssm_dt.bias"))), head, heads, n)
        g1 = g.mul(g1, g.reshape(layer.need("ssm_a"), 1, heads, 1))
        g1 = g.reshape(g1, head, heads, per, seqs)
        beta = g.mul_mat(layer.need("ssm_beta"), cur)
        beta = g.unary(g.reshape(beta, 1, heads, per, seqs))
        states = g.placed("f32", (layer.shape.s_width, seqs), layer.cache_place)
        state = g.reshape(self.state(states), head, head, heads, seqs)
        q, k = (g.scale(g.like("RMS_NORM", t)) for t in (q, k))
        out = g.new("GATED_DELTA_NET", (inner, n + head * seqs), q, k, v, g1, beta, state)
        result = g.cont(g.view(out, (head, heads, per, seqs)))
        new = g.view(out, (head, head, heads, seqs))
        g.expand(g.cpy(new, g.view(states, (layer.shape.s_width * seqs,), ())))
        g2 = g.mul_mat(layer.need("ssm_g_b"), g.mul_mat(layer.need("ssm_g_a"), cur))
        g2 = g.unary(g.reshape(g2, head, heads, n))
        normed = self.norm(g.reshape(result, head, heads, n), layer.get("ssm_norm"))
        return g.mul_mat(layer.need("attn_output"), g.cont(g.mul(normed, g2), inner, n))

    def _kimi_conv(
        self, layer: Layer, cur: Node, name: str, kept: tuple[Node, Node, int], head: int
    ) -> Node:
        """causal_conv1d: a projection and its short convolution."""
        g, seqs = self.graph, self.step.n_seqs
        before, cache, taps = kept
        x = g.mul_mat(layer.need(f"attn_{name}"), cur)
        inner, per = x.ne[0], self.n_tokens // seqs
        x = g.transpose(g.reshape(x, inner, per, seqs))
        own = g.view(before, (taps, inner, seqs), (4 * taps, before.nb[1]))
        joined = g.concat(own, x, 0)
        last = g.view(joined, (taps, inner, seqs), joined.nb[1:3])
        g.expand(g.cpy(last, g.view(cache, (taps, inner, seqs), (4 * taps, cache.nb[1]))))
        kernel = layer.need(f"ssm_conv1d_{name}")
        kernel = g.reshape(kernel, kernel.ne[0], inner)
        out = g.new("SSM_CONV", (inner, per, seqs), joined, kernel)
        return g.reshape(g.unary(out), head, inner // head, per, seqs)
