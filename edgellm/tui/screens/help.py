"""``?``: every key that works where you are, in the order of how near it is."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.table import Table
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

ORDER = ("This screen", "The conversation", "A value", "Writing", "Everywhere")
PLACES = {"Stepper": "A value", "Transcript": "The conversation", "Composer": "Writing"}


class HelpScreen(ModalScreen[None]):
    """A table of the keys of the screen below, and the mouse's part."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "Close")]

    def __init__(self, below: Screen[Any]) -> None:
        super().__init__()
        self._below = below

    def compose(self) -> ComposeResult:
        box = VerticalScroll(Static(self._table()), classes="dialog")
        box.border_title = "Keys"
        box.border_subtitle = "esc closes · ctrl+p finds any command · tui.keys changes keys"
        yield box

    def _table(self) -> Table:
        ink = self.app.theme_variables
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(justify="right", style=f"bold {ink['primary']}", width=14, no_wrap=True)
        table.add_column(style=ink["foreground"], ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(style=ink["faint"], no_wrap=True)
        group = ""
        for where, keys, text, name in self._rows():
            if where != group:
                if group:
                    table.add_row("", "", "")
                table.add_row("", f"[{ink['muted']}]{where}[/]", "")
                group = where
            table.add_row(keys, text, name)
        return table

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """(place, keys, what they do, the name for remapping), this screen's first."""
        rows: dict[str, tuple[str, list[str], str]] = {}
        for active in self._below.active_bindings.values():
            binding = active.binding
            if binding.id is None or not binding.description:
                continue
            _, keys, _ = rows.setdefault(binding.id, (_place(active), [], binding.description))
            keys.append(self.app.get_key_display(binding))
        found = [(where, " ".join(keys), text, id_) for id_, (where, keys, text) in rows.items()]
        return sorted(found, key=lambda row: ORDER.index(row[0]))


def _place(active: ActiveBinding) -> str:
    name = type(active.node).__name__
    return PLACES.get(name, "Everywhere" if name == "EdgeApp" else "This screen")
