"""Where a message is written: grows with it, Enter sends, history on the arrows."""

from __future__ import annotations

from typing import ClassVar, Final

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

PASTE_LIMIT: Final = 20_000
"""Characters; a longer paste becomes an attachment, so that typing stays quick under it."""
HISTORY: Final = 200


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
            "shift+enter,ctrl+j,alt+enter", "newline", "New line", id="composer.newline",
            key_display="^j", show=False,
        ),
        Binding("up", "older", "Older message", show=False, id="composer.older"),
        Binding("down", "newer", "Newer message", show=False, id="composer.newer"),
    ]  # fmt: skip

    class Submitted(Message):
        """Send this."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

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
        self.post_message(self.Submitted(text))

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

    async def _on_key(self, event: events.Key) -> None:
        """Send and new line, in the order of typing.

        A priority binding would overtake the letters typed before it whenever the interface is
        busy; TextArea's own handler would take Enter for a new line.
        """
        for binding in self._bindings.key_to_bindings.get(event.key, ()):
            if binding.action in ("submit", "newline"):
                event.stop()
                event.prevent_default()
                await self.run_action(binding.action)
                return

    async def _on_paste(self, event: events.Paste) -> None:
        # Textual calls TextArea's handler next, unless it is prevented here.
        if len(event.text) > PASTE_LIMIT:
            event.prevent_default()
            event.stop()
            self.post_message(self.LongPaste(event.text))
