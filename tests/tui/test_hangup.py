"""The real program on a terminal that goes away without a signal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgellm.tui.hangup import EXIT_CODE

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
READY = b"shows the keys"
"""On the first screen of a new home."""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="terminals are polled on Linux alone"
)


def read_until(fd: int, wanted: bytes) -> bytes:
    seen = b""
    began = time.monotonic()
    while wanted not in seen and time.monotonic() - began < PATIENCE_S:
        if select.select([fd], [], [], 1.0)[0]:
            seen += os.read(fd, 65536)
    return seen


def test_a_terminal_that_is_gone_ends_the_program(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    environment = {
        **os.environ, "EDGELLM_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "TERM": "xterm",
    }  # fmt: skip
    program = subprocess.Popen(
        [sys.executable, "-m", "edgellm"],
        stdin=slave, stdout=slave, stderr=slave, env=environment,
        start_new_session=True,  # no controlling terminal: no SIGHUP comes
    )  # fmt: skip
    os.close(slave)
    try:
        assert READY in read_until(master, READY)
        os.close(master)
        assert program.wait(PATIENCE_S) == EXIT_CODE
    finally:
        program.kill()
        program.wait()
