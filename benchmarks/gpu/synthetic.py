"""Write GGUF files to measure with: real architectures, random valid weights, a real vocabulary.

``headers/`` holds the exact headers of 16 models people run (metadata and tensor table, without a
tokenizer). :func:`write_model` joins one with the vocabulary of a tokenizer-only GGUF, such as
those in llama.cpp's ``models/``, and fills every tensor with random blocks whose scales give
weights of about N(0, 0.02): finite everywhere, and as costly to compute as the real thing. A
sparse file (a hole instead of weights) allocates the same memory and is written in milliseconds.

    python benchmarks/gpu/synthetic.py llama-3.1-8b out.gguf --vocab ggml-vocab-llama-bpe.gguf
    python benchmarks/gpu/synthetic.py gemma-3-12b out.gguf --sparse
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

HEADERS = Path(__file__).parent / "headers"
ALIGNMENT = 32
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
F32 = 0
PATTERN_BLOCKS = 1 << 16


@dataclass(frozen=True)
class BlockType:
    """A ggml type: elements and bytes a block, and (offset, value) of each fp16 scale in it."""

    elements: int
    n_bytes: int
    scales: tuple[tuple[int, float], ...]


# Block layouts from ggml/src/ggml-common.h; the scales make the weights' deviation about 0.02.
TYPES = {
    1: BlockType(1, 2, ()),
    2: BlockType(32, 18, ((0, 0.004),)),
    3: BlockType(32, 20, ((0, 0.004), (2, -0.03))),
    6: BlockType(32, 22, ((0, 0.002),)),
    7: BlockType(32, 24, ((0, 0.002), (2, -0.03))),
    8: BlockType(32, 34, ((0, 2.7e-4),)),
    10: BlockType(256, 84, ((80, 1.5e-3), (82, 2.2e-3))),
    11: BlockType(256, 110, ((108, 5e-4),)),
    12: BlockType(256, 144, ((0, 1.2e-4), (2, 9e-4))),
    13: BlockType(256, 176, ((0, 6e-5), (2, 9e-4))),
    14: BlockType(256, 210, ((208, 1.5e-5),)),
    20: BlockType(32, 18, ((0, 3e-4),)),
    23: BlockType(256, 136, ((0, 1e-5),)),
    30: BlockType(1, 2, ()),
    39: BlockType(32, 17, ()),
}


@dataclass(frozen=True)
class Tensor:
    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def n_elements(self) -> int:
        return int(np.prod(self.dims, dtype=np.int64))

    @property
    def n_bytes(self) -> int:
        if self.type_id == F32:
            return 4 * self.n_elements
        block = TYPES[self.type_id]
        return self.n_elements // block.elements * block.n_bytes


class Cursor:
    """Walks a GGUF header and hands out the raw bytes of what it passes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def string(self) -> str:
        length = self.take("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def skip_string(self) -> None:
        length = self.take("Q")
        self.at += length

    def skip_value(self, kind: int) -> None:
        if kind == STRING:
            self.skip_string()
        elif kind == ARRAY:
            inner, count = self.take("I"), self.take("Q")
            if inner == STRING:
                for _ in range(count):
                    self.skip_string()
            else:
                self.at += SCALAR_BYTES[inner] * count
        else:
            self.at += SCALAR_BYTES[kind]


def read_header(data: bytes) -> tuple[dict[str, bytes], list[Tensor]]:
    """Metadata as key -> raw bytes (key, type and value), and the tensor table."""
    cursor = Cursor(data)
    cursor.at = 8
    n_tensors, n_kv = cursor.take("Q"), cursor.take("Q")
    metadata = {}
    for _ in range(n_kv):
        start = cursor.at
        key = cursor.string()
        cursor.skip_value(cursor.take("I"))
        metadata[key] = data[start : cursor.at]
    tensors = []
    for _ in range(n_tensors):
        name = cursor.string()
        dims = tuple(cursor.take("Q") for _ in range(cursor.take("I")))
        tensors.append(Tensor(name, dims, cursor.take("I"), cursor.take("Q")))
    return metadata, tensors


def padded_array(raw: bytes, n_vocab: int) -> bytes:
    """A tokenizer array (tokens, scores or types) lengthened to ``n_vocab`` entries."""
    cursor = Cursor(raw)
    cursor.string()
    head = cursor.at
    cursor.take("I")
    inner, count = cursor.take("I"), cursor.take("Q")
    if count > n_vocab:
        raise SystemExit(f"the vocabulary has {count} tokens, the model {n_vocab}")
    if inner == STRING:
        names = [f"<unused_{i}>".encode() for i in range(count, n_vocab)]
        filler = b"".join(struct.pack("<Q", len(name)) + name for name in names)
    else:  # scores: 0.0; types: 5 (unused)
        value = struct.pack("<f", 0.0) if inner == 6 else struct.pack("<i", 5)
        filler = value * (n_vocab - count)
    return raw[:head] + struct.pack("<IIQ", ARRAY, inner, n_vocab) + raw[cursor.at :] + filler


PER_TOKEN = {"tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"}


def joined_metadata(model: dict[str, bytes], vocab: Path | None, n_vocab: int) -> list[bytes]:
    """The model's metadata with its tokenizer replaced by the one in ``vocab``."""
    if vocab is None:
        return list(model.values())
    donor, _ = read_header(vocab.read_bytes())
    kept = [raw for key, raw in model.items() if not key.startswith("tokenizer.")]
    for key, raw in donor.items():
        if key.startswith("tokenizer."):
            kept.append(padded_array(raw, n_vocab) if key in PER_TOKEN else raw)
    return kept


def encode_header(metadata: list[bytes], tensors: list[Tensor]) -> bytes:
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)), *metadata]
    for tensor in tensors:
        name = tensor.name.encode()
        parts += [struct.pack("<Q", len(name)), name, struct.pack("<I", len(tensor.dims))]
        parts += [struct.pack("<Q", dim) for dim in tensor.dims]
        parts += [struct.pack("<IQ", tensor.type_id, tensor.offset)]
    header = b"".join(parts)
    return header + bytes(-len(header) % ALIGNMENT)


def float_values(tensor: Tensor, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """F32: matrices like the quantised ones; vectors at what each name needs to stay finite."""
    left = tensor.n_elements
    while left:
        n = min(left, 1 << 22)
        if len(tensor.dims) > 1 and min(tensor.dims) > 1:
            yield rng.normal(0, 0.02, n).astype("<f4")
        elif "ssm_a" in tensor.name:
            yield -rng.uniform(0.5, 2.0, n).astype("<f4")
        elif tensor.name.endswith("bias") or "sinks" in tensor.name:
            yield rng.normal(0, 0.02, n).astype("<f4")
        else:
            yield np.ones(n, "<f4")
        left -= n


def block_pattern(type_id: int, rng: np.random.Generator) -> bytes:
    """Twice PATTERN_BLOCKS random blocks of a type, so that a window may start anywhere."""
    block = TYPES[type_id]
    if type_id in (1, 30):
        values = rng.normal(0, 0.02, PATTERN_BLOCKS).astype("<f4")
        half = values.astype("<f2") if type_id == 1 else (values.view("<u4") >> 16).astype("<u2")
        return half.tobytes() * 2
    data = rng.integers(0, 256, (PATTERN_BLOCKS, block.n_bytes), dtype=np.uint8)
    for offset, value in block.scales:
        scale = (value * rng.uniform(0.8, 1.2, PATTERN_BLOCKS)).astype("<f2")
        data[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    if type_id == 39:  # MXFP4: the first byte is a power of two, 2^(e - 127)
        data[:, 0] = rng.integers(119, 122, PATTERN_BLOCKS)
    return data.tobytes() * 2


def write_tensor(
    out: BinaryIO, tensor: Tensor, patterns: dict[int, bytes], rng: np.random.Generator
) -> None:
    if tensor.type_id == F32:
        for chunk in float_values(tensor, rng):
            out.write(chunk.tobytes())
        return
    block = TYPES[tensor.type_id]
    if tensor.type_id not in patterns:
        patterns[tensor.type_id] = block_pattern(tensor.type_id, rng)
    pattern = memoryview(patterns[tensor.type_id])
    left = tensor.n_bytes
    while left:
        start = int(rng.integers(PATTERN_BLOCKS)) * block.n_bytes
        n = min(left, PATTERN_BLOCKS * block.n_bytes)
        out.write(pattern[start : start + n])
        left -= n


def n_tokens(vocab: Path) -> int:
    """How many tokens a tokenizer-only GGUF has."""
    cursor = Cursor(read_header(vocab.read_bytes())[0]["tokenizer.ggml.tokens"])
    cursor.string()
    cursor.at += 8
    return cursor.take("Q")


def write_model(
    name: str, path: Path, *, vocabs: Sequence[Path] = (), sparse: bool = False, seed: int = 1
) -> int:
    """Write the model called ``name`` (see ``headers/``) and return its size in bytes.

    Of ``vocabs`` the largest that the model has room for is taken.
    """
    metadata, tensors = read_header((HEADERS / f"{name}.gguf-header").read_bytes())
    n_vocab = next(t for t in tensors if t.name == "token_embd.weight").dims[1]
    fitting = [vocab for vocab in vocabs if n_tokens(vocab) <= n_vocab]
    if vocabs and not fitting:
        raise SystemExit(f"{name} has {n_vocab} tokens: none of the vocabularies is that small")
    vocab = max(fitting, key=n_tokens, default=None)
    header = encode_header(joined_metadata(metadata, vocab, n_vocab), tensors)
    end = max(t.offset + t.n_bytes for t in tensors)
    rng = np.random.default_rng(seed)
    patterns: dict[int, bytes] = {}
    with path.open("wb") as out:
        out.write(header)
        if not sparse:
            for tensor in tensors:
                out.seek(len(header) + tensor.offset)
                write_tensor(out, tensor, patterns, rng)
        out.truncate(len(header) + end)
    return len(header) + end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    names = json.loads((HEADERS / "file_bytes.json").read_text())
    parser.add_argument("model", choices=sorted(names))
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab", type=Path, action="append", default=[], help="a tokenizer GGUF")
    parser.add_argument("--sparse", action="store_true", help="a hole instead of weights")
    args = parser.parse_args()
    size = write_model(args.model, args.out, vocabs=args.vocab, sparse=args.sparse)
    print(f"{args.out}: {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
