"""What llama.cpp knows by an architecture's name: lists and sliding-window rules, as data.

Sources: src/llama-arch.cpp (names, ``llm_arch_is_recurrent``, ``llm_arch_is_hybrid``),
``llama_model::create_memory`` in src/llama-model.cpp (who has no cache), and ``load_arch_hparams``
in src/models/<name>.cpp (windows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


KNOWN: Final = names(
    """llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert
    modern-bert
    nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert bloom stablelm qwen
    qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp
    phi2 phi3 phimoe plamo plamo2 plamo3 codeshell orion internlm2 minicpm minicpm3 gemma gemma2
    gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding starcoder2 mamba mamba2 maple jamba
    falcon-h1 xverse command-r cohere2 cohere2moe dbrx olmo olmo2 olmoe muse-glimmer openelm
    arctic deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 chatglm glm4 glm4moe glm-dsa
    bitnet t5 t5encoder jais jais2 nemotron nemotron_h nemotron_h_moe exaone exaone4 exaone-moe
    rwkv6 rwkv6qwen2 rwkv7 arwkv7 granite granitemoe granitehybrid graniteswitch granite_swa
    chameleon wavtokenizer-dec plm bailingmoe bailingmoe2 bailingmoe3 dots1 dots3note arcee afmoe
    laguna ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 gpt-oss
    lfm2 lfm2moe dream smallthinker llada llada-moe seed_oss grovemoe apertus minimax-01 hrm_text
    minimax-m2 minimax-m3 cogvlm rnd1 pangu-embedded mistral3 eagle3 dflash mistral4 paddleocr
    mimo2 step35 spark2_5 llama-embed maincoder kimi-linear kimi-k3 glm5-next talkie mellum
    nanbeige qwen3tts pockettts"""
)
"""Every architecture that this llama.cpp loads (LLM_ARCH_NAMES)."""

RECURRENT: Final = names("""mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7""")
"""No attention at all (llm_arch_is_recurrent)."""

HYBRID: Final = names(
    """jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next
    kimi-linear bailingmoe3 kimi-k3 glm5-next qwen35 qwen35moe qwen4exp deepseek4 minimax-01"""
)
"""Attention in some layers, a recurrent state in others (llm_arch_is_hybrid)."""

NO_KV_CACHE: Final = names(
    """bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert wavtokenizer-dec
    modern-bert gemma-embedding dream llada llada-moe rnd1"""
)
"""create_memory returns none: encoders, and diffusion models that compute the whole text."""

ENCODERS: Final = names(
    """bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert modern-bert
    gemma-embedding t5encoder"""
)
"""Models that embed."""


@dataclass(frozen=True)
class SwaRule:
    """How an architecture slides; period 4 is three sliding layers and one full."""

    period: int = 0
    """Used when the file gives no pattern; 0: every layer slides."""
    default_window: int = 0
    """Used when the file gives no window."""
    fixed_window: int = 0
    """Used whatever window the file gives, unless it gives 0."""
    dense_first: bool = False
    needs_key: bool = False
    """Slides only when the file gives a window above 0."""
    only_n_layer: int = 0
    attention_layers: bool = False
    kind: str = "standard"


SWA_RULES: Final = {
    "afmoe": SwaRule(4, needs_key=True),
    "cohere2": SwaRule(4),
    "cohere2moe": SwaRule(4, dense_first=True),
    "deepseek4": SwaRule(0),
    "dots3note": SwaRule(0),
    "exaone-moe": SwaRule(4, default_window=128),
    "exaone4": SwaRule(4, default_window=4096, only_n_layer=64),
    "gemma-embedding": SwaRule(6, kind="symmetric"),
    "gemma2": SwaRule(2, default_window=4096),
    "gemma3": SwaRule(6, needs_key=True),
    "gemma3n": SwaRule(5),
    "gemma4": SwaRule(0),
    "gemma4-assistant": SwaRule(0),
    "gpt-oss": SwaRule(2),
    "granite_swa": SwaRule(0),
    "laguna": SwaRule(4, dense_first=True, needs_key=True),
    "lfm2": SwaRule(needs_key=True, attention_layers=True),
    "llama4": SwaRule(4, fixed_window=8192, kind="chunked"),
    "maple": SwaRule(0),
    "mellum": SwaRule(4, needs_key=True),
    "mimo2": SwaRule(0),
    "modern-bert": SwaRule(3, dense_first=True, needs_key=True, kind="symmetric"),
    "muse-glimmer": SwaRule(4),
    "olmo2": SwaRule(4, needs_key=True),
    "plamo3": SwaRule(8, needs_key=True),
    "smallthinker": SwaRule(4, fixed_window=4096, dense_first=True, needs_key=True),
    "spark2_5": SwaRule(0),
    "step35": SwaRule(0),
}
"""phi3 is absent on purpose: llama.cpp disables its window (phi3.cpp)."""
