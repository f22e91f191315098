"""Rows for models that are not here: from the catalog and from a search, judged by size alone.

Nothing is fetched for a row. A plan from the model's own header replaces the rough verdict as soon
as somebody asks for one.
"""

from __future__ import annotations

from edgellm.devices import Devices
from edgellm.store.catalog import Entry
from edgellm.store.names import display_name, quant_of
from edgellm.store.rough import entry_bytes, rough_verdict
from edgellm.tui.ports import ModelRow


def entry_row(entry: Entry, devices: Devices) -> ModelRow:
    """A catalog entry as a row."""
    quant = quant_of(entry.file) or ""
    n_bytes = entry_bytes(entry)
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
