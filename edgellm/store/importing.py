"""Taking a model from elsewhere on this machine into the store: linked or copied."""

from __future__ import annotations

import datetime
import errno
import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec

from edgellm.config import StoreSettings
from edgellm.errors import ChecksumError, GGUFError, StoreError
from edgellm.store import records, transfer
from edgellm.store.locks import locked
from edgellm.store.names import SHARD, display_name, is_plain
from edgellm.store.pull import Check
from edgellm.store.records import FileRecord, Record
from edgellm.store.transfer import Listener

Mode = Literal["link", "copy"]
_CHUNK: Final = 4 * 1024 * 1024


def import_model(
    source: Path,
    *,
    check: Check,
    mode: Mode = "link",
    name: str | None = None,
    listener: Listener | None = None,
    settings: StoreSettings | None = None,
) -> Record:
    """Bring a GGUF (all shards, from any) into the store.

    ``link`` makes a hard link, or a symbolic one across disks, and takes no room; ``copy`` makes a
    copy, resumed where an earlier one was ended, its SHA-256 compared with the source's. The source
    is never changed. Raises GGUFError for a file that is not sound, StoreError for a name taken.
    """
    listener = listener or Listener()
    chosen = source.name if name is None else name
    if not is_plain(chosen):
        raise StoreError(
            f"{chosen!r} cannot be the name of a file in the store",
            hint="give it another: --name",
        )
    try:
        return _import(source, check, mode, name, listener, settings)
    except OSError as error:
        raise StoreError(
            f"{error.filename or source}: {error.strerror or error}",
            hint="edgellm doctor shows the folders; EDGELLM_STORE_DIR moves the store",
        ) from error


def _import(  # noqa: PLR0917 (called in one place, with all of them)
    source: Path,
    check: Check,
    mode: Mode,
    name: str | None,
    listener: Listener,
    settings: StoreSettings | None,
) -> Record:
    sources = _shards(source)
    for path in sources:
        if not path.is_file():
            raise GGUFError(path, "this shard of the model is missing")
        check(path)
    folder = records.store_folder(settings)
    record = _record(sources, folder, name, mode)
    with locked(folder / ".locks" / records.path_of(record.ref).name):
        for path, file in zip(sources, record.files, strict=True):
            _refuse_taken(path, file, records.load(record.ref, settings))
        if mode == "copy":
            missing = sum((f.size or 0) - f.n_done for f in record.files)
            transfer.check_disk(folder, missing)
        records.save(record, settings)
        files = tuple(
            _bring(path, file, mode, listener)
            for path, file in zip(sources, record.files, strict=True)
        )
        for file in reversed(files):
            if file.blob != file.part and os.path.exists(file.part):
                os.replace(file.part, file.blob)
        record = msgspec.structs.replace(record, files=files, complete=True)
        records.save(record, settings)
    return record


def _shards(source: Path) -> list[Path]:
    match = SHARD.fullmatch(source.name)
    if match is None:
        return [source]
    count = int(match["count"])
    return [
        source.with_name(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf")
        for i in range(1, count + 1)
    ]


def _record(sources: list[Path], folder: Path, name: str | None, mode: Mode) -> Record:
    own = display_name(sources[0].name)
    files = []
    for source in sources:
        file = source.name.replace(own, name, 1) if name else source.name
        path = str(folder / (file if file.lower().endswith(".gguf") else f"{file}.gguf"))
        files.append(
            FileRecord(
                name=os.path.basename(path),
                path=path,
                blob=path,
                part=f"{path}.part",
                size=source.stat().st_size,
                url=str(source),
            )
        )
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    ref = f"import:{os.path.abspath(sources[0])}" + (f"#{name}" if name else "")
    return Record(
        name=display_name(files[0].path),
        ref=ref,
        source="import",
        files=tuple(files),
        created=now,
        revision=mode,
    )


def _refuse_taken(source: Path, file: FileRecord, known: Record | None) -> None:
    if known is not None or not os.path.lexists(file.path):
        return
    if os.path.exists(file.path) and os.path.samefile(source, file.path):
        return
    raise StoreError(
        f"{file.path} exists and is another file", hint="give the new one another name: --name"
    )


def _bring(source: Path, file: FileRecord, mode: Mode, listener: Listener) -> FileRecord:
    target = Path(file.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.exists(target) and os.path.samefile(source, target):
        return file
    if mode == "link":
        _link(source, target)
        return file
    if target.exists() and target.stat().st_size == source.stat().st_size:
        return msgspec.structs.replace(file, sha256=_same_digest(source, target, listener))
    digest = _copy(source, Path(file.part), listener)
    return msgspec.structs.replace(file, sha256=digest)


def _link(source: Path, target: Path) -> None:
    """A hard link to the bytes themselves (through any links to them), else a symbolic one."""
    real = Path(os.path.realpath(source))
    target.unlink(missing_ok=True)
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        target.symlink_to(os.path.abspath(source))


def _copy(source: Path, part: Path, listener: Listener) -> str:
    """Copy to ``part``, going on after what is there, and compare digests of both in the end."""
    size = source.stat().st_size
    with source.open("rb") as reader, part.open("ab") as writer:
        if writer.tell() > size:
            writer.truncate(0)
        have = writer.tell()
        digest = _hash_prefix(reader, have)
        while data := reader.read(_CHUNK):
            digest.update(data)
            writer.write(data)
            writer.flush()
            have += len(data)
            listener.progress(source.name, have, size)
        os.fsync(writer.fileno())
    expected = digest.hexdigest()
    with part.open("rb") as written:
        if transfer.file_digest(written) == expected:
            return expected
    part.unlink()
    raise ChecksumError(
        f"{part.name}: the copy differs from {source}", hint="run the same command again"
    )


def _hash_prefix(reader: BinaryIO, n: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    while n > 0 and (data := reader.read(min(n, _CHUNK))):
        digest.update(data)
        n -= len(data)
    return digest


def _same_digest(source: Path, target: Path, listener: Listener) -> str:
    with target.open("rb") as there, source.open("rb") as here:
        digest = transfer.file_digest(there)
        if digest == transfer.file_digest(here):
            return digest
    listener.note(f"{target.name}: what is there differs from the source; copying again")
    part = Path(f"{target}.part")
    digest = _copy(source, part, listener)
    os.replace(part, target)
    return digest
