"""Rows of one widget straight to the terminal, past Textual's compositor.

The compositor keeps no cells: for whatever changed it renders every widget under the union of the
changed regions, ancestors and scroll bar included. For a transcript that moves up by a line that
was 3.5 ms of a frame's 5.6. A widget that knows its own rows, with nothing over it, writes them in
0.6 ms; whatever is refreshed later is rendered from the widget's state as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console
from textual._compositor import CompositorUpdate
from textual.app import App
from textual.geometry import Region
from textual.strip import Strip
from textual.widgets import Tooltip
from textual.widgets._toast import ToastRack

if TYPE_CHECKING:
    from textual.widget import Widget


SUPPORTED: Final = hasattr(App, "_display") and hasattr(App, "batch_update")
"""Whether this Textual has the parts that are used here; without them all is drawn its own way."""


class Rows(CompositorUpdate):
    """Strips from one place of the screen downwards."""

    def __init__(self, x: int, y: int, strips: Sequence[Strip]) -> None:
        self._x, self._y, self._strips = x, y, strips

    def render_segments(self, console: Console) -> str:
        return "".join(
            f"\x1b[{self._y + i + 1};{self._x + 1}H{strip.render(console)}"
            for i, strip in enumerate(self._strips)
        )


def is_clear(widget: Widget) -> bool:
    """Whether this widget's rows are what the terminal shows at its place, and all of them."""
    screen, app = widget.screen, widget.app
    if not SUPPORTED:
        return False
    if (
        screen is not app.screen
        or app.is_inline
        or getattr(app, "_batch_count", True)
        or screen.selections
    ):
        return False
    inside = Region(0, 0, *app.size).contains_region(widget.region)
    return inside and not any(_covers(child) for child in screen.children)


def _covers(child: Widget) -> bool:
    """What Textual shows above a screen's own widgets."""
    if isinstance(child, ToastRack):
        return bool(child.children)
    return isinstance(child, Tooltip) and child.display


def paint(widget: Widget, first: int, strips: Sequence[Strip]) -> None:
    """Write these strips as the content's rows from ``first`` on."""
    region = widget.scrollable_content_region
    filters, background = widget.app.get_line_filters(), widget.background_colors[1]
    for each in filters:
        strips = [strip.apply_filter(each, background) for strip in strips]
    # What Textual remembers of the widget's lines is of the frame before.
    widget._styles_cache.clear()
    rows = Rows(region.x, region.y + first, strips)
    widget.app._display(widget.screen, rows)  # type: ignore[arg-type]  # as for every update
