"""The small widgets of every screen: the bar on top, steppers, meters, metric cards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

MODE_LABELS: Final = {
    "models": "Models",
    "plan": "Plan",
    "chat": "Chat",
    "monitor": "Monitor",
    "server": "Server",
    "bench": "Bench",
}
HISTORY: Final = 240
"""Readings a sparkline keeps: four minutes at one a second."""


class NavBar(Widget):
    """Where you are, where you can go, and which model answers. Two rows on every screen."""

    DEFAULT_CSS = """
    NavBar { dock: top; height: 2; width: 1fr; background: $background; }
    """
    status: reactive[str] = reactive("")
    mark: reactive[str] = reactive("○")

    class Chosen(Message):
        """A tab was clicked."""

        def __init__(self, mode: str) -> None:
            super().__init__()
            self.mode = mode

    def __init__(self, active: str) -> None:
        super().__init__()
        self._active = active
        self._spans: list[tuple[int, int, str]] = []

    def render_line(self, y: int) -> Strip:
        segments = self._tabs() if y == 0 else self._rule()
        base = self.rich_style
        painted = [Segment(text, base + (style or Style.null())) for text, style, _ in segments]
        return Strip(painted).adjust_cell_length(self.size.width, base)

    def _tabs(self) -> list[Segment]:
        ink = self.app.theme_variables
        roomy = self.size.width >= 100
        segments = [Segment(" ▞ edgellm " if roomy else " ▞ ", _style(ink["primary"], bold=True))]
        at = len(segments[0].text)
        self._spans = []
        for number, (mode, label) in enumerate(MODE_LABELS.items(), 1):
            active = mode == self._active
            parts = [
                Segment(f" {number} ", _style(ink["primary" if active else "faint"])),
                Segment(f"{label} ", _style(ink["foreground" if active else "muted"], bold=active)),
            ]
            width = sum(len(part.text) for part in parts)
            self._spans.append((at, at + width, mode))
            at += width
            segments += parts
        return segments + self._status(self.size.width - at)

    def _status(self, room: int) -> list[Segment]:
        ink = self.app.theme_variables
        text = (
            self.status if len(self.status) <= room - 4 else self.status[: max(room - 5, 0)] + "…"
        )
        gap = max(room - len(text) - 3, 0)
        color = {"●": "success", "◐": "warning", "✗": "error"}.get(self.mark, "faint")
        return [
            Segment(" " * gap),
            Segment(f"{self.mark} ", _style(ink[color])),
            Segment(f"{text} ", _style(ink["muted"])),
        ]

    def _rule(self) -> list[Segment]:
        ink = self.app.theme_variables
        active = next(((a, b) for a, b, mode in self._spans if mode == self._active), (0, 0))
        start, end = active
        return [
            Segment("─" * start, _style(ink["border"])),
            Segment("━" * (end - start), _style(ink["primary"])),
            Segment("─" * max(self.size.width - end, 0), _style(ink["border"])),
        ]

    def on_click(self, event: events.Click) -> None:
        for start, end, mode in self._spans:
            if start <= event.x < end:
                self.post_message(self.Chosen(mode))


class Stepper(Widget, can_focus=True):
    """One value out of a row: left and right step through it, ``a`` gives it back to the planner.

    ``index`` None means automatic; ``shown`` is what the planner chose.
    """

    DEFAULT_CSS = """
    Stepper { height: 1; width: 1fr; }
    Stepper:focus { background: $block-cursor-background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h,minus", "step(-1)", "Less", id="stepper.less"),
        Binding("right,l,plus", "step(1)", "More", id="stepper.more"),
        Binding("a", "auto", "Auto", id="stepper.auto"),
    ]
    index: reactive[int | None] = reactive(None)
    shown: reactive[str] = reactive("")
    note: reactive[str] = reactive("")

    class Changed(Message):
        """Somebody chose another value (``value`` None: the planner decides)."""

        def __init__(self, stepper: Stepper, value: object) -> None:
            super().__init__()
            self.stepper = stepper
            self.value = value

        @property
        def control(self) -> Stepper:
            return self.stepper

    def __init__(self, name: str, label: str, values: Sequence[object], *, help: str = "") -> None:
        super().__init__(id=f"step-{name.replace('_', '-')}")
        self.field = name
        self.label = label
        self.values = list(values)
        self.tooltip = help or None

    @property
    def value(self) -> object:
        return None if self.index is None else self.values[self.index]

    def render_line(self, y: int) -> Strip:  # noqa: ARG002
        ink = self.app.theme_variables
        focused = self.has_focus
        text = self.shown or "-"
        auto = self.index is None
        arrows = _style(ink["primary" if focused else "faint"])
        segments = [
            Segment("▸ " if focused else "  ", _style(ink["primary"], bold=True)),
            Segment(self.label.ljust(19), _style(ink["foreground" if focused else "muted"])),
            Segment("◂ ", arrows),
            Segment(text.rjust(8), _style(ink["foreground"], bold=not auto)),
            Segment(" ▸ ", arrows),
            Segment("auto " if auto else "set  ", _style(ink["faint" if auto else "accent"])),
            Segment(self.note, _style(ink["muted"])),
        ]
        base = self.rich_style
        painted = [Segment(text, base + (style or Style.null())) for text, style, _ in segments]
        return Strip(painted).adjust_cell_length(self.size.width, base)

    def action_step(self, step: int) -> None:
        at = self._nearest() if self.index is None else self.index
        new = min(max(at + step, 0), len(self.values) - 1)
        if new != self.index:
            self.index = new
            self.post_message(self.Changed(self, self.value))

    def action_auto(self) -> None:
        if self.index is not None:
            self.index = None
            self.post_message(self.Changed(self, None))

    def on_click(self, event: events.Click) -> None:
        if 21 <= event.x < 24:
            self.action_step(-1)
        elif 31 <= event.x < 35:
            self.action_step(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        if self.has_focus:
            event.stop()
            self.action_step(1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        if self.has_focus:
            event.stop()
            self.action_step(-1)

    def _nearest(self) -> int:
        """Where stepping starts from when the planner had chosen."""
        shown = self.shown.replace(",", "")
        for i, value in enumerate(self.values):
            if str(value) == shown:
                return i
        numbers = [v for v in self.values if isinstance(v, int)]
        if shown.isdigit() and numbers:
            return min(range(len(numbers)), key=lambda i: abs(numbers[i] - int(shown)))
        return 0


class Meter(Widget):
    """A thin bar with words after it: ``ctx ━━━━━━──── 1,204 / 8,192``."""

    DEFAULT_CSS = """
    Meter { height: 1; width: 1fr; }
    """
    fraction: reactive[float] = reactive(0.0)
    text: reactive[str] = reactive("")
    label: reactive[str] = reactive("")
    right: reactive[str] = reactive("")
    """Words at the right edge, where there is room for them."""

    def __init__(
        self, label: str = "", *, bar: int = 20, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.set_reactive(Meter.label, label)
        self._bar = bar

    def render_line(self, y: int) -> Strip:  # noqa: ARG002
        ink = self.app.theme_variables
        width = self.size.width
        words = len(self.label) + len(self.text) + len(self.right)
        n = min(self._bar, max(width - words - 5, 6))
        full = min(max(round(self.fraction * n), 1 if self.fraction > 0 else 0), n)
        color = ink[
            "error" if self.fraction > 0.95 else "warning" if self.fraction > 0.8 else "primary"
        ]
        segments = [
            Segment(f"{self.label} " if self.label else "", _style(ink["muted"])),
            Segment("━" * full, _style(color)),
            Segment("─" * (n - full), _style(ink["border"])),
            Segment(f" {self.text}", _style(ink["muted"])),
        ]
        room = width - sum(len(segment.text) for segment in segments)
        if len(self.right) < room:
            segments.append(Segment(self.right.rjust(room), _style(ink["muted"])))
        base = self.rich_style
        painted = [Segment(text, base + (style or Style.null())) for text, style, _ in segments]
        return Strip(painted).adjust_cell_length(width, base)


class Spark(Widget):
    """The last readings as bars from zero, the newest at the right edge."""

    DEFAULT_CSS = """
    Spark { height: 2; width: 1fr; color: $primary 75%; }
    """
    data: reactive[Sequence[float]] = reactive(tuple)
    EIGHTHS = " ▁▂▃▄▅▆▇█"

    def render_line(self, y: int) -> Strip:
        width, height = self.size.width, self.size.height
        shown = list(self.data)[-width:]
        # A little air above the highest bar: a steady value is a band, not a wall.
        top = max(shown, default=0.0) * 1.25 or 1.0
        levels = [round(max(value, 0.0) / top * height * 8) for value in shown]
        below = (height - 1 - y) * 8
        bars = "".join(self.EIGHTHS[min(max(level - below, 0), 8)] for level in levels)
        return Strip([Segment(bars.rjust(width), self.rich_style)])


class Metric(Vertical):
    """A number that lives: its name, its value now, and the last minutes as a sparkline."""

    DEFAULT_CSS = """
    Metric { height: 4; width: 1fr; padding: 0 1; background: $surface; }
    Metric .metric-name { color: $muted; height: 1; text-wrap: nowrap; }
    Metric .metric-value { text-style: bold; height: 1; text-wrap: nowrap; }
    """

    def __init__(self, name: str, *, id: str) -> None:
        super().__init__(id=id)
        self._title = name
        self._data: deque[float] = deque(maxlen=HISTORY)

    def compose(self) -> ComposeResult:
        yield Static(self._title, classes="metric-name")
        yield Static("–", classes="metric-value")
        yield Spark()

    @property
    def data(self) -> list[float]:
        return list(self._data)

    def push(self, value: float | None, text: str, *, title: str | None = None) -> None:
        """A new reading; None keeps the line as it is and says there is nothing."""
        self.query_one(".metric-value", Static).update(text)
        if title is not None and title != self._title:
            self._title = title
            self.query_one(".metric-name", Static).update(title)
        if value is not None:
            self._data.append(value)
            self.query_one(Spark).data = tuple(self._data)


def _style(color: str, *, bold: bool = False) -> Style:
    return Style(color=color, bold=bold)
