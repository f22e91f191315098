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
from edgellm.planner.build_attention import AttentionBlocks
from edgellm.planner.build_ffn import FeedForwardBlocks
from edgellm.planner.build_recurrent import RecurrentBlocks
from edgellm.planner.graph import Graph, Node
from edgellm.planner.styles import style_of


class Builder(AttentionBlocks, FeedForwardBlocks, RecurrentBlocks, AltupBlocks):
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
        self.rotation = self.rotations()
        s_copy = g.input("i32", step.n_seqs)  # build_rs_inp: two views, shared by all blocks
        self.s_main, self.s_extra = g.view(s_copy, (step.n_seqs,), ()), g.view(s_copy, (0,), ())

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
