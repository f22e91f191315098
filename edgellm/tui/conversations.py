"""The list of conversations beside the chat, and the field that searches them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option, OptionDoesNotExist

from edgellm.tui.sessions import Session

TITLE_CELLS: Final = 28
"""What the list has room for on a line."""
NONE_YET: Final = "no conversations yet"
NONE_FOUND: Final = "no conversation has that in it"


class Conversations(Vertical):
    """Two lines a conversation: its title, and when and with whom it was."""

    DEFAULT_CSS = """
    Conversations #find { background: $background; height: 1; }
    Conversations #sessions {
        border: none; background: $background; height: 1fr; margin-top: 1; padding: 0;
        scrollbar-size-vertical: 1;
    }
    Conversations #sessions:focus { background-tint: $background 0%; }
    """

    class Chosen(Message):
        """Open this conversation."""

        def __init__(self, session_id: str) -> None:
            super().__init__()
            self.session_id = session_id

    class Asked(Message):
        """Another text is looked for: :attr:`Conversations.query_text`."""

    def compose(self) -> ComposeResult:
        yield Input(placeholder="find in conversations", id="find", compact=True)
        yield OptionList(id="sessions")

    @property
    def query_text(self) -> str:
        return self.query_one("#find", Input).value

    def show(self, sessions: Sequence[Session], now: float) -> None:
        """List these, newest first; ``now`` is the wall clock's."""
        options = self.query_one("#sessions", OptionList)
        options.clear_options()
        ink = self.app.theme_variables
        for session in sessions:
            text = _fitting(Text(session.title))
            below = _fitting(Text(f"{ago(now - session.updated)} · {session.model}", ink["faint"]))
            options.add_option(Option(text.append("\n").append_text(below), id=session.id))
        if not sessions:
            words = NONE_FOUND if self.query_text.strip() else NONE_YET
            options.add_option(Option(Text(words, ink["muted"]), disabled=True))

    def mark(self, session: Session | None) -> None:
        """The conversation that is open, where the list has it."""
        options = self.query_one("#sessions", OptionList)
        if session is None:
            options.highlighted = None
            return
        with suppress(OptionDoesNotExist):  # the search may have left it out
            options.highlighted = options.get_option_index(session.id)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option.id is not None:
            self.post_message(self.Chosen(event.option.id))

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Asked())


def _fitting(text: Text) -> Text:
    text.truncate(TITLE_CELLS, overflow="ellipsis")
    return text


def ago(seconds: float) -> str:
    """A time that has passed, in its largest unit."""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name} ago"
    return "now"
