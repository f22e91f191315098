"""``python -m edgellm``."""

from __future__ import annotations

import sys

from edgellm.cli import main

if __name__ == "__main__":
    sys.exit(main())
