"""Gemma 3n's blocks: several hidden states side by side, predicted and corrected (gemma3n.cpp)."""

from __future__ import annotations

from typing import Final

from edgellm.gguf.shape import Tensor
from edgellm.planner.blocks import Blocks, Layer, weight
from edgellm.planner.graph import Node

SPARSE_LAYERS: Final = 10
"""n_layer_sparsity: blocks whose gate keeps only what is far above its mean."""


class AltupBlocks(Blocks):
    """The half of the builder that knows the stacked hidden states: (n_embd, tokens, n_altup)."""

    def attention(self, layer: Layer, cur: Node) -> Node:
        raise NotImplementedError

    def stack(self, cur: Node, proj: Tensor, place: int) -> Node:
        """One hidden state and its projections."""
        g = self.graph
        matrix = weight(g, proj, place)
        target = self._magnitude(cur)
        repeated = g.new("REPEAT", (*cur.ne[:2], matrix.ne[2]), cur)
        added = self._scaled_to(g.mul_mat(matrix, repeated), target)
        return g.concat(cur, added, 2)

    def unstack(self, cur: Node, unembd: Tensor, place: int) -> Node:
        """The mean of all hidden states, for the rows that are asked for."""
        g = self.graph
        matrix = weight(g, unembd, place)
        target = self._magnitude(self._slice(cur, 0))
        rest = self._scaled_to(g.mul_mat(matrix, self._rest(cur)), target)
        cur = self._slice(cur, 0)
        for i in range(rest.ne[2]):
            cur = g.add(cur, self._slice(rest, i))
        return g.get_rows(g.scale(cur), self.out_ids)

    def altup_block(self, layer: Layer, x: Node, per_layer: Node, pin: int | None) -> Node:
        """One block."""
        g = self.graph
        predictions = self._predict(layer, x)
        active = self._slice(predictions, 0)
        cur = self.norm(active, layer.get("attn_norm"), pin=pin)
        laurel = g.mul_mat(layer.need("laurel_r"), g.mul_mat(layer.need("laurel_l"), cur))
        laurel = g.add(self.norm(laurel, layer.get("laurel_post_norm"), pin=pin), cur)
        cur = self.norm(self.attention(layer, cur), layer.get("post_attention_norm"), pin=pin)
        mixed = g.scale(g.add(g.add(cur, active), laurel))
        cur = self._feed_forward(layer, self.norm(mixed, layer.get("ffn_norm"), pin=pin))
        gated = g.add(self.norm(cur, layer.get("post_ffw_norm")), mixed)
        corrected = self._correct(layer, predictions, gated)
        first = g.mul(self._slice(corrected, 0), layer.need("altup_correct_scale"))
        first = g.unary(g.mul_mat(layer.need("inp_gate"), first))
        first = g.mul(first, self._slice(per_layer, layer.il))
        first = self.norm(g.mul_mat(layer.need("proj"), first), layer.get("post_norm"), pin=pin)
        rest = g.add(self._rest(corrected), first)
        return g.concat(self._slice(corrected, 0), rest, 2)

    def _feed_forward(self, layer: Layer, cur: Node) -> Node:
        g = self.graph
        up = g.mul_mat(layer.need("ffn_up"), cur)
        gate = g.mul_mat(layer.need("ffn_gate"), cur)
        if layer.il < SPARSE_LAYERS:
            gate = self._gaussian_topk(gate)
        return g.mul_mat(layer.need("ffn_down"), g.mul(up, g.unary(gate)))

    def _gaussian_topk(self, x: Node) -> Node:
        g = self.graph
        mean = g.new("MEAN", (1, *x.ne[1:]), x)
        squares = g.like("SQR", g.like("SUB", x, mean))
        std = g.like("SQRT", g.scale(g.new("SUM_ROWS", (1, *x.ne[1:]), squares)))
        return g.unary(g.like("SUB", x, g.add(mean, g.scale(std))))

    def _predict(self, layer: Layer, x: Node) -> Node:
        g, n = self.graph, x.ne[1]
        modalities = self._modalities(layer, self._slice(x, 0))
        coefs = g.mul_mat(layer.need("altup_predict_coef"), modalities)
        coefs = g.reshape(coefs, x.ne[2], x.ne[2], n)
        turned = g.cont(g.permute(x, 1, 2, 0, 3))
        made = g.cont(g.permute(g.mul_mat(turned, coefs), 0, 2, 1, 3))
        return g.add(made, x)

    def _correct(self, layer: Layer, predictions: Node, activated: Node) -> Node:
        g = self.graph
        modalities = self._modalities(layer, activated)
        innovation = g.like("SUB", activated, self._slice(predictions, 0))
        coefs = g.scale(g.mul_mat(layer.need("altup_correct_coef"), modalities))
        coefs = g.cont(g.transpose(coefs), 1, *predictions.ne[1:3])
        spread = g.new("REPEAT", predictions.ne, innovation)
        return g.add(g.mul(spread, coefs), predictions)

    def _modalities(self, layer: Layer, x: Node) -> Node:
        g = self.graph
        scaled = g.scale(self.norm(x, layer.get("altup_router_norm")))
        return g.unary(g.mul_mat(layer.need("altup_router"), scaled))

    def _magnitude(self, x: Node) -> Node:
        g = self.graph
        return g.like("SQRT", g.new("SUM_ROWS", (1, *x.ne[1:]), g.like("SQR", x)))

    def _scaled_to(self, x: Node, target: Node) -> Node:
        g = self.graph
        magnitude = self._magnitude(x)
        return g.like("DIV", g.mul(x, target), magnitude)

    def _slice(self, x: Node, _i: int) -> Node:
        return self.graph.view(x, x.ne[:2], x.nb[1:2])

    def _rest(self, x: Node) -> Node:
        return self.graph.view(x, (*x.ne[:2], x.ne[2] - 1), x.nb[1:3])
