"""What every screen has: the bar on top, the keys at the bottom, and the application's type."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from textual.app import ComposeResult
from textual.screen import Screen
from textual.widgets import Footer

from edgellm.tui.app import EdgeApp
from edgellm.tui.ports import HERE
from edgellm.tui.widgets import NavBar

Command = tuple[str, str, Callable[[], object]]


class EdgeScreen(Screen[None]):
    """A mode's screen. Subclasses give ``MODE`` and :meth:`body`."""

    MODE = ""

    @property
    def edge(self) -> EdgeApp:
        return cast(EdgeApp, self.app)

    def compose(self) -> ComposeResult:
        yield NavBar(self.MODE)
        yield from self.body()
        yield Footer(show_command_palette=False)

    def body(self) -> ComposeResult:
        """The widgets between the two bars."""
        yield from ()

    def commands(self) -> list[Command]:
        """What this screen adds to the command palette: title, help, call."""
        return []

    def on_mount(self) -> None:
        self.watch(self.app, "endpoint", self._show_status)
        self.watch(self.app, "loading", self._show_status)
        self.watch(self.app, "theme", self._theme_changed, init=False)
        self.ready()

    def ready(self) -> None:
        """The screen is mounted; subclasses start their work here."""

    def _theme_changed(self) -> None:
        self.query_one(NavBar).refresh()
        self.recolored()

    def recolored(self) -> None:
        """The theme changed: what was drawn in its colours is drawn again."""

    def on_screen_resume(self) -> None:
        self._show_status()
        self.shown()

    def shown(self) -> None:
        """The screen came to the front."""

    def _show_status(self) -> None:
        bar, app = self.query_one(NavBar), self.edge
        if app.loading:
            bar.mark, bar.status = "◐", app.loading
        elif app.endpoint is None:
            bar.mark, bar.status = "○", "no model"
        else:
            remote = app.endpoint.where != HERE
            place = f" @ {app.endpoint.where.split('//')[-1]}" if remote else ""
            bar.mark = "●" if app.endpoint.is_alive else "✗"
            bar.status = app.endpoint.name + place

    def refresh_status(self) -> None:
        """Something about the endpoint changed that no reactive tells."""
        self._show_status()
