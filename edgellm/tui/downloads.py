"""Downloads that go on while you look elsewhere: several at once, paused, resumed, cancelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from edgellm.errors import EdgeLLMError
from edgellm.tui.ports import ModelRow, Progress
from edgellm.units import format_bytes

Pull = Callable[[str, Callable[[Progress], None], Callable[[], bool]], str]
""":meth:`edgellm.tui.ports.Services.pull`."""


@dataclass
class Download:
    """One model on its way. ``state``: running, paused, cancelled, done or failed."""

    row: ModelRow
    state: str = "running"
    progress: Progress = field(default_factory=lambda: Progress(phase="starting"))
    error: EdgeLLMError | None = None
    path: str = ""


class DownloadsChanged(Message, bubble=True):
    """A download moved or changed its state; ``finished`` when its file is here now."""

    def __init__(self, download: Download, *, finished: bool = False) -> None:
        super().__init__()
        self.download = download
        self.finished = finished


class Downloads:
    """All downloads of this run, by reference. What has arrived stays on disk when one stops."""

    def __init__(
        self,
        pull: Pull,
        start: Callable[[Callable[[], None]], object],
        tell: Callable[[DownloadsChanged], object],
    ) -> None:
        """``start`` runs a call in a thread of its own; ``tell`` may be called from any."""
        self._pull, self._start, self._send = pull, start, tell
        self.items: dict[str, Download] = {}

    def start(self, row: ModelRow) -> None:
        """Begin, or go on where it stopped."""
        known = self.items.get(row.ref)
        if known is not None and known.state == "running":
            return
        download = Download(row)
        self.items[row.ref] = download
        self._start(partial(self._run, download))
        self._tell(download)

    def pause(self, ref: str) -> None:
        self._stop(ref, "paused")

    def cancel(self, ref: str) -> None:
        self._stop(ref, "cancelled")

    def _stop(self, ref: str, state: str) -> None:
        download = self.items.get(ref)
        if download is not None and download.state in ("running", "paused"):
            download.state = state
            self._tell(download)

    def _run(self, download: Download) -> None:
        """In a thread: the seam's blocking pull."""

        def on_progress(progress: Progress) -> None:
            download.progress = progress
            self._tell(download)

        try:
            download.path = self._pull(
                download.row.ref, on_progress, lambda: download.state != "running"
            )
        except EdgeLLMError as error:
            if download.state == "running":
                download.state, download.error = "failed", error
        else:
            if download.state == "running":
                download.state = "done"
        self._tell(download, finished=download.state == "done")

    def _tell(self, download: Download, *, finished: bool = False) -> None:
        self._send(DownloadsChanged(download, finished=finished))


COLORS = {"done": "success", "failed": "error", "paused": "warning"}
MARKS = {"running": "↓", "paused": "‖", "done": "✓", "failed": "✗", "cancelled": "✗"}


class DownloadList(Widget):
    """A row a download: state, name, bar, size, speed, time left."""

    DEFAULT_CSS = """
    DownloadList { height: auto; max-height: 5; padding: 0 1; }
    """

    def __init__(self, downloads: Downloads) -> None:
        super().__init__()
        self._downloads = downloads

    def _shown(self) -> list[Download]:
        items = self._downloads.items.values()
        return [item for item in items if item.state != "cancelled"][-5:]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return len(self._shown())

    def render_line(self, y: int) -> Strip:
        shown, width = self._shown(), self.content_size.width
        base = self.rich_style
        if y >= len(shown):
            return Strip.blank(width, base)
        segments = self._line(shown[y], width)
        painted = [Segment(text, base + (style or Style.null())) for text, style, _ in segments]
        return Strip(painted).adjust_cell_length(width, base)

    def _line(self, item: Download, width: int) -> list[Segment]:
        ink = self.app.theme_variables
        color = COLORS.get(item.state, "primary")
        n_name = 20 if width < 100 else 28
        n_bar = min(max(width - n_name - 52, 6), 40)
        progress = item.progress
        share = progress.n_done / progress.n_total if progress.n_total else 0.0
        full = round(share * n_bar) if item.state != "done" else n_bar
        head = [
            Segment(f"{MARKS[item.state]} ", Style(color=ink[color], bold=True)),
            Segment(item.row.name[:n_name].ljust(n_name + 1), Style(color=ink["foreground"])),
        ]
        if item.state == "failed":
            return [*head, Segment(_facts(item), Style(color=ink["muted"]))]  # room for the reason
        return [
            *head,
            Segment("━" * full, Style(color=ink[color])),
            Segment("─" * (n_bar - full), Style(color=ink["border"])),
            Segment(f" {share * 100:3.0f} %  ", Style(bold=True)),
            Segment(_facts(item), Style(color=ink["muted"])),
        ]


def _facts(item: Download) -> str:
    progress = item.progress
    if item.state == "failed" and item.error is not None:
        return item.error.message
    if item.state == "done":
        return "on this machine"
    done, total = (format_bytes(n, digits=1) for n in (progress.n_done, progress.n_total))
    size = f"{done} of {total}" if progress.n_total else done
    if item.state == "paused":
        return f"{size}, paused"
    if progress.phase != "downloading":
        return f"{size}, {progress.phase}" if progress.n_total else progress.phase
    if not progress.rate:
        return size
    left = max(progress.n_total - progress.n_done, 0) / progress.rate
    rate = format_bytes(int(progress.rate), digits=1)
    return f"{size}  {rate}/s  {_duration(left)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
