"""What a model is made of, from headers of real models and from headers made to be odd."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from tests.gguf import build
from tests.gguf.build import BOOL, STR, U32

HEADERS = Path(__file__).parents[1] / "data" / "planner" / "headers"
SIZES = msgspec.json.decode((HEADERS / "file_bytes.json").read_bytes())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("shapes")

    @cache
    def make(name: str) -> ModelShape:
        path = folder / f"{name}.gguf"
        shutil.copyfile(HEADERS / f"{name}.gguf-header", path)
        os.truncate(path, SIZES[name])
        return model_shape(read_gguf(path))

    return make


PATTERNS = {
    "gemma-2-9b": "s." * 21,
    "gemma-3-12b": "sssss." * 8,
    "gemma-4-12b": "sssss." * 8,
    "gpt-oss-20b": "s." * 12,
    "qwen3.5-9b": "rrr." * 8,
    "lfm2-1.2b": "rr.rr.rr.r.r.r.r",
    "llama-3.1-8b": "." * 32,
    "deepseek-v2-lite": "." * 27,
}


@pytest.mark.parametrize("name", PATTERNS)
def test_which_layers_slide_and_which_recur(real: Any, name: str) -> None:
    kinds = ("r" if x.is_recurrent else "s" if x.is_swa else "." for x in real(name).layers)
    assert "".join(kinds) == PATTERNS[name]


def test_a_head_is_what_the_header_says_not_n_embd_over_n_head(real: Any) -> None:
    layer = real("qwen3-30b-a3b").layers[0]
    assert (layer.head_k, layer.k_width, layer.v_width) == (128, 512, 512)
    assert real("qwen3-30b-a3b").n_embd // layer.n_head == 64


def test_layers_differ(real: Any) -> None:
    slides, sees_all = real("gemma-4-12b").layers[0], real("gemma-4-12b").layers[5]
    assert (slides.n_head_kv, slides.head_k, slides.k_width) == (8, 256, 2048)
    assert (sees_all.n_head_kv, sees_all.head_k, sees_all.k_width) == (1, 512, 512)


def test_latent_attention_caches_one_row_of_k_and_no_v(real: Any) -> None:
    shape = real("deepseek-v2-lite")
    assert shape.is_mla
    assert {(x.k_width, x.v_width) for x in shape.layers} == {(576, 0)}


def test_recurrent_layers_keep_state_and_cache_nothing(real: Any) -> None:
    layer = real("qwen3.5-9b").layers[0]
    assert (layer.k_width, layer.r_width, layer.s_width) == (0, 24576, 524288)
    assert real("lfm2-1.2b").layers[0].r_width == 4096


def test_experts_count_by_what_is_stored_and_what_is_used(real: Any) -> None:
    shape = real("mixtral-8x7b")
    assert (shape.n_expert, shape.n_expert_used) == (8, 2)
    assert shape.layers[0].expert_bytes > 0.9 * shape.layers[0].n_bytes
    assert shape.n_params > 46e9


def test_a_tied_output_is_the_token_table(real: Any) -> None:
    shape = real("llama-3.2-1b")
    assert shape.tied_output
    assert shape.tied_tensor.name == "token_embd.weight"
    assert not real("llama-3.1-8b").tied_output


def made(tmp_path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, Any]) -> ModelShape:
    """A file of F32 tensors."""
    pairs = [build.pair("general.architecture", STR, arch)]
    for key, value in keys.items():
        if isinstance(value, list):
            kind = BOOL if isinstance(value[0], bool) else U32
            pairs.append(build.array(f"{arch}.{key}", kind, value))
        else:
            pairs.append(build.pair(f"{arch}.{key}", U32, value))
    infos, offset = [], 0
    for name, dims in tensors.items():
        infos.append(build.tensor(name, dims, 0, offset))
        n = 4
        for dim in dims:
            n *= dim
        offset += (n + 31) // 32 * 32
    path = tmp_path / f"{arch}.gguf"
    path.write_bytes(build.gguf(pairs, infos, data=offset))
    return model_shape(read_gguf(path))


def blocks(n: int, kv: int = 64) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (128, 320)}
    for il in range(n):
        found[f"blk.{il}.attn_q.weight"] = (128, 128)
        found[f"blk.{il}.attn_k.weight"] = (128, kv)
        found[f"blk.{il}.attn_v.weight"] = (128, kv)
    return found


KEYS = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 128,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def test_numbers_may_be_one_a_layer(tmp_path: Path) -> None:
    keys = {**KEYS, "attention.head_count_kv": [1, 2], "feed_forward_length": [256, 512]}
    shape = made(tmp_path, "openelm", keys, blocks(2))
    assert [x.n_head_kv for x in shape.layers] == [1, 2]
    assert [x.k_width for x in shape.layers] == [32, 64]
    assert [x.n_ff for x in shape.layers] == [256, 512]


def test_key_and_value_heads_may_differ(tmp_path: Path) -> None:
    keys = {**KEYS, "attention.key_length": 48, "attention.value_length": 16}
    layer = made(tmp_path, "llama", keys, blocks(2)).layers[0]
    assert (layer.k_width, layer.v_width) == (96, 32)


def test_next_token_layers_are_outside_the_graph(tmp_path: Path) -> None:
    keys = {**KEYS, "block_count": 3, "nextn_predict_layers": 1}
    shape = made(tmp_path, "glm4moe", keys, blocks(3))
    assert (shape.n_layer, shape.n_layer_all, shape.n_layer_nextn) == (2, 3, 1)
    assert [x.is_nextn for x in shape.layers] == [False, False, True]


def test_encoders_cache_nothing(tmp_path: Path) -> None:
    shape = made(tmp_path, "bert", {**KEYS, "attention.causal": 0}, blocks(2))
    assert shape.is_encoder
    assert not any(x.has_kv for x in shape.layers)


def test_an_unknown_architecture_is_read_with_a_warning(tmp_path: Path) -> None:
    shape = made(tmp_path, "brandnew", KEYS, blocks(2))
    assert any("brandnew" in warning for warning in shape.warnings)
    assert [x.k_width for x in shape.layers] == [64, 64]


def test_a_file_without_layers_has_a_shape(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(build.small_model())
    shape = model_shape(read_gguf(path))
    assert (shape.layers, shape.n_vocab) == ((), 0)
