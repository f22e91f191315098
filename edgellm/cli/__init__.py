"""The command line: one file a command, imported when it runs."""

from __future__ import annotations

from edgellm.cli.app import main

__all__ = ["main"]
