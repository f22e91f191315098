"""``?``: every key that works where you are, in the order of how near it is."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.table import Table
from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

GROUPS = (("Stepper", "A value"), ("Transcript", "The conversation"), ("Composer", "Writing"))
HIDDEN = {"Submit", "Copy selected text", "Help"}


class HelpScreen(ModalScreen[None]):
    """A table of the keys of the screen below, and the mouse's part."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "Close")]

    def __init__(self, below: Screen[Any]) -> None:
        super().__init__()
        self._below = below

    def compose(self) -> ComposeResult:
        box = VerticalScroll(Static(self._table()), classes="dialog")
        box.border_title = "Keys"
        box.border_subtitle = "esc closes · ctrl+p finds any command"
        yield box

    def _table(self) -> Table:
        ink = self.app.theme_variables
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(justify="right", style=f"bold {ink['primary']}", width=22)
        table.add_column(style=ink["foreground"])
        group = ""
        for where, keys, text in self._rows():
            if where != group:
                table.add_row("", "") if group else None
                table.add_row("", f"[{ink['muted']}]{where}[/]")
                group = where
            table.add_row(keys, text)
        return table

    def _rows(self) -> list[tuple[str, str, str]]:
        rows: dict[tuple[str, str], list[str]] = {}
        for active in self._below.active_bindings.values():
            text = active.binding.tooltip or active.binding.description
            if active.binding.system or not text or text in HIDDEN:
                continue
            key = self.app.get_key_display(active.binding)
            rows.setdefault((_place(active), text), []).append(key)
        return [(where, " ".join(keys), text) for (where, text), keys in rows.items()]


def _place(active: ActiveBinding) -> str:
    name = type(active.node).__name__
    for known, label in GROUPS:
        if name == known:
            return label
    if name == "EdgeApp":
        return "Everywhere"
    return "This screen" if name.endswith("Screen") else name
