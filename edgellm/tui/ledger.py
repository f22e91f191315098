"""The plan bar: where every byte of a device goes, in proportion, with its exact MiB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from edgellm.planner.plan import DeviceLedger, HostLedger, Plan
from edgellm.tui.palette import ENTRIES
from edgellm.units import MiB

FIELDS: Final = {entry[0]: entry for entry in ENTRIES}
BAR_ROWS: Final = 2


class Share(msgspec.Struct, frozen=True):
    """One stretch of a bar: an entry of the ledger and its bytes."""

    field: str
    n_bytes: int

    @property
    def label(self) -> str:
        return FIELDS[self.field][1]

    @property
    def letter(self) -> str:
        return FIELDS[self.field][2]


class Bar(msgspec.Struct, frozen=True):
    """What is drawn for one device: its name, its shares in order, and what is over or spare."""

    id: str
    name: str
    total: int
    shares: tuple[Share, ...]
    headroom: int

    @property
    def used(self) -> int:
        spare = ("margin", "free")
        return sum(share.n_bytes for share in self.shares if share.field not in spare)


def device_bar(ledger: DeviceLedger) -> Bar:
    """A GPU: what others hold, the plan's entries, the margin, and what stays free."""
    names = ("weights", "extra", "kv_cache", "recurrent_state", "compute", "overhead")
    shares = [Share("taken", ledger.total - ledger.free)]
    shares += [Share(name, getattr(ledger, name, 0)) for name in names]
    shares += [Share("margin", ledger.margin), Share("free", ledger.headroom)]
    kept = tuple(share for share in shares if share.n_bytes > 0)
    return Bar(ledger.id, ledger.name, ledger.total, kept, ledger.headroom)


def host_bar(ledger: HostLedger) -> Bar:
    """The RAM: what others hold, the plan's entries, and what stays free."""
    names = ("repacked", "extra", "kv_cache", "recurrent_state", "compute", "output", "process")
    shares = [Share("taken", ledger.total - ledger.available)]
    shares.append(Share("weights", ledger.weights - getattr(ledger, "idle", 0)))
    shares += [Share(name, getattr(ledger, name, 0)) for name in names]
    headroom = ledger.available - ledger.used
    shares.append(Share("free", headroom))
    kept = tuple(share for share in shares if share.n_bytes > 0)
    return Bar("RAM", "", ledger.total, kept, headroom)


def plan_bars(plan: Plan) -> tuple[Bar, ...]:
    """A bar a device, the host last."""
    return (*(device_bar(device) for device in plan.devices), host_bar(plan.host))


def allocate(sizes: Sequence[int], width: int) -> list[int]:
    """Cells for each size, in proportion, adding up to ``width``; nothing that is there vanishes.

    Every size gets one cell first; the rest goes by largest remainder.
    """
    if not sizes or width <= 0:
        return [0] * len(sizes)
    if len(sizes) >= width:
        return [1 if i < width else 0 for i in range(len(sizes))]
    total = sum(sizes) or 1
    exact = [max(size / total * width, 1.0) for size in sizes]
    # Sizes raised to one cell are paid for by the larger ones.
    large = sum(cells for cells in exact if cells > 1)
    spare = width - sum(1 for cells in exact if cells <= 1)
    scaled = [cells if cells <= 1 else max(cells * spare / large, 1.0) for cells in exact]
    cells = [int(value) for value in scaled]
    order = sorted(range(len(sizes)), key=lambda i: scaled[i] - cells[i], reverse=True)
    for i in order[: width - sum(cells)]:
        cells[i] += 1
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    return cells


def mib(n_bytes: int) -> str:
    """Exact to the MiB, with thousands apart: ``4,403 MiB``."""
    return f"{round(n_bytes / MiB):,} MiB"


class LedgerBar(Widget):
    """One device: a title, a bar of two rows, and a legend with every entry's MiB."""

    DEFAULT_CSS = """
    LedgerBar { height: auto; width: 1fr; }
    """
    bar: reactive[Bar | None] = reactive(None, layout=True)
    legend: reactive[bool] = reactive(True, layout=True)

    def __init__(
        self, bar: Bar | None = None, *, legend: bool = True, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self.set_reactive(LedgerBar.bar, bar)
        self.set_reactive(LedgerBar.legend, legend)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        if self.bar is None:
            return 0
        return 1 + BAR_ROWS + (len(self._legend_rows(width)) if self.legend else 0)

    def render_line(self, y: int) -> Strip:
        width, bar = self.size.width, self.bar
        if bar is None or width < 8:
            return Strip.blank(width, self.rich_style)
        if y == 0:
            segments = self._title(bar, width)
        elif y <= BAR_ROWS:
            segments = self._row(bar, width, y - 1)
        else:
            rows = self._legend_rows(width)
            segments = rows[y - 1 - BAR_ROWS] if y - 1 - BAR_ROWS < len(rows) else []
        base = self.rich_style
        painted = [Segment(text, base + (style or Style.null())) for text, style, _ in segments]
        return Strip(painted).adjust_cell_length(width, base)

    def _color(self, name: str) -> str:
        return self.app.theme_variables[name]

    def _title(self, bar: Bar, width: int) -> list[Segment]:
        over = bar.headroom < 0
        tail = f"over by {mib(-bar.headroom)}" if over else f"{mib(bar.headroom)} to spare"
        sign = "✗" if over else "✓"
        right = f"{mib(bar.used)} of {mib(bar.total)} · {sign} {tail}"
        left = f"{bar.id}  "
        room = max(width - len(left) - len(right) - 2, 0)
        name = bar.name if len(bar.name) <= room else f"{bar.name[: max(room - 1, 0)].rstrip()}…"
        gap = " " * max(width - len(left) - len(name) - len(right), 1)
        color = self._color("error" if over else "success")
        head, _, end = right.partition(" · ")
        return [
            Segment(left, Style(color=self._color("primary"), bold=True)),
            Segment(name, Style(color=self._color("muted"))),
            Segment(gap),
            Segment(head + " · ", Style(color=self._color("muted"))),
            Segment(end, Style(color=color, bold=over)),
        ]

    def _row(self, bar: Bar, width: int, row: int) -> list[Segment]:
        cells = allocate([share.n_bytes for share in bar.shares], width)
        return [
            self._stretch(share, n, row)
            for share, n in zip(bar.shares, cells, strict=True)
            if n > 0
        ]

    def _stretch(self, share: Share, n: int, row: int) -> Segment:
        fill = FIELDS[share.field][3] if self.app.no_color else " "
        text = _fit(share, n, row)
        body = f" {text} ".center(n, "\0") if text and len(text) + 2 <= n else text.center(n, "\0")
        # A fill of its own carries the meaning where there is no colour.
        body = body.replace("\0", fill)[:n]
        return Segment(body, self._paint(share.field))

    def _paint(self, field: str) -> Style:
        if self.app.no_color:
            return Style()
        background = self._color(FIELDS[field][4])
        quiet = field in ("free", "margin", "taken")
        return Style(color=self._color("muted" if quiet else "on-ledger"), bgcolor=background)

    def _legend_rows(self, width: int) -> list[list[Segment]]:
        bar = self.bar
        if bar is None:
            return []
        rows: list[list[Segment]] = [[]]
        used = 0
        for share in bar.shares:
            item = self._legend_item(share)
            size = sum(len(segment.text) for segment in item)
            if used and used + size > width:
                rows.append([])
                used = 0
            rows[-1] += item
            used += size
        return rows

    def _legend_item(self, share: Share) -> list[Segment]:
        _, label, letter, fill, color = FIELDS[share.field]
        mark = fill if self.app.no_color else "■"
        return [
            Segment(mark, Style() if self.app.no_color else Style(color=self._color(color))),
            Segment(f" {letter} ", Style(bold=True)),
            Segment(f"{label} ", Style(color=self._color("muted"))),
            Segment(f"{mib(share.n_bytes)}   ", Style()),
        ]


def _fit(share: Share, n: int, row: int) -> str:
    """The longest true thing that fits into ``n`` cells of a row."""
    if row == 1:
        exact = mib(share.n_bytes)
        short = exact.removesuffix(" MiB")
        return exact if len(exact) + 2 <= n else (short if len(short) <= n else "")
    label = share.label
    return label if len(label) + 2 <= n else share.letter
