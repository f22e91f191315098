"""``edgellm ls``: the models on this machine."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from edgellm import config
from edgellm.cli.rows import Row, rows_of
from edgellm.devices import probe
from edgellm.store import records
from edgellm.store.local import LocalModel, list_models
from edgellm.store.records import Record
from edgellm.units import format_bytes

SCHEMA = "edgellm.ls/1"
VERDICTS = {
    "gpu": "whole on the GPU",
    "partial": "partly on the GPU",
    "cpu": "on the CPU",
    "does_not_fit": "does not fit",
    "": "",
}


def ls(words: str = "", /, *, exact: bool = False, json: bool = False) -> None:
    """The models on this machine: edgellm's own and those that other programs downloaded.

    Names, sizes, quantisation, owner, and whether each fits here; ~ marks a verdict by size alone,
    where there are too many to plan for each.
    Downloads that are not complete are listed below.

    Examples, one a line:

    * `edgellm ls`
    * `edgellm ls qwen --json`

    Parameters
    ----------
    words
        Only models with this in their name.
    exact
        Plan for every model, however many.
    json
        Print JSON (edgellm.ls/1).
    """
    settings = config.load().settings
    models = [m for m in list_models(settings.store) if words.lower() in m.name.lower()]
    rows = rows_of(models, probe(), exact=exact)
    partials = [r for r in records.load_all(settings.store) if not r.complete]
    if json:
        print(msgspec.json.encode(_as_json(models, rows, partials)).decode())
        return
    _print(models, rows)
    for record in partials:
        total = f" of {format_bytes(record.size)}" if record.size else ""
        print(f"\nincomplete: {record.name}, {format_bytes(record.n_done)}{total}")
        print(f"  go on: {again(record)}    give up: edgellm rm {record.name}")


def again(record: Record) -> str:
    """The command that goes on with a partial."""
    if record.source == "import":
        return f"edgellm import --copy {record.files[0].url}"
    return f"edgellm pull {record.ref}"


def _print(models: list[LocalModel], rows: list[Row]) -> None:
    if not models:
        print("no models here yet", file=sys.stderr)
        print("  try: edgellm pull starter, or edgellm search qwen3", file=sys.stderr)
        return
    table = [("NAME", "SIZE", "QUANT", "HERE", "OWNER")]
    for model, row in zip(models, rows, strict=True):
        table.append((model.name, format_bytes(model.n_bytes), row.quant, _here(row), model.owner))
    widths = [max(len(line[i]) for line in table) for i in range(4)]
    for line in table:
        cells = [text.ljust(width) for text, width in zip(line, [*widths, 0], strict=True)]
        print("  ".join(cells).rstrip())


def _here(row: Row) -> str:
    if row.error:
        return f"broken: {row.error}"[:60]
    if row.kind != "model":
        return row.kind
    text = ("" if row.exact else "~") + VERDICTS[row.verdict]
    return f"{text}, {row.decode_tps:.0f} tok/s" if row.decode_tps else text


def _as_json(models: list[LocalModel], rows: list[Row], partials: list[Record]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "models": [
            {
                "name": model.name,
                "path": model.files[0],
                "n_bytes": model.n_bytes,
                "owner": model.owner,
                "arch": row.arch,
                "quant": row.quant,
                "kind": row.kind,
                "verdict": row.verdict or None,
                "exact": row.exact,
                "n_ctx": row.n_ctx or None,
                "decode_tps": row.decode_tps,
                "mmproj": str(model.mmproj) if model.mmproj else None,
                "ref": model.ref,
                "error": row.error or None,
            }
            for model, row in zip(models, rows, strict=True)
        ],
        "incomplete": [
            {"name": r.name, "ref": r.ref, "done": r.n_done, "size": r.size} for r in partials
        ],
    }
