"""JSON lines that people write by hand: a BOM, CRLF and blank lines are no mistakes."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from edgellm.errors import ConfigError

T = TypeVar("T")


def read_rows(path: str | Path, type: type[T]) -> Iterator[tuple[int, T]]:
    """(line number, row) of every line that holds one, none of it kept in memory.

    Raises ConfigError with the line that is wrong, or when there is not one.
    """
    number, n_rows = 0, 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                row = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if row.strip():
                    yield number, msgspec.json.decode(row, type=type)
                    n_rows += 1
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}:{number}: {error}", hint=FORM) from error
    if not n_rows:
        raise ConfigError(f"{path}: no prompts", hint=FORM)


FORM = 'one a line: {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
