"""Rows for models that are not here: from the catalog and from a search, judged by size alone.

Nothing is fetched for a row. A plan from the model's own header replaces the rough verdict as soon
as somebody asks for one.
"""

from __future__ import annotations

import re
from typing import Final

from edgellm.devices import Devices
from edgellm.store.catalog import Entry
from edgellm.store.names import display_name, quant_of
from edgellm.tui.ports import ModelRow
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


def entry_row(entry: Entry, devices: Devices) -> ModelRow:
    """A catalog entry as a row."""
    quant = quant_of(entry.file) or ""
    n_bytes = rough_bytes(entry.parameters, quant)
    return ModelRow(
        ref=f"hf:{entry.repo}:{entry.file}", name=entry.name, source="catalog",
        owner=entry.repo.split("/")[0], n_bytes=n_bytes, quant=quant,
        about=", ".join(entry.good_at), licence=entry.license or "",
        verdict=rough_verdict(n_bytes, devices),
    )  # fmt: skip


def hit_row(repo: str, downloads: int, licence: str | None) -> ModelRow:
    """A repository of the hub; which quantisation suits is chosen when it is planned or pulled."""
    owner, _, name = repo.partition("/")
    return ModelRow(
        ref=f"hf:{repo}", name=display_name(name), source="hub", owner=owner,
        about=f"{downloads:,} downloads", licence=licence or "",
    )  # fmt: skip
