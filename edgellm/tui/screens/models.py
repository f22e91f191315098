"""Models: everything that is here or could be, with its verdict on this machine."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import DataTable, Input, Label, Static
from textual.widgets.data_table import RowKey
from textual.worker import get_current_worker

from edgellm.errors import DoesNotFitError, EdgeLLMError
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.tui.downloads import DownloadList, DownloadsChanged
from edgellm.tui.ports import ModelRow
from edgellm.tui.screens.base import Command, EdgeScreen
from edgellm.units import format_bytes

COLUMNS = (
    ("", 1), ("Model", 21), ("Quant", 7), ("Size", 8), ("Here", 9), ("tok/s", 5), ("Context", 7),
)  # fmt: skip
RIGHT = ("Size", "tok/s", "Context")
MORE = (("From", 14), ("Licence", 12))
"""Columns for which only a wide terminal has room."""
DETAILS_CELLS = 46
WIDE = 110
SOURCES = {"here": "●", "catalog": "○", "hub": "◌"}


class Found(Message):
    """Rows from one source, replacing what was known of it."""

    def __init__(self, source: str, rows: list[ModelRow]) -> None:
        super().__init__()
        self.source = source
        self.rows = rows


class Judged(Message):
    """What the planner says of one model here: a plan, or why there is none."""

    def __init__(self, ref: str, outcome: Plan | EdgeLLMError) -> None:
        super().__init__()
        self.ref = ref
        self.outcome = outcome


class ModelTable(DataTable[Text]):
    """The table, saying in the footer what Enter does."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Plan", id="models.plan")
    ]


class ModelsScreen(EdgeScreen):
    """A table to filter, details beside it, downloads below it."""

    MODE = "models"
    AUTO_FOCUS = "#table"
    CSS = """
    ModelsScreen #bar { height: 1; padding: 0 2; margin-bottom: 1; }
    ModelsScreen #bar Label { color: $primary; width: auto; }
    ModelsScreen #bar #counts { color: $faint; }
    ModelsScreen #filter { width: 1fr; border: none; background: $background; padding: 0 1; }
    ModelsScreen #main { height: 1fr; }
    ModelsScreen #table { width: 1fr; margin: 0 1; overflow-x: hidden; }
    ModelsScreen #details { width: 46; padding: 0 2; border-left: vkey $border; }
    ModelsScreen #empty { height: auto; padding: 1 3; color: $muted; display: none; }
    ModelsScreen.-narrow #main { layout: vertical; }
    ModelsScreen.-narrow #details {
        width: 1fr; height: 8; border-left: none; border-top: solid $border; padding: 0 2;
    }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "chat", "Chat", id="models.chat"),
        Binding("d", "download", "Download", id="models.download"),
        Binding("p", "pause", "Pause/resume", id="models.pause"),
        Binding("x", "cancel", "Cancel", id="models.cancel"),
        Binding("slash", "filter", "Filter", id="models.filter", key_display="/"),
        Binding("s", "search", "Search the hub", id="models.search"),
        Binding("u", "refresh", "Look again", id="models.refresh", show=False),
        Binding("escape", "table", "Table", show=False),
    ]
    query_text: reactive[str] = reactive("")
    current: reactive[ModelRow | None] = reactive(None)

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, list[ModelRow]] = {"here": [], "catalog": [], "hub": []}
        self._verdicts: dict[str, Plan | EdgeLLMError] = {}
        self._shown: list[tuple[str, int]] = []

    def body(self) -> ComposeResult:
        with Horizontal(id="bar"):
            yield Label("/")
            yield Input(
                placeholder="type to filter, enter searches the hub", id="filter", compact=True
            )
            yield Label(id="counts")
        with Horizontal(id="main"):
            with Vertical():
                yield ModelTable(id="table", cursor_type="row")
                yield Static(id="empty")
            with VerticalScroll(id="details"):
                yield Static(id="facts")
        yield DownloadList(self.edge.downloads)

    def ready(self) -> None:
        self._arrange()
        self.query_one("#table").focus()
        self.action_refresh()
        self.watch(self.app, "wanted", self._wanted)

    def _wanted(self, query: str) -> None:
        """Another screen asks for models of a name."""
        if query:
            self.query_one("#filter", Input).value = self.query_text = query
            self.action_search()

    def on_resize(self) -> None:
        self._arrange()

    def recolored(self) -> None:
        self._fill()
        self.watch_current(self.current)

    def _arrange(self) -> None:
        """As many columns as there is room for, the model's as wide as that leaves it."""
        columns = columns_for(self.size.width)
        if not self.size.width or columns == self._shown:
            return
        self._shown = columns
        table: DataTable[Text] = self.query_one("#table", DataTable)
        table.clear(columns=True)
        for label, width in columns:
            text = Text(label, justify="right" if label in RIGHT else "left")
            table.add_column(text, width=width, key=label or "source")
        self._fill()

    # -- looking ---------------------------------------------------------------------------------

    def action_refresh(self) -> None:
        self._look()

    @work(thread=True, exclusive=True, group="look")
    def _look(self) -> None:
        services = self.edge.services
        for source, ask in (("here", services.local_models), ("catalog", services.catalog)):
            try:
                self.post_message(Found(source, ask()))
            except EdgeLLMError as error:
                self.app.call_from_thread(self.edge.report, error)

    @on(Found)
    def _found(self, event: Found) -> None:
        self._rows[event.source] = event.rows
        self._fill()
        if event.source == "here":
            self._judge([row for row in event.rows if row.ref not in self._verdicts])
        elif event.source == "hub" and not event.rows:
            self.notify(f"nothing on the hub for {self.query_text!r}", severity="warning")

    @work(thread=True, exclusive=True, group="judge")
    def _judge(self, rows: list[ModelRow]) -> None:
        """Plan model after model: headers are read, never weights."""
        worker = get_current_worker()
        for row in rows:
            if worker.is_cancelled:
                return
            outcome: Plan | EdgeLLMError
            try:
                outcome = self.edge.services.plan(row.ref, PlanRequest())
            except EdgeLLMError as error:
                outcome = error
            self.post_message(Judged(row.ref, outcome))

    @on(Judged)
    def _judged(self, event: Judged) -> None:
        self._verdicts[event.ref] = event.outcome
        table: DataTable[Text] = self.query_one("#table", DataTable)
        row = next((row for row in self._visible() if row.ref == event.ref), None)
        if row is not None and event.ref in {key.value for key in table.rows}:
            for name, cell in self._verdict(row).items():
                table.update_cell(event.ref, name, cell)
        if self.current is not None and self.current.ref == event.ref:
            self.watch_current(self.current)

    # -- the table -------------------------------------------------------------------------------

    def _visible(self) -> list[ModelRow]:
        here = {row.name for row in self._rows["here"]}
        rows = [
            *self._rows["here"],
            *(row for row in self._rows["catalog"] if row.name not in here),
            *self._rows["hub"],
        ]
        words = self.query_text.lower().split()
        kept = {row.ref: row for row in reversed(rows)}
        order = dict.fromkeys(row.ref for row in rows)
        return [kept[ref] for ref in order if all(w in _haystack(kept[ref]) for w in words)]

    def _fill(self) -> None:
        table: DataTable[Text] = self.query_one("#table", DataTable)
        keep = self.current.ref if self.current else None
        rows = self._visible()
        table.clear()
        for row in rows:
            table.add_row(*self._cells(row), key=row.ref)
        refs = [row.ref for row in rows]
        if rows:
            table.move_cursor(row=refs.index(keep) if keep in refs else 0)
        n_here = sum(row.is_here for row in rows)
        counts = f"● {n_here} here   ○ {len(rows) - n_here} to download"
        self.query_one("#counts", Label).update(counts)
        empty = self.query_one("#empty", Static)
        empty.display = not rows
        if not rows:
            empty.update("Nothing matches. [b]Enter[/b] in the filter searches the hub.")
            self.current = None

    def _cells(self, row: ModelRow) -> list[Text]:
        ink = self.app.theme_variables
        name = ink["foreground" if row.is_here else "muted"]
        size = format_bytes(row.n_bytes, digits=1) if row.n_bytes else ""
        cells = {
            "": Text(SOURCES[row.source], style=ink["primary" if row.is_here else "faint"]),
            "Model": Text(row.name, overflow="ellipsis", style=name),
            "Quant": Text(row.quant, overflow="ellipsis", style=ink["muted"]),
            "Size": Text(size, justify="right"),
            "From": Text(row.owner, overflow="ellipsis", style=ink["muted"]),
            "Licence": Text(row.licence, overflow="ellipsis", style=ink["muted"]),
            **self._verdict(row),
        }
        return [cells[label] for label, _ in self._shown]

    def _verdict(self, row: ModelRow) -> dict[str, Text]:
        """What the planner says, by column; from the size alone where it was not asked."""
        ink = self.app.theme_variables
        outcome = self._verdicts.get(row.ref)
        nothing = {"tok/s": Text(""), "Context": Text("")}
        if outcome is None:
            return {"Here": rough_text(row.verdict, ink), **nothing}
        if isinstance(outcome, EdgeLLMError):
            word = "✗ too big" if isinstance(outcome, DoesNotFitError) else "✗ unread"
            return {"Here": Text(word, style=ink["error"]), **nothing}
        speed, n_ctx = f"{outcome.speed.decode_tps:.0f}", f"{outcome.params.n_ctx_seq:,}"
        return {
            "Here": verdict_text(outcome, ink),
            "tok/s": Text(speed, justify="right", style=ink["foreground"]),
            "Context": Text(n_ctx, justify="right", style=ink["muted"]),
        }

    @on(DataTable.RowHighlighted)
    def _highlighted(self, event: DataTable.RowHighlighted) -> None:
        # Textual highlights row -1 of an empty table, which has no key.
        key: RowKey | None = event.row_key
        ref = None if key is None else key.value
        self.current = next((row for row in self._visible() if row.ref == ref), None)

    @on(DataTable.RowSelected)
    def _selected(self) -> None:
        self.action_plan()

    # -- the details -----------------------------------------------------------------------------

    def watch_current(self, row: ModelRow | None) -> None:
        facts = self.query_one("#facts", Static)
        self.refresh_bindings()
        if row is None:
            facts.update("")
            return
        facts.update(self._summary(row, []))
        if row.is_here:
            self._read_details(row)

    @work(thread=True, exclusive=True, group="details")
    def _read_details(self, row: ModelRow) -> None:
        try:
            pairs = self.edge.services.details(row)
        except EdgeLLMError as error:
            pairs = [("not readable", error.message)]
        self.app.call_from_thread(self._show_details, row, pairs)

    def _show_details(self, row: ModelRow, pairs: list[tuple[str, str]]) -> None:
        if self.current is not None and self.current.ref == row.ref:
            self.query_one("#facts", Static).update(self._summary(row, pairs))

    def _summary(self, row: ModelRow, pairs: list[tuple[str, str]]) -> Table:
        ink = self.app.theme_variables
        outer = Table.grid(expand=True)
        outer.add_row(Text(row.name, style=f"bold {ink['primary']}"))
        where = row.owner if row.is_here else f"not here · {row.owner}"
        outer.add_row(Text(f"{where} · {row.about}" if row.about else where, style=ink["muted"]))
        outer.add_row("")
        outer.add_row(self._verdict_line(row))
        if self.has_class("-narrow"):
            return outer
        outer.add_row("")
        table = Table.grid(padding=(0, 2))
        table.add_column(style=ink["muted"], max_width=16)
        table.add_column(style=ink["foreground"], overflow="fold")
        for name, value in [("file", row.path or row.ref), *pairs]:
            table.add_row(name, Text(value[:400]))
        outer.add_row(table)
        return outer

    def _verdict_line(self, row: ModelRow) -> Text:
        ink = self.app.theme_variables
        outcome = self._verdicts.get(row.ref)
        if outcome is None:
            hint = "enter plans it from its header, d downloads it"
            return Text(hint if not row.is_here else "reading its header…", style=ink["muted"])
        if isinstance(outcome, EdgeLLMError):
            text = Text(outcome.message, style=ink["error"])
            return text.append(f"\n→ {outcome.hint}", ink["muted"]) if outcome.hint else text
        text = verdict_text(outcome, ink)
        text.append(
            f" · {outcome.params.n_ctx:,} tokens of context · "
            f"{outcome.speed.decode_tps:.0f} tok/s predicted", ink["foreground"],
        )  # fmt: skip
        return text

    # -- doing -----------------------------------------------------------------------------------

    @on(Input.Changed, "#filter")
    def _typed(self, event: Input.Changed) -> None:
        self.query_text = event.value
        self._fill()

    @on(Input.Submitted, "#filter")
    def _submitted(self) -> None:
        self.action_search()

    def action_filter(self) -> None:
        self.query_one("#filter").focus()

    def action_table(self) -> None:
        self.query_one("#table").focus()

    def action_search(self) -> None:
        if not self.query_text.strip():
            self.action_filter()
            return
        self.action_table()
        self._search(self.query_text)

    @work(thread=True, exclusive=True, group="search")
    def _search(self, query: str) -> None:
        try:
            self.post_message(Found("hub", self.edge.services.search(query)))
        except EdgeLLMError as error:
            self.app.call_from_thread(self.edge.report, error)

    def action_plan(self) -> None:
        if self.current is not None:
            self.edge.chosen = self.current
            self.edge.action_go("plan")

    def action_chat(self) -> None:
        row = self.current
        if row is None:
            return
        if not row.is_here:
            self.notify("not on this machine yet: d downloads it", title=row.name)
            return
        self.edge.open_model(row.ref)
        self.edge.action_go("chat")

    def action_download(self) -> None:
        if self.current is None:
            return
        if self.current.is_here:
            self.notify("already on this machine", title=self.current.name)
            return
        self.edge.downloads.start(self.current)

    def action_pause(self) -> None:
        if self.current is None or self.current.ref not in self.edge.downloads.items:
            return
        download = self.edge.downloads.items[self.current.ref]
        if download.state == "running":
            self.edge.downloads.pause(self.current.ref)
        else:
            self.edge.downloads.start(self.current)

    def action_cancel(self) -> None:
        if self.current is not None:
            self.edge.downloads.cancel(self.current.ref)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of a download are there as long as there is one under the cursor."""
        if action not in ("pause", "cancel"):
            return super().check_action(action, parameters)
        ref = "" if self.current is None else self.current.ref
        download = self.edge.downloads.items.get(ref)
        return download is not None and download.state in ("running", "paused")

    def show_download(self, event: DownloadsChanged) -> None:
        """The application passes on what its downloads say."""
        self.query_one(DownloadList).refresh(layout=True)
        self.refresh_bindings()
        if event.finished:
            self.action_refresh()

    def commands(self) -> list[Command]:
        return [
            ("Search the hub", "Look for models on the hub", self.action_search),
            ("Look again", "List the models on this machine again", self.action_refresh),
        ]


def columns_for(width: int) -> list[tuple[str, int]]:
    """The columns on a screen so wide, with the model's stretched over what is left."""
    room = width - (DETAILS_CELLS if width >= WIDE else 0) - 4
    for columns in ([*COLUMNS, *MORE], list(COLUMNS)):
        spare = room - sum(cells + 2 for _, cells in columns)
        if spare >= 4 or len(columns) == len(COLUMNS):
            break
    return [(name, cells + max(spare, 0) * (name == "Model")) for name, cells in columns]


def verdict_text(plan: Plan, ink: dict[str, str]) -> Text:
    """The verdict in a word, with a sign that needs no colour."""
    n, n_all = plan.params.n_gpu_layers, plan.model.n_layer + 1
    sign, word, color = {
        "gpu": ("●", "GPU", "success"),
        "partial": ("◐", f"{n}/{n_all}", "warning"),
        "cpu": ("○", "CPU", "secondary"),
    }.get(plan.verdict, ("✗", "too big", "error"))
    return Text(f"{sign} {word}", style=ink[color])


def rough_text(verdict: str, ink: dict[str, str]) -> Text:
    """A verdict from the size alone: the same signs, and ``~`` for "about"."""
    word = {"gpu": "● ~GPU", "partial": "◐ ~part", "cpu": "○ ~CPU", "does_not_fit": "✗ ~big"}
    return Text(word.get(verdict, "·"), style=ink["faint"])


def _haystack(row: ModelRow) -> str:
    return f"{row.name} {row.quant} {row.owner} {row.about} {row.source}".lower()


def make() -> ModelsScreen:
    return ModelsScreen()
