"""First run: what this machine is, what runs well on it, and an answer in four keys."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from rich.table import Table
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Center, Vertical
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from edgellm.devices import Devices
from edgellm.errors import EdgeLLMError
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.tui.ports import ModelRow
from edgellm.tui.screens.base import EdgeScreen
from edgellm.tui.screens.models import rough_text, verdict_text
from edgellm.units import format_bytes

LOGO = """\
█▀▀ █▀▄ █▀▀ █▀▀ █   █   █▄ ▄█
█▀▀ █ █ █ █ █▀▀ █   █   █ ▀ █
▀▀▀ ▀▀  ▀▀▀ ▀▀▀ ▀▀▀ ▀▀▀ ▀   ▀"""
TAGLINE = "models on the machine you own, planned to the MiB"


class Suggestion(msgspec.Struct, frozen=True):
    """A model worth starting with, and how it would run here (None: not asked yet)."""

    row: ModelRow
    plan: Plan | None = None


class Suggested(Message):
    """The machine and what fits it, small to large."""

    def __init__(self, devices: Devices, suggestions: list[Suggestion]) -> None:
        super().__init__()
        self.devices = devices
        self.suggestions = suggestions


class WelcomeScreen(EdgeScreen):
    """The starter is under the cursor: Enter loads it, and you can type at once."""

    MODE = "welcome"
    CSS = """
    WelcomeScreen #middle { align: center middle; height: 1fr; }
    WelcomeScreen #box { width: 76; max-width: 96%; height: auto; }
    WelcomeScreen #hello { height: auto; margin-bottom: 1; }
    WelcomeScreen OptionList {
        height: auto; max-height: 14; border: round $border; background: $background;
        padding: 0 1; border-title-color: $muted; scrollbar-size-vertical: 1;
    }
    WelcomeScreen OptionList:focus { border: round $primary 60%; }
    WelcomeScreen #below { height: auto; margin-top: 1; color: $muted; }
    """
    # Priority: what is typed after Enter is for the chat, and must not overtake it; nor may Enter
    # overtake the arrows.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "start", "Start", id="welcome.start", priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("escape", "app.go('models')", "All models", id="welcome.models"),
    ]
    suggestions: reactive[list[Suggestion]] = reactive(list, always_update=True)
    _devices: Devices | None = None

    def body(self) -> ComposeResult:
        with Center(id="middle"), Vertical(id="box"):
            yield Static(_hello(self.app.theme_variables, None), id="hello")
            options = OptionList(id="options")
            options.border_title = "start with"
            yield options
            yield Static(self._keys(), id="below")

    def ready(self) -> None:
        self.query_one(OptionList).focus()
        self._suggest()

    def _keys(self) -> str:
        key = self.edge.key
        named = {
            key("welcome.start", "Enter"): "starts",
            key("welcome.models", "Esc"): "shows every model",
            key("help", "?"): "shows the keys",
        }
        return " · ".join(f"[b]{name}[/b] {does}" for name, does in named.items())

    def recolored(self) -> None:
        self.query_one("#hello", Static).update(_hello(self.app.theme_variables, self._devices))
        self.watch_suggestions(self.suggestions)

    @work(thread=True, exclusive=True)
    def _suggest(self) -> None:
        """First what needs no network and no planning, then the rest with its verdict."""
        services = self.edge.services
        devices = services.devices()
        rows = [row for row in services.local_models() if row.owner == "starter"][:1]
        self.post_message(Suggested(devices, [Suggestion(row) for row in rows]))
        plans = [Suggestion(row, self._plan(row)) for row in rows]
        self.post_message(Suggested(devices, plans))
        try:
            rows = services.catalog()
        except EdgeLLMError:
            return  # without a catalog the starter alone is suggested
        self.post_message(Suggested(devices, plans + spread(rows)))

    def _plan(self, row: ModelRow) -> Plan | None:
        try:
            return self.edge.services.plan(row.ref, PlanRequest())
        except EdgeLLMError:
            return None  # shown without a verdict; choosing it says what is wrong

    @on(Suggested)
    def _suggested(self, event: Suggested) -> None:
        self._devices = event.devices
        self.query_one("#hello", Static).update(_hello(self.app.theme_variables, event.devices))
        self.suggestions = event.suggestions

    def watch_suggestions(self, suggestions: list[Suggestion]) -> None:
        options = self.query_one(OptionList)
        keep = options.highlighted or 0
        options.clear_options()
        for each in suggestions:
            options.add_option(Option(self._prompt(each), id=None))
        if suggestions:
            options.highlighted = min(keep, len(suggestions) - 1)

    def _prompt(self, each: Suggestion) -> Table:
        ink, row = self.app.theme_variables, each.row
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(width=10, justify="right", no_wrap=True)
        table.add_column(width=9, no_wrap=True)
        table.add_column(width=10, justify="right", no_wrap=True)
        verdict = verdict_text(each.plan, ink) if each.plan else rough_text(row.verdict, ink)
        speed = f"{each.plan.speed.decode_tps:.0f} tok/s" if each.plan else ""
        table.add_row(
            Text(row.name, style=f"bold {ink['foreground']}"), _size(row), verdict,
            Text(speed, style=ink["primary"]),
        )  # fmt: skip
        about = "ready at once, no network" if row.is_here else f"download · {row.about}"
        table.add_row(Text(about, style=ink["muted"]), "", "", "")
        return table

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        options.action_cursor_up() if step < 0 else options.action_cursor_down()

    def action_start(self) -> None:
        self._choose(self.query_one(OptionList).highlighted)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(event.option_index)

    def _choose(self, index: int | None) -> None:
        if index is None or index >= len(self.suggestions):
            return
        row = self.suggestions[index].row
        if row.is_here:
            self.edge.open_model(row.ref)
            self.edge.action_go("chat")
        else:
            self.edge.downloads.start(row)
            self.edge.action_go("models")


def spread(rows: list[ModelRow]) -> list[Suggestion]:
    """Three that chat and run well here, small to large; whole on the GPU before in part."""
    chats = [row for row in rows if "embedding" not in row.about and "rerank" not in row.about]
    chats.sort(key=lambda row: row.n_bytes)
    good = [row for row in chats if row.verdict == "gpu"]
    if len(good) < 3:
        good += [row for row in chats if row.verdict == "partial"][: 3 - len(good)]
    if not good:
        # On a CPU the largest that fits answers slowly: half-way up is worth starting with.
        fits = [row for row in chats if row.verdict == "cpu"]
        good = fits[: max(len(fits) // 2, 3)]
    if not good:
        return []
    places = sorted({0 if len(good) <= 3 else len(good) // 4, len(good) // 2, len(good) - 1})
    return [Suggestion(good[place]) for place in places]


def _size(row: ModelRow) -> str:
    return format_bytes(row.n_bytes) if row.is_here else f"~{format_bytes(row.n_bytes, digits=1)}"


def _hello(ink: dict[str, str], devices: Devices | None) -> Text:
    text = Text()
    text.append(f"{LOGO}\n", ink["primary"])
    text.append(f"{TAGLINE}\n\n", f"italic {ink['muted']}")
    if devices is None:
        return text.append("looking at this machine…", ink["muted"])
    for gpu in devices.gpus:
        free = f"{format_bytes(gpu.free)} of {format_bytes(gpu.total)} free"
        text.append(f"{gpu.name}  ", ink["foreground"]).append(f"{free}\n", ink["muted"])
    host = devices.host
    text.append(f"{host.cpu}  ", ink["foreground"])
    text.append(
        f"{host.n_physical} cores · {format_bytes(host.available)} of "
        f"{format_bytes(host.total)} RAM free", ink["muted"],
    )  # fmt: skip
    if not devices.gpus:
        text.append("\nno GPU found: models run on the CPU", ink["muted"])
    return text


def make() -> WelcomeScreen:
    return WelcomeScreen()
