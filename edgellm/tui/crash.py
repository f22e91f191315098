"""What is left of an exception that nobody expected: a log with all of it, and one line to read."""

from __future__ import annotations

import datetime
import traceback
from pathlib import Path
from typing import Final

from textual.worker import WorkerFailed

from edgellm import __version__
from edgellm.errors import EdgeLLMError

LOG: Final = "interface-errors.log"
MAX_LOG: Final = 1024 * 1024
"""Bytes; a longer log begins anew."""


def record(error: BaseException, path: Path) -> EdgeLLMError:
    """Append the traceback to a log, without anybody's words in it; return what to say."""
    if isinstance(error, WorkerFailed):
        error = error.error
    said = f"the interface met an unexpected {type(error).__name__}: {error}"
    try:
        _append(path, "".join(traceback.format_exception(error)))
    except OSError as refused:
        hint = f"run edgellm again and report it; {path} could not be written: {refused.strerror}"
        return EdgeLLMError(f"{said}; conversations are saved", hint=hint)
    return EdgeLLMError(
        f"{said}; conversations are saved",
        hint=f"run edgellm again, and report it with the end of {path}",
    )


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists() or path.stat().st_size > MAX_LOG
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with path.open("w" if fresh else "a", encoding="utf-8", errors="replace") as log:
        log.write(f"{now} edgellm {__version__}\n{text}\n")
