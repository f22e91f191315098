"""What is done to the cache before a step: listed while it is planned, carried out in order."""

from __future__ import annotations

from typing import NamedTuple

from edgellm.engine.sequence import Sequence


class Remove(NamedTuple):
    """Forget a seq_id's positions from ``start`` on."""

    seq_id: int
    start: int


class Copy(NamedTuple):
    """Let ``target`` hold the first ``n`` cells of ``source``."""

    source: int
    target: int
    n: int


class Shift(NamedTuple):
    """Drop ``n`` positions from ``start`` on and move the rest down."""

    seq_id: int
    start: int
    n: int


class Restore(NamedTuple):
    """Put the first ``n`` tokens of a checkpoint (by its key) back into the seq_id that ``seq``
    has got."""

    seq_id: int
    key: int
    n: int
    seq: Sequence


Op = Remove | Copy | Shift | Restore
