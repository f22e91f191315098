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
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip
from textual.widgets import Tooltip
from textual.widgets._toast import ToastRack

if TYPE_CHECKING:
    from textual.widget import Widget


SUPPORTED: Final = hasattr(App, "_display") and hasattr(App, "batch_update")
"""Whether this Textual has the parts that are used here; without them all is drawn its own way."""


class Rows(CompositorUpdate):
    """Strips from one place of the screen downwards, and from others."""

    def __init__(self, x: int, y: int, strips: Sequence[Strip], *others: Rows) -> None:
        self._x, self._y, self._strips, self._others = x, y, strips, others

    def render_segments(self, console: Console) -> str:
        text = "".join(
            f"\x1b[{self._y + i + 1};{self._x + 1}H{strip.render(console)}"
            for i, strip in enumerate(self._strips)
        )
        return text + "".join(other.render_segments(console) for other in self._others)


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


def paint(widget: Widget, first: int, strips: Sequence[Strip], *others: Rows) -> None:
    """Write these strips as the content's rows from ``first`` on, and the others where they go."""
    region = widget.scrollable_content_region
    # What Textual remembers of the widget's lines is of the frame before.
    widget._styles_cache.clear()
    rows = Rows(region.x, region.y + first, _filtered(widget, strips), *others)
    widget.app._display(widget.screen, rows)  # type: ignore[arg-type]  # as for every update


def bar_rows(bar: ScrollBar, n_lines: int, top: int) -> Rows:
    """A vertical bar as it will look with so many lines, scrolled to ``top``; it is not changed.

    A bar that is told of its new place is drawn by the compositor, with all that it touches: 7 ms.
    """
    look, height = bar.render(), bar.size.height
    if isinstance(look, ScrollBarRender):
        look.virtual_size, look.position = n_lines, top
        look.window_size = height if height < n_lines else 0
    console = bar.app.console
    options = console.options.update(width=bar.size.width, height=height)
    lines = console.render_lines(look, options, style=bar.rich_style)
    return Rows(bar.region.x, bar.region.y, _filtered(bar, [Strip(line) for line in lines]))


def _filtered(widget: Widget, strips: Sequence[Strip]) -> Sequence[Strip]:
    background = widget.background_colors[1]
    for each in widget.app.get_line_filters():
        strips = [strip.apply_filter(each, background) for strip in strips]
    return strips
