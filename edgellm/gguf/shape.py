"""ModelShape: what a model is made of, read from its header alone.

Everything the planner needs: per layer the widths of what is cached, whether the layer slides,
recurs or routes experts, and the bytes of its tensors. The rules are llama.cpp's own
(``llama_model_base::load_hparams`` in src/llama-model.cpp, ``load_arch_hparams`` in src/models/);
the name beside a rule is the file it comes from. A head size is never n_embd / n_head when the
file says otherwise, and everything that may be an array per layer is read as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from edgellm.gguf.arch import (
    ENCODERS,
    HYBRID,
    KNOWN,
    NO_KV_CACHE,
    RECURRENT,
    SWA_RULES,
    SwaRule,
    names,
)

if TYPE_CHECKING:
    from edgellm.gguf.reader import GGUFFile, TensorInfo

_BLOCK: Final = re.compile(r"(?:[a-z]+\.)?blk\.(\d+)\.(.+)")
_EXPERTS: Final = re.compile(r"ffn_(?:up|down|gate|gate_up)_(?:ch|)exps")
"""What ``--n-cpu-moe`` moves to the host (LLM_FFN_EXPS_REGEX in common/common.h)."""

_INPUT: Final = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")
"""Tensors that always stay on the host (LLM_TENSOR_LAYER_INPUT in src/llama-arch.cpp)."""
_FIRST_BLOCK: Final = ("per_layer_model_proj.", "per_layer_proj_norm.")
"""Tensors without a block that llama.cpp loads with block 0 (gemma3n.cpp, gemma4.cpp)."""
_SHARED: Final = ("rope_freqs.", "rope_factors_")
"""Tensors without a block that blocks use (created with TENSOR_DUPLICATED after the first)."""


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor of the file: dims innermost first, as ggml's ne; offset within its shard."""

    name: str
    dims: tuple[int, ...]
    type: str
    n_bytes: int
    offset: int
    shard: int = 0

    @property
    def n_elements(self) -> int:
        count = 1
        for dim in self.dims:
            count *= dim
        return count


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """One block. Widths are elements a cell (K, V, indexer) or a sequence (recurrent r and s)."""

    n_head: int = 0
    n_head_kv: int = 0
    n_ff: int = 0
    n_ff_exp: int = 0
    n_expert_used: int = 0
    head_k: int = 0
    head_v: int = 0
    is_swa: bool = False
    is_recurrent: bool = False
    is_nextn: bool = False
    """A next-token-prediction block: in the file, not in the ordinary graph."""
    k_width: int = 0
    v_width: int = 0
    """0 where the layer caches none: recurrent, reusing another layer's, or MLA (K only)."""
    index_width: int = 0
    """Elements a cell of the sparse-attention indexer's key cache."""
    r_width: int = 0
    s_width: int = 0
    tensors: tuple[Tensor, ...] = ()
    expert_tensors: tuple[Tensor, ...] = ()
    """The part of ``tensors`` that ``n_cpu_moe`` may keep on the host."""

    @property
    def has_kv(self) -> bool:
        return self.k_width > 0

    @property
    def n_bytes(self) -> int:
        return sum(t.n_bytes for t in self.tensors)

    @property
    def expert_bytes(self) -> int:
        return sum(t.n_bytes for t in self.expert_tensors)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the planner sees it. ``layers`` holds every block, next-token ones last."""

    name: str
    path: str
    arch: str
    quant: str
    file_bytes: int
    shard_bytes: tuple[int, ...] = ()
    n_params: int
    n_layer_all: int
    n_layer_nextn: int = 0
    n_ctx_train: int
    n_embd: int
    n_embd_out: int
    n_vocab: int
    n_expert: int = 0
    n_expert_used: int = 0
    n_expert_shared: int = 0
    n_swa: int = 0
    swa_type: str = "none"
    """none, standard, chunked or symmetric."""
    is_mla: bool = False
    is_hybrid: bool = False
    is_recurrent: bool = False
    is_encoder: bool = False
    """Embeds instead of generating: no KV cache, no next token."""
    has_memory: bool = True
    causal: bool = True
    tied_output: bool = False
    """The output matrix is the token embedding: a GPU needs a copy of its own."""
    layers: tuple[LayerShape, ...]
    input_tensors: tuple[Tensor, ...] = ()
    output_tensors: tuple[Tensor, ...] = ()
    """Without the copy of a tied output."""
    shared_tensors: tuple[Tensor, ...] = ()
    """Used by every block, one copy a device: rope_freqs."""
    hparams: dict[str, Any] = {}
    """Small numbers of the architecture that the compute graph needs (ssm_*, lora ranks ...)."""
    warnings: tuple[str, ...] = ()

    @property
    def n_layer(self) -> int:
        """Blocks of the ordinary graph (llama_hparams::n_layer)."""
        return self.n_layer_all - self.n_layer_nextn

    @property
    def n_offloadable(self) -> int:
        """What ``n_gpu_layers`` can reach: every block and the output layer."""
        return self.n_layer_all + 1

    @property
    def token_embd(self) -> Tensor | None:
        for tensor in self.input_tensors:
            if tensor.name == "token_embd.weight":
                return tensor
        return None

    @property
    def tied_tensor(self) -> Tensor | None:
        """The tensor that the output layer copies, when it has none of its own."""
        return self.token_embd if self.tied_output else None

    @property
    def has_experts(self) -> bool:
        return any(layer.expert_tensors for layer in self.layers)


class Keys:
    """Metadata under an architecture's prefix: scalars, or one value a layer."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, n_layer: int) -> None:
        self._metadata = metadata
        self._arch = arch
        self.n_layer = n_layer

    def raw(self, key: str) -> Any:
        return self._metadata.get(f"{self._arch}.{key}")

    def has(self, key: str) -> bool:
        return self.raw(key) is not None

    def number(self, key: str, default: int = 0) -> int:
        value = self.raw(key)
        if value is None or isinstance(value, str):
            return default
        if isinstance(value, (int, float)):
            return int(value)
        items = _items(value)
        return int(items[0]) if items else default

    def per_layer(self, key: str, default: Sequence[int] | int = 0) -> list[int]:
        """``ml.get_key_or_arr``: one value for all, or an array; short arrays are padded with 0."""
        value = self.raw(key)
        if value is None:
            return [default] * self.n_layer if isinstance(default, int) else list(default)
        if isinstance(value, (int, float)):
            return [int(value)] * self.n_layer
        items = [int(item) for item in _items(value)][: self.n_layer]
        return items + [0] * (self.n_layer - len(items))


def _items(value: Any) -> list[Any]:
    """A metadata array, decoded."""
    decode = getattr(value, "decode", None)
    return list(decode() if callable(decode) and not isinstance(value, str) else value)


def model_shape(file: GGUFFile) -> ModelShape:
    """The shape of the model in ``file``; an unknown architecture is read generically."""
    metadata = file.metadata
    arch = str(metadata.get("general.architecture", "unknown"))
    n_layer_all = _count_layers(metadata, arch, file.tensors)
    keys = Keys(metadata, arch, n_layer_all)
    blocks, rest = _split_tensors(file.tensors, n_layer_all)
    return _build(file, keys, arch, blocks, rest)


def _count_layers(metadata: Mapping[str, Any], arch: str, tensors: Iterable[TensorInfo]) -> int:
    known = metadata.get(f"{arch}.block_count")
    if isinstance(known, int) and 0 < known <= 4096:
        return known
    return 1 + max((int(m[1]) for t in tensors if (m := _BLOCK.match(t.name))), default=-1)


def _split_tensors(
    infos: Iterable[TensorInfo], n_layer: int
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Tensors of each block, and those of none."""
    blocks: list[list[Tensor]] = [[] for _ in range(n_layer)]
    rest: list[Tensor] = []
    for info in infos:
        tensor = Tensor(
            info.name, tuple(info.dims), info.type_name, info.n_bytes, info.offset, info.shard
        )
        match = _BLOCK.match(info.name)
        if match and int(match[1]) < n_layer:
            blocks[int(match[1])].append(tensor)
        elif info.name.startswith(_FIRST_BLOCK) and blocks:
            blocks[0].append(tensor)
        else:
            rest.append(tensor)
    return blocks, rest


def _build(
    file: GGUFFile, keys: Keys, arch: str, blocks: list[list[Tensor]], rest: list[Tensor]
) -> ModelShape:
    metadata = file.metadata
    layers = _layers(keys, arch, blocks)
    input_tensors = tuple(t for t in rest if t.name.startswith(_INPUT))
    output_tensors = tuple(t for t in rest if not t.name.startswith((*_INPUT, *_SHARED)))
    n_vocab = _vocab_size(metadata, keys, input_tensors)
    n_embd = keys.number("embedding_length")
    window, kind = _window(keys, arch)
    is_swa = any(layer.is_swa for layer in layers)
    has_output = any(t.name == "output.weight" for t in output_tensors)
    encoder = arch in ENCODERS
    return ModelShape(
        name=str(metadata.get("general.name") or _stem(str(file.path))),
        path=str(file.path),
        arch=arch,
        quant=file.quant,
        file_bytes=file.file_bytes,
        n_params=sum(t.n_elements for block in [*blocks, rest] for t in block),
        n_layer_all=keys.n_layer,
        n_layer_nextn=_nextn(keys),
        n_ctx_train=keys.number("context_length"),
        n_embd=n_embd,
        n_embd_out=keys.number("embedding_length_out") or n_embd,
        n_vocab=n_vocab,
        n_expert=keys.number("expert_count"),
        n_expert_used=max(keys.per_layer("expert_used_count"), default=0),
        n_expert_shared=keys.number("expert_shared_count"),
        n_swa=window if is_swa else 0,
        swa_type=kind if is_swa else "none",
        is_mla=_is_mla(keys),
        is_hybrid=arch in HYBRID,
        is_recurrent=arch in RECURRENT,
        is_encoder=encoder,
        has_memory=arch not in NO_KV_CACHE,
        causal=bool(keys.raw("attention.causal")) if keys.has("attention.causal") else not encoder,
        tied_output=not has_output and not encoder,
        layers=tuple(layers),
        input_tensors=input_tensors,
        output_tensors=output_tensors,
        shared_tensors=tuple(t for t in rest if t.name.startswith(_SHARED)),
        hparams=_hparams(keys),
        warnings=_warnings(arch),
    )


def _warnings(arch: str) -> tuple[str, ...]:
    if arch in KNOWN:
        return ()
    return (
        f"architecture {arch!r} is unknown: the estimate is generic (dense attention from the "
        "metadata, every tensor counted); compare it with the buffers after loading",
    )


def _stem(path: str) -> str:
    base = path.replace("\\", "/").rsplit("/", 1)[-1]
    return base[:-5] if base.endswith(".gguf") else base


def _nextn(keys: Keys) -> int:
    return min(keys.number("nextn_predict_layers"), max(keys.n_layer - 1, 0))


def _vocab_size(metadata: Mapping[str, Any], keys: Keys, inputs: Sequence[Tensor]) -> int:
    """The rows of the embedding: what the graph computes with, tokenizer or not."""
    for tensor in inputs:
        if tensor.name == "token_embd.weight" and len(tensor.dims) > 1:
            return tensor.dims[1]
    tokens = metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if tokens is not None else keys.number("vocab_size")


_HPARAMS: Final = {
    "ssm_d_conv": "ssm.conv_kernel",
    "ssm_d_inner": "ssm.inner_size",
    "ssm_d_state": "ssm.state_size",
    "ssm_dt_rank": "ssm.time_step_rank",
    "ssm_n_group": "ssm.group_count",
    "n_lora_q": "attention.q_lora_rank",
    "n_lora_kv": "attention.kv_lora_rank",
    "head_k_mla": "attention.key_length_mla",
    "head_v_mla": "attention.value_length_mla",
    "n_rot": "rope.dimension_count",
    "wkv_head_size": "wkv.head_size",
    "token_shift_count": "token_shift_count",
    "shortconv_l_cache": "shortconv.l_cache",
    "kda_head_dim": "kda.head_dim",
    "n_ff_shexp": "expert_shared_feed_forward_length",
    "n_embd_per_layer": "embedding_length_per_layer_input",
    "indexer_n_head": "attention.indexer.head_count",
    "indexer_head": "attention.indexer.key_length",
    "indexer_top_k": "attention.indexer.top_k",
    "n_layer_dense_lead": "leading_dense_block_count",
    "pooling_type": "pooling_type",
    "n_deepstack": "n_deepstack_layers",
    "full_attention_interval": "full_attention_interval",
    "n_expert_groups": "expert_group_count",
    "n_group_used": "expert_group_used_count",
    "expert_gating_func": "expert_gating_func",
}


def _hparams(keys: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: keys.number(key) for name, key in _HPARAMS.items() if keys.has(key)
    }
    if keys.has("expert_weights_norm"):
        found["expert_weights_norm"] = bool(keys.raw("expert_weights_norm"))
    for name, key in (
        ("attn_softcap", "attn_logit_softcapping"),
        ("final_softcap", "final_logit_softcapping"),
        ("clamp_kqv", "attention.clamp_kqv"),
        ("expert_weights_scale", "expert_weights_scale"),
    ):
        value = keys.raw(key)
        if isinstance(value, (int, float)):
            found[name] = float(value)
    return found


def _is_mla(keys: Keys) -> bool:
    """llama_hparams::is_mla: such a cache holds the compressed K alone."""
    return keys.number("attention.key_length_mla") > 0 < keys.number("attention.value_length_mla")


# --- layers -----------------------------------------------------------------------------------


def _layers(keys: Keys, arch: str, blocks: list[list[Tensor]]) -> list[LayerShape]:
    n_head = keys.per_layer("attention.head_count")
    n_head_kv = keys.per_layer("attention.head_count_kv", n_head)
    n_ff = keys.per_layer("feed_forward_length")
    n_ff_exp = keys.per_layer("expert_feed_forward_length")
    n_used = keys.per_layer("expert_used_count")
    swa = swa_layers(keys, arch)
    recurrent = recurrent_layers(keys, arch, n_head_kv, n_ff)
    widths = _state_widths(keys, arch, n_head)
    heads = _head_sizes(keys, n_head)
    layers = []
    for il, tensors in enumerate(blocks):
        head_k, head_v = heads[1] if swa[il] else heads[0]
        cached = caches_kv(keys, arch, il, recurrent[il], n_ff)
        k_width = head_k * n_head_kv[il] if cached else 0
        has_v = cached and not _is_mla(keys)
        has_state = recurrent[il] and il < keys.n_layer - _nextn(keys)
        layers.append(
            LayerShape(
                n_head=n_head[il],
                n_head_kv=n_head_kv[il],
                n_ff=n_ff[il],
                n_ff_exp=n_ff_exp[il],
                n_expert_used=n_used[il],
                head_k=head_k,
                head_v=head_v,
                is_swa=swa[il],
                is_recurrent=recurrent[il],
                is_nextn=il >= keys.n_layer - _nextn(keys),
                k_width=k_width,
                v_width=head_v * n_head_kv[il] if has_v else 0,
                index_width=_index_width(keys, arch, il) if cached else 0,
                r_width=widths[0] if has_state else 0,
                s_width=widths[1] if has_state else 0,
                tensors=tuple(tensors),
                expert_tensors=tuple(t for t in tensors if _EXPERTS.search(t.name)),
            )
        )
    return layers


def _head_sizes(keys: Keys, n_head: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(K, V) head sizes of full and of sliding layers (load_hparams): keys, else n_embd/n_head."""
    first = n_head[0] if n_head else 0
    even = keys.number("embedding_length") // first if first else 0
    head_k = keys.number("attention.key_length", even)
    head_v = keys.number("attention.value_length", even)
    swa_k = keys.number("attention.key_length_swa", head_k)
    swa_v = keys.number("attention.value_length_swa", head_v)
    return (head_k, head_v), (swa_k, swa_v)


def _window(keys: Keys, arch: str) -> tuple[int, str]:
    """The window in tokens and its kind, by the architecture's rule."""
    rule = SWA_RULES.get(arch)
    if rule is None:
        return 0, "none"
    found = keys.number("attention.sliding_window", -1)
    if rule.fixed_window:
        return (
            (0, "none")
            if found == 0 or not _rule_applies(rule, keys)
            else (
                rule.fixed_window,
                rule.kind,
            )
        )
    window = found if found >= 0 else rule.default_window
    return (window, rule.kind) if window > 0 and _rule_applies(rule, keys) else (0, "none")


def _rule_applies(rule: SwaRule, keys: Keys) -> bool:
    if rule.only_n_layer and keys.n_layer - _nextn(keys) != rule.only_n_layer:
        return False
    return not rule.needs_key or keys.number("attention.sliding_window") > 0


def swa_layers(keys: Keys, arch: str) -> list[bool]:
    """Which layers slide: the file's pattern array, else its period, else the rule's.

    ``llama_model_base::load_swa_pattern`` and ``llama_hparams::set_swa_pattern``.
    """
    n_layer = keys.n_layer - _nextn(keys)
    window, _ = _window(keys, arch)
    if window == 0:
        return [False] * keys.n_layer
    rule = SWA_RULES[arch]
    given = keys.raw("attention.sliding_window_pattern")
    if given is not None and not isinstance(given, (int, float)):
        return [bool(x) for x in keys.per_layer("attention.sliding_window_pattern")]
    if rule.attention_layers:  # lfm2.cpp: every layer with attention slides
        return [kv > 0 for kv in keys.per_layer("attention.head_count_kv")]
    period = int(given) if given is not None else rule.period
    pattern = [_slides(il, period, rule.dense_first) for il in range(n_layer)]
    return pattern + [False] * (keys.n_layer - n_layer)


def _slides(il: int, period: int, dense_first: bool) -> bool:
    if period == 0:
        return True
    return il % period != 0 if dense_first else il % period < period - 1


_ZERO_HEADS_RECUR: Final = names(
    """bailingmoe3 granitehybrid glm5-next jamba kimi-k3 kimi-linear lfm2 lfm2moe plamo2"""
)
_INTERVAL_RECUR: Final = {
    "qwen3next": 4,
    "qwen35": 4,
    "qwen35moe": 4,
    "qwen4exp": 4,
    "minimax-01": 8,
}
_NEMOTRON_H: Final = ("nemotron_h", "nemotron_h_moe")


def recurrent_layers(
    keys: Keys, arch: str, n_head_kv: Sequence[int], n_ff: Sequence[int]
) -> list[bool]:
    """Which layers keep a state instead of cells (``is_recr_impl``)."""
    n_all, n_layer = keys.n_layer, keys.n_layer - _nextn(keys)
    if arch in RECURRENT or arch == "falcon-h1":
        return [True] * n_all
    unknown_hybrid = arch not in KNOWN and keys.has("ssm.state_size")
    if arch in _ZERO_HEADS_RECUR or unknown_hybrid:
        return [n_head_kv[il] == 0 for il in range(n_all)]
    if arch in _NEMOTRON_H:
        return [il < n_layer and n_head_kv[il] == 0 and n_ff[il] == 0 for il in range(n_all)]
    if arch in _INTERVAL_RECUR:
        if keys.has("attention.recurrent_layers"):
            return [bool(x) for x in keys.per_layer("attention.recurrent_layers")]
        interval = keys.number("full_attention_interval", _INTERVAL_RECUR[arch])
        return [il < n_layer and (il + 1) % interval != 0 for il in range(n_all)]
    return [False] * n_all


def caches_kv(keys: Keys, arch: str, il: int, recurrent: bool, n_ff: Sequence[int]) -> bool:
    """Whether block ``il`` has cells of its own (llama_model::create_memory's filters)."""
    n_layer = keys.n_layer - _nextn(keys)
    if arch in RECURRENT or arch in NO_KV_CACHE or il >= n_layer:
        return False
    if arch == "falcon-h1":
        return True
    if arch in _NEMOTRON_H:
        return not recurrent and n_ff[il] == 0
    if arch == "gemma3n":  # gemma3n.cpp: n_layer_kv_from_start = 20
        return il < 20
    if arch == "gemma4":
        return il < keys.n_layer - keys.number("attention.shared_kv_layers")
    return not recurrent


_INDEX_TYPES: Final = ("glm-dsa", "glm5-next", "hy_v4", "dots3note")


def _owns_indexer(keys: Keys, il: int) -> bool:
    if not keys.has("attention.indexer.types"):
        return True
    types = keys.per_layer("attention.indexer.types")
    return bool(types[il])


def _index_width(keys: Keys, arch: str, il: int) -> int:
    if arch in ("deepseek32", "qwen4exp"):
        owns = True
    elif arch == "minimax-m3":
        owns = il >= keys.number("leading_dense_block_count")
    else:
        owns = arch in _INDEX_TYPES and _owns_indexer(keys, il)
    return keys.number("attention.indexer.key_length") if owns else 0


def _state_widths(keys: Keys, arch: str, n_head: Sequence[int]) -> tuple[int, int]:
    """(n_embd_r, n_embd_s) in f32 elements a sequence (llama_hparams::n_embd_r, n_embd_s)."""
    n_embd = keys.number("embedding_length")
    wkv = keys.number("wkv.head_size")
    if wkv:
        return keys.number("token_shift_count", 2) * n_embd, n_embd * wkv
    conv = max(keys.number("ssm.conv_kernel") - 1, 0)
    state, inner = keys.number("ssm.state_size"), keys.number("ssm.inner_size")
    groups = keys.number("ssm.group_count")
    shortconv = keys.number("shortconv.l_cache")
    if shortconv:
        return n_embd * (shortconv - 1), state * inner
    kda = keys.number("kda.head_dim")
    first = n_head[0] if n_head else 0
    if kda:
        return 3 * (conv or 3) * first * kda, kda * kda * first
    if arch == "minimax-01":
        head = _head_sizes(keys, n_head)[0][0]
        return conv * (inner + 2 * groups * state), head * head * first
    return conv * (inner + 2 * groups * state), state * inner
