"""Quantising with llama.cpp: ``python -m edgellm.engine.llama.quantize`` is the child that
engine/quantize.py starts.

It reads one job from stdin as JSON and writes one JSON object a line: a tensor done, or an error.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from edgellm.engine.imatrix import read_imatrix
from edgellm.engine.llama.library import lib
from edgellm.engine.llama.log import Log
from edgellm.engine.quantize import Message, QuantizeJob, parse_line
from edgellm.errors import EdgeLLMError, EngineError


def quantize_file(job: QuantizeJob, on_line: Callable[[str], None]) -> None:
    """Write ``job.target`` from ``job.source`` with llama.cpp's quantiser, or with ``dry_run`` only
    say what each tensor would become. ``on_line`` gets its log. Raises EngineError."""
    last: deque[str] = deque(maxlen=20)

    def take(_: int, line: str) -> None:
        last.append(line)
        on_line(line)

    log = Log(take)  # noqa: F841  (its callback must live as long as the call)
    lib.llama_backend_init()
    params = lib.llama_model_quantize_default_params()
    params.nthread = job.n_threads
    params.ftype = job.file_type
    params.allow_requantize = job.allow_requantize
    params.dry_run = job.dry_run
    # The array and what its pointers point to must outlive the call.
    keep = _imatrix_data(job.imatrix) if job.imatrix else None
    if keep is not None:
        params.imatrix = keep[0]
    code = lib.llama_model_quantize(job.source.encode(), job.target.encode(), ctypes.byref(params))
    if code != 0:
        said = [line for line in last if "fail" in line or "disabled" in line]
        raise EngineError(f"llama.cpp could not quantize: {'; '.join(said) or f'code {code}'}")


def _imatrix_data(path: str) -> tuple[Any, list[Any]]:
    """llama_model_imatrix_data[]: by name the mean squares of what a weight is multiplied with, an
    entry of zeros at the end (``i_data`` in tools/quantize/quantize.cpp)."""
    entries = read_imatrix(path)
    kept: list[Any] = []
    data = (lib.llama_model_imatrix_data * (len(entries) + 1))()
    for slot, (name, values) in zip(data, entries.items(), strict=False):
        buffer = (ctypes.c_float * len(values)).from_buffer(values)
        kept += [name.encode(), values, buffer]
        slot.name = kept[-3]
        slot.data = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_float))
        slot.size = len(values)
    return data, kept


def main() -> int:
    """The child."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=QuantizeJob)

    def say(line: str) -> None:
        done = parse_line(line)
        if done is not None:
            _send(Message(tensor=done))

    try:
        quantize_file(job, say)
    except EdgeLLMError as error:
        _send(Message(error=error.message))
        return 1
    return 0


def _send(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
