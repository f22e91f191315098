"""``edgellm verify``: are the bytes on disk the right ones?"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from edgellm import config
from edgellm.cli.progress import Progress
from edgellm.config import Settings, StoreSettings
from edgellm.errors import ChecksumError, ModelNotFoundError, StoreError
from edgellm.gguf.reader import check_file
from edgellm.store import records
from edgellm.store.local import LocalModel, find, list_models
from edgellm.store.records import Record
from edgellm.store.verify import Finding, forget_stamps, record_of
from edgellm.store.verify import verify as look
from edgellm.units import format_bytes


def verify(*names: str, repair: bool = False, json: bool = False) -> None:
    """Check models: structure, and SHA-256 where it is known (the hub's, Ollama's, edgellm's).

    Without names, every model here. The exit code is 5 when something is wrong.

    Examples, one a line:

    * `edgellm verify`
    * `edgellm verify qwen3-8b-Q4_K_M --repair`

    Parameters
    ----------
    names
        Names as `edgellm ls` prints them.
    repair
        Fetch damaged models of edgellm's again, and finish incomplete ones.
    json
        Print JSON (edgellm.verify/1).
    """
    settings = config.load().settings
    store = settings.store
    models, partials = _wanted(names, store)
    progress = Progress()
    found = {m.name: look(m, check_file, listener=progress, settings=store) for m in models}
    progress.end()
    bad = [m for m in models if any(f.problem for f in found[m.name])]
    if json:
        print(msgspec.json.encode(_as_json(found, partials)).decode())
    else:
        _print(found, partials)
    if repair:
        _repair(bad, partials, settings, json)
    elif bad:
        problem = next(f for f in found[bad[0].name] if f.problem)
        raise ChecksumError(
            f"{len(bad)} of {len(models)} models are damaged: {problem.path}: {problem.problem}",
            hint=f"edgellm verify --repair {bad[0].name}",
        )


def _wanted(names: tuple[str, ...], store: StoreSettings) -> tuple[list[LocalModel], list[Record]]:
    models = list_models(store)
    partials = [r for r in records.load_all(store) if not r.complete]
    if not names:
        return models, partials
    chosen, unfinished = [], []
    for name in names:
        model = find(name, models)
        record = next((r for r in partials if name in (r.name, r.ref)), None)
        if model is None and record is None:
            raise ModelNotFoundError(f"no model named {name!r}", hint="edgellm ls")
        chosen += [model] if model else []
        unfinished += [record] if record else []
    return chosen, unfinished


def _repair(
    bad: list[LocalModel], partials: list[Record], settings: Settings, as_json: bool
) -> None:
    store = settings.store
    todo = list(partials)
    for model in bad:
        record = record_of(model, store)
        if record is None or record.source == "import":
            raise StoreError(
                f"{model.name} is damaged and belongs to {model.owner}: only its owner can mend it",
                hint=f"delete it there, then edgellm pull {model.ref or model.name}",
            )
        forget_stamps(record, store)
        todo.append(record)
    from edgellm.cli.pull import again

    for record in todo:
        if record.source == "import":
            print(f"{record.name}: an import; run it again from its source", file=sys.stderr)
            continue
        done = again(record, settings, as_json)
        if not as_json:
            print(f"{done.name} is complete and right")


def _print(found: dict[str, list[Finding]], partials: list[Record]) -> None:
    for name, findings in found.items():
        for finding in findings:
            how = "structure and SHA-256" if finding.digest else "structure (no SHA-256 is known)"
            state = f"DAMAGED: {finding.problem}" if finding.problem else f"right: {how}"
            print(f"{name}  {format_bytes(finding.n_bytes)}  {state}")
    for record in partials:
        print(f"{record.name}  {format_bytes(record.n_done)}  incomplete")


def _as_json(found: dict[str, list[Finding]], partials: list[Record]) -> dict[str, Any]:
    return {
        "schema": "edgellm.verify/1",
        "models": [
            {"name": name, "ok": not any(f.problem for f in findings), "files": findings}
            for name, findings in found.items()
        ],
        "incomplete": [record.name for record in partials],
    }
