"""``edgellm quantize``: a smaller copy of a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from edgellm import config, library
from edgellm.cli.errors import UsageError
from edgellm.cli.flags import AT_LEAST_1
from edgellm.cli.progress import Progress, emit
from edgellm.cli.pull import plan_line
from edgellm.devices import probe
from edgellm.engine import quantize as engine
from edgellm.engine.build import require_engine
from edgellm.engine.quantize import QuantizeJob, TensorDone
from edgellm.errors import DoesNotFitError, EngineError
from edgellm.gguf.reader import GGUFFile, check_file, read_gguf
from edgellm.gguf.types import FILE_TYPES, TENSOR_TYPES
from edgellm.planner.plan import PlanRequest
from edgellm.runtime import local_path
from edgellm.store.transfer import check_disk
from edgellm.units import format_bytes

# What quantising from loses nothing that matters; anything smaller must be asked for.
_GOOD_SOURCES = {"F32", "F16", "BF16", "Q8_0"}


def quantize(
    source: str,
    target: Path,
    /,
    *,
    type: str = "Q4_K_M",
    imatrix: Path | None = None,
    threads: Annotated[int | None, AT_LEAST_1] = None,
    force: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Write a smaller copy of a model with llama.cpp's quantiser, after showing its plan here.

    The source should be F32, F16, BF16 or Q8_0: quantising what is quantised already loses quality,
    and needs --force.

    Examples, one a line:

    * `edgellm quantize model-F16.gguf model-Q4_K_M.gguf`
    * `edgellm quantize model-BF16.gguf small.gguf --type IQ4_XS --imatrix imatrix.gguf`

    Parameters
    ----------
    source
        A path or the name of a model here.
    target
        The file to write.
    type
        Q8_0, Q6_K, Q5_K_M, Q4_K_M, Q4_K_S, IQ4_XS, Q3_K_M ...
    imatrix
        An importance matrix for the model (GGUF or .dat).
    threads
        Threads to use; all physical cores by default.
    force
        Also from a quantised source, and over an existing target.
    dry_run
        Show the sizes and the plan, and stop.
    json
        Print JSON events, one a line.
    """
    require_engine()
    if imatrix is not None and not imatrix.is_file():
        raise UsageError(f"{imatrix}: no such file", hint="leave --imatrix out, or mend its path")
    settings = config.load().settings
    header = read_gguf(local_path(source, settings))
    devices = probe()
    job = QuantizeJob(
        source=header.path,
        target=str(_checked_target(target, header, force)),
        file_type=_file_type(type),
        n_threads=threads or devices.host.n_physical,
        allow_requantize=_may_requantize(header, force),
        imatrix=str(imatrix) if imatrix else None,
    )
    result = requantized(header, list(engine.run(msgspec.structs.replace(job, dry_run=True))))
    _show(header, result, type, json)
    if dry_run:
        return
    check_disk(target.absolute().parent, result.file_bytes)
    _carry_out(job, target, json)


def requantized(header: GGUFFile, tensors: Sequence[TensorDone]) -> GGUFFile:
    """The header of the result, from what a dry run says each tensor becomes."""
    by_name = {kind.name.lower(): (number, kind) for number, kind in TENSOR_TYPES.items()}
    becomes = {t.name: by_name[t.to_type.lower()] for t in tensors if t.to_type is not None}
    offset, changed = 0, []
    for tensor in header.tensors:
        if tensor.name in becomes:
            number, kind = becomes[tensor.name]
            n_elements = tensor.n_bytes * TENSOR_TYPES[tensor.type_id].block
            n_elements //= TENSOR_TYPES[tensor.type_id].n_bytes
            tensor = msgspec.structs.replace(  # noqa: PLW2901
                tensor,
                type_id=number,
                type_name=kind.name,
                n_bytes=n_elements // kind.block * kind.n_bytes,
            )
        changed.append(msgspec.structs.replace(tensor, offset=offset, shard=0))
        offset += -(-tensor.n_bytes // header.alignment) * header.alignment
    return msgspec.structs.replace(
        header, tensors=tuple(changed), file_bytes=header.data_offset + offset
    )


def _checked_target(target: Path, header: GGUFFile, force: bool) -> Path:
    if not target.name or (target.exists() and not target.is_file()):
        # A folder, or a device such as /dev/null, which the finished file would replace.
        raise UsageError(f"{str(target)!r} cannot be the file to write")
    if target.exists() and any(os.path.samefile(target, s.path) for s in header.shards):
        raise UsageError("the target is the source")
    if target.exists() and not force:
        raise UsageError(f"{target} exists", hint="another name, or --force")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target.absolute().parent} is not a folder")
    return target.with_name(target.name + ".part")


def _file_type(name: str) -> int:
    for number, known in FILE_TYPES.items():
        if known == name.upper():
            return number
    raise UsageError(f"no type {name!r}; one of {', '.join(FILE_TYPES.values())}")


def _may_requantize(header: GGUFFile, force: bool) -> bool:
    worst = [t.type_name for t in header.tensors if len(t.dims) > 1]
    lossy = sorted({name for name in worst if name not in _GOOD_SOURCES})
    if lossy and not force:
        raise UsageError(
            f"{os.path.basename(header.path)} is quantised already ({', '.join(lossy)}): "
            "quantising it again loses quality",
            hint="start from F32, F16, BF16 or Q8_0, or add --force",
        )
    return force or bool(set(worst) - {"F32", "F16", "BF16"})


def _show(header: GGUFFile, result: GGUFFile, name: str, as_json: bool) -> None:
    note, plan = "", None
    try:
        plan = library.plan_header(result, probe(), PlanRequest())
    except DoesNotFitError as error:
        note = f"the result does not fit here: {error.message}"
    if as_json:
        emit(
            "offer",
            type=name.upper(),
            before=header.file_bytes,
            after=result.file_bytes,
            plan=plan.to_json() if plan else None,
            note=note,
        )
        return
    sizes = f"{format_bytes(header.file_bytes)} -> about {format_bytes(result.file_bytes)}"
    print(f"{name.upper()}: {sizes}")
    print(f"  {plan_line(plan) if plan else note}", flush=True)


def _carry_out(job: QuantizeJob, target: Path, as_json: bool) -> None:
    part = Path(job.target)
    shown = Progress()
    part.unlink(missing_ok=True)
    try:
        # Closed at once when something is raised here (Ctrl-C): the child must not write on.
        with contextlib.closing(engine.run(job)) as tensors:
            for done in tensors:
                if as_json:
                    emit("tensor", name=done.name, done=done.index, total=done.count)
                else:
                    shown.draw(f"{done.index} of {done.count} tensors: {done.name}")
        shown.end()
        if not part.exists():
            raise EngineError("llama.cpp wrote no file")
        check_file(part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    size = target.stat().st_size
    if as_json:
        emit("complete", path=str(target), size=size)
    else:
        print(f"{target}: {format_bytes(size)}")
