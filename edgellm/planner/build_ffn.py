"""Feed-forward blocks: dense, and experts with their router.

Sources: ``build_ffn`` and ``build_moe_ffn`` in src/llama-graph.cpp, src/models/gemma4.cpp.
"""

from __future__ import annotations

from edgellm.planner.blocks import Blocks, Layer
from edgellm.planner.graph import Node


class FeedForwardBlocks(Blocks):
    """The part of the builder behind attention."""

    router: Node | None

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
