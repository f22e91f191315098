"""Conversations on disk: nothing a person wrote or read is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from edgellm.errors import DiskFullError, StoreError
from edgellm.tui.sessions import BUSY_S, OPEN_S, SessionStore, code_blocks, title_of


@pytest.fixture
def store(tmp_path: Path):
    ticks = count(1_700_000_000)
    store = SessionStore(tmp_path / "chat.db", clock=lambda: float(next(ticks)))
    yield store
    store.close()


def test_a_conversation_comes_back_as_it_was_written(store: SessionStore) -> None:
    session = store.create(model="m", system="be brief")
    asked = store.add(session.id, "user", "What is a KV cache?", parent=None)
    answer = store.add(session.id, "assistant", "", parent=asked.id, model="m", state="streaming")
    store.append(answer.id, "A ")
    store.append(answer.id, "cache.", reasoning="hm")
    store.finish(answer.id, content="A cache.", reasoning="hm", n_tokens=2, decode_tps=70.0)
    thread = store.thread(session.id)
    assert [(m.role, m.content, m.state) for m in thread] == [
        ("user", "What is a KV cache?", "done"),
        ("assistant", "A cache.", "done"),
    ]
    assert thread[1].reasoning == "hm"
    assert thread[1].decode_tps == 70.0
    assert store.get(session.id).title == "What is a KV cache?"
    assert store.get(session.id).system == "be brief"


def test_search_finds_titles_and_messages_and_takes_percent_signs_literally(
    store: SessionStore,
) -> None:
    first = store.create()
    store.add(first.id, "user", "about llamas", parent=None)
    second = store.create()
    store.add(second.id, "user", "100% sure", parent=None)
    assert [s.id for s in store.find()] == [second.id, first.id]
    assert [s.id for s in store.find("LLAMA")] == [first.id]
    assert [s.id for s in store.find("0%")] == [second.id]
    assert store.find("1%0") == []


def test_rename_and_delete(store: SessionStore) -> None:
    session = store.create()
    store.add(session.id, "user", "hello", parent=None)
    store.rename(session.id, "  Mine ")
    assert store.get(session.id).title == "Mine"
    store.delete(session.id)
    assert store.find() == []
    with pytest.raises(StoreError, match="no conversation"):
        store.get(session.id)


def test_editing_branches_and_both_branches_can_be_shown(store: SessionStore) -> None:
    session = store.create()
    first = store.add(session.id, "user", "one", parent=None)
    store.add(session.id, "assistant", "answer one", parent=first.id)
    edited = store.add(session.id, "user", "one, edited", parent=None)
    store.add(session.id, "assistant", "answer two", parent=edited.id)
    assert [m.content for m in store.thread(session.id)] == ["one, edited", "answer two"]
    assert [m.id for m in store.siblings(edited)] == [first.id, edited.id]
    store.switch_branch(edited, -1)
    assert [m.content for m in store.thread(session.id)] == ["one", "answer one"]


def test_export_to_markdown_and_json_keeps_every_branch_in_json(store: SessionStore) -> None:
    session = store.create(system="be\nbrief")
    first = store.add(session.id, "user", "one", parent=None)
    store.add(session.id, "assistant", "answer", parent=first.id, model="m")
    store.add(session.id, "user", "two", parent=None)
    store.set_head(session.id, store.to_json(session.id)["messages"][1]["id"])
    text = store.to_markdown(session.id)
    assert text == "# one\n\n> **System:** be\n> brief\n\n## You\n\none\n\n## m\n\nanswer\n"
    data = store.to_json(session.id)
    assert data["schema"] == "edgellm.conversation/1"
    assert [m["content"] for m in data["messages"]] == ["one", "answer", "two"]


KILLED = """
import sys, time
from edgellm.tui.sessions import SessionStore
store = SessionStore(sys.argv[1])
session = store.create()
asked = store.add(session.id, "user", "go", parent=None)
answer = store.add(session.id, "assistant", "", parent=asked.id, state="streaming")
for i in range(3):
    store.append(answer.id, f"piece {i} ")
print("ready", flush=True)
time.sleep(60)
"""


def test_after_kill_9_every_appended_piece_is_there(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    with SessionStoreContext(path) as during:
        assert during.n_recovered == 0  # its writer is alive: not ours to finish
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with SessionStoreContext(path) as store:
        assert store.n_recovered == 1
        answer = store.thread(store.find()[0].id)[-1]
    assert answer.content == "piece 0 piece 1 piece 2 "
    assert answer.state == "interrupted"


class SessionStoreContext:
    def __init__(self, path: Path) -> None:
        self.store = SessionStore(path)

    def __enter__(self) -> SessionStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()


def test_a_full_disk_is_a_disk_full_error_and_what_was_saved_stays(store: SessionStore) -> None:
    session = store.create()
    asked = store.add(session.id, "user", "kept", parent=None)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(DiskFullError) as caught:
        store.add(session.id, "assistant", "x" * 1_000_000, parent=asked.id)
    assert "disk is full" in caught.value.message
    assert caught.value.hint
    assert [m.content for m in store.thread(session.id)] == ["kept"]


def test_a_file_of_a_newer_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "chat.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(StoreError, match="newer edgellm") as caught:
        SessionStore(path)
    assert "upgrade" in (caught.value.hint or "")


def test_settings_are_kept(store: SessionStore) -> None:
    assert store.setting("theme", "dark") == "dark"
    store.save_setting("theme", "light")
    assert store.setting("theme", "dark") == "light"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("hello\n  world", "hello world"),
        ("", "New conversation"),
        ("notes.txt:\n```\nlong\n```\n\nwhat is it?", "notes.txt: what is it?"),
        ("```\nonly code\n```", "``` only code ```"),
        ("word " * 30, "word word word word word word word word word…"),
    ],
)
def test_a_title_is_the_first_words(text: str, title: str) -> None:
    assert title_of(text) == title


def test_code_blocks_are_found_with_an_unclosed_one_last() -> None:
    text = "a\n```python\nx = 1\n```\nb\n~~~\n```\n~~~\n```sh\nls\n"
    assert code_blocks(text) == ["x = 1\n", "```\n", "ls\n"]


def test_conversations_are_readable_by_their_owner_alone(store: SessionStore) -> None:
    store.create()
    for path in Path(store.path).parent.glob("chat.db*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_database_that_somebody_holds_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat.db"
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("CREATE TABLE x (a)")
        other.execute("BEGIN EXCLUSIVE")
        connect = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", lambda p, **k: connect(p, **{**k, "timeout": 0.01}))
        with pytest.raises(StoreError, match="another program holds it"):
            SessionStore(path)


def test_a_held_file_is_said_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.db"
    SessionStore(path).close()
    holder = sqlite3.connect(path)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    waits: list[float] = []
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda p, **k: waits.append(k["timeout"]) or connect(p, **k)
    )
    with pytest.raises(StoreError, match="another program holds it"):
        SessionStore(path)
    assert waits == [OPEN_S]
    holder.close()


def test_later_a_write_waits_for_another_program(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "chat.db")
    (waits,) = store._db.execute("PRAGMA busy_timeout").fetchone()
    store.close()
    assert waits == BUSY_S * 1000
