"""List the licences of everything that edgellm installs, from the packages' own metadata.

``--check`` fails on one that is unknown or not among those that may go into an Apache-2.0 program.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS: Final = ("edgellm[engine]",)
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


def main() -> int:
    rows = sorted({(d.metadata["Name"], d.version, licence(d)) for d in installed(ROOTS)})
    for name, version, text in rows:
        print(f"{name:<24} {version:<14} {text}")
    wrong = [name for name, _, text in rows if not ALLOWED.search(text)]
    for name in wrong:
        print(f"{name}: this licence is not on the list", file=sys.stderr)
    return int(bool(wrong) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
