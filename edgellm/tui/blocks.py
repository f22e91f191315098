"""Markdown text cut into blocks while it arrives, so that a frame renders only the last one.

A finished block never changes: it is parsed, laid out and highlighted once. Only the open block at
the end is rendered again when more text comes, and it is kept short: long code and long lists are
cut at a line. Pure; no widget knows this file's insides.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

MAX_CODE_LINES: Final = 24
"""Lines of an open code block before it is cut: what one frame may have to highlight again."""
MAX_TEXT_CHARS: Final = 4000
"""Characters of an open paragraph or list before it is cut at a line or a space."""

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})\s*([^`]*)$")
_LIST_OR_INDENT: Final = re.compile(r"(?:\s{2,}|\t|\s{0,3}(?:[-*+]|\d{1,9}[.)])\s)")


class Block(msgspec.Struct, frozen=True):
    """A piece of Markdown. Code has its language in ``info`` and says which edges are its own."""

    text: str
    is_code: bool = False
    info: str = ""
    opens: bool = True
    closes: bool = True


class BlockSplitter:
    """Feed text; finished blocks come out of :meth:`feed`, the unfinished one is :attr:`tail`."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._partial = ""
        self._fence = ""
        self._info = ""
        self._opens = True
        self._gap = False

    @property
    def tail(self) -> Block | None:
        """The open block as it stands, or None when there is nothing after the last block."""
        text = "\n".join([*self._lines, self._partial]) if self._partial else self._joined()
        if self._fence:
            return Block(text, True, self._info, self._opens, closes=False)
        return Block(text) if text.strip() else None

    def feed(self, text: str) -> list[Block]:
        """Add text; return the blocks that it finished."""
        done: list[Block] = []
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._line(line.removesuffix("\r"), done)
        if len(self._partial) > MAX_TEXT_CHARS and not self._fence:
            self._cut_partial(done)
        return done

    def finish(self) -> list[Block]:
        """Close whatever is open; return the last blocks."""
        done: list[Block] = []
        if self._partial:
            line, self._partial = self._partial, ""
            self._line(line, done)
        if self._fence:
            self._flush_code(done, closes=True)
            self._fence = ""
        else:
            self._flush_text(done)
        return done

    def _joined(self) -> str:
        return "\n".join(self._lines)

    def _line(self, line: str, done: list[Block]) -> None:
        if self._fence:
            self._code_line(line, done)
        elif (match := _FENCE.match(line)) is not None:
            self._flush_text(done)
            self._fence, self._info = match.group(1), match.group(2).strip()
            self._opens = True
        else:
            self._text_line(line, done)

    def _code_line(self, line: str, done: list[Block]) -> None:
        bare = line.strip()
        if bare.startswith(self._fence) and not bare.strip(self._fence[0]):
            self._flush_code(done, closes=True)
            self._fence = ""
            return
        self._lines.append(line)
        if len(self._lines) >= MAX_CODE_LINES:
            self._flush_code(done, closes=False)

    def _text_line(self, line: str, done: list[Block]) -> None:
        blank = not line.strip()
        goes_on = _is_list(self._lines) and _LIST_OR_INDENT.match(line) is not None
        if self._gap and not blank and not goes_on:
            self._flush_text(done)
        if blank and not _is_list(self._lines):
            self._flush_text(done)
            return
        self._gap = blank
        at_item = re.match(r"(?:[-*+]|\d{1,9}[.)])\s", line) is not None
        if at_item and sum(map(len, self._lines)) > MAX_TEXT_CHARS:
            self._flush_text(done)
        self._lines.append(line)

    def _cut_partial(self, done: list[Block]) -> None:
        """A paragraph without an end: cut at its last space, so that its start is laid out once."""
        at = self._partial.rfind(" ")
        cut = at if at > 0 else len(self._partial)
        self._lines.append(self._partial[:cut])
        self._partial = self._partial[cut:].lstrip(" ")
        self._flush_text(done)

    def _flush_text(self, done: list[Block]) -> None:
        text = self._joined().rstrip()
        if text.strip():
            done.append(Block(text))
        self._lines.clear()
        self._gap = False

    def _flush_code(self, done: list[Block], *, closes: bool) -> None:
        done.append(Block(self._joined(), True, self._info, self._opens, closes))
        self._lines.clear()
        self._opens = False


def _is_list(lines: list[str]) -> bool:
    return bool(lines) and _LIST_OR_INDENT.match(lines[0]) is not None


def split_blocks(text: str) -> list[Block]:
    """A whole text at once."""
    splitter = BlockSplitter()
    return splitter.feed(text) + splitter.finish()
