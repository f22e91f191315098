"""What llama.cpp says while it works: whole lines, and what can be read from them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from edgellm.engine.llama.library import build, lib
from edgellm.errors import DoesNotFitError, EngineError, GGUFError
from edgellm.planner.plan import LoadReport, MeasuredDevice, Plan
from edgellm.units import MiB

# enum ggml_log_level, ggml.h
DEBUG: Final = 1
WARN: Final = 3
ERROR: Final = 4
CONTINUED: Final = 5


class Log:
    """llama.cpp's log, a line at a time with its level; debug lines are left out.

    There is one log a process: the newest of these hears it.
    """

    def __init__(self, on_line: Callable[[int, str], None]) -> None:
        self._on_line = on_line
        self._partial = ""
        self._level = DEBUG
        self._callback = lib.llama_log_callback(self._take)
        lib.llama_log_set(self._callback, None)

    def _take(self, level: int, text: bytes, _: object) -> None:
        if level != CONTINUED:
            self._level = level
        if self._level == DEBUG:
            return
        self._partial += text.decode("utf-8", "replace")
        *lines, self._partial = self._partial.split("\n")
        for line in lines:
            self._on_line(self._level, line)


class LoadLog:
    """Everything is kept and shown while a model loads; afterwards warnings alone are shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_loading = True
        self._log = Log(self._take)

    def _take(self, level: int, line: str) -> None:
        if self.is_loading:
            self.lines.append(line)
        if self.is_loading or level in (WARN, ERROR):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


_BUFFER: Final = re.compile(
    r"\s(\S+)\s+(model|KV|RS|output|compute) buffer size\s*=\s*([\d.]+) MiB"
)
_OFFLOADED: Final = re.compile(r"offloaded (\d+/\d+) layers to GPU")
_DEVICE: Final = re.compile(r"using device (\S+) \((.*?)\)")
_EOG: Final = re.compile(r"EOG token\s*=\s*(\d+)")
_ENTRY: Final = {
    "model": "weights",
    "KV": "kv_cache",
    "RS": "recurrent_state",
    "output": "output",
    "compute": "compute",
}


def read_report(lines: Sequence[str], aliases: Mapping[str, str] = {}) -> LoadReport:
    """What llama.cpp's log says it allocated, by device; everything on the host as ``host``.

    ``aliases``: device names of the buffers that the log calls otherwise.
    """
    found: dict[str, dict[str, int]] = {}
    offloaded = ""
    for line in lines:
        if match := _BUFFER.search(line):
            name, kind, size = match.groups()
            is_host = name.startswith("CPU") or name.endswith("_Host")
            device = "host" if is_host else aliases.get(name, name)
            entry = found.setdefault(device, {})
            entry[_ENTRY[kind]] = entry.get(_ENTRY[kind], 0) + round(float(size) * MiB)
        elif match := _OFFLOADED.search(line):
            offloaded = match.group(1)
    measured = tuple(MeasuredDevice(id=name, **entry) for name, entry in found.items())
    return LoadReport(measured=measured, offloaded=offloaded, build=build())


def devices_named(lines: Sequence[str]) -> tuple[str, ...]:
    """The devices that the model uses."""
    return tuple(m.group(1) for m in map(_DEVICE.search, lines) if m) or ("CPU",)


def eog_named(lines: Sequence[str]) -> set[int]:
    """Tokens that end a generation; no function lists them."""
    return {int(m.group(1)) for m in map(_EOG.search, lines) if m}


_NO_MEMORY: Final = (
    "out of memory",
    "failed to allocate",
    "unable to allocate",
    "cudaMalloc failed",
)


def load_error(plan: Plan, lines: Sequence[str], what: str) -> Exception:
    """What a NULL from llama.cpp means; it says why in its log alone."""
    tail = [line for line in lines if "error" in line.lower() or "fail" in line.lower()][-3:]
    said = "; ".join(tail) or "llama.cpp gave no reason"
    if any(sign in line for sign in _NO_MEMORY for line in lines):
        named = (d for d in plan.devices if any(d.id in line for line in tail))
        card = next(named, plan.devices[0] if plan.devices else None)
        return DoesNotFitError(
            f"no memory for {what}: {said}",
            device=card.id if card else "host",
            required=card.used if card else plan.host.used,
            available=card.free if card else plan.host.available,
        )
    if what == "the model":
        return GGUFError(plan.model.path, f"llama.cpp cannot load it: {said}")
    return EngineError(f"llama.cpp could not make {what}: {said}")
