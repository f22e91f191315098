"""The command line: one file a command, imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    The imports are inside: Ctrl-C while they run (half a second on a busy machine) ends the program
    as it does later, without a traceback.
    """
    try:
        from edgellm.cli.app import main as run

        return run(argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
