"""What a chat answer is made of while it streams, and the parser that makes it."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ContentDelta(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Text of the thinking before the answer."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """Call number ``index`` of this answer begins; its arguments follow."""

    index: int
    id: str
    name: str


class ToolArgsDelta(msgspec.Struct, frozen=True):
    """The next piece of call ``index``'s arguments; all pieces together are one JSON value."""

    index: int
    fragment: str


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgsDelta


class OutputParser(Protocol):
    """Turns the text of one choice into deltas, however the text is cut into pieces."""

    warnings: list[str]
    """Filled by ``finish``: what the client should know about a cut answer."""

    @property
    def n_calls(self) -> int:
        """Tool calls begun so far; above 0 the finish_reason is ``tool_calls``."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of generated text. Never raises."""
        ...

    def finish(self) -> list[Delta]:
        """The generation is over: give what was held back."""
        ...


class PlainParser:
    """An answer that is only text."""

    n_calls = 0

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def feed(self, text: str) -> list[Delta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []
