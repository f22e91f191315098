"""What edgellm downloaded or imported: one small JSON file a model, beside the models.

A record is written before the first byte is fetched, so that a partial has a name and can be listed
and gone on with; it is also what says that a file in a shared cache is edgellm's to delete.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Literal

import msgspec

from edgellm import paths
from edgellm.config import StoreSettings

SCHEMA: Final = 1


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file. ``path`` is where it is used, ``blob`` where its bytes are, ``part`` where they
    are while it is not complete."""

    name: str
    path: str
    blob: str
    part: str
    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    etag: str | None = None
    url: str | None = None
    ours: bool = True
    """False: it was here before, so another program's."""
    mtime_ns: int | None = None
    """Of the blob when its digest was last found right."""

    @property
    def n_done(self) -> int:
        """Bytes on disk."""
        for path in (self.blob, self.part):
            try:
                return os.stat(path).st_size
            except OSError:
                continue
        return 0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was asked for."""

    name: str
    ref: str
    source: Literal["hf", "url", "import"]
    files: tuple[FileRecord, ...]
    complete: bool = False
    revision: str | None = None
    created: str = ""
    schema: int = SCHEMA

    @property
    def size(self) -> int | None:
        """Bytes of all files, where all are known."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def n_done(self) -> int:
        return sum(file.n_done for file in self.files)


def store_folder(settings: StoreSettings | None = None) -> Path:
    """Where edgellm keeps imported models and those from plain URLs, and its records."""
    if settings is not None and settings.dir:
        return paths.expand(settings.dir)
    return paths.store_dir()


def folder(settings: StoreSettings | None = None) -> Path:
    """Hidden, so that nobody takes it for models."""
    return store_folder(settings) / ".records"


def path_of(ref: str, settings: StoreSettings | None = None) -> Path:
    name = re.sub(r"[^\w.-]+", "_", ref.removeprefix("hf:"))[-150:]
    return folder(settings) / f"{name}.json"


def save(record: Record, settings: StoreSettings | None = None) -> None:
    """Write a record whole or not at all."""
    target = path_of(record.ref, settings)
    target.parent.mkdir(parents=True, exist_ok=True)
    # One name for the unfinished file: a killed process leaves none that the next does not reuse.
    part = target.with_suffix(".tmp")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        os.replace(part, target)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def load(ref: str, settings: StoreSettings | None = None) -> Record | None:
    return _read(path_of(ref, settings))


def load_all(settings: StoreSettings | None = None) -> list[Record]:
    """Every readable record, by name."""
    found = [_read(path) for path in sorted(folder(settings).glob("*.json"))]
    return sorted((record for record in found if record is not None), key=lambda r: r.name)


def forget(record: Record, settings: StoreSettings | None = None) -> None:
    path_of(record.ref, settings).unlink(missing_ok=True)


def _read(path: Path) -> Record | None:
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None
    return record if record.schema == SCHEMA else None
