"""Errors on the terminal: one table to exit codes, one place that prints them.

0 done, 1 failed, 2 wrong usage, 3 model not found, 4 does not fit, 5 bad file, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from edgellm.errors import (
    ChecksumError,
    ConfigError,
    DoesNotFitError,
    EdgeLLMError,
    GGUFError,
    ModelNotFoundError,
    RequestError,
)

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
DOES_NOT_FIT: Final = 4
BAD_FILE: Final = 5
INTERRUPTED: Final = 130

# The first class that fits decides; EdgeLLMError itself is last.
EXIT_CODES: Final[tuple[tuple[type[EdgeLLMError], int], ...]] = (
    (ConfigError, USAGE),
    (RequestError, USAGE),
    (ModelNotFoundError, NOT_FOUND),
    (DoesNotFitError, DOES_NOT_FIT),
    (GGUFError, BAD_FILE),
    (ChecksumError, BAD_FILE),
    (EdgeLLMError, FAILED),
)


_MOVE: Final = "edgellm doctor shows the folders; EDGELLM_HOME moves them"
_SYSTEM_HINTS: Final = {
    errno.ENOSPC: "make room on that disk; " + _MOVE,
    errno.EDQUOT: "make room in your quota; " + _MOVE,
    errno.EROFS: _MOVE,
    errno.EACCES: "use another path, or mend its permissions",
    errno.EPERM: "use another path, or mend its permissions",
    errno.EMFILE: "ulimit -n 4096",
}


class UsageError(EdgeLLMError):
    """The command line itself is wrong."""


def exit_code(error: EdgeLLMError) -> int:
    """The documented exit code of an error."""
    if isinstance(error, UsageError):
        return USAGE
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def report(error: EdgeLLMError, *, as_json: bool) -> int:
    """Print one error to stderr; return its exit code."""
    code = exit_code(error)
    if as_json:
        _print(_encode(to_json(error, code)))
        return code
    _print(f"edgellm: error: {one_line(error.message)}")
    if error.hint:
        _print(f"  try: {one_line(error.hint)}")
    return code


@contextlib.contextmanager
def kept_if_possible() -> Iterator[None]:
    """Around keeping what took minutes to measure: when that fails (a full disk), it is said, and
    the result is shown all the same."""
    try:
        yield
    except EdgeLLMError as error:
        _print(f"edgellm: warning: this run is not kept: {one_line(error.message)}")
    except OSError as error:
        _print(f"edgellm: warning: this run is not kept: {_system_error(error).message}")


def _system_error(error: OSError) -> EdgeLLMError:
    """What the system refused (a full disk, no permission): the path, its words and what helps."""
    what = error.strerror or str(error) or type(error).__name__
    at = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    hint = _SYSTEM_HINTS.get(error.errno or 0)
    return EdgeLLMError(f"{at}{what}", hint=hint)


def report_unexpected(error: BaseException, *, as_json: bool) -> int:
    """An error nobody planned for: its class and text, the traceback when EDGELLM_DEBUG is set.

    What the system refuses (OSError) is no defect of ours, and is not called unexpected.
    """
    if os.environ.get("EDGELLM_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, OSError):
        return report(_system_error(error), as_json=as_json)
    wrapped = EdgeLLMError(
        f"unexpected {type(error).__name__}: {error}",
        hint="run it again with EDGELLM_DEBUG=1 and report what it prints",
    )
    return report(wrapped, as_json=as_json)


def to_json(error: EdgeLLMError, code: int) -> dict[str, Any]:
    """``{"error": {...}}`` with the class's own attributes beside message, hint and exit code."""
    attributes = {k: v for k, v in vars(error).items() if k not in ("message", "hint")}
    return {
        "error": {
            "type": type(error).__name__,
            "message": error.message,
            "hint": error.hint,
            "exit_code": code,
            **attributes,
        }
    }


def _encode(document: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(document, enc_hook=str).decode()
    except UnicodeEncodeError:  # a file name that is not UTF-8 (surrogateescape)
        return json.dumps(document, default=str)


def one_line(text: str) -> str:
    """``text`` with its line breaks folded: an error is one line, whatever raised it."""
    return " ".join(text.split())


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
