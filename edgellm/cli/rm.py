"""``edgellm rm``: delete a model of edgellm's, and nothing else."""

from __future__ import annotations

import sys

from edgellm import config
from edgellm.cli.errors import UsageError
from edgellm.config import StoreSettings
from edgellm.errors import ModelNotFoundError
from edgellm.store import records
from edgellm.store.local import find, list_models
from edgellm.store.remove import Removal, removal_of, removal_of_record, remove
from edgellm.units import format_bytes


def rm(*names: str, yes: bool = False, dry_run: bool = False, json: bool = False) -> None:
    """Delete models of edgellm's from disk, or partial downloads; asks first.

    Files that other programs downloaded, or still use, are never deleted.

    Examples, one a line:

    * `edgellm rm qwen3-8b-Q4_K_M`
    * `edgellm rm --yes old-model`

    Parameters
    ----------
    names
        Names as `edgellm ls` prints them.
    yes
        Do not ask.
    dry_run
        Show what would be deleted and freed.
    json
        Print JSON.
    """
    if not names:
        raise UsageError("no model was named", hint="edgellm ls")
    store = config.load().settings.store
    removals = [_removal(name, store) for name in names]
    if not json:
        for removal in removals:
            _show(removal)
    if not dry_run and not yes:
        _ask(sum(removal.n_bytes for removal in removals))
    for removal in removals:
        if not dry_run:
            remove(removal, store)
    _report(removals, dry_run, json)


def _removal(name: str, store: StoreSettings) -> Removal:
    for record in records.load_all(store):
        if not record.complete and name in (record.name, record.ref):
            return removal_of_record(record, store)
    model = find(name, list_models(store))
    if model is None:
        raise ModelNotFoundError(f"no model named {name!r}", hint="edgellm ls")
    return removal_of(model, store)


def _show(removal: Removal) -> None:
    print(f"{removal.name}: {format_bytes(removal.n_bytes)} will be free")
    for path in removal.paths:
        print(f"  delete {path}")
    for kept in removal.kept:
        print(f"  keep   {kept}")
    sys.stdout.flush()


def _ask(n_bytes: int) -> None:
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to ask", hint="edgellm rm --yes ...")
    if input(f"Delete, and free {format_bytes(n_bytes)}? [y/N] ").strip().lower() not in (
        "y",
        "yes",
    ):
        raise KeyboardInterrupt


def _report(removals: list[Removal], dry_run: bool, as_json: bool) -> None:
    if as_json:
        import msgspec

        done = [
            {
                "name": r.name,
                "deleted": [] if dry_run else list(r.paths),
                "would_delete": list(r.paths) if dry_run else [],
                "freed": r.n_bytes,
                "kept": list(r.kept),
            }
            for r in removals
        ]
        print(msgspec.json.encode({"schema": "edgellm.rm/1", "models": done}).decode())
    elif not dry_run:
        print(f"{format_bytes(sum(r.n_bytes for r in removals))} freed")
