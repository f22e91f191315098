"""Pulling a model: each file whole and right, then all of them visible under their names.

A model's record is written first, its files are fetched one after another beside their places, each
is checked (size, SHA-256, structure) and moved into place, and only then do names appear, the first
shard last. Killed anywhere, the same command goes on from there.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec

from edgellm.config import StoreSettings
from edgellm.errors import GGUFError, StoreError
from edgellm.store import records, transfer
from edgellm.store.files import Remote
from edgellm.store.locks import locked
from edgellm.store.names import SHARD, display_name, is_plain
from edgellm.store.records import FileRecord, Record
from edgellm.store.transfer import Listener

# Raises GGUFError when the file at the path is not a sound GGUF; injected by the caller.
Check = Callable[[Path], None]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A remote file and its place: fetched to ``part``, moved to ``blob``, seen as ``path``."""

    remote: Remote
    path: Path
    blob: Path
    part: Path
    lock: Path


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a pull needs to know. ``refs`` are files to write once all is visible."""

    name: str
    ref: str
    source: Literal["hf", "url"]
    targets: tuple[Target, ...]
    revision: str | None = None
    refs: tuple[tuple[Path, str], ...] = ()

    @property
    def size(self) -> int | None:
        """Bytes of all files, where all are known."""
        sizes = [target.remote.size for target in self.targets]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def missing(self) -> int:
        """Bytes still to be fetched, as far as sizes are known."""
        return sum(_missing(target) for target in self.targets)


def _missing(target: Target) -> int:
    size = target.remote.size or 0
    for path in (target.blob, target.part):
        if path.exists():
            return max(0, size - path.stat().st_size)
    return size


def url_order(url: str, *, name: str | None = None, settings: StoreSettings | None = None) -> Order:
    """An order for the GGUF at a plain address, with all its shards, into the store's folder."""
    parts = urlsplit(url)
    file = unquote(parts.path).rsplit("/", 1)[-1]
    if name is not None and not is_plain(name):
        raise StoreError(f"{name!r} cannot be the name of a file")
    if not is_plain(file) or not file.lower().endswith(".gguf"):
        raise StoreError(
            f"{url} does not name a .gguf file", hint="give the address of the file itself"
        )
    folder = records.store_folder(settings)
    match = SHARD.fullmatch(file)
    count = int(match["count"]) if match else 1
    targets = []
    for number in range(1, count + 1):
        shard = f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf" if match else file
        address = urlunsplit(
            parts._replace(path=quote(parts.path.rsplit("/", 1)[0] + "/" + shard, safe="/%"))
        )
        local = shard.replace(display_name(shard), name, 1) if name else shard
        targets.append(_plain_target(Remote(url=address if match else url, name=local), folder))
    return Order(name=name or display_name(file), ref=url, source="url", targets=tuple(targets))


def _plain_target(remote: Remote, folder: Path) -> Target:
    path = folder / remote.name
    return Target(
        remote=remote,
        path=path,
        blob=path,
        part=path.with_name(path.name + ".part"),
        lock=folder / ".locks" / f"{remote.name}.lock",
    )


def pull(
    order: Order,
    *,
    check: Check,
    headers: Mapping[str, str] | None = None,
    listener: Listener | None = None,
    settings: StoreSettings | None = None,
) -> Record:
    """Carry out an order and return its record, complete.

    A second process with the same order waits for the first and finds the work done. Raises
    DownloadError (what arrived is kept), ChecksumError, DiskFullError or GGUFError.
    """
    listener = listener or Listener()
    try:
        return _pull(order, check, headers or {}, listener, settings)
    except OSError as error:
        where = error.filename or order.targets[0].blob.parent
        raise StoreError(
            f"{where}: {error.strerror or error}",
            hint="edgellm doctor shows the folders; HF_HOME and EDGELLM_STORE_DIR move them",
        ) from error


def _pull(
    order: Order,
    check: Check,
    headers: Mapping[str, str],
    listener: Listener,
    settings: StoreSettings | None,
) -> Record:
    lock = records.store_folder(settings) / ".locks" / records.path_of(order.ref).name
    with locked(lock, lambda: listener.note(f"{order.name}: another edgellm is pulling it")):
        known = records.load(order.ref, settings)
        transfer.check_disk(order.targets[0].part.parent, order.missing)
        record = _opened(order, known, settings)
        records.save(record, settings)
        for index, target in enumerate(order.targets):
            waits = f"{target.remote.name}: another program is downloading it"
            with locked(target.lock, lambda text=waits: listener.note(text)):  # type: ignore[misc]
                job = _Job(record, index, target, check, headers, listener, settings)
                record = job.run()
        for target in reversed(order.targets):
            _show(target)
        for path, text in order.refs:
            _write(path, text)
        record = msgspec.structs.replace(record, complete=True)
        records.save(record, settings)
        return record


def _opened(order: Order, known: Record | None, settings: StoreSettings | None) -> Record:
    """The record to begin with: what was known about each file, as long as it is the same file."""
    before = {file.blob: file for file in known.files} if known else {}
    owned = {f.blob for r in records.load_all(settings) for f in r.files if f.ours}
    files = []
    for target in order.targets:
        old = before.get(str(target.blob))
        if old is None or old.url != target.remote.url:
            there = target.blob.exists() and str(target.blob) not in owned
            _refuse_foreign(order, target, there)
            old = _file_record(target, ours=not there)
        files.append(old)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Record(
        name=order.name,
        ref=order.ref,
        source=order.source,
        files=tuple(files),
        revision=order.revision,
        created=known.created if known else now,
    )


def _refuse_foreign(order: Order, target: Target, there: bool) -> None:
    if there and order.source == "url":
        raise StoreError(
            f"{target.path} exists and did not come from {order.ref}",
            hint="give the new one another name: --name",
        )


def _file_record(target: Target, *, ours: bool) -> FileRecord:
    remote = target.remote
    return FileRecord(
        name=remote.name,
        path=str(target.path),
        blob=str(target.blob),
        part=str(target.part),
        size=remote.size,
        sha256=remote.sha256,
        git_sha1=remote.git_sha1,
        url=remote.url,
        ours=ours,
    )


class _Job:
    """One file of a pull, with its lock held."""

    def __init__(  # noqa: PLR0917 (called in one place, with all of them)
        self,
        record: Record,
        index: int,
        target: Target,
        check: Check,
        headers: Mapping[str, str],
        listener: Listener,
        settings: StoreSettings | None,
    ) -> None:
        self.record = record
        self.index = index
        self.target = target
        self.check = check
        self.headers = headers
        self.listener = listener
        self.settings = settings

    @property
    def file(self) -> FileRecord:
        return self.record.files[self.index]

    def run(self) -> Record:
        """Make sure that the blob is in place and right."""
        if not self.is_here():
            sha256 = transfer.fetch(
                self.target.remote,
                self.target.part,
                headers=self.headers,
                etag=self.file.etag,
                listener=self.listener,
                on_etag=self.learn,
            )
            self.accept(sha256)
        return self.record

    def is_here(self) -> bool:
        """Whether the blob exists and is right: by its digest, or as it was when last checked."""
        blob, file = self.target.blob, self.file
        if not blob.is_file():
            return False
        stat = blob.stat()
        if file.mtime_ns == stat.st_mtime_ns and file.size == stat.st_size:
            return True
        if is_right(blob, file):
            self.update(mtime_ns=stat.st_mtime_ns, size=stat.st_size)
            return True
        self.listener.note(f"{file.name}: the copy on disk is damaged; fetching it again")
        return False

    def accept(self, sha256: str) -> None:
        """The structural check, then the move that makes the blob exist."""
        part, blob = self.target.part, self.target.blob
        try:
            self.check(part)
        except GGUFError as error:
            part.unlink()
            raise GGUFError(
                self.target.remote.url,
                f"what was downloaded is not a sound GGUF: {error.what}; it was not kept",
                offset=error.offset,
                hint=error.hint,
            ) from error
        stat = part.stat()
        self.update(sha256=sha256, size=stat.st_size, mtime_ns=stat.st_mtime_ns)
        blob.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, blob)

    def learn(self, etag: str | None, size: int | None) -> None:
        if (etag, size) != (self.file.etag, self.file.size):
            self.update(etag=etag, size=size)

    def update(self, **changes: object) -> None:
        files = list(self.record.files)
        files[self.index] = msgspec.structs.replace(self.file, **changes)
        self.record = msgspec.structs.replace(self.record, files=tuple(files))
        records.save(self.record, self.settings)


def is_right(blob: Path, file: FileRecord) -> bool:
    """Whether a file's bytes are those promised, as far as anything was promised."""
    if file.size is not None and blob.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        with blob.open("rb") as stream:
            return transfer.file_digest(stream) == file.sha256
    return file.git_sha1 is None or transfer.git_sha1(blob) == file.git_sha1


def _show(target: Target) -> None:
    """Make the name appear: a relative link to the blob, as the hub's own library makes it."""
    if target.path == target.blob:
        return
    link = os.path.relpath(target.blob, target.path.parent)
    if target.path.is_symlink() and os.readlink(target.path) == link:
        return
    target.path.parent.mkdir(parents=True, exist_ok=True)
    part = target.path.with_name(f".{target.path.name}.link")
    part.unlink(missing_ok=True)
    part.symlink_to(link)
    os.replace(part, target.path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.tmp")
    part.write_text(text, encoding="ascii")
    os.replace(part, path)
