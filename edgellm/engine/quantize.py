"""Quantising a model in a child process (engine/llama/quantize.py): an abort inside llama.cpp ends
the child alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Generator
from typing import Final

import msgspec

from edgellm.errors import EngineError

# ``llama_model_quantize_impl`` in src/llama-quant.cpp. Only a dry run names the new type; with an
# importance matrix, remarks break the line after the old one.
_TENSOR: Final = re.compile(
    r"\[\s*(\d+)/\s*(\d+)\]\s+(\S+)\s+-\s+\[.*\], type =\s*(\w+),(?:.*MiB \((\w+)\))?"
)


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to do. ``file_type`` is llama.h's llama_ftype."""

    source: str
    target: str
    file_type: int
    n_threads: int
    allow_requantize: bool = False
    imatrix: str | None = None
    dry_run: bool = False


class TensorDone(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: number ``index`` of ``count``. ``to_type`` is given by dry runs for tensors that
    change, as ggml writes it (``q4_K``)."""

    index: int
    count: int
    name: str
    from_type: str
    to_type: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the child's."""

    tensor: TensorDone | None = None
    error: str | None = None


def run(job: QuantizeJob) -> Generator[TensorDone, None, None]:
    """Carry out a job in a child, tensor by tensor. Closing the iterator ends the child.

    Raises EngineError when it fails, with what llama.cpp said.
    """
    command = [sys.executable, "-m", "edgellm.engine.llama.quantize"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        if child.stdin is None or child.stdout is None:
            raise EngineError("the quantiser's pipes could not be opened")
        try:
            child.stdin.write(msgspec.json.encode(job))
            child.stdin.close()
            for line in child.stdout:
                message = msgspec.json.decode(line, type=Message)
                if message.error is not None:
                    raise EngineError(message.error)
                if message.tensor is not None:
                    yield message.tensor
        finally:
            if child.poll() is None and sys.exc_info()[0] is not None:
                child.kill()
        if child.wait() != 0:
            raise EngineError(f"the quantiser ended with code {child.returncode}")


def parse_line(line: str) -> TensorDone | None:
    """A line of the quantiser's log about one tensor."""
    match = _TENSOR.search(line)
    if match is None:
        return None
    index, count, name, from_type, to_type = match.groups()
    return TensorDone(
        index=int(index), count=int(count), name=name, from_type=from_type, to_type=to_type
    )
