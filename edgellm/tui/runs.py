"""Benchmark runs that were archived, as values for a table."""

from __future__ import annotations

import datetime
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from edgellm.errors import StoreError
from edgellm.tui.ports import Json


class Run(msgspec.Struct, frozen=True):
    """One archived run: what was measured, by a metric's name."""

    LABELS: ClassVar[dict[str, str]] = {
        "decode_tps_p50": "decode tok/s",
        "prefill_tps_p50": "prefill tok/s",
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


def read_runs(path: Path) -> list[Json]:
    """The archive's benchmark runs, a row a level, newest first. Read-only; no file, no runs."""
    if not path.is_file():
        return []
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2.0)) as db:
            rows = db.execute(
                "SELECT started, model, scenario, document FROM runs WHERE kind = 'bench'"
                " ORDER BY id DESC LIMIT 100"
            ).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}", hint="edgellm bench ls") from error
    return [level for row in rows for level in _levels(*row)]


def _levels(started: str, model: str, scenario: str, document: bytes) -> list[Json]:
    """Each concurrency (or rate) of a run, with the medians of its figures."""
    try:
        levels = json.loads(document)["levels"]
    except (ValueError, KeyError, TypeError):
        return []
    return [
        {
            "created": started, "model": model, "scenario": f"{scenario} {_load(level)}".strip(),
            "figures": {
                name: stat.get("median")
                for name, stat in level.get("stats", {}).items()
                if isinstance(stat, dict)
            },
        }
        for level in levels
    ]  # fmt: skip


def _load(level: Json) -> str:
    if level.get("rate"):
        return f"{level['rate']:g}/s"
    return f"x{level['concurrency']}" if level.get("concurrency") else ""
