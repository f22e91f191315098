"""What an architecture does with its tensors that they do not tell (src/models/<arch>.cpp)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from edgellm.gguf.arch import names
from edgellm.gguf.shape import ModelShape


@dataclass(frozen=True)
class Style:
    """One architecture's habits."""

    norm: str = "RMS_NORM"
    """NORM where the architecture uses layer norm: that one is never computed in place."""
    late_outputs: bool = False
    """Every token goes through the last block; rows are chosen before the output matrix."""
    keeps_hidden: bool = False
    """The hidden state of every token is an output (for next-token prediction)."""
    rope: str = "all"
    """all, none, swa (only sliding layers), not_fourth or not_first_of_four."""
    norms_after_rope: bool = False
    expanded_norm: bool = False
    """A block's first norm is computed before anything else of it."""
    scaled_q: bool = False
    scaled_input: bool = False
    parallel: str = ""
    """Attention and feed-forward side by side; how they are added."""
    residual_first: bool = False
    """The residual is the first operand of the sums, and so the one overwritten."""
    ffn_residual_first: bool = False
    post_norm: bool = False
    """Norms come after attention and feed-forward, none before (olmo2, exaone4)."""
    one_part: bool = False
    """A block is attention, a recurrence or a feed-forward, not two of them (nemotron_h)."""
    gated_q: bool = False
    """The Q projection holds a gate beside it (qwen3next, qwen35)."""
    gated_output: bool = False
    """Attention's output is gated before its last matrix (afmoe)."""
    gating: str = "softmax"
    """How experts are weighed: softmax, sigmoid, softmax_weight (after the choice)."""
    norm_weights: bool = True
    scaled_residual: bool = False
    """What attention and feed-forward add is scaled first."""
    embed_norm: bool = False
    router_first: bool = False
    """Experts are chosen by the block's input, before attention."""
    weighed_input: bool = False
    """Experts' inputs are weighed, not what they give (llama4)."""
    attn_residual_first: bool = False
    expanded_input: bool = False
    """Embeddings are scaled by build_inp_embd, before anything else is computed."""
    normed_v: bool = False
    """V goes through a norm without weights."""
    factors_of_full: bool = False
    """RoPE's frequency factors are for the layers without a window only."""
    borrows_cache: bool = False
    """The last blocks attend to the cells of an earlier one."""
    positions: int = 1
    """4 for multi-section RoPE."""


_LAYER_NORM: Final = names(
    """bert bloom chameleon codeshell cohere2 command-r dbrx falcon gpt2 gptneox jais jais2
    modern-bert mpt nemotron olmo orion phi2 stablelm starcoder starcoder2 jina-bert-v2
    jina-bert-v3 nomic-bert nomic-bert-moe rwkv6 rwkv7"""
)
_NO_ROPE: Final = names(
    """gpt2 bloom mpt starcoder jamba nemotron_h nemotron_h_moe bert jina-bert-v2 refact
    kimi-linear jais mamba mamba2"""
)
_NEXT: Final = Style(late_outputs=True, keeps_hidden=True, gated_q=True, positions=4)
_ALIKE: Final = (
    ("gemma gemma2 gemma3", Style(scaled_q=True, scaled_input=True)),
    (
        "granite granitehybrid granitemoe",
        Style(scaled_input=True, expanded_input=True, scaled_residual=True),
    ),
    ("bailingmoe2 dots1 minimax-m2", Style(gating="sigmoid")),
    ("mamba mamba2", Style(one_part=True)),
    ("minicpm minicpm3", Style(scaled_input=True, scaled_residual=True)),
    ("hunyuan-dense hunyuan-moe", Style(norms_after_rope=True)),
    ("qwen2vl qwen3vl qwen3vlmoe", Style(positions=4)),
    ("exaone4 olmo2", Style(post_norm=True)),
    ("qwen35 qwen35moe", _NEXT),
)
_STYLES: Final[dict[str, Style]] = {
    **{arch: style for alike, style in _ALIKE for arch in names(alike)},
    "afmoe": Style(gating="sigmoid", gated_output=True, scaled_input=True, rope="swa"),
    "bert": Style(embed_norm=True, post_norm=True),
    "cohere2": Style(rope="swa", parallel="norm"),
    "command-r": Style(parallel="norm"),
    "deepseek2": Style(keeps_hidden=True),
    "falcon": Style(parallel="attn"),
    "gemma3n": Style(scaled_input=True, normed_v=True, borrows_cache=True),
    "gemma4": Style(
        late_outputs=True,
        keeps_hidden=True,
        scaled_input=True,
        normed_v=True,
        factors_of_full=True,
        borrows_cache=True,
    ),
    "glm4moe": Style(gating="sigmoid", keeps_hidden=True),
    "gpt-oss": Style(
        late_outputs=True, keeps_hidden=True, gating="softmax_weight", norm_weights=False
    ),
    "gptneox": Style(parallel="input"),
    "jamba": Style(residual_first=True, norm_weights=False),
    "kimi-linear": Style(gating="sigmoid", expanded_norm=True),
    "llama4": Style(
        rope="not_fourth",
        norms_after_rope=True,
        gating="sigmoid",
        norm_weights=False,
        weighed_input=True,
    ),
    "lfm2": Style(residual_first=True),
    "lfm2moe": Style(residual_first=True, gating="sigmoid"),
    "nemotron_h": Style(one_part=True, late_outputs=True, keeps_hidden=True),
    "nemotron_h_moe": Style(one_part=True, late_outputs=True, keeps_hidden=True, gating="sigmoid"),
    "openelm": Style(attn_residual_first=True),
    "phi2": Style(parallel="phi", scaled_q=True),
    "phi3": Style(scaled_q=True, ffn_residual_first=True),
    "qwen2moe": Style(norm_weights=False),
    "qwen3next": replace(_NEXT, positions=1),
    "smallthinker": Style(rope="not_first_of_four", router_first=True),
    "smollm3": Style(rope="not_fourth"),
}


def style_of(shape: ModelShape) -> Style:
    """The habits of ``shape``'s architecture; most have none of their own."""
    style = _STYLES.get(shape.arch, Style())
    if shape.arch in _LAYER_NORM:
        style = replace(style, norm="NORM")
    # baichuan.cpp: 40 layers make the 13B, with ALiBi; only the 7B's 32 are known to rotate
    if shape.arch in _NO_ROPE or (shape.arch == "baichuan" and shape.n_layer != 32):
        style = replace(style, rope="none")
    weights = shape.hparams.get("expert_weights_norm")
    if shape.arch in ("deepseek2", "glm4moe", "dots1"):
        style = replace(style, norm_weights=bool(weights))
    if shape.hparams.get("expert_gating_func") == 2 and style.gating == "softmax":
        style = replace(style, gating="sigmoid")
    return style
