"""Every run ever made, in one SQLite file: nothing is overwritten, everything can be compared."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from edgellm.bench.results import BenchRun
from edgellm.errors import ConfigError, EdgeLLMError
from edgellm.paths import state_dir

_DIGITS: Final = 18  # of a number that SQLite can hold

_BUSY: Final = "another process holds it: once more in a moment"
_BROKEN: Final = "move the file away; a new one is made"
# By SQLite's codes: BUSY, LOCKED, FULL, CORRUPT, NOTADB.
_HINTS: Final = {5: _BUSY, 6: _BUSY, 13: "make room on that disk", 11: _BROKEN, 26: _BROKEN}
_VERSION: Final = 1
_NONE: Final = {"last": "no run is kept yet", "last-1": "no run before the last one is kept"}
_SCHEMA: Final = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    started TEXT NOT NULL,
    label TEXT NOT NULL,
    target TEXT NOT NULL,
    model TEXT NOT NULL,
    digest TEXT,
    scenario TEXT NOT NULL,
    headline TEXT NOT NULL,
    document BLOB NOT NULL
);
CREATE INDEX runs_by_model ON runs (model, kind);
CREATE TABLE profiles (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    name TEXT NOT NULL,
    text BLOB,
    previous TEXT
);
"""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A run as ``bench ls`` shows it."""

    id: int
    kind: str
    """bench, tune or eval."""
    started: str
    label: str
    target: str
    model: str
    scenario: str
    headline: str


class Archive:
    """The file; made on first use, safe with several processes."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_dir() / "bench.sqlite3"

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """A connection in one transaction; the schema is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
                self._prepare(db)
                yield db
        except sqlite3.DatabaseError as error:
            # Python 3.10 does not tell.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            hint = _HINTS.get(code, "edgellm doctor shows the folders; EDGELLM_HOME moves them")
            raise EdgeLLMError(f"{self.path}: {error}", hint=hint) from error

    def _prepare(self, db: sqlite3.Connection) -> None:
        if self._version(db) == _VERSION:
            return
        # Asked again under the lock: another process may have made the tables meanwhile.
        db.execute("BEGIN IMMEDIATE")
        if self._version(db) == 0:
            for statement in (*_SCHEMA.split(";")[:-1], f"PRAGMA user_version={_VERSION}"):
                db.execute(statement)

    def _version(self, db: sqlite3.Connection) -> int:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version > _VERSION:
            raise EdgeLLMError(f"{self.path} is of a later version of edgellm ({version})")
        return version

    def add(self, run: BenchRun) -> int:
        """Keep a benchmark run; its number."""
        return self.add_document(
            kind="bench",
            started=run.started,
            label=run.label,
            target=run.target.name,
            model=run.target.model,
            digest=run.target.model_digest,
            scenario=run.config.scenario.name,
            headline=headline(run),
            document=msgspec.json.encode(run),
        )

    def add_document(
        self,
        *,
        kind: str,
        started: str,
        label: str,
        target: str,
        model: str,
        digest: str | None,
        scenario: str,
        headline: str,
        document: bytes,
    ) -> int:
        """Keep a document of any kind; its number."""
        values = (kind, started, label, target, model, digest, scenario, headline, document)
        with self.open() as db:
            cursor = db.execute(
                "INSERT INTO runs (kind, started, label, target, model, digest, scenario,"
                " headline, document) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            return int(cursor.lastrowid or 0)

    def entries(self, *, kind: str | None = None, limit: int | None = 50) -> list[Entry]:
        """The newest runs first."""
        with self.open() as db:
            rows = db.execute(
                "SELECT id, kind, started, label, target, model, scenario, headline FROM runs"
                " WHERE ?1 IS NULL OR kind = ?1 ORDER BY id DESC LIMIT ?2",
                (kind, -1 if limit is None else limit),
            ).fetchall()
        names = Entry.__struct_fields__
        return [Entry(**dict(zip(names, row, strict=True))) for row in rows]

    def document(self, ref: str) -> tuple[int, str, bytes]:
        """(number, kind, JSON) of a run by number, ``last``, ``last-1`` or label (its newest)."""
        if not ref:
            raise ConfigError("a run has a number or a label", hint="edgellm bench ls")
        with self.open() as db:
            row = self._find(db, ref)
        if row is None:
            said = _NONE.get(ref, f"no run {ref!r}")
            raise ConfigError(said, hint="edgellm bench ls; edgellm bench MODEL makes one")
        return int(row[0]), str(row[1]), bytes(row[2])

    def _find(self, db: sqlite3.Connection, ref: str) -> Any:
        select = "SELECT id, kind, document FROM runs "
        if ref.isdecimal() and len(ref) < _DIGITS:
            return db.execute(select + "WHERE id = ?", (int(ref),)).fetchone()
        if ref == "last" or (
            ref.startswith("last-") and ref[5:].isdecimal() and len(ref) < _DIGITS
        ):
            back = int(ref[5:] or 0) if ref != "last" else 0
            return db.execute(
                select + "WHERE kind = 'bench' ORDER BY id DESC LIMIT 1 OFFSET ?", (back,)
            ).fetchone()
        return db.execute(select + "WHERE label = ? ORDER BY id DESC LIMIT 1", (ref,)).fetchone()

    def run(self, ref: str) -> tuple[int, BenchRun]:
        """A benchmark run; raises ConfigError when there is none or it is of another kind."""
        number, kind, document = self.document(ref)
        if kind != "bench":
            raise ConfigError(f"run {number} is a {kind} run", hint="edgellm bench ls --kind bench")
        return number, msgspec.json.decode(document, type=BenchRun)


def is_reference(text: str) -> bool:
    """Whether ``text`` means a number or a place in the list, so that no run can be called so."""
    return re.fullmatch(r"\d+|last(-\d+)?", text) is not None


def headline(run: BenchRun) -> str:
    """The best level's rate in one phrase."""
    rated = [(level.median("output_tps") or 0.0, level) for level in run.levels]
    if not rated:
        return ""
    best, level = max(rated, key=lambda pair: pair[0])
    return f"{best:.1f} tok/s at {level.label}"
