"""Benchmark runs that were archived, as values for a table."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from edgellm.tui.ports import Json


class Run(msgspec.Struct, frozen=True):
    """One archived run: what was measured, by a metric's name."""

    LABELS: ClassVar[dict[str, str]] = {
        "decode_tps": "decode tok/s",
        "prefill_tps": "prefill tok/s",
        "output_tps": "total tok/s",
        "ttft_p50_s": "TTFT p50",
        "ttft_p99_s": "TTFT p99",
        "tpot_p50_s": "TPOT p50",
        "tpot_p99_s": "TPOT p99",
        "itl_p99_s": "ITL p99",
    }
    when: str
    model: str
    scenario: str
    values: dict[str, float]

    def shown(self, name: str) -> str:
        """A metric with its unit, or a dash."""
        value = self.values.get(name)
        if value is None:
            return "–"
        if not name.endswith("_s"):
            return f"{value:,.1f}"
        return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def read_run(data: Json) -> Run:
    """A run out of an archive, whatever depth its numbers are at."""
    model = _first(data, ("model", "model_name", "name"))
    if isinstance(model, dict):
        model = model.get("name", "")
    values = {
        name: float(value)
        for name in Run.LABELS
        if isinstance(value := _first(data, (name,)), (int, float))
    }
    return Run(
        when=_when(_first(data, ("when", "created", "started", "time", "date"))),
        model=Path(str(model or "")).name,
        scenario=str(_first(data, ("scenario", "workload", "kind")) or ""),
        values=values,
    )


def _first(data: Any, names: tuple[str, ...]) -> Any:
    """The first value under one of these names, nearest to the root."""
    level = [data]
    while level:
        for each in level:
            for name in names:
                if isinstance(each, dict) and each.get(name) is not None:
                    return each[name]
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
    return None


def _when(value: Any) -> str:
    if isinstance(value, (int, float)):
        stamp = datetime.datetime.fromtimestamp(value, datetime.timezone.utc)
        return stamp.strftime("%Y-%m-%d %H:%M")
    return str(value or "").replace("T", " ")[:16]


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
