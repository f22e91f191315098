"""What llama-server's own fit chose, read from its log (``-lv 4``; common/fit.cpp)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_LAYERS = re.compile(r"  - (\S+) \(.*?\) *: +(\d+) layers(?: \( *(\d+) overflowing\))?, +(\d+) MiB")
_UNCHANGED = re.compile(r"no changes needed")
_FAILED = re.compile(r"failed to fit params.*?: (.*)")
_BUFFER = re.compile(r"(\S+) (model|KV|RS|compute) buffer size = +([\d.]+) MiB")


@dataclass(frozen=True)
class Fitted:
    """Layers on the GPUs in all; by device, those of which some tensors stay on the host."""

    n_gpu_layers: int | None = None
    n_layer: int | None = None
    layers: dict[str, int] = field(default_factory=dict)
    """Empty where the fit changed nothing: the layers are then shared out by free memory."""
    overflowing: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, dict[str, float]] = field(default_factory=dict)
    """MiB by device (as the log names it) and kind."""
    note: str = ""

    def __str__(self) -> str:
        if not self.layers:
            return self.note or (f"{self.n_gpu_layers} of {self.n_layer}" if self.n_layer else "")
        parts = [
            f"{n}" + (f" ({self.overflowing[name]} in part)" if self.overflowing.get(name) else "")
            for name, n in self.layers.items()
        ]
        return " + ".join(parts) + f" of {self.n_layer}"


def read_fit(lines: Sequence[str]) -> Fitted:
    """The last word of each: a fit tries several placements, and step 4 follows step 3."""
    offloaded: tuple[int, int] | None = None
    layers: dict[str, int] = {}
    overflowing: dict[str, int] = {}
    buffers: dict[str, dict[str, float]] = {}
    note = ""
    for line in lines:
        if match := _LAYERS.search(line):
            name, n, part, _ = match.groups()
            layers[name], overflowing[name] = int(n), int(part or 0)
        elif match := _OFFLOADED.search(line):
            # Each trial of the fit says it as well: what follows is the real load's.
            offloaded = int(match.group(1)), int(match.group(2))
            buffers = {}
        elif match := _BUFFER.search(line):
            name, kind, size = match.groups()
            held = buffers.setdefault(name, {})
            held[kind] = held.get(kind, 0.0) + float(size)
        elif match := _FAILED.search(line):
            note = f"fit failed: {match.group(1)}"
        elif _UNCHANGED.search(line):
            note = "as its defaults"
    n_gpu, n_all = offloaded or (None, None)
    return Fitted(n_gpu, n_all, layers, overflowing, buffers, note)
