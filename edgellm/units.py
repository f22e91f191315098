"""Byte counts: integers everywhere, parsed and printed in one place, always in powers of 1024."""

from __future__ import annotations

import re
from typing import Final

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB
TiB: Final = 1024 * GiB

_SCALE: Final = {"": 1, "b": 1, "k": KiB, "m": MiB, "g": GiB, "t": TiB}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|(b))?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """``"6GiB"``, ``"6G"``, ``"512 MiB"`` or plain bytes, as an int number of bytes.

    Every prefix is a power of 1024: a card sold as "6 GB" has 6 GiB. Raises ValueError, with the
    accepted forms, on anything else.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 6GiB, 512MiB or a number of bytes")
    number, prefix, _ = match.groups()
    return round(float(number) * _SCALE[(prefix or "").lower()])


def format_bytes(n: int, *, digits: int = 2) -> str:
    """``n`` bytes as MiB below one GiB and as GiB from there on: ``"512 MiB"``, ``"4.58 GiB"``."""
    if abs(n) >= GiB:
        return f"{n / GiB:.{digits}f} GiB"
    if abs(n) >= 10 * MiB or n == 0:
        return f"{n / MiB:.0f} MiB"
    return f"{n / MiB:.{digits}f} MiB"
