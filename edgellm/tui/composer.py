"""Where a message is written: grows with it, Enter sends, history on the arrows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

PASTE_LIMIT: Final = 20_000
"""Characters; a longer paste becomes an attachment, so that typing stays quick under it."""
HISTORY: Final = 200
NEWLINE: Final = "shift+enter,ctrl+j,alt+enter"


class Composer(TextArea):
    """A text area that sends. Long pastes become attachments instead of text."""

    DEFAULT_CSS = """
    Composer {
        height: auto; max-height: 10; min-height: 3; border: round $border;
        background: $background; padding: 0 1; scrollbar-size-vertical: 1;
    }
    Composer:focus { border: round $primary 70%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "Send", id="composer.send"),
        Binding(
            NEWLINE, "newline", "New line", id="composer.newline", key_display="^j", show=False
        ),
        Binding("up", "older", "Older message", show=False, id="composer.older"),
        Binding("down", "newer", "Newer message", show=False, id="composer.newer"),
    ]  # fmt: skip

    class Submitted(Message):
        """Send this."""

        def __init__(self, raw: str) -> None:
            super().__init__()
            self.raw = raw
            self.text = raw.strip()

    class LongPaste(Message):
        """Text too long to be edited comfortably."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(
            "", id=id, soft_wrap=True, tab_behavior="focus", show_line_numbers=False, compact=False,
            highlight_cursor_line=False,
        )  # fmt: skip
        self._history: list[str] = []
        self._place = 0
        self._unsent = ""
        self._acts: dict[str, Callable[[], None]] = {}
        self.use_keys({})

    def use_keys(self, keymap: Mapping[str, str]) -> None:
        """Keys of a person's own by the bindings' ids, as :meth:`textual.app.App.set_keymap`."""
        keys = {"composer.send": "enter", "composer.newline": NEWLINE}
        does = {"composer.send": self.action_submit, "composer.newline": self.action_newline}
        self._acts = {"backspace": self.action_delete_left}
        for name, default in keys.items():
            for key in keymap.get(name, default).split(","):
                self._acts[key.strip()] = does[name]

    def remember(self, texts: list[str]) -> None:
        """The history that the arrows walk through, oldest first."""
        self._history = texts[-HISTORY:]
        self._place = len(self._history)

    def action_submit(self) -> None:
        text = self.text.strip()
        if text:
            self._history.append(text)
        self._place = len(self._history)
        self._unsent = ""
        self.post_message(self.Submitted(self.text))

    def sent(self, raw: str) -> None:
        """It is on its way; what was typed meanwhile stays."""
        self.text = self.text.removeprefix(raw)
        self.move_cursor(self.document.end)

    def action_newline(self) -> None:
        self.insert("\n")

    def action_older(self) -> None:
        if self.cursor_location[0] > 0:
            self.action_cursor_up()
        elif self._place > 0:
            self._recall(self._place - 1)

    def action_newer(self) -> None:
        if self.cursor_location[0] < self.document.line_count - 1:
            self.action_cursor_down()
        elif self._place < len(self._history):
            self._recall(self._place + 1)

    def _recall(self, place: int) -> None:
        if self._place == len(self._history):
            self._unsent = self.text
        self._place = place
        self.text = self._history[place] if place < len(self._history) else self._unsent
        self.move_cursor(self.document.end)

    def type_early(self, keys: list[events.Key]) -> None:
        """Keys that were pressed before this had the focus (:func:`writes` chose them)."""
        for event in keys:
            if event.is_printable and event.character is not None:
                self.insert(event.character)
            else:
                self._acts.get(event.key, self.action_newline)()

    async def _on_key(self, event: events.Key) -> None:
        """Send, new line and backspace, in the order of typing.

        A priority binding would overtake the letters typed before it whenever the interface is
        busy, and any other would be overtaken by those after it; TextArea's own handler would take
        Enter for a new line.
        """
        if (act := self._acts.get(event.key)) is not None:
            event.stop()
            event.prevent_default()
            act()

    async def _on_paste(self, event: events.Paste) -> None:
        # Textual calls TextArea's handler next, unless it is prevented here.
        if len(event.text) > PASTE_LIMIT:
            event.prevent_default()
            event.stop()
            self.post_message(self.LongPaste(event.text))


def writes(event: events.Key) -> bool:
    """Whether a key that nobody was given yet is part of writing a message."""
    is_text = event.is_printable or event.key in ("enter", "backspace")
    return is_text and not event.is_forwarded
