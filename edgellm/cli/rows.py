"""What ``ls`` says about a model, remembered by path, size and time of change.

A row costs a few tenths of a millisecond the first time (the first bytes of the header) and nothing
afterwards. Verdicts come from the planner, as many a call as the time allows, the newest models
first; the others get one from their size, marked as such, and an exact one at a later call. With
more than MANY models to judge none is planned unless asked for: a list must come at once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from edgellm import paths
from edgellm.devices import Devices
from edgellm.store.local import LocalModel
from edgellm.store.names import quant_of
from edgellm.units import GiB, MiB

SCHEMA: Final = 1
# Seconds that exact verdicts may take together in one call.
PLAN_TIME_S: Final = 0.4
MANY: Final = 100
# Memory that is the same for a verdict: plans are not made again for every MiB that comes and goes.
_GRAIN: Final = 256 * MiB
# What a model takes beyond its weights, for a verdict from its size alone.
_OVERHEAD: Final = 1 * GiB


class Row(msgspec.Struct, kw_only=True):
    """What is known of a model. ``verdict`` is gpu, partial, cpu, does_not_fit, or empty for files
    that are not run (projectors, adapters); ``exact`` False: judged by its size alone."""

    size: int
    mtime: float
    arch: str = ""
    quant: str = ""
    kind: str = "model"
    n_ctx: int = 0
    decode_tps: float | None = None
    verdict: str = ""
    exact: bool = False
    machine: str = ""
    error: str = ""


class Index(msgspec.Struct, kw_only=True):
    """The remembered rows, by path."""

    schema: int = SCHEMA
    rows: dict[str, Row] = {}


def rows_of(models: Sequence[LocalModel], devices: Devices, *, exact: bool = False) -> list[Row]:
    """A row for each model, in order. ``exact`` plans for every one, however long it takes."""
    index, machine = _load(), machine_of(devices)
    rows, changed = [], False
    for model in models:
        row = index.rows.get(model.files[0])
        if row is None or (row.size, row.mtime) != (model.n_bytes, model.mtime):
            row, changed = _peeked(model), True
        if row.machine != machine:
            _judge_by_size(row, devices, machine)
            changed = True
        rows.append(row)
        index.rows[model.files[0]] = row
    if _plan_some(models, rows, devices, exact) or changed:
        listed = {model.files[0] for model in models}
        index.rows = {path: row for path, row in index.rows.items() if path in listed}
        _save(index)
    return rows


def machine_of(devices: Devices) -> str:
    """What verdicts depend on."""
    gpus = ",".join(f"{g.name}:{g.total}:{g.free // _GRAIN}" for g in devices.gpus)
    return f"{gpus};{devices.host.total}:{devices.host.available // (4 * _GRAIN)}"


def _peeked(model: LocalModel) -> Row:
    from edgellm.gguf.reader import peek
    from edgellm.gguf.types import FILE_TYPES

    metadata = peek(model.files[0])
    arch, file_type = metadata.get("general.architecture"), metadata.get("general.file_type")
    named = quant_of(os.path.basename(model.files[0])) or quant_of(model.name.replace(":", "-"))
    quant = named or (FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else "")
    kind = {"adapter": "lora", "mmproj": "mmproj", "imatrix": "other"}.get(
        str(metadata.get("general.type", "")), "model"
    )
    return Row(
        size=model.n_bytes,
        mtime=model.mtime,
        arch=arch if isinstance(arch, str) else "",
        quant=quant,
        kind="mmproj" if arch == "clip" else kind,
        error="" if metadata else "not a readable GGUF",
    )


def _judge_by_size(row: Row, devices: Devices, machine: str) -> None:
    row.machine, row.exact = machine, False
    row.n_ctx, row.decode_tps = 0, None
    if row.kind != "model" or row.error:
        row.verdict = ""
        return
    needed = row.size + _OVERHEAD
    gpu = sum(card.free for card in devices.gpus)
    if gpu >= needed:
        row.verdict = "gpu"
    elif gpu + devices.host.available < needed:
        row.verdict = "does_not_fit"
    else:
        row.verdict = "partial" if gpu else "cpu"


def _plan_some(
    models: Sequence[LocalModel], rows: Sequence[Row], devices: Devices, every: bool
) -> bool:
    """Exact verdicts for as many as the time allows; whether there was one to make."""
    todo = [i for i, row in enumerate(rows) if row.verdict and not row.exact]
    if not todo or (len(todo) > MANY and not every):
        return False
    from edgellm import library
    from edgellm.errors import EdgeLLMError

    started = time.monotonic()
    for i in sorted(todo, key=lambda i: -models[i].mtime):
        if not every and time.monotonic() - started > PLAN_TIME_S:
            break
        try:
            known = library.verdict(models[i].path, devices)
        except EdgeLLMError as error:
            rows[i].verdict, rows[i].error = "", error.message
        else:
            rows[i].verdict, rows[i].n_ctx, rows[i].decode_tps, rows[i].kind = known
        rows[i].exact = True
    return True


def _path() -> str:
    return str(paths.cache_dir() / "models.msgpack")


def _load() -> Index:
    try:
        with open(_path(), "rb") as file:
            index = msgspec.msgpack.decode(file.read(), type=Index)
    except (OSError, msgspec.DecodeError):
        return Index()
    return index if index.schema == SCHEMA else Index()


def _save(index: Index) -> None:
    """Whole or not at all; two at once leave one of the two."""
    target = _path()
    part = f"{target}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(part, "wb") as file:
            file.write(msgspec.msgpack.encode(index))
        os.replace(part, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
