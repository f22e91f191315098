"""Checking what is on disk against what it should be."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from edgellm.config import StoreSettings
from edgellm.errors import GGUFError
from edgellm.store import records, transfer
from edgellm.store.local import LocalModel
from edgellm.store.pull import Check
from edgellm.store.records import FileRecord, Record
from edgellm.store.transfer import Listener

# Blobs of the hub's cache and of Ollama are named by their own SHA-256.
_DIGEST_NAME: Final = re.compile(r"(?:sha256-)?([0-9a-f]{64})")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a model, looked at. ``problem`` is None when it is right."""

    path: str
    n_bytes: int
    digest: str | None
    """The SHA-256 it was held against; None when none is known."""
    problem: str | None = None


def verify(
    model: LocalModel,
    check: Check,
    *,
    listener: Listener | None = None,
    settings: StoreSettings | None = None,
) -> list[Finding]:
    """Look at every file of a model: its structure first, then its SHA-256 where one is known."""
    listener = listener or Listener()
    paths = [*model.files, *([str(model.mmproj)] if model.mmproj else [])]
    known = {f.path: f for record in records.load_all(settings) for f in record.files}
    return [_look(path, known.get(path), check, listener) for path in paths]


def forget_stamps(record: Record, settings: StoreSettings | None = None) -> None:
    """Make the next pull of a record look at every byte, whatever the times of change say."""
    files = tuple(msgspec.structs.replace(file, mtime_ns=None) for file in record.files)
    records.save(msgspec.structs.replace(record, files=files), settings)


def record_of(model: LocalModel, settings: StoreSettings | None = None) -> Record | None:
    """The record that a model came from."""
    for record in records.load_all(settings):
        if any(file.path == str(model.path) for file in record.files):
            return record
    return None


def expected_digest(path: str, file: FileRecord | None) -> str | None:
    """The SHA-256 a file should have: from its record, or from the name of its blob."""
    if file is not None and file.sha256 is not None:
        return file.sha256
    match = _DIGEST_NAME.fullmatch(os.path.basename(os.path.realpath(path)))
    return match[1] if match else None


def _look(path: str, file: FileRecord | None, check: Check, listener: Listener) -> Finding:
    expected = expected_digest(path, file)
    try:
        n_bytes = os.stat(path).st_size
        problem = _problem(Path(path), n_bytes, file, expected, check, listener)
    except OSError as error:
        return Finding(path=path, n_bytes=0, digest=expected, problem=f"{error.strerror}")
    return Finding(path=path, n_bytes=n_bytes, digest=expected, problem=problem)


def _problem(  # noqa: PLR0917 (called in one place)
    path: Path,
    n_bytes: int,
    file: FileRecord | None,
    expected: str | None,
    check: Check,
    listener: Listener,
) -> str | None:
    if file is not None and file.size is not None and file.size != n_bytes:
        return f"has {n_bytes} bytes, should have {file.size}"
    try:
        check(path)
    except GGUFError as error:
        return error.what
    if expected is None:
        return None
    with path.open("rb") as stream:
        actual = transfer.file_digest(
            stream, lambda done: listener.progress(path.name, done, n_bytes)
        )
    return None if actual == expected else f"SHA-256 is {actual}, should be {expected}"
