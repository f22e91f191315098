"""Command blocks of the documentation: found, and run as a reader would, one page a session."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\s*?$", re.M | re.S
)
NOT_RUN = re.compile(r"<!-- not run: (?P<why>\S.*?) -->\s*$")
# Fences that hold no command: configuration, output, drawings.
DATA = {"toml", "text", "json", "yaml", "ini"}
SERVES = re.compile(r"(?:[A-Z_]+=\S+ )*edgellm serve\b")
# It exits with 1 where it finds a problem: it ran all the same.
FINDS_PROBLEMS = re.compile(r"edgellm doctor\b")
READY_S = 120


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    line: int
    not_run: str | None
    """The reason given, or None."""

    def commands(self) -> list[str]:
        """The lines a reader types; the others show what is printed."""
        return [line[2:] for line in self.body.splitlines() if line.startswith("$ ")]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return list(_blocks(text))


def _blocks(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip()
        reason = NOT_RUN.search(before)
        yield Block(
            language=match["language"],
            body=textwrap.dedent(match["body"]),
            line=text.count("\n", 0, match.start()) + 1,
            not_run=reason["why"] if reason else None,
        )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Session:
    """A reader at a terminal: a home, a port that ``8080`` stands for, a server at most."""

    folder: Path
    port: int = field(default_factory=free_port)
    server: subprocess.Popen[bytes] | None = None

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._run_program([sys.executable, "-c", self._here(block.body)], block)
            return
        for command in block.commands():
            if SERVES.match(command):
                self._serve(command)
            else:
                self._run_program(["bash", "-euo", "pipefail", "-c", self._here(command)], block)

    def _run_program(self, command: list[str], block: Block) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self._environ(), capture_output=True, text=True,
            timeout=300, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        said = f"line {block.line}: {command[-1]}\n{done.stdout}\n{done.stderr}"
        fine = (0, 1) if FINDS_PROBLEMS.match(command[-1]) else (0,)
        assert done.returncode in fine, said

    def _serve(self, command: str) -> None:
        """Start a server and wait until it says it is ready; the page's earlier one ends."""
        self.close()
        log_path = self.folder / "server.log"
        with log_path.open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec env {self._here(command)}"],
                cwd=self.folder, env=self._environ(), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + READY_S
        while not self._is_ready():
            said = log_path.read_text(errors="replace")
            assert self.server.poll() is None, f"{command}: the server ended\n{said}"
            assert time.monotonic() < deadline, f"{command}: no answer\n{said}"
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as got:
                return bool(got.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def close(self) -> None:
        if self.server is None:
            return
        self.server.send_signal(signal.SIGTERM)
        assert self.server.wait(timeout=60) == 0, "the server did not end well"
        self.server = None

    def _here(self, text: str) -> str:
        return text.replace("127.0.0.1:8080", f"127.0.0.1:{self.port}")

    def _environ(self) -> dict[str, str]:
        tools = self.folder / "bin"
        if not tools.exists():
            tools.mkdir()
            script = tools / "edgellm"
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m edgellm "$@"\n')
            script.chmod(0o755)
        path = os.environ.get("PYTHONPATH", "")
        places = (str(tools), str(Path(sys.executable).parent), os.environ["PATH"])
        return {
            **os.environ,
            "PATH": os.pathsep.join(places),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
            "EDGELLM_SERVE_PORT": str(self.port),
            "NO_PROXY": "127.0.0.1",
        }
