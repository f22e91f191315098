"""A GGUF file's header as values: what the reader returns and the cache keeps."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from edgellm.errors import GGUFError
from edgellm.gguf.types import BOOL, FILE_TYPES, SCALARS, STRING

Kind = Literal["model", "mmproj", "lora", "vocab", "other"]
Scalar = bool | int | float | str

_U64: Final = struct.Struct("<Q")


class GGUFArray(msgspec.Struct, frozen=True):
    """An array in the metadata: its length is free, its items are decoded when asked for.

    Small arrays hold their bytes (``raw``); the others are read from ``path`` again.
    """

    item_type: int
    n: int
    path: str
    offset: int
    n_bytes: int
    raw: bytes | None = None

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Scalar:
        return self.decode()[index]

    def decode(self) -> list[Scalar]:
        """The items. Strings that are not UTF-8 get replacement characters (token texts may)."""
        raw = self._bytes()
        if self.item_type == STRING:
            return list(split_strings(raw, self.n, self.path, self.offset))
        code = SCALARS[self.item_type].format.removeprefix("<")
        values = struct.unpack(f"<{self.n}{code}", raw)
        return [value != 0 for value in values] if self.item_type == BOOL else list(values)

    def _bytes(self) -> bytes:
        if self.raw is not None:
            return self.raw
        if "://" in self.path:
            raise GGUFError(self.path, f"this array ({self.n} items) stayed on the server")
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                raw = file.read(self.n_bytes)
        except OSError as error:
            raise GGUFError(self.path, f"cannot be read again: {error.strerror}") from error
        if len(raw) != self.n_bytes:
            raise GGUFError(self.path, "changed while it was used", offset=self.offset)
        return raw


MetaValue = bool | int | float | str | GGUFArray


class TensorInfo(msgspec.Struct, frozen=True):
    """One row of the tensor table. ``dims`` in ggml's order (the row length first); ``offset``
    counts from the data section of ``shard``; ``n_bytes`` is the size without padding."""

    name: str
    dims: tuple[int, ...]
    type_name: str
    type_id: int
    offset: int
    n_bytes: int
    shard: int = 0


class Shard(msgspec.Struct, frozen=True):
    """One file of a model; an unsplit model is one shard."""

    path: str
    file_bytes: int
    data_offset: int


class GGUFFile(msgspec.Struct, frozen=True):
    """A model as its headers describe it, all shards together (metadata of the first)."""

    path: str
    shards: tuple[Shard, ...]
    version: int
    alignment: int
    data_offset: int
    file_bytes: int
    metadata: Mapping[str, MetaValue]
    tensors: tuple[TensorInfo, ...]
    kind: Kind

    @property
    def arch(self) -> str:
        """``general.architecture``, or an empty string."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    @property
    def quant(self) -> str:
        """``general.file_type`` as people write it (``Q4_K_M``), or the most common tensor type."""
        file_type = self.metadata.get("general.file_type")
        if isinstance(file_type, int) and file_type in FILE_TYPES:
            return FILE_TYPES[file_type]
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.n_bytes
        return max(sizes, key=lambda name: sizes[name]) if sizes else ""


class Header(msgspec.Struct, frozen=True):
    """What one file says about itself."""

    version: int
    alignment: int
    data_offset: int
    file_bytes: int
    metadata: dict[str, MetaValue]
    tensors: tuple[TensorInfo, ...]


def split_strings(raw: bytes, n: int, path: str, offset: int) -> list[str]:
    texts, pos = [], 0
    try:
        for _ in range(n):
            end = pos + 8 + _U64.unpack_from(raw, pos)[0]
            texts.append(raw[pos + 8 : end].decode("utf-8", "replace"))
            pos = end
    except (struct.error, OverflowError, IndexError) as error:
        raise GGUFError(path, "changed while it was used", offset=offset + pos) from error
    return texts
