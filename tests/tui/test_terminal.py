"""The real program in tmux with a real model: what a person types and what a person sees."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]
ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


class Tmux:
    """One session on a server of its own, so that nobody's tmux is touched."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux.sock")
        self.home = folder / "home"

    def start(self, command: str, *, max_tokens: int) -> None:
        width, height = "100", "30"
        environment = {
            **os.environ, "EDGELLM_HOME": str(self.home), "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color", "EDGELLM_CHAT_MAX_TOKENS": str(max_tokens),
            "EDGELLM_CHAT_TEMPERATURE": "0",
        }  # fmt: skip
        self._run(
            "new-session",
            "-d",
            "-x",
            width,
            "-y",
            height,
            f"{command}; echo status=$?; sleep 600",
            environment=environment,
        )

    def _run(self, *words: str, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, "-f", "/dev/null", *words],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        return done.stdout

    def keys(self, *names: str) -> None:
        for name in names:
            self._run("send-keys", name)

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def resize(self, width: int, height: int) -> None:
        self._run("resize-window", "-x", str(width), "-y", str(height))

    @property
    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def wait(self, holds: str | Callable[[str], bool]) -> str:
        """The screen as soon as it shows a text (or satisfies a test)."""
        check = (lambda screen: holds in screen) if isinstance(holds, str) else holds
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if check(self.screen):
                return self.screen
            time.sleep(0.1)
        raise AssertionError(f"never shown: {holds}\n{self.screen}")

    def engine(self) -> psutil.Process:
        """The engine's process, under the program's."""
        pane = int(self._run("display-message", "-p", "#{pane_pid}"))
        children = psutil.Process(pane).children(recursive=True)
        engines = [p for p in children if "edgellm.engine.worker" in " ".join(p.cmdline())]
        assert len(engines) == 1, [p.cmdline() for p in children]
        return engines[0]

    def close(self) -> None:
        self._run("kill-server")


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    session = Tmux(tmp_path)
    yield session
    session.close()


EDGELLM = f"{sys.executable} -m edgellm"


def answered(screen: str) -> bool:
    return "tok/s · first token" in screen


def answer(screen: str) -> list[str]:
    """The lines of the last answer that have words on them.

    An engine that ends before the first word begins the answer again, and nobody learns of it.
    """
    _, _, below = screen.rpartition("│ SmolLM2-135M-Instruct")
    above, _, _ = below.partition("╭")
    return [line for line in above.splitlines()[1:] if re.match(r"\s*│ +\w", line)]


def test_first_run_to_first_answer_in_four_keys(tmux: Tmux) -> None:
    tmux.start(EDGELLM, max_tokens=16)
    tmux.wait("ready at once, no network")
    tmux.keys("Enter")
    tmux.wait("You can write already")
    tmux.keys("h", "i", "Enter")
    screen = tmux.wait(answered)
    assert "You" in screen
    assert "SmolLM2-135M-Instruct" in screen
    tmux.keys("C-q")
    tmux.wait("status=0")
    assert "Traceback" not in tmux.screen


def test_kill_9_of_the_engine_and_a_resize_lose_nothing(tmux: Tmux) -> None:
    tmux.start(f"{EDGELLM} tui starter", max_tokens=4000)
    tmux.wait("tokens of context")
    tmux.type("Write a very long story about the sea.")
    tmux.keys("Enter")
    tmux.wait(lambda screen: len(answer(screen)) > 2)
    tmux.resize(70, 20)
    tmux.wait(lambda screen: "│" in screen and len(screen.split("\n")[0]) <= 70)
    engine = tmux.engine()
    engine.send_signal(signal.SIGKILL)
    psutil.wait_procs([engine], timeout=PATIENCE_S)
    tmux.wait("the engine's process was ended")
    tmux.keys("C-q")
    screen = tmux.wait("status=")
    assert "Traceback" not in screen
    from edgellm.tui.sessions import SessionStore

    store = SessionStore(tmux.home / "state" / "chat.db")
    thread = store.thread(store.find()[0].id)
    store.close()
    assert thread[0].content == "Write a very long story about the sea."
    assert thread[1].content
    assert thread[1].state in ("error", "stopped", "done")


DEFECT = """\
import sys
from edgellm.tui.app import EdgeApp
def boom(self): raise RuntimeError("a defect for this test")
EdgeApp.action_theme = boom
from edgellm.cli import main
sys.exit(main(["tui"]))
"""


def test_a_defect_ends_in_a_line_and_a_log_without_a_traceback(tmux: Tmux, tmp_path: Path) -> None:
    script = tmp_path / "defect.py"
    script.write_text(DEFECT)
    tmux.start(f"{sys.executable} {script}", max_tokens=16)
    tmux.wait("ready at once, no network")
    tmux.keys("F10")
    screen = tmux.wait("status=1")
    assert "Traceback" not in screen
    assert "unexpected RuntimeError: a defect for this test" in screen
    log = tmux.home / "state" / "interface-errors.log"
    assert "interface-errors.log" in "".join(screen.split())
    assert "a defect for this test" in log.read_text()
