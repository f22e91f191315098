"""Monitor: latency, throughput and memory of the model that answers, as they happen."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Grid, Horizontal, Vertical
from textual.css.query import NoMatches
from textual.reactive import reactive
from textual.widgets import DataTable, Static

from edgellm.errors import EdgeLLMError
from edgellm.metrics import EngineStats, RunningRequest, percentile
from edgellm.tui.ports import Endpoint, Gauge
from edgellm.tui.screens.base import Command, EdgeScreen
from edgellm.tui.widgets import HISTORY, Metric
from edgellm.units import format_bytes

TICK_S: Final = 1.0
METRICS: Final = (
    ("decode", "decode tok/s"),
    ("prefill", "prefill tok/s"),
    ("ttft", "TTFT p50"),
    ("tpot", "TPOT p50"),
    ("queue", "requests"),
    ("cells", "KV cells"),
    ("prefix", "prefix hits"),
    ("vram", "VRAM in use"),
    ("gpu", "GPU"),
    ("power", "GPU power"),
    ("ram", "RAM"),
    ("cpu", "CPU"),
)
# A plot's lines: metric, scale, mark, colour. Their legend is in the title: plotext's own legend
# raises IndexError for a line without points.
PLOTS: Final = {
    "throughput": (("decode", 1.0, "braille", "primary"),),
    "latency": (
        ("ttft", 1000.0, "braille", "primary"),
        ("tpot", 1000.0, "dot", "accent"),
    ),
}
IDLE: Final = "nothing runs now"
NO_MODEL: Final = "no model answers yet: [b]1[/b] chooses one, [b]a[/b] attaches to a server"
TITLES: Final = {"throughput": "decode tok/s", "latency": "⠶ TTFT  • TPOT, ms"}


class MonitorScreen(EdgeScreen):
    """Cards of numbers, a plot where there is room, and the requests that run now."""

    MODE = "monitor"
    AUTO_FOCUS = "#requests"
    CSS = """
    MonitorScreen #cards {
        grid-size: 6; grid-gutter: 1 1; height: auto; padding: 0 1; grid-rows: 4;
    }
    MonitorScreen.-narrow #cards { grid-size: 4; grid-gutter: 0 1; grid-rows: 3; }
    MonitorScreen.-narrow Metric { height: 3; }
    MonitorScreen.-narrow Metric Spark { height: 1; }
    MonitorScreen #plots { height: 1fr; min-height: 8; padding: 0 1; margin-top: 1; }
    MonitorScreen #plots PlotextPlot {
        background: $surface; border: round $border; border-title-color: $muted;
    }
    MonitorScreen.-narrow #plots { display: none; }
    MonitorScreen.-short #plots { display: none; }
    MonitorScreen #below { height: 1fr; min-height: 5; padding: 0 1; margin-top: 1; }
    MonitorScreen #requests { height: auto; max-height: 100%; }
    MonitorScreen #none { color: $muted; padding: 0 1; height: 1fr; }
    MonitorScreen .head { color: $primary; text-style: bold; height: 1; }
    MonitorScreen #log-box { width: 46; border-left: vkey $border; padding: 0 2; }
    MonitorScreen.-narrow #log-box { display: none; }
    MonitorScreen #log { color: $muted; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "cancel", "Cancel the request", id="monitor.cancel"),
        Binding("a", "attach", "Attach to a server", id="monitor.attach"),
        Binding("space", "pause", "Pause", id="monitor.pause"),
    ]
    stats: reactive[EngineStats | None] = reactive(None, always_update=True)
    gauge: reactive[Gauge | None] = reactive(None, always_update=True)
    paused: reactive[bool] = reactive(False)

    def __init__(self) -> None:
        super().__init__()
        self._plots: dict[str, Any] = {}
        self._log: deque[str] = deque(maxlen=200)
        self._seen: dict[str, RunningRequest] = {}
        self._ttfts: deque[float] = deque(maxlen=200)

    def body(self) -> ComposeResult:
        with Grid(id="cards"):
            for name, label in METRICS:
                yield Metric(label, id=f"metric-{name}")
        yield Horizontal(id="plots")
        with Horizontal(id="below"):
            with Vertical():
                yield Static("Requests", classes="head")
                yield DataTable(id="requests", cursor_type="row")
                yield Static(id="none")
            with Vertical(id="log-box"):
                yield Static("Log", classes="head")
                yield Static(id="log")

    def ready(self) -> None:
        table: DataTable[Text] = self.query_one("#requests", DataTable)
        for label in ("id", "client", "state", "prompt", "out", "age", "TTFT", "tok/s"):
            right = label in ("prompt", "out", "age", "TTFT", "tok/s")
            table.add_column(Text(label, justify="right" if right else "left"), key=label)
        table.focus()
        self.set_interval(TICK_S, self._tick)
        self._tick()
        if self.size.width >= 120 and self.size.height >= 36:
            self._make_plots()

    def recolored(self) -> None:
        if self.stats is not None:
            self._show_requests(self.stats.requests)
        self._draw()

    def on_resize(self) -> None:
        if not self._plots and self.size.width >= 120 and self.size.height >= 36:
            self._make_plots()

    @work(exclusive=True, group="plots")
    async def _make_plots(self) -> None:
        """plotext is imported here: a terminal without room for plots never pays for it."""
        from textual_plotext import PlotextPlot

        box = self.query_one("#plots")
        for name, title in TITLES.items():
            plot = PlotextPlot(id=f"plot-{name}")
            plot.border_title = f"{title} · last {HISTORY // 60} minutes"
            self._plots[name] = plot.plt
            await box.mount(plot)
        self._draw()

    # -- reading ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.is_current and not self.paused:
            self._read(self.edge.endpoint)

    @work(exclusive=True, group="read")
    async def _read(self, endpoint: Endpoint | None) -> None:
        """One reading, shown; one that comes while the screen is taken down has nowhere to go."""
        with contextlib.suppress(NoMatches):
            await self._read_and_show(endpoint)

    async def _read_and_show(self, endpoint: Endpoint | None) -> None:
        """The machine, and the engine; a lost server is said once."""
        self.gauge = await asyncio.to_thread(self.edge.services.gauge)
        if endpoint is None:
            self.stats = None
            return
        was_alive = endpoint.is_alive
        try:
            self.stats = await endpoint.stats()
        except EdgeLLMError as error:
            self.stats = None
            self._say(error.message.splitlines()[0])
            if was_alive:
                self.edge.report(error)
        self.refresh_status()

    def watch_gauge(self, gauge: Gauge | None) -> None:
        if gauge is None:
            return
        self._push("cpu", gauge.cpu_percent, _percent(gauge.cpu_percent))
        self._push("ram", gauge.ram_used, _of(gauge.ram_used, gauge.ram_total))
        measured = _of(gauge.gpu_used, gauge.gpu_total)
        self.query_one("#metric-vram", Metric).push(gauge.gpu_used, measured, title=self._planned())
        heat = f" {gauge.gpu_celsius:.0f} °C" if gauge.gpu_celsius is not None else ""
        self._push("gpu", gauge.gpu_percent, _percent(gauge.gpu_percent) + heat)
        watts = gauge.gpu_watts
        self._push("power", watts, "–" if watts is None else f"{watts:.0f} W")

    def _planned(self) -> str:
        """The plan's own bytes on the cards, beside what is measured there."""
        endpoint = self.edge.endpoint
        if endpoint is None or endpoint.plan is None or not endpoint.plan.devices:
            return "VRAM in use"
        planned = sum(device.used for device in endpoint.plan.devices)
        return f"VRAM plan {format_bytes(planned, digits=1)}"

    def watch_stats(self, stats: EngineStats | None) -> None:
        if stats is None:
            for name in ("decode", "prefill", "ttft", "tpot", "queue", "cells", "prefix"):
                self._push(name, None, "–")
            self._show_requests(())
            return
        self._note(stats)
        self._push("decode", stats.decode_tps, f"{stats.decode_tps:.1f}")
        self._push("prefill", stats.prefill_tps, f"{stats.prefill_tps:,.0f}")
        self._push_latency(stats)
        self._push(
            "queue", stats.running + stats.waiting, f"{stats.running} run · {stats.waiting} wait"
        )
        share = stats.cells_used / stats.n_cells if stats.n_cells else 0.0
        self._push("cells", share, f"{stats.cells_used:,} / {stats.n_cells:,}")
        asked = stats.prompt_tokens or 1
        hits = stats.cached_tokens / asked
        self._push("prefix", hits, f"{hits * 100:.0f} % of tokens")
        self._show_requests(stats.requests)
        self._draw()

    def _push_latency(self, stats: EngineStats) -> None:
        """TTFT of the requests seen lately; TPOT of those that run."""
        for request in stats.requests:
            known = self._seen.get(request.id)
            if request.ttft_s is not None and (known is None or known.ttft_s is None):
                self._ttfts.append(request.ttft_s)
        self._seen = {request.id: request for request in stats.requests}
        ttft = percentile(sorted(self._ttfts), 50)
        self._push("ttft", ttft, _milliseconds(ttft))
        speeds = sorted(1 / r.decode_tps for r in stats.requests if r.decode_tps)
        tpot = percentile(speeds, 50)
        self._push("tpot", tpot, _milliseconds(tpot))

    def _push(self, name: str, value: float | None, text: str) -> None:
        self.query_one(f"#metric-{name}", Metric).push(value, text)

    def _note(self, stats: EngineStats) -> None:
        """The log: what came and what went since the last reading."""
        now = {request.id for request in stats.requests}
        for request in stats.requests:
            if request.id not in self._seen:
                self._say(f"+ {request.id} from {request.client}, {request.n_prompt:,} tokens")
        for gone in self._seen.keys() - now:
            self._say(f"– {gone} after {self._seen[gone].n_output:,} tokens")

    def _say(self, line: str) -> None:
        if self._log and self._log[-1] == line:
            return
        self._log.append(line)
        box = self.query_one("#log", Static)
        box.update(Text("\n".join(list(self._log)[-max(box.size.height, 8) :])))

    # -- showing ---------------------------------------------------------------------------------

    def _show_requests(self, requests: tuple[RunningRequest, ...]) -> None:
        table: DataTable[Text] = self.query_one("#requests", DataTable)
        row = table.cursor_row
        table.clear()
        for request in requests:
            table.add_row(*_cells(request, self.app.theme_variables), key=request.id)
        if requests:
            table.move_cursor(row=min(row, len(requests) - 1))
        none = self.query_one("#none", Static)
        none.display = not requests
        none.update(IDLE if self.edge.endpoint is not None else NO_MODEL)

    def _draw(self) -> None:
        """Both plots again, from the cards' readings. Each line has a mark of its own."""
        if len(self._plots) < len(PLOTS) or not self.is_current:
            return
        ink = self.app.theme_variables
        for name, lines in PLOTS.items():
            plt = self._plots[name]
            plt.clear_data()
            plt.xaxes(True, False)
            plt.yaxes(True, False)
            plt.xticks([])
            highest = 0.0
            for metric, scale, marker, color in lines:
                data = self.query_one(f"#metric-{metric}", Metric).data
                values = [value * scale for value in data]
                rgb = tuple(Color.parse(ink[color]).rgb)
                if values:
                    plt.plot(values, marker=marker, color=rgb)
                    highest = max(highest, *values)
            # Left to itself plotext puts a line of zeros between -1 and 1.
            plt.ylim(*((None, None) if highest else (0, 1)))
            self.query_one(f"#plot-{name}").refresh()

    # -- doing -----------------------------------------------------------------------------------

    @work
    async def action_cancel(self) -> None:
        table: DataTable[Text] = self.query_one("#requests", DataTable)
        endpoint = self.edge.endpoint
        if endpoint is None or table.row_count == 0:
            return
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        try:
            await endpoint.cancel(str(key))
        except EdgeLLMError as error:
            self.edge.report(error)
        else:
            self._say(f"× {key} cancelled")

    @work
    async def action_attach(self) -> None:
        from edgellm.tui.screens.dialogs import AskScreen

        url = await self.app.push_screen_wait(
            AskScreen("Attach to a server", "http://127.0.0.1:8080", "")
        )
        if url:
            self.edge.attach(url)

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.notify("paused" if self.paused else "watching")

    def commands(self) -> list[Command]:
        return [("Attach to a server", "Watch a server that runs already", self.action_attach)]


def _cells(request: RunningRequest, ink: dict[str, str]) -> list[Text]:
    sign, color = {"running": ("●", "success"), "waiting": ("○", "muted")}.get(
        request.state, ("◐", "warning")
    )
    done = request.n_computed if request.n_computed < request.n_prompt else request.n_prompt
    ttft = "–" if request.ttft_s is None else f"{request.ttft_s * 1000:.0f} ms"
    speed = "–" if request.decode_tps is None else f"{request.decode_tps:.1f}"
    return [
        Text(request.id[:16], style=ink["foreground"]),
        Text(request.client[:12], style=ink["muted"]),
        Text(f"{sign} {request.state}", style=ink[color]),
        Text(f"{done:,}/{request.n_prompt:,}", justify="right"),
        Text(f"{request.n_output:,}", justify="right"),
        Text(f"{request.age_s:.0f} s", justify="right"),
        Text(ttft, justify="right"),
        Text(speed, justify="right", style=ink["primary"]),
    ]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


def _of(used: int | None, total: int | None) -> str:
    if used is None or not total:
        return "–"
    return f"{used / 2**30:.1f} / {total / 2**30:.1f} GiB"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.0f} ms"


def make() -> MonitorScreen:
    return MonitorScreen()
