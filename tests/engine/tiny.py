"""Tiny random models of several architectures, with the starter's vocabulary: a few MiB each.

Their text means nothing; that it depends on every token before it is what tests need.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.gpu.synthetic import Tensor, encode_header, read_header
from tests.engine.starter import starter_path
from tests.gguf.build import F32, I32, STR, U32, array, pair

N_EMBD, N_HEAD, N_KV, N_FF, N_CTX = 64, 2, 1, 96, 512
HEAD = N_EMBD // N_HEAD
Shapes = dict[str, tuple[int, ...]]


@cache
def _tokenizer() -> tuple[tuple[bytes, ...], int]:
    """The starter's tokenizer metadata, and how many tokens it has."""
    with Path(starter_path()).open("rb") as file:
        metadata, tensors = read_header(file.read(8 << 20))
    n_vocab = next(t for t in tensors if t.name == "token_embd.weight").dims[1]
    kept = (raw for key, raw in metadata.items() if key.startswith("tokenizer."))
    return tuple(kept), n_vocab


def _attention(il: int, *, bias: bool = False) -> Shapes:
    p = f"blk.{il}.attn_"
    found: Shapes = {
        f"{p}q.weight": (N_EMBD, N_EMBD),
        f"{p}k.weight": (N_EMBD, HEAD * N_KV),
        f"{p}v.weight": (N_EMBD, HEAD * N_KV),
        f"{p}output.weight": (N_EMBD, N_EMBD),
    }
    if bias:
        found |= {
            f"{p}q.bias": (N_EMBD,),
            f"{p}k.bias": (HEAD * N_KV,),
            f"{p}v.bias": (HEAD * N_KV,),
        }
    return found


def _norms(il: int, *names: str) -> Shapes:
    return {f"blk.{il}.{name}.weight": (N_EMBD,) for name in names}


def _head_norms(il: int) -> Shapes:
    return {f"blk.{il}.attn_{x}_norm.weight": (HEAD,) for x in "qk"}


def _feed_forward(il: int, *, gate: bool = True) -> Shapes:
    p = f"blk.{il}.ffn_"
    found: Shapes = {f"{p}up.weight": (N_EMBD, N_FF), f"{p}down.weight": (N_FF, N_EMBD)}
    return found | ({f"{p}gate.weight": (N_EMBD, N_FF)} if gate else {})


def _experts(il: int, n: int) -> Shapes:
    p = f"blk.{il}.ffn_"
    return {
        f"{p}gate_inp.weight": (N_EMBD, n),
        f"{p}gate_exps.weight": (N_EMBD, N_FF, n),
        f"{p}up_exps.weight": (N_EMBD, N_FF, n),
        f"{p}down_exps.weight": (N_FF, N_EMBD, n),
    }


def _llama(il: int) -> Shapes:
    return _norms(il, "attn_norm", "ffn_norm") | _attention(il) | _feed_forward(il)


def _qwen3moe(il: int) -> Shapes:
    return _norms(il, "attn_norm", "ffn_norm") | _attention(il) | _head_norms(il) | _experts(il, 4)


def _gemma3(il: int) -> Shapes:
    norms = _norms(il, "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    return norms | _attention(il) | _head_norms(il) | _feed_forward(il)


def _lfm2(il: int) -> Shapes:
    found = _norms(il, "attn_norm", "ffn_norm") | _feed_forward(il)
    if il % 2:
        return found | _attention(il) | _head_norms(il)
    p = f"blk.{il}.shortconv."
    return found | {
        f"{p}conv.weight": (3, N_EMBD),
        f"{p}in_proj.weight": (N_EMBD, 3 * N_EMBD),
        f"{p}out_proj.weight": (N_EMBD, N_EMBD),
    }


def _mamba(il: int) -> Shapes:
    p, inner, state, rank = f"blk.{il}.ssm_", 2 * N_EMBD, 16, 4
    return _norms(il, "attn_norm") | {
        f"{p}in.weight": (N_EMBD, 2 * inner),
        f"{p}conv1d.weight": (4, inner),
        f"{p}conv1d.bias": (inner,),
        f"{p}x.weight": (inner, rank + 2 * state),
        f"{p}dt.weight": (rank, inner),
        f"{p}dt.bias": (inner,),
        f"{p}a": (state, inner),
        f"{p}d": (inner,),
        f"{p}out.weight": (inner, N_EMBD),
    }


def _bert(il: int) -> Shapes:
    norms = _norms(il, "attn_output_norm", "layer_output_norm")
    norms |= {name.replace("weight", "bias"): dims for name, dims in norms.items()}
    return norms | _attention(il, bias=True) | _feed_forward(il, gate=False)


_LAYERS = {
    "llama": _llama,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "lfm2": _lfm2,
    "mamba": _mamba,
    "bert": _bert,
}


def _globals(arch: str, n_vocab: int, *, rank: bool) -> Shapes:
    found: Shapes = {"token_embd.weight": (N_EMBD, n_vocab)}
    if arch != "bert":
        name = "token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight"
        return found | {name: (N_EMBD,)}
    found |= {
        "token_types.weight": (N_EMBD, 2),
        "position_embd.weight": (N_EMBD, N_CTX),
        "token_embd_norm.weight": (N_EMBD,),
        "token_embd_norm.bias": (N_EMBD,),
    }
    if rank:
        found |= {"cls.weight": (N_EMBD, N_EMBD), "cls.bias": (N_EMBD,)}
        found |= {"cls.output.weight": (N_EMBD, 1), "cls.output.bias": (1,)}
    return found


def _metadata(arch: str, n_layer: int, *, rank: bool) -> list[bytes]:
    def number(key: str, value: int) -> bytes:
        return pair(f"{arch}.{key}", U32, value)

    found = [
        pair("general.architecture", STR, arch),
        pair("general.name", STR, f"tiny {arch}"),
        number("context_length", N_CTX if arch == "bert" else 4096),
        number("embedding_length", N_EMBD),
        number("block_count", n_layer),
        number("feed_forward_length", 0 if arch == "mamba" else N_FF),
        number("attention.head_count", 0 if arch == "mamba" else N_HEAD),
        pair(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-5),
    ]
    if arch == "lfm2":
        heads = [N_KV if il % 2 else 0 for il in range(n_layer)]
        found += [array("lfm2.attention.head_count_kv", I32, heads)]
        found += [number("shortconv.l_cache", 3)]
    elif arch != "mamba":
        found.append(number("attention.head_count_kv", N_KV))
    if arch == "qwen3moe":
        found += [number("expert_count", 4), number("expert_used_count", 2)]
        found += [number("expert_feed_forward_length", N_FF)]
    if arch == "gemma3":
        found += [number("attention.sliding_window", 64)]
    if arch == "mamba":
        found += [number("ssm.conv_kernel", 4), number("ssm.inner_size", 2 * N_EMBD)]
        found += [number("ssm.state_size", 16), number("ssm.time_step_rank", 4)]
    if arch == "bert":
        found += [pair("bert.attention.layer_norm_epsilon", F32, 1e-5)]
        found += [pair("bert.attention.causal", 7, value=False)]
        found += [number("pooling_type", 4 if rank else 1)]
        found += [pair("tokenizer.ggml.token_type_count", U32, 2)]
    return found


def _values(name: str, dims: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    n = int(np.prod(dims))
    if name.endswith("ssm_a"):
        return -rng.uniform(0.5, 2.0, n)
    if name.endswith("norm.weight") or name.endswith("ssm_d"):
        return np.ones(n)
    # Strong enough that the next token depends on the last ones, not on the newest alone.
    return rng.normal(0, 0.02 if name.endswith("bias") else 1.2 / dims[0] ** 0.5, n)


def tiny_model(
    folder: Path, arch: str, *, n_layer: int = 4, rank: bool = False, seed: int = 1
) -> str:
    """Write the model and return its path. ``rank``: a bert with a classifier on top."""
    tokenizer, n_vocab = _tokenizer()
    shapes = _globals(arch, n_vocab, rank=rank)
    for il in range(n_layer):
        shapes |= _LAYERS[arch](il)
    rng = np.random.default_rng(seed)
    tensors, data, offset = [], [], 0
    for name, dims in shapes.items():
        is_half = name == "token_embd.weight"
        raw = _values(name, dims, rng).astype("<f2" if is_half else "<f4").tobytes()
        raw += bytes(-len(raw) % 32)
        tensors.append(Tensor(name, dims, 1 if is_half else 0, offset))
        data.append(raw)
        offset += len(raw)
    metadata = [*_metadata(arch, n_layer, rank=rank), *tokenizer]
    path = folder / f"tiny-{arch}-{n_layer}-{seed}{'-rank' if rank else ''}.gguf"
    path.write_bytes(encode_header(metadata, tensors) + b"".join(data))
    return str(path)
