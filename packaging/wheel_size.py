"""Fail when a wheel is not what it should be: small, and with the files that are not Python."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Final

LIMIT: Final = 2 * 1024 * 1024
NEEDED: Final = ("edgellm/py.typed", "edgellm/models/catalog.toml", "man1/edgellm.1")


def complaints(wheel: Path) -> list[str]:
    size = wheel.stat().st_size
    found = [] if size < LIMIT else [f"{size} bytes; {LIMIT} at most"]
    names = zipfile.ZipFile(wheel).namelist()
    found += [f"no {end} in it" for end in NEEDED if not any(n.endswith(end) for n in names)]
    if not any(n.startswith("edgellm/profiles/") and n.endswith(".toml") for n in names):
        found.append("no profile in it")
    return found


def main() -> int:
    wrong = 0
    for wheel in map(Path, sys.argv[1:]):
        for complaint in complaints(wheel):
            print(f"{wheel.name}: {complaint}")
            wrong = 1
        print(f"{wheel.name}: {wheel.stat().st_size / 1024:.0f} KiB")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
