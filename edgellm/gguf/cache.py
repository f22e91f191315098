"""Headers already read, kept on disk by path, size and time of change.

A tokenizer's strings take tens of milliseconds to walk over; an entry here takes one. Nothing
depends on it: an entry that is damaged, of another version or cannot be written is as if absent.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from pathlib import Path
from typing import Final

import msgspec

from edgellm import paths
from edgellm.gguf.file import Header

SCHEMA: Final = 1
# Entries are a few KiB to 200 KiB; beyond this many the oldest quarter goes.
MAX_ENTRIES: Final = 4096
_CHECKSUM_BYTES: Final = 4


Stamp = tuple[int, int, int]
NO_STAMP: Final[Stamp] = (0, 0, 0)  # for keys that are digests of the content


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    schema: int
    key: str
    stamp: Stamp
    header: Header


_DECODER: Final = msgspec.msgpack.Decoder(_Entry)


def stamp(stat: os.stat_result) -> Stamp:
    """What changes when a file does: size, time of change, inode."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def load(key: str, stamp: Stamp) -> Header | None:
    """The header read from this very file (an absolute path, or a digest) before, or None."""
    try:
        data = _entry_path(key).read_bytes()
    except OSError:
        return None
    body = memoryview(data)[_CHECKSUM_BYTES:]
    if zlib.crc32(body) != int.from_bytes(data[:_CHECKSUM_BYTES], "little"):
        return None
    try:
        entry = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    same = (entry.schema, entry.key, entry.stamp) == (SCHEMA, key, stamp)
    return entry.header if same else None


def save(key: str, stamp: Stamp, header: Header) -> None:
    """Keep a header. The entry appears whole or not at all; failing to write it is no error."""
    body = msgspec.msgpack.encode(_Entry(SCHEMA, key, stamp, header))
    checksum = zlib.crc32(body)
    target = _entry_path(key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(checksum.to_bytes(_CHECKSUM_BYTES, "little") + body)
            os.replace(part, target)
        except OSError:
            os.unlink(part)  # a full disk: every run would leave one
            raise
        if checksum % 64 == 0:  # one write in 64 looks whether there are too many
            _prune(target.parent)
    except OSError:
        return


def _entry_path(key: str) -> Path:
    name = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return paths.cache_dir() / "headers" / name[:32]


def _prune(folder: Path) -> None:
    with os.scandir(folder) as entries:
        found = [(entry.stat().st_mtime, entry.path) for entry in entries]
    if len(found) > MAX_ENTRIES:
        for _, path in sorted(found)[: MAX_ENTRIES // 4]:
            Path(path).unlink(missing_ok=True)
