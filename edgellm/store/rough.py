"""Whether a model of the catalog would run here, judged by its size alone: nothing is fetched.

A plan from the model's own header is exact; this is for lists.
"""

from __future__ import annotations

import re
from typing import Final

from edgellm.devices import Devices
from edgellm.store.catalog import Entry
from edgellm.store.names import quant_of
from edgellm.units import GiB

# Bits a weight, averaged over the tensors of a model (llama.cpp, tools/quantize/README.md).
BITS: Final = {
    "Q2_K": 3.2, "Q3_K_M": 4.0, "Q4_0": 4.7, "Q4_1": 5.1, "Q4_K_S": 4.7, "Q4_K_M": 4.9,
    "Q5_K_M": 5.7, "Q6_K": 6.6, "Q8_0": 8.5, "F16": 16.0, "BF16": 16.0, "MXFP4": 4.4,
}  # fmt: skip
BESIDES: Final = GiB
"""What a model takes beyond its weights, roughly: a cache, compute buffers, the context."""
_SCALE: Final = {"m": 1e6, "b": 1e9}


def rough_bytes(parameters: str, quant: str) -> int:
    """File size from \"8B\" or \"30B, 3B active\" and a quantisation; 0 when it cannot be told."""
    match = re.match(r"([\d.]+)\s*([MB])", parameters.strip(), re.IGNORECASE)
    if match is None:
        return 0
    count = float(match[1]) * _SCALE[match[2].lower()]
    return int(count * BITS.get(quant.upper(), BITS["Q4_K_M"]) / 8)


def rough_verdict(n_bytes: int, devices: Devices) -> str:
    """gpu, partial, cpu or does_not_fit, by size alone; empty when the size is unknown."""
    if not n_bytes:
        return ""
    needed = n_bytes + BESIDES
    gpu = sum(card.free for card in devices.gpus)
    if gpu >= needed:
        return "gpu"
    if gpu + devices.host.available < needed:
        return "does_not_fit"
    return "partial" if gpu else "cpu"


def entry_bytes(entry: Entry) -> int:
    """About how large a catalog entry's file is; 0 when it cannot be told."""
    return rough_bytes(entry.parameters, quant_of(entry.file) or "")
