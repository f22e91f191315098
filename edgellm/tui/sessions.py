"""Conversations on disk: SQLite in WAL mode, messages as a tree, answers appended as they arrive.

A conversation is a tree of messages; ``Session.head`` names the leaf that is shown, and editing or
regenerating adds a sibling instead of overwriting. While an answer streams, its text is appended
in pieces (:meth:`SessionStore.append`), each committed to disk, so that a crash costs what arrived
since the last piece. The next :class:`SessionStore` that opens the file joins them again.

Every method is synchronous and may be called from any thread: one at a time goes to the file.
sqlite3's errors leave as DiskFullError or StoreError.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from edgellm.errors import DiskFullError, StoreError

SCHEMA_VERSION: Final = 1
NEW_TITLE: Final = "New conversation"
TITLE_LENGTH: Final = 48
OPEN_S: Final = 0.25
"""How long opening waits for another program: nothing is on the screen before it."""
BUSY_S: Final = 5.0
"""How long a write waits for another edgellm's; a thread of its own waits."""
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FENCED: Final = re.compile(r"^```.*?^```$", re.M | re.S)

_SCHEMA: Final = """
CREATE TABLE session (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL,
    model TEXT NOT NULL DEFAULT '', system TEXT NOT NULL DEFAULT '',
    sampling TEXT NOT NULL DEFAULT '{}', head TEXT, draft TEXT NOT NULL DEFAULT '');
CREATE INDEX session_by_time ON session (updated DESC);
CREATE TABLE message (
    id TEXT PRIMARY KEY, session TEXT NOT NULL REFERENCES session (id) ON DELETE CASCADE,
    parent TEXT, role TEXT NOT NULL, content TEXT NOT NULL, reasoning TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '', created REAL NOT NULL, state TEXT NOT NULL, note TEXT,
    n_tokens INTEGER, decode_tps REAL, ttft_s REAL, writer INTEGER);
CREATE INDEX message_by_session ON message (session);
CREATE TABLE piece (
    message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
    content TEXT NOT NULL, reasoning TEXT NOT NULL);
CREATE INDEX piece_by_message ON piece (message);
CREATE TABLE setting (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. ``state``: done, streaming, stopped (by the reader), interrupted, or error."""

    id: str
    session: str
    parent: str | None
    role: str
    content: str
    reasoning: str = ""
    model: str = ""
    created: float = 0.0
    state: str = "done"
    note: str | None = None
    n_tokens: int | None = None
    decode_tps: float | None = None
    ttft_s: float | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its messages. Times are seconds of the wall clock."""

    id: str
    title: str
    created: float
    updated: float
    model: str = ""
    system: str = ""
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    head: str | None = None
    draft: str = ""


class SessionStore:
    """The conversations in one SQLite file (``:memory:`` keeps them only for this run)."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = str(path)
        self._clock = clock
        self._lock = threading.RLock()
        with _translated(self.path):
            self._db = _connect(self.path)
            self._prepare()
            self.n_recovered = self._recover()
            self._db.execute(f"PRAGMA busy_timeout={int(BUSY_S * 1000)}")

    def close(self) -> None:
        self._db.close()

    # -- conversations ---------------------------------------------------------------------------

    def create(self, *, model: str = "", system: str = "", title: str = NEW_TITLE) -> Session:
        now = self._clock()
        session = Session(
            id=_new_id(), title=title, created=now, updated=now, model=model, system=system
        )
        self._write(
            "INSERT INTO session (id, title, created, updated, model, system)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (session.id, title, now, now, model, system),
        )
        return session

    def get(self, session_id: str) -> Session:
        """The conversation; raises StoreError when there is none of that id."""
        row = self._one("SELECT * FROM session WHERE id = ?", (session_id,))
        if row is None:
            raise StoreError(f"no conversation {session_id}")
        return _session(row)

    def find(self, query: str = "", *, limit: int = 500) -> list[Session]:
        """Newest first; with ``query`` those whose title or any message contains it."""
        if not query.strip():
            rows = self._all("SELECT * FROM session ORDER BY updated DESC LIMIT ?", (limit,))
            return [_session(row) for row in rows]
        like = f"%{_escape_like(query.strip())}%"
        rows = self._all(
            "SELECT * FROM session WHERE title LIKE ? ESCAPE '\\' OR EXISTS (SELECT 1 FROM message"
            " WHERE message.session = session.id AND message.content LIKE ? ESCAPE '\\')"
            " ORDER BY updated DESC LIMIT ?",
            (like, like, limit),
        )
        return [_session(row) for row in rows]

    def rename(self, session_id: str, title: str) -> None:
        self._set(session_id, title=title.strip() or NEW_TITLE)

    def delete(self, session_id: str) -> None:
        self._write("DELETE FROM session WHERE id = ?", (session_id,))

    def update(
        self,
        session_id: str,
        *,
        model: str | None = None,
        system: str | None = None,
        sampling: dict[str, Any] | None = None,
        draft: str | None = None,
    ) -> None:
        """Change what is given, leave the rest."""
        values: dict[str, Any] = {"model": model, "system": system, "draft": draft}
        if sampling is not None:
            values["sampling"] = json.dumps(sampling)
        self._set(session_id, **{k: v for k, v in values.items() if v is not None})

    # -- messages --------------------------------------------------------------------------------

    def add(
        self,
        session_id: str,
        role: str,
        content: str,
        *,
        parent: str | None,
        model: str = "",
        state: str = "done",
    ) -> Message:
        """Append a message under ``parent`` and make it the conversation's head."""
        now = self._clock()
        message = Message(
            id=_new_id(), session=session_id, parent=parent, role=role, content=content,
            model=model, created=now, state=state,
        )  # fmt: skip
        with self._transaction() as db:
            db.execute(
                "INSERT INTO message (id, session, parent, role, content, model, created, state,"
                " writer) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (message.id, session_id, parent, role, content, model, now, state, os.getpid()),
            )
            db.execute(
                "UPDATE session SET head = ?, updated = ? WHERE id = ?",
                (message.id, now, session_id),
            )
            if role == "user":
                self._title_from(db, session_id, content)
        return message

    def append(self, message_id: str, content: str, reasoning: str = "") -> None:
        """Put a piece of a streaming answer on disk: it survives a crash from here on."""
        self._write("INSERT INTO piece VALUES (?, ?, ?)", (message_id, content, reasoning))

    def finish(
        self,
        message_id: str,
        *,
        content: str,
        reasoning: str = "",
        state: str = "done",
        note: str | None = None,
        n_tokens: int | None = None,
        decode_tps: float | None = None,
        ttft_s: float | None = None,
    ) -> None:
        """Replace the pieces of a streaming answer by its whole text."""
        with self._transaction() as db:
            db.execute(
                "UPDATE message SET content = ?, reasoning = ?, state = ?, note = ?, n_tokens = ?,"
                " decode_tps = ?, ttft_s = ?, writer = NULL WHERE id = ?",
                (content, reasoning, state, note, n_tokens, decode_tps, ttft_s, message_id),
            )
            db.execute("DELETE FROM piece WHERE message = ?", (message_id,))

    def path_to(self, message_id: str | None) -> list[Message]:
        """The messages from the root to this one: what a model is shown."""
        rows = self._all(
            "WITH RECURSIVE up (id, depth) AS (SELECT ?, 0 UNION ALL"
            " SELECT message.parent, depth + 1 FROM message JOIN up ON message.id = up.id"
            " WHERE message.parent IS NOT NULL)"
            " SELECT message.* FROM message JOIN up ON message.id = up.id ORDER BY depth DESC",
            (message_id,),
        )
        return [_message(row) for row in rows]

    def thread(self, session_id: str) -> list[Message]:
        """The messages shown now: the path to the conversation's head."""
        return self.path_to(self.get(session_id).head)

    def siblings(self, message: Message) -> list[Message]:
        """Every alternative at this place, oldest first, the message itself among them."""
        rows = self._all(
            "SELECT * FROM message WHERE session = ? AND parent IS ? ORDER BY created, rowid",
            (message.session, message.parent),
        )
        return [_message(row) for row in rows]

    def set_head(self, session_id: str, message_id: str | None) -> None:
        self._set(session_id, head=message_id)

    def switch_branch(self, message: Message, step: int) -> str:
        """Show the next (or previous) alternative, down to its newest leaf; return the leaf."""
        family = self.siblings(message)
        place = next(i for i, other in enumerate(family) if other.id == message.id)
        leaf = family[(place + step) % len(family)].id
        while (child := self._newest_child(leaf)) is not None:
            leaf = child
        self.set_head(message.session, leaf)
        return leaf

    # -- settings --------------------------------------------------------------------------------

    def setting(self, key: str, default: str = "") -> str:
        row = self._one("SELECT value FROM setting WHERE key = ?", (key,))
        return default if row is None else str(row["value"])

    def save_setting(self, key: str, value: str) -> None:
        self._write("INSERT OR REPLACE INTO setting VALUES (?, ?)", (key, value))

    # -- export ----------------------------------------------------------------------------------

    def to_markdown(self, session_id: str) -> str:
        """The shown branch as a Markdown document."""
        session = self.get(session_id)
        parts = [f"# {session.title}"]
        if session.system:
            parts.append("> **System:** " + session.system.replace("\n", "\n> "))
        for message in self.thread(session_id):
            name = "You" if message.role == "user" else message.model or "Assistant"
            parts.append(f"## {name}\n\n{message.content.strip()}")
            if message.state != "done":
                parts.append(f"*({message.note or message.state})*")
        return "\n\n".join(parts) + "\n"

    def to_json(self, session_id: str) -> dict[str, Any]:
        """Every branch: plain JSON values, messages oldest first with their parents."""
        rows = self._all(
            "SELECT * FROM message WHERE session = ? ORDER BY created, rowid", (session_id,)
        )
        session: dict[str, Any] = msgspec.to_builtins(self.get(session_id))
        messages = [msgspec.to_builtins(_message(row)) for row in rows]
        return {"schema": "edgellm.conversation/1", **session, "messages": messages}

    def export(self, session_id: str, path: Path) -> None:
        """Write a file: every branch where its name ends in .json, else the shown one."""
        if path.suffix == ".json":
            text = json.dumps(self.to_json(session_id), ensure_ascii=False, indent=2)
        else:
            text = self.to_markdown(session_id)
        with _translated(str(path)):
            path.write_text(text, "utf-8")

    # -- below -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} was written by a newer edgellm (schema {version})",
                hint="upgrade edgellm, or move the file away to begin a new one",
            )
        if version == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")

    def _recover(self) -> int:
        """Join the pieces of answers whose writer is gone; return how many there were."""
        rows = self._all("SELECT id, content, writer FROM message WHERE state = 'streaming'")
        lost = [row for row in rows if not _is_alive(row["writer"])]
        for row in lost:
            pieces = self._all(
                "SELECT content, reasoning FROM piece WHERE message = ? ORDER BY rowid",
                (row["id"],),
            )
            self.finish(
                row["id"],
                content=row["content"] + "".join(piece["content"] for piece in pieces),
                reasoning="".join(piece["reasoning"] for piece in pieces),
                state="interrupted",
                note="edgellm ended while this was being written",
            )
        return len(lost)

    def _title_from(self, db: sqlite3.Connection, session_id: str, content: str) -> None:
        db.execute(
            "UPDATE session SET title = ? WHERE id = ? AND title = ?",
            (title_of(content), session_id, NEW_TITLE),
        )

    def _newest_child(self, message_id: str) -> str | None:
        row = self._one(
            "SELECT id FROM message WHERE parent = ? ORDER BY created DESC, rowid DESC LIMIT 1",
            (message_id,),
        )
        return None if row is None else str(row["id"])

    def _set(self, session_id: str, **values: Any) -> None:
        if not values:
            return
        columns = ", ".join(f"{name} = ?" for name in values)
        # The column names are this file's own keyword names, never a caller's text.
        self._write(f"UPDATE session SET {columns} WHERE id = ?", (*values.values(), session_id))

    def _write(self, sql: str, values: tuple[Any, ...]) -> None:
        with self._transaction() as db:
            db.execute(sql, values)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _translated(self.path), self._db:
            yield self._db

    def _all(self, sql: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        with self._lock, _translated(self.path):
            return self._db.execute(sql, values).fetchall()

    def _one(self, sql: str, values: tuple[Any, ...]) -> sqlite3.Row | None:
        rows = self._all(sql, values)
        return rows[0] if rows else None


def title_of(content: str) -> str:
    """A conversation's title from its first message: its first words on one line."""
    words = _FENCED.sub(" ", content)  # an attached file comes before what is asked about it
    line = re.sub(r"\s+", " ", (words if words.strip() else content)[:400]).strip()
    if len(line) <= TITLE_LENGTH:
        return line or NEW_TITLE
    return line[:TITLE_LENGTH].rsplit(" ", 1)[0] + "…"


def code_blocks(markdown: str) -> list[str]:
    """The contents of the fenced code blocks, in order; an unclosed last one counts."""
    pattern = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*\s*$|\Z)", re.M | re.S)
    return [match.group(2) for match in pattern.finditer(markdown)]


def _connect(path: str) -> sqlite3.Connection:
    if path != ":memory:":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    # Threads take turns by the store's own lock.
    db = sqlite3.connect(path, timeout=OPEN_S, check_same_thread=False)
    if path != ":memory:":
        os.chmod(path, 0o600)  # conversations are their owner's; SQLite's side files follow
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode=WAL")
    # FULL: a piece that was committed survives a power cut, not only the end of the process.
    db.execute("PRAGMA synchronous=FULL")
    db.execute("PRAGMA foreign_keys=ON")
    return db


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """sqlite3's and the file system's errors as ours."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise _translate(error, path) from error


def _translate(error: Exception, path: str) -> StoreError:
    full = "full" in str(error) if isinstance(error, sqlite3.OperationalError) else False
    if full or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return DiskFullError(
            f"the disk is full: {path} cannot grow",
            required=1,
            available=_free(path),
            hint="free some space; what is on the screen is kept and saved then",
        )
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return StoreError(f"{path}: {error}", hint="move it away; edgellm then begins a new one")
    if "locked" in str(error):
        return StoreError(f"{path}: another program holds it", hint="end that one, and start again")
    what = error.strerror if isinstance(error, OSError) else error
    return StoreError(f"{path}: {what}", hint="check that the file and its folder can be written")


def _free(path: str) -> int:
    folder = Path(path).parent
    return shutil.disk_usage(folder).free if folder.exists() else 0


def _is_alive(pid: int | None) -> bool:
    """Whether another running process writes this message; our own pid means an earlier life."""
    if pid is None or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _new_id() -> str:
    return uuid.uuid4().hex[:16]


def _escape_like(text: str) -> str:
    return re.sub(r"([%_\\])", r"\\\1", text)


def _session(row: sqlite3.Row) -> Session:
    values = {**dict(row), "sampling": json.loads(row["sampling"])}
    return msgspec.convert(values, Session)


def _message(row: sqlite3.Row) -> Message:
    values = dict(row)
    values.pop("writer")
    return msgspec.convert(values, Message)
