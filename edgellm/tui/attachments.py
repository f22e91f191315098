"""Text that goes with a message: files and long pastes, named above the place to write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.text import Text
from textual.widgets import Static

MAX_ATTACHMENT: Final = 4 * 1024 * 1024
Attached = tuple[str, str]
"""A name and its text."""


class Attachments(Static):
    """What is attached to the message that is being written; hidden while that is nothing."""

    DEFAULT_CSS = """
    Attachments { height: auto; padding: 0 2; color: $accent; display: none; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._items: tuple[Attached, ...] = ()

    @property
    def items(self) -> tuple[Attached, ...]:
        return self._items

    def add(self, name: str, text: str) -> None:
        self.show([*self._items, (name, text)])

    def show(self, items: Sequence[Attached]) -> None:
        """These and no others."""
        self._items = tuple(items)
        self.display = bool(items)
        words = [f"⊞ {name} ({len(text):,} characters)" for name, text in items]
        self.update(Text("   ".join(words)))

    def before(self, text: str) -> str:
        """The message as it is sent: each attachment in a fence of its own, then the words."""
        parts = [f"{name}:\n{fenced(content)}" for name, content in self._items]
        return "\n\n".join([*parts, text] if text else parts)


def fenced(content: str) -> str:
    """A code block that no fence inside of it ends."""
    fence = "```"
    while fence in content:
        fence += "`"
    return f"{fence}\n{content.rstrip()}\n{fence}"


def read_text(path: Path) -> str:
    """A UTF-8 file that fits into a message; ValueError says what is wrong with it."""
    if path.stat().st_size > MAX_ATTACHMENT:
        raise ValueError("larger than 4 MiB")
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        raise ValueError("not a text file")
    return data.decode("utf-8", errors="replace")
