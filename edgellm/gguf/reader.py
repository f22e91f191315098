"""A GGUF file's header: metadata and tensor table, never the tensor data.

Follows ``gguf_init_from_reader`` in llama.cpp's ggml/src/gguf.cpp: what that refuses is refused
here, with the byte where it went wrong. Arrays are skipped by their length and decoded only when
asked for, because a tokenizer's strings are nearly all of a header and nobody plans with them.
"""

from __future__ import annotations

import os
import re
import stat as stat_
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from edgellm.errors import GGUFError, ModelNotFoundError
from edgellm.gguf import cache
from edgellm.gguf.file import (
    GGUFArray,
    GGUFFile,
    Header,
    Kind,
    MetaValue,
    Scalar,
    Shard,
    TensorInfo,
)
from edgellm.gguf.types import (
    ARRAY,
    BOOL,
    REMOVED_TENSOR_TYPES,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    UINT32,
)
from edgellm.units import KiB, MiB, format_bytes

__all__ = [
    "GGUFArray",
    "GGUFFile",
    "IncompleteHeaderError",
    "Kind",
    "MetaValue",
    "Scalar",
    "Shard",
    "TensorInfo",
    "check_file",
    "parse_header",
    "peek",
    "read_gguf",
    "shard_paths",
]

# Limits a real header is far from: the largest seen (262k tokens with merges) has 16 MiB.
MAX_HEADER: Final = 64 * MiB
MAX_KEYS: Final = 16_384
MAX_TENSORS: Final = 65_536
MAX_STRINGS: Final = 4_000_000  # half a second of skipping
MAX_TEXT: Final = 16 * MiB  # all scalar strings together
MAX_NAME: Final = 64  # GGML_MAX_NAME, the closing zero included
MAX_DIMS: Final = 4  # GGML_MAX_DIMS
INT64_MAX: Final = 2**63 - 1
# Arrays up to this size stay in memory (per-layer head counts and the like).
KEPT_ARRAY: Final = 64 * KiB
FIRST_READ: Final = 1 * MiB
MAX_READ: Final = 4 * MiB
PEEK: Final = 8 * KiB

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_SHARD_NAME: Final = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")

# (bytes at hand, bytes needed, bytes the whole header may take) -> the bytes that follow
Fill = Callable[[int, int, int], bytes]
# Bytes of header a token costs, types, scores and merges included: 22 to 61 in 19 tokenizers.
BYTES_PER_TOKEN: Final = 48
BYTES_PER_STRING: Final = 20


class IncompleteHeaderError(GGUFError):
    """The bytes given end before the header does; ``needed`` is how many are wanted at least."""

    def __init__(self, path: str | Path, needed: int, offset: int) -> None:
        super().__init__(path, f"the header needs at least {needed} bytes", offset=offset)
        self.needed = needed


class _Cursor:
    """A position in a header of which more bytes can be fetched as they are needed."""

    def __init__(self, path: str, data: bytes, file_bytes: int | None, fill: Fill | None) -> None:
        self.path = path
        self.data = bytearray(data)
        self.pos = 0
        self.file_bytes = file_bytes
        self.fill = fill
        self.text_bytes = 0
        self.n_strings = 0
        self.expected = 0

    def error(self, what: str, at: int | None = None, hint: str | None = None) -> GGUFError:
        return GGUFError(self.path, what, offset=self.pos if at is None else at, hint=hint)

    def need(self, end: int, what: str) -> None:
        """Make the bytes up to ``end`` available, or say that ``what`` cannot be there."""
        if end <= len(self.data):
            return
        if self.file_bytes is not None and end > self.file_bytes:
            raise self.error(
                f"{what} runs past the end of the file ({end} of {self.file_bytes} bytes)",
                hint="the download may be incomplete: edgellm verify --repair",
            )
        if end > MAX_HEADER:
            raise self.error(f"{what} would make a header of over {format_bytes(MAX_HEADER)}")
        if self.fill is None:
            raise IncompleteHeaderError(self.path, end, self.pos)
        self.data += self.fill(len(self.data), end, self.expected)
        if end > len(self.data):
            raise self.error(f"{what}: the file ended early", at=len(self.data))

    def scalar(self, kind: struct.Struct, what: str) -> int | float:
        self.need(self.pos + kind.size, what)
        value: int | float = kind.unpack_from(self.data, self.pos)[0]
        self.pos += kind.size
        return value

    def uint32(self, what: str) -> int:
        return int(self.scalar(_U32, what))

    def uint64(self, what: str) -> int:
        return int(self.scalar(_U64, what))

    def string(self, what: str) -> str:
        start = self.pos
        length = self.uint64(what)
        end = self.pos + length
        self.text_bytes += length
        if length > MAX_TEXT or self.text_bytes > MAX_TEXT:
            raise self.error(f"{what} has a length of {length} bytes", at=start)
        self.need(end, what)
        try:
            text = self.data[self.pos : end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8", at=self.pos + error.start) from error
        self.pos = end
        return text

    def skip_strings(self, n: int, what: str) -> None:
        """Walk over ``n`` strings: the loop that reading a header spends its time in."""
        self.n_strings += n
        if self.n_strings > MAX_STRINGS:
            raise self.error(f"{what} has {n} strings, more than any tokenizer")
        each = BYTES_PER_TOKEN if "tokenizer.ggml.tokens" in what else BYTES_PER_STRING
        self.expected = max(self.expected, self.pos + each * n)
        self.need(self.pos + 8 * n, what)
        unpack, left = _U64.unpack_from, n
        while left:
            data, pos, done = self.data, self.pos, 0
            try:
                for done in range(left):  # noqa: B007 (read after the loop stopped early)
                    pos += 8 + unpack(data, pos)[0]
                done = left
            except (struct.error, OverflowError, IndexError):
                pass  # past what is in memory: the file's end, or only the prefix read so far
            if pos > self.limit:
                self._name_string(done, what)
            self.pos, left = pos, left - done
            self.need(pos + (8 if left else 0), what)

    @property
    def limit(self) -> int:
        """Where a header must have ended."""
        return MAX_HEADER if self.file_bytes is None else min(self.file_bytes, MAX_HEADER)

    def _name_string(self, n: int, what: str) -> None:
        """Say which string, of ``n`` that were walked over, ends outside the file."""
        pos = self.pos
        for index in range(n):
            end = pos + 8 + _U64.unpack_from(self.data, pos)[0]
            if end > self.limit:
                raise self.error(f"{what}: string {index} runs past the end", at=pos)
            pos = end


def parse_header(
    data: bytes | memoryview,
    *,
    path: str = "<memory>",
    file_bytes: int | None = None,
    fill: Fill | None = None,
) -> GGUFFile:
    """Parse a header from its first bytes.

    ``fill(have, need, expected)`` must return the bytes that follow the first ``have``, up to at
    least ``need``; ``expected`` guesses where the header ends. Without it a prefix that is too
    short raises IncompleteHeaderError. ``file_bytes``, where known, lets every length be checked
    against the end of the file. Arrays too large to keep can be decoded only if ``path`` is a
    local file.
    """
    header = parse_one(path, bytes(data), file_bytes, fill)
    return assemble((path,), (header,))


def parse_one(path: str, data: bytes, file_bytes: int | None, fill: Fill | None) -> Header:
    """The header of one file, given its first bytes and where more come from."""
    return _parse(_Cursor(path, data, file_bytes, fill))


def read_gguf(path: str | Path) -> GGUFFile:
    """Read a model's header; for a split model all shards, found from any of them.

    Raises ModelNotFoundError when there is no file, GGUFError for anything wrong with it.
    """
    # Absolute, but not normalised: ``a/../b`` is not ``b`` when ``a`` is a link.
    first = os.fspath(path)
    first = first if os.path.isabs(first) else os.path.join(os.getcwd(), first)
    header = _read_one(first)
    count = split_count(header, first)
    if count <= 1:
        return assemble((first,), (header,))
    paths = shard_paths(first, count)
    headers = tuple(header if p == first else _read_shard(p) for p in paths)
    check_shards(paths, headers)
    return assemble(paths, headers)


def peek(path: str | Path) -> dict[str, MetaValue]:
    """The metadata that stands in the first bytes, before the tokenizer: architecture and name.

    A tenth of a millisecond, for lists of many models. Empty for what is not a readable GGUF.
    """
    metadata: dict[str, MetaValue] = {}
    try:
        with open(path, "rb") as file:
            cursor = _Cursor(str(path), file.read(PEEK), None, None)
        _parse_version(cursor)
        cursor.pos += 8  # the number of tensors
        for _ in range(min(cursor.uint64("the number of keys"), MAX_KEYS)):
            key, _type, value = _parse_pair(cursor)
            metadata[key] = value
    except (OSError, GGUFError):
        pass  # the prefix ended, or the file is something else: what was read is the answer
    return metadata


def check_file(path: str | Path) -> None:
    """Raise GGUFError unless this one file is whole: its header sound, every tensor inside it.

    A shard is looked at alone. Nothing is taken from the cache or put there.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            parse_one(str(path), b"", size, _file_fill(file, size))
    except OSError as error:
        raise _unreadable(str(path), error) from error


def shard_paths(path: str, count: int) -> tuple[str, ...]:
    """All shards of a split model by name (``llama_split_path`` in src/llama.cpp)."""
    folder, name = os.path.split(path)
    match = _SHARD_NAME.fullmatch(name)
    if match is None or int(match["count"]) != count:
        raise GGUFError(
            path,
            f"is one of {count} shards, but its name does not end in -00001-of-{count:05d}.gguf",
        )
    names = [f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    return tuple(os.path.join(folder, n) for n in names)


def _read_shard(path: str) -> Header:
    try:
        return _read_one(path)
    except ModelNotFoundError as error:
        raise GGUFError(
            path, "this shard of the model is missing", hint="pull the model again to complete it"
        ) from error


def _read_one(path: str) -> Header:
    try:
        with open_plain(path) as file:
            stat = os.fstat(file.fileno())
            stamp = cache.stamp(stat)
            header = cache.load(path, stamp)
            if header is None:
                header = parse_one(path, b"", stat.st_size, _file_fill(file, stat.st_size))
                cache.save(path, stamp, header)
            return header
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: no such file", hint="edgellm ls") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> GGUFError:
    if isinstance(error, IsADirectoryError):
        return GGUFError(path, "is a folder, not a GGUF file")
    return GGUFError(path, f"cannot be read: {error.strerror}")


def open_plain(path: str | Path) -> BinaryIO:
    """Open a file to read it. GGUFError for a pipe or a device: opening a pipe would wait for ever
    for a writer."""
    mode = os.stat(path).st_mode
    if not (stat_.S_ISREG(mode) or stat_.S_ISDIR(mode)):
        raise GGUFError(path, "is a pipe or a device, not a GGUF file")
    return open(path, "rb")


def _file_fill(file: BinaryIO, size: int) -> Fill:
    def fill(have: int, need: int, _: int) -> bytes:
        file.seek(have)
        more = min(max(have, FIRST_READ), MAX_READ)
        return file.read(min(size, max(need, have + more)) - have)

    return fill


def _parse(cursor: _Cursor) -> Header:
    version = _parse_version(cursor)
    n_tensors = _parse_count(cursor, "tensors", MAX_TENSORS, least_bytes=24)
    n_keys = _parse_count(cursor, "metadata keys", MAX_KEYS, least_bytes=14)
    metadata: dict[str, MetaValue] = {}
    alignment = 32  # GGUF_DEFAULT_ALIGNMENT
    for _ in range(n_keys):
        at, (key, value_type, value) = cursor.pos, _parse_pair(cursor)
        if key in metadata:
            raise cursor.error(f"the key {key!r} appears twice", at=at)
        if key == "general.alignment":
            alignment = _checked_alignment(cursor, value_type, value, at)
        metadata[key] = value
    tensors = _parse_tensors(cursor, n_tensors)
    data_offset = -(-cursor.pos // alignment) * alignment if n_tensors else cursor.pos
    _check_layout(cursor, tensors, data_offset, alignment)
    ends = cursor.file_bytes
    if ends is None:
        last = tensors[-1] if tensors else None
        ends = data_offset + (last.offset + last.n_bytes if last else 0)
    return Header(version, alignment, data_offset, ends, metadata, tensors)


def _parse_version(cursor: _Cursor) -> int:
    cursor.need(4, "the magic")
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise cursor.error("is not a GGUF file", hint=_foreign(bytes(cursor.data[:256])))
    cursor.pos = 4
    version = cursor.uint32("the version")
    if version & 0xFFFF == 0 and version != 0:
        raise cursor.error("is a big-endian GGUF, which is not supported", at=4)
    if version not in (2, 3):
        raise cursor.error(f"has GGUF version {version}; 2 and 3 can be read", at=4)
    return version


def _foreign(start: bytes) -> str | None:
    """What a file that is not a GGUF is, when its first bytes tell."""
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, perhaps a proxy's or a login page: download the model again"
    if text.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the model: edgellm pull the repository instead"
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "it is a GGML file from before GGUF: convert it or download a GGUF"
    if start[:2] == b"PK" or b"__metadata__" in start or b'"dtype"' in start:
        return "it holds PyTorch or safetensors weights: download a GGUF of the model"
    return None


def _parse_count(cursor: _Cursor, what: str, most: int, least_bytes: int) -> int:
    """A count from the header; refused at once when the file has no room for so many."""
    at = cursor.pos
    count = cursor.uint64(f"the number of {what}")
    room = cursor.file_bytes
    if count > most or (room is not None and count * least_bytes > room):
        raise cursor.error(f"claims {count} {what}", at=at)
    return count


def _parse_pair(cursor: _Cursor) -> tuple[str, int, MetaValue]:
    at = cursor.pos
    key = cursor.string("a metadata key")
    if not key:
        raise cursor.error("has an empty metadata key", at=at)
    value_type = cursor.uint32(f"the type of {key!r}")
    if value_type == ARRAY:
        return key, value_type, _parse_array(cursor, key)
    if value_type == STRING:
        return key, value_type, cursor.string(f"the value of {key!r}")
    kind = SCALARS.get(value_type)
    if kind is None:
        raise cursor.error(f"{key!r} has the unknown value type {value_type}", at=cursor.pos - 4)
    value = cursor.scalar(kind, f"the value of {key!r}")
    return key, value_type, (value != 0 if value_type == BOOL else value)


def _parse_array(cursor: _Cursor, key: str) -> GGUFArray:
    what = f"the array {key!r}"
    item_type = cursor.uint32(what)
    if item_type != STRING and item_type not in SCALARS:
        nested = "arrays" if item_type == ARRAY else f"the unknown type {item_type}"
        raise cursor.error(f"{what} holds {nested}", at=cursor.pos - 4)
    n = cursor.uint64(what)
    start = cursor.pos
    if item_type == STRING:
        cursor.skip_strings(n, what)
    else:
        end = start + n * SCALARS[item_type].size
        cursor.need(end, what)
        cursor.pos = end
    n_bytes = cursor.pos - start
    keep = n_bytes <= KEPT_ARRAY
    raw = bytes(cursor.data[start : cursor.pos]) if keep else None
    return GGUFArray(item_type, n, cursor.path, start, n_bytes, raw)


def _checked_alignment(cursor: _Cursor, value_type: int, value: MetaValue, at: int) -> int:
    if value_type != UINT32 or not isinstance(value, int):
        raise cursor.error("general.alignment is not a 32-bit unsigned number", at=at)
    if value == 0 or value & (value - 1):
        raise cursor.error(f"general.alignment is {value}, not a power of two", at=at)
    return value


def _parse_tensors(cursor: _Cursor, n: int) -> tuple[TensorInfo, ...]:
    tensors: list[TensorInfo] = []
    names: set[str] = set()
    for _ in range(n):
        at = cursor.pos
        tensor = _parse_tensor(cursor)
        if tensor.name in names:
            raise cursor.error(f"the tensor {tensor.name!r} appears twice", at=at)
        names.add(tensor.name)
        tensors.append(tensor)
    return tuple(tensors)


def _parse_tensor(cursor: _Cursor) -> TensorInfo:
    at = cursor.pos
    name = cursor.string("a tensor name")
    if len(name.encode()) >= MAX_NAME:
        raise cursor.error(f"a tensor name has {len(name)} letters, over {MAX_NAME - 1}", at=at)
    dims = _parse_dims(cursor, name)
    type_id = cursor.uint32(f"the type of tensor {name!r}")
    kind = TENSOR_TYPES.get(type_id)
    if kind is None:
        gone = ", which llama.cpp no longer reads" if type_id in REMOVED_TENSOR_TYPES else ""
        raise cursor.error(f"tensor {name!r} has the type {type_id}{gone}", at=cursor.pos - 4)
    n_elements = 1
    for dim in dims:
        n_elements *= dim
    row = dims[0] if dims else 1
    n_bytes = n_elements // kind.block * kind.n_bytes
    if row % kind.block or n_elements > INT64_MAX or n_bytes > INT64_MAX:
        raise cursor.error(f"tensor {name!r} of type {kind.name} cannot be {dims}", at=at)
    offset = cursor.uint64(f"the offset of tensor {name!r}")
    return TensorInfo(name, dims, kind.name, type_id, offset, n_bytes)


def _parse_dims(cursor: _Cursor, name: str) -> tuple[int, ...]:
    n_dims = cursor.uint32(f"tensor {name!r}")
    if n_dims > MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {n_dims} dimensions", at=cursor.pos - 4)
    cursor.need(cursor.pos + 8 * n_dims, f"the shape of tensor {name!r}")
    dims: tuple[int, ...] = struct.unpack_from(f"<{n_dims}Q", cursor.data, cursor.pos)
    if any(dim > INT64_MAX for dim in dims):
        raise cursor.error(f"tensor {name!r} has an impossible shape {dims}")
    cursor.pos += 8 * n_dims
    return dims


def _check_layout(
    cursor: _Cursor, tensors: tuple[TensorInfo, ...], data_offset: int, alignment: int
) -> None:
    """Tensors must follow one another without gap or overlap, and end inside the file."""
    expected = 0
    for tensor in tensors:
        at = data_offset + tensor.offset
        if tensor.offset != expected:
            how = "overlaps the one before" if tensor.offset < expected else "leaves a gap"
            raise cursor.error(f"tensor {tensor.name!r} {how} (expected at {expected})", at=at)
        if cursor.file_bytes is not None and at + tensor.n_bytes > cursor.file_bytes:
            raise cursor.error(
                f"tensor {tensor.name!r} ends at {at + tensor.n_bytes}, "
                f"the file at {cursor.file_bytes}: it is incomplete",
                at=at,
                hint="finish the download: edgellm verify --repair",
            )
        expected += -(-tensor.n_bytes // alignment) * alignment


def split_count(header: Header, path: str) -> int:
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 0 or count > 65_535:
        raise GGUFError(path, f"split.count is {count!r}")
    return count


def check_shards(paths: tuple[str, ...], headers: tuple[Header, ...]) -> None:
    """The checks of ``llama_model_loader`` (src/llama-model-loader.cpp) on a split model."""
    names: set[str] = set()
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        if header.metadata.get("split.no") != index:
            raise GGUFError(
                path, f"says it is shard {header.metadata.get('split.no')}, not {index}"
            )
        for tensor in header.tensors:
            if tensor.name in names:
                raise GGUFError(path, f"the tensor {tensor.name!r} is in two shards")
            names.add(tensor.name)
    promised = headers[0].metadata.get("split.tensors.count")
    if promised is not None and promised != len(names):
        raise GGUFError(paths[0], f"promises {promised} tensors, the shards hold {len(names)}")


def assemble(paths: tuple[str, ...], headers: tuple[Header, ...]) -> GGUFFile:
    first = headers[0]
    tensors = first.tensors
    if len(headers) > 1:
        tensors = tuple(
            msgspec.structs.replace(tensor, shard=index) if index else tensor
            for index, header in enumerate(headers)
            for tensor in header.tensors
        )
    shards = tuple(
        Shard(path, header.file_bytes, header.data_offset)
        for path, header in zip(paths, headers, strict=True)
    )
    return GGUFFile(
        path=paths[0],
        shards=shards,
        version=first.version,
        alignment=first.alignment,
        data_offset=first.data_offset,
        file_bytes=sum(header.file_bytes for header in headers),
        metadata=first.metadata,
        tensors=tensors,
        kind=_kind(first.metadata, len(tensors)),
    )


def _kind(metadata: Mapping[str, MetaValue], n_tensors: int) -> Kind:
    """``general.type`` where the converter wrote it (gguf.constants.GGUFType), else by content."""
    general = metadata.get("general.type")
    if general == "adapter" or "adapter.type" in metadata:
        return "lora" if metadata.get("adapter.type", "lora") == "lora" else "other"
    if general == "mmproj" or metadata.get("general.architecture") == "clip":
        return "mmproj"
    if general == "imatrix" or metadata.get("general.architecture") == "controlvector":
        return "other"
    return "model" if n_tensors else "vocab"
