"""Benchmark runs that were archived, as plain values for a table."""

from __future__ import annotations

import json
from pathlib import Path

from edgellm.tui.ports import Json


def read_runs(folder: Path) -> list[Json]:
    """Every ``*.json`` archive that reads, newest first; a broken one is left out."""
    if not folder.is_dir():
        return []
    runs = []
    for path in sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(data, dict):
            runs.append(data)
    return runs
