"""The file that says a server runs: its address and a token, for ``edgellm ps`` and ``stop``.

One file a process, named by its pid, readable by its owner alone. The token is an API key of the
server that only this file knows.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import msgspec
import psutil

from edgellm import paths


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """A running server."""

    pid: int
    url: str
    token: str
    started_at: float
    process_started_at: float
    """Tells this process from a later one with the same pid."""


class StateFile:
    """This process's file."""

    def __init__(self, folder: Path | None = None) -> None:
        self.token = "local-" + secrets.token_urlsafe(24)
        self._path = (folder or paths.runtime_dir()) / f"serve-{os.getpid()}.json"

    def write(self, url: str) -> None:
        """Say that this server runs at ``url``."""
        state = ServerState(
            pid=os.getpid(),
            url=url,
            token=self.token,
            started_at=time.time(),
            process_started_at=psutil.Process().create_time(),
        )
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(state))

    def remove(self) -> None:
        """The server is gone."""
        self._path.unlink(missing_ok=True)


def running(folder: Path | None = None) -> list[ServerState]:
    """Every server of this user that runs now, the newest last. Stale files are removed."""
    found = []
    for path in (folder or paths.runtime_dir()).glob("serve-*.json"):
        state = _read(path)
        if state is not None and _is_alive(state):
            found.append(state)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda s: s.started_at)


def _read(path: Path) -> ServerState | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerState)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_alive(state: ServerState) -> bool:
    try:
        return abs(psutil.Process(state.pid).create_time() - state.process_started_at) < 1
    except psutil.Error:
        return False
