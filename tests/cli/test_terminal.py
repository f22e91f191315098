"""The chat at a real terminal: a pty, keys, signals."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

# In the child: make the pty its controlling terminal, so that Ctrl-C becomes a signal.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A program under a pty, and what it has shown."""

    def __init__(self, *argv: str, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, "-m", "edgellm", *argv],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm", **environ},
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, pattern: str, timeout_s: float = 60) -> None:
        """Read until ``pattern`` was shown since the last wait."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.shown):
            assert time.monotonic() < deadline, f"{pattern!r} did not come:\n{self.shown}"
            self._read(0.1)
        self.shown = self.shown[re.search(pattern, self.shown).end() :]  # type: ignore[union-attr]

    def interrupt(self, pattern: str) -> None:
        """Ctrl-C until ``pattern`` is shown: Python's readline notices one that comes between its
        check and its wait only with the next key."""
        for _ in range(10):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for(pattern, timeout_s=6)
        raise AssertionError(f"{pattern!r} did not come after ten times Ctrl-C")

    def _read(self, timeout_s: float) -> None:
        if select.select([self._ours], [], [], timeout_s)[0]:
            try:
                self.shown += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # Linux: the other end is closed, the program is about to exit
                time.sleep(timeout_s)

    def end(self, timeout_s: float = 60) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        return self.process.wait(timeout=1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def chat() -> Iterator[Terminal]:
    terminal = Terminal("chat", "starter", "--max-tokens", "400", EDGELLM_ENGINE_BACKEND="scripted")
    yield terminal
    terminal.close()


def test_a_conversation_with_keys(chat: Terminal) -> None:
    chat.wait_for(">>> ")
    chat.type("hello there\n")
    chat.wait_for(r"\w+ \w+ \w+[\s\S]*>>> ")
    chat.type("/stats on\n")
    chat.wait_for("stats are on[\\s\\S]*>>> ")
    chat.type('"""one\ntwo"""\n')
    chat.wait_for("decode_tps")
    chat.wait_for(">>> ")
    chat.interrupt("leaves[\\s\\S]*>>> ")
    chat.type("\x04")
    assert chat.end() == 0


def test_the_arrow_key_brings_back_what_was_asked_before(chat: Terminal) -> None:
    chat.wait_for(">>> ")
    chat.type("a question of mine\n")
    chat.wait_for(r"mine[\s\S]*\w[\s\S]*>>> ")
    chat.type("\x1b[A")
    chat.wait_for("a question of mine")
    chat.interrupt(">>> ")
    chat.type("/exit\n")
    assert chat.end() == 0


@pytest.mark.model
def test_ctrl_c_stops_the_answer_and_the_next_one_comes() -> None:
    terminal = Terminal("chat", "starter", "--temperature", "0")
    try:
        terminal.wait_for(">>> ")
        terminal.type("Write a very long story about a fox.\n")
        terminal.wait_for(r"fox\.\r\n[\s\S]{20}")
        terminal.type("\x03")
        terminal.wait_for(r"\(stopped\)[\s\S]*>>> ")
        terminal.type("/set max_tokens 5\n")
        terminal.wait_for("max_tokens = 5[\\s\\S]*>>> ")
        terminal.type("And now?\n")
        terminal.wait_for(r"now\?\r\n[\s\S]*\w[\s\S]*>>> ")
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()


@pytest.mark.model
def test_ctrl_c_ends_a_single_answer_with_exit_code_130_and_no_engine_left() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "chat", "starter", "-p", "Count to one thousand."],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.read(1)
    workers = _children(child.pid)
    assert workers
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert b"Traceback" not in stderr
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < deadline, "the engine's process is still there"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]
