"""Bench: archived runs in a table, two of them side by side, and a plot of the chosen metric."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.reactive import reactive
from textual.widgets import DataTable, Static

from edgellm.errors import EdgeLLMError
from edgellm.tui.ports import Json
from edgellm.tui.runs import Run, read_run
from edgellm.tui.screens.base import EdgeScreen

EMPTY = """No benchmark has been run yet.

[b]edgellm bench starter[/b] measures speed and memory and keeps the run here.
[b]r[/b] looks again."""


class BenchScreen(EdgeScreen):
    """Runs, newest first. Space marks one; the marked and the highlighted one are compared."""

    MODE = "bench"
    AUTO_FOCUS = "#runs"
    CSS = """
    BenchScreen #main { height: 1fr; }
    BenchScreen #runs { width: 1fr; margin: 0 1; overflow-x: hidden; }
    BenchScreen #side { width: 54; padding: 0 2; border-left: vkey $border; }
    BenchScreen #empty { padding: 3 4; color: $muted; display: none; }
    BenchScreen.-narrow #main { layout: vertical; }
    BenchScreen.-narrow #side {
        width: 1fr; height: 11; border-left: none; border-top: solid $border; padding: 0 2;
    }
    BenchScreen #plot { height: 16; margin: 1 1 0 1; display: none; }
    BenchScreen.-tall #plot { display: block; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "mark", "Mark to compare", id="bench.mark"),
        Binding("r", "refresh", "Look again", id="bench.refresh"),
    ]
    runs: reactive[list[Run]] = reactive(list, always_update=True)
    marked: reactive[int | None] = reactive(None)

    def body(self) -> ComposeResult:
        yield Static(EMPTY, id="empty")
        with Horizontal(id="main"):
            yield DataTable(id="runs", cursor_type="row")
            with Vertical(id="side"):
                yield Static(id="compare")
        yield Horizontal(id="plot")

    def ready(self) -> None:
        table: DataTable[Text] = self.query_one("#runs", DataTable)
        for label, width in (("", 1), ("when", 16), ("model", 21), ("scenario", 11)):
            table.add_column(label, width=width, key=label or "mark")
        for label in ("decode", "TTFT"):
            table.add_column(Text(label, justify="right"), width=8, key=label)
        table.focus()

    def recolored(self) -> None:
        self.watch_runs(self.runs)

    def shown(self) -> None:
        self.action_refresh()

    @work(thread=True, exclusive=True, group="runs")
    def action_refresh(self) -> None:
        try:
            found = self.edge.services.bench_runs()
        except EdgeLLMError as error:
            self.app.call_from_thread(self.edge.report, error)
            return
        self.app.call_from_thread(self._found, found)

    def _found(self, found: list[Json]) -> None:
        self.runs = [read_run(data) for data in found]

    def watch_runs(self, runs: list[Run]) -> None:
        if not self.is_mounted:
            return
        self.query_one("#empty").display = not runs
        self.query_one("#main").display = bool(runs)
        self.query_one("#plot").display = bool(runs) and self.has_class("-tall")
        self._fill()
        if runs:
            self._make_plot()

    def _fill(self) -> None:
        ink = self.app.theme_variables
        table: DataTable[Text] = self.query_one("#runs", DataTable)
        row = table.cursor_row
        table.clear()
        for i, run in enumerate(self.runs):
            mark = "◆" if i == self.marked else ""
            table.add_row(
                Text(mark, style=ink["accent"]), Text(run.when, style=ink["muted"]),
                Text(run.model), Text(run.scenario, style=ink["muted"]),
                Text(run.shown("decode_tps_p50"), justify="right", style=ink["primary"]),
                Text(run.shown("ttft_p50_s"), justify="right"),
            )  # fmt: skip
        if self.runs:
            table.move_cursor(row=min(row, len(self.runs) - 1))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if 0 <= event.cursor_row < len(self.runs):
            self._compare(self.runs[event.cursor_row])

    def _compare(self, run: Run) -> None:
        other = None if self.marked is None else self.runs[self.marked]
        self.query_one("#compare", Static).update(_table(run, other, self.app.theme_variables))

    def action_mark(self) -> None:
        table: DataTable[Text] = self.query_one("#runs", DataTable)
        if not self.runs:
            return
        self.marked = None if self.marked == table.cursor_row else table.cursor_row
        self._fill()
        self._compare(self.runs[table.cursor_row])

    @work(exclusive=True, group="plot")
    async def _make_plot(self) -> None:
        """A bar a run, oldest on the left: decode speed over time."""
        if not self.has_class("-tall"):
            return
        from textual.color import Color
        from textual_plotext import PlotextPlot

        plot = PlotextPlot()
        shown = [run for run in reversed(self.runs[:16]) if run.values.get("decode_tps_p50")]
        plt: Any = plot.plt
        plt.title("decode tok/s, oldest first")
        color = tuple(Color.parse(self.app.theme_variables["primary"]).rgb)
        labels = [f"{run.when[5:10]} {run.model[:10]}" for run in shown]
        plt.bar(labels, [run.values["decode_tps_p50"] for run in shown], color=color, width=0.5)
        # Only now: plotext keeps the scale of what it drew first, were it nothing.
        box = self.query_one("#plot")
        await box.remove_children()
        await box.mount(plot)


def _table(run: Run, other: Run | None, ink: dict[str, str]) -> Table:
    table = Table(
        title=f"{run.model} · {run.scenario}", title_style=f"bold {ink['primary']}", box=None,
        title_justify="left", expand=True, header_style=ink["faint"], padding=(0, 1),
        pad_edge=False,
    )  # fmt: skip
    table.add_column("")
    table.add_column("this", justify="right")
    if other is not None:
        table.add_column("◆ marked", justify="right")
        table.add_column("change", justify="right")
    for name, label in Run.LABELS.items():
        if name not in run.values:
            continue
        cells = [Text(label, style=ink["muted"]), Text(run.shown(name))]
        if other is not None:
            cells += [Text(other.shown(name)), _change(run, other, name, ink)]
        table.add_row(*cells)
    return table


def _change(run: Run, other: Run, name: str, ink: dict[str, str]) -> Text:
    old, new = other.values.get(name), run.values.get(name)
    if not old or new is None:
        return Text("–")
    change = new / old - 1
    better = (change > 0) == ("tps" in name)
    color = "muted" if abs(change) < 0.005 else "success" if better else "error"
    word = "" if abs(change) < 0.005 else " better" if better else " worse"
    return Text(f"{change * 100:+.1f} %{word}", style=ink[color])


def make() -> BenchScreen:
    return BenchScreen()
