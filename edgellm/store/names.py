"""What a model file's name says: shard, quantisation, projector."""

from __future__ import annotations

import os
import re
from typing import Final

_LONGEST: Final = 200  # bytes; file systems end at 255, and endings such as .gguf.part come on top

SHARD: Final = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT: Final = re.compile(
    r"(?:^|[-_./])((?:UD-)?(?:I?Q\d(?:_(?:K|0|1|NL|XXS|XS|S|M))?(?:_(?:XXS|XS|S|M|L|XL))?"
    r"|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))(?=$|[-_./])",
    re.IGNORECASE,
)


def shard_match(name: str) -> re.Match[str] | None:
    """A shard's name taken apart, or None; no regular expression for the names that are none."""
    return SHARD.fullmatch(name) if "-of-" in name.lower() else None


def is_safe(name: str) -> bool:
    """Whether a relative path that came from outside stays below the folder it is put into."""
    parts = name.replace("\\", "/").split("/")
    return bool(name) and "\0" not in name and not any(p in ("", ".", "..") for p in parts)


def is_plain(name: str) -> bool:
    """Whether a name is one path component, fit for a file."""
    return (
        is_safe(name)
        and "/" not in name
        and "\\" not in name
        and name.isprintable()  # no line break, no terminal escape
        and len(os.fsencode(name)) <= _LONGEST
    )


def display_name(path: str) -> str:
    """A file's name without folder, ending and shard number."""
    name = os.path.basename(path)
    match = shard_match(name)
    return match["prefix"] if match else without_ending(name)


def without_ending(name: str) -> str:
    """``name`` without ``.gguf`` in any case."""
    return name[: -len(".gguf")] if name[-5:].lower() == ".gguf" else name


def is_projector(path: str) -> bool:
    """By name: every published projector has ``mmproj`` in it."""
    return "mmproj" in os.path.basename(path).lower()


def quant_of(file: str) -> str:
    """The quantisation that a file's name gives (``Q4_K_M``), or an empty string."""
    found = _QUANT.findall(without_ending(file))
    return found[-1].upper().replace("FP16", "F16").replace("FP32", "F32") if found else ""
