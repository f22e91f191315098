"""Plan: how the model will sit on the devices, and what each choice costs or gains."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from rich.table import Table
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import Static
from textual.worker import get_current_worker

from edgellm.errors import DoesNotFitError, EdgeLLMError
from edgellm.planner.plan import Alternative, LoadReport, Plan, PlanRequest
from edgellm.tui.ledger import LedgerBar, mib, plan_bars
from edgellm.tui.ports import ModelRow
from edgellm.tui.screens.base import Command, EdgeScreen
from edgellm.tui.widgets import Stepper

CONTEXTS = [512 * 2**i for i in range(12)]
KV_TYPES = ["f16", "q8_0", "q5_1", "q4_0"]
UBATCHES = [32, 64, 128, 256, 512, 1024, 2048]
SEQUENCES = [1, 2, 4, 8, 16, 32]
IDLE_S = 0.15
"""Alternatives are looked for when nobody has stepped for this long."""


class Planned(Message):
    """The answer to one question; ``serial`` tells a late one from the current one."""

    def __init__(self, serial: int, plan: Plan | None, error: EdgeLLMError | None) -> None:
        super().__init__()
        self.serial = serial
        self.plan = plan
        self.error = error


class Alternatives(Message):
    """The plan of one question again, with what else could be done."""

    def __init__(self, serial: int, plan: Plan) -> None:
        super().__init__()
        self.serial = serial
        self.plan = plan


class PlanScreen(EdgeScreen):
    """Bars on top; steppers on the left; alternatives and reasons on the right."""

    MODE = "plan"
    CSS = """
    PlanScreen #head { height: 2; padding: 0 2; margin-bottom: 1; }
    PlanScreen #steppers { height: auto; }
    PlanScreen #bars { height: auto; max-height: 60%; padding: 0 2; }
    PlanScreen #bars LedgerBar { margin-bottom: 1; }
    PlanScreen #lower { height: 1fr; }
    PlanScreen #steps { width: 55; height: 1fr; padding: 0 0 0 2; }
    PlanScreen #side { width: 1fr; height: 1fr; padding: 0 2; border-left: vkey $border; }
    PlanScreen #change { height: auto; margin-top: 1; }
    PlanScreen #empty { padding: 3 4; color: $muted; }
    PlanScreen.-narrow #bars LedgerBar { margin-bottom: 0; }
    PlanScreen.-narrow #head, PlanScreen.-narrow #bars { padding: 0 1; }
    PlanScreen.-narrow #steps { width: 1fr; padding: 0 0 0 1; }
    PlanScreen.-narrow #head { margin-bottom: 0; }
    PlanScreen.-narrow #change { margin-top: 0; }
    PlanScreen.-narrow #side { display: none; }
    PlanScreen.-narrow.-why #steps { display: none; }
    PlanScreen.-narrow.-why #side { display: block; border-left: none; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "load", "Load", id="plan.load"),
        Binding("up,k", "app.focus_previous", show=False),
        Binding("down,j", "app.focus_next", show=False),
        Binding("x", "alternative(0)", "Take", id="plan.first", key_display="x y z"),
        Binding("y", "alternative(1)", "Second alternative", show=False, id="plan.second"),
        Binding("z", "alternative(2)", "Third alternative", show=False, id="plan.third"),
        Binding("0", "reset", "All automatic", id="plan.reset", show=False),
        Binding("w", "why", "Why", id="plan.why"),
        Binding("ctrl+s", "save", "Save", id="plan.save"),
    ]
    plan: reactive[Plan | None] = reactive(None)
    asked: reactive[PlanRequest] = reactive(PlanRequest())
    failure: reactive[EdgeLLMError | None] = reactive(None)

    def __init__(self) -> None:
        super().__init__()
        self._serial = 0
        self._before: Plan | None = None
        self._n_layer = -1

    def body(self) -> ComposeResult:
        yield Static(id="head")
        yield VerticalScroll(id="bars", can_focus=False)
        with Horizontal(id="lower"):
            with VerticalScroll(id="steps", can_focus=False):
                yield Vertical(id="steppers")
                yield Static(id="change")
            with VerticalScroll(id="side", can_focus=True):
                yield Static(id="reasons")
        yield Static("Choose a model on the Models screen (key 1), then press Enter.", id="empty")

    def ready(self) -> None:
        self.watch(self.app, "chosen", self._chosen)
        self.watch(self.app, "endpoint", self._loaded)

    def recolored(self) -> None:
        self.run_worker(self.watch_plan(self.plan), group="colours", exclusive=True)

    def _chosen(self, row: ModelRow | None) -> None:
        self.query_one("#empty").display = row is None
        for part in ("#head", "#bars", "#lower"):
            self.query_one(part).display = row is not None
        if row is None:
            return
        self._before, self.plan, self.failure, self._n_layer = None, None, None, -1
        head = Text(row.name, "bold").append(" reading the header…", "not bold")
        self.query_one("#head", Static).update(head)
        self.asked = PlanRequest()
        self.watch_asked(self.asked)  # of another model nothing was planned, whatever was asked

    # -- planning --------------------------------------------------------------------------------

    def watch_asked(self, request: PlanRequest) -> None:
        if self.edge.chosen is not None:
            self._serial += 1
            self._replan(self._serial, self.edge.chosen.ref, request)

    @work(thread=True, exclusive=True, group="plan")
    def _replan(self, serial: int, ref: str, request: PlanRequest) -> None:
        plan, failure = None, None
        try:
            plan = self.edge.services.plan(ref, request)
        except EdgeLLMError as error:
            failure = error
            plan = self._overfull(ref, request) if isinstance(error, DoesNotFitError) else None
        if get_current_worker().is_cancelled:
            return
        self.post_message(Planned(serial, plan, failure))
        time.sleep(IDLE_S)
        if plan is None or get_current_worker().is_cancelled:
            return
        richer = self.edge.services.alternatives(ref, request, plan)
        self.post_message(Alternatives(serial, richer))

    def _overfull(self, ref: str, request: PlanRequest) -> Plan | None:
        """The ledger of what does not fit, so that the bar can show by how much."""
        try:
            return self.edge.services.plan(ref, msgspec.structs.replace(request, force=True))
        except EdgeLLMError:
            return None

    @on(Planned)
    def _planned(self, event: Planned) -> None:
        if event.serial != self._serial:
            return
        self.failure = event.error
        if event.plan is not None:
            self._before, self.plan = self.plan, event.plan
        elif event.error is not None:
            self.query_one("#head", Static).update(_failure(event.error, self.app.theme_variables))

    @on(Alternatives)
    def _alternatives_found(self, event: Alternatives) -> None:
        if event.serial == self._serial:
            self.set_reactive(PlanScreen.plan, event.plan)
            self._show_change(event.plan)
            self._show_side(event.plan)

    async def watch_plan(self, plan: Plan | None) -> None:
        if plan is None:
            return
        await self._make_steppers(plan)
        await self._show_bars(plan)
        self._show_head(plan)
        self._show_steppers(plan)
        self._show_change(plan)
        self._show_side(plan)

    # -- showing ---------------------------------------------------------------------------------

    async def _show_bars(self, plan: Plan) -> None:
        """A bar a device that has something on it; the RAM last."""
        box = self.query_one("#bars")
        bars = plan_bars(plan)
        shown = list(box.query(LedgerBar))
        if len(shown) != len(bars):
            await box.remove_children()
            shown = [LedgerBar(bar) for bar in bars]
            await box.mount_all(shown)
        # On a small terminal the RAM's bar goes without its legend: the card matters more.
        shown[-1].legend = len(bars) == 1 or not self.has_class("-narrow")
        for widget, bar in zip(shown, bars, strict=True):
            widget.bar = bar

    def _show_head(self, plan: Plan) -> None:
        ink = self.app.theme_variables
        model, speed = plan.model, plan.speed
        text = Text(no_wrap=True, overflow="ellipsis")
        name = self.edge.chosen.name if self.edge.chosen is not None else model.name
        text.append(name, f"bold {ink['foreground']}")
        text.append(
            f"  {model.quant} · {mib(model.file_bytes)} · {model.n_layer} layers", ink["muted"]
        )
        text.append("\n")
        text.append_text(_verdict(plan, self.failure, ink))
        if self.failure is None:
            text.append("  ·  ", ink["faint"])
            text.append(f"{speed.decode_tps:.1f} tok/s", f"bold {ink['primary']}")
            text.append(" decode  ·  ", ink["muted"])
            text.append(f"{speed.prefill_tps:,.0f} tok/s", ink["foreground"])
            text.append(" prefill", ink["muted"])
            if not self.has_class("-narrow"):
                text.append(f"  ·  {plan.proof}", ink["muted"])
        self.query_one("#head", Static).update(text)

    async def _make_steppers(self, plan: Plan) -> None:
        """The steppers of this model: its layers, its longest context, its experts."""
        if self._n_layer == plan.model.n_layer:
            return
        self._n_layer = plan.model.n_layer
        box = self.query_one("#steppers")
        await box.remove_children()
        steps = _steppers(plan)
        await box.mount_all(steps)
        if self.is_current:
            steps[0].focus()

    def _show_steppers(self, plan: Plan) -> None:
        values = _shown(plan)
        for stepper in self.query(Stepper):
            stepper.shown = values.get(stepper.field, "")

    def _show_change(self, plan: Plan) -> None:
        """What the last step cost or gained."""
        ink = self.app.theme_variables
        text = Text()
        if self._before is not None and self._before.model.name == plan.model.name:
            text.append_text(_difference(self._before, plan, ink))
        if plan.warnings:
            text.append("\n" if text.plain else "")
            text.append("\n".join(f"▲ {warning}" for warning in plan.warnings[:3]), ink["warning"])
        if self.failure is not None:
            text.append("\n" if text.plain else "")
            text.append_text(_failure(self.failure, ink))
        if self.has_class("-narrow"):
            # The side is not shown here; what a key away is would not be seen.
            text.append_text(_alternative_lines(plan.alternatives, ink))
        self.query_one("#change", Static).update(text)

    def _show_side(self, plan: Plan) -> None:
        ink = self.app.theme_variables
        side = Table.grid(expand=True)
        report = self._report(plan)
        if report is not None:
            side.add_row(_measured(plan, report, ink))
            side.add_row("")
        if plan.alternatives:
            side.add_row(_alternatives(plan.alternatives, ink))
            side.add_row("")
        side.add_row(_reasons(plan, ink))
        self.query_one("#reasons", Static).update(side)

    def _report(self, plan: Plan) -> LoadReport | None:
        endpoint = self.edge.endpoint
        if endpoint is None or endpoint.plan is None or endpoint.plan.params != plan.params:
            return None
        return endpoint.report if endpoint.plan.model.name == plan.model.name else None

    def _loaded(self) -> None:
        if self.plan is not None:
            self._show_side(self.plan)

    # -- doing -----------------------------------------------------------------------------------

    @on(Stepper.Changed)
    def _stepped(self, event: Stepper.Changed) -> None:
        self.asked = msgspec.structs.replace(self.asked, **{event.stepper.field: event.value})

    def action_reset(self) -> None:
        for stepper in self.query(Stepper):
            stepper.index = None
        self.asked = PlanRequest()

    def action_alternative(self, index: int) -> None:
        if self.plan is None or index >= len(self.plan.alternatives):
            return
        change = self.plan.alternatives[index].change
        if "quant" in change:
            self._look_for_quant(str(change["quant"]))
            return
        known = {k: v for k, v in change.items() if k in PlanRequest.__struct_fields__}
        self.asked = msgspec.structs.replace(self.asked, **known)
        self._place_steppers(known)

    def _look_for_quant(self, quant: str) -> None:
        """Another file of the same model is no step: the models screen looks for it."""
        if self.plan is None:
            return
        name = re.sub(r"[-_.]?(I?Q\d\w*|BF16|F16|F32|GGUF)$", "", self.plan.model.name, flags=re.I)
        self.notify(f"choose one, and take its {quant} file", title=f"Looking for {name}")
        self.edge.wanted = name
        self.edge.action_go("models")

    def _place_steppers(self, change: Mapping[str, Any]) -> None:
        for stepper in self.query(Stepper):
            value = change.get(stepper.field)
            if value in stepper.values:
                stepper.index = stepper.values.index(value)

    def action_why(self) -> None:
        self.toggle_class("-why")

    def action_load(self) -> None:
        if self.plan is None:
            return
        if self.failure is not None:
            self.edge.report(self.failure)
            return
        row = self.edge.chosen
        if row is not None and not row.is_here:
            self.notify("not on this machine yet: press 1, then d downloads it", title=row.name)
            return
        self.edge.load_plan(self.plan)
        self.edge.action_go("chat")

    @work
    async def action_save(self) -> None:
        from edgellm.tui.screens.dialogs import AskScreen

        if self.plan is None:
            return
        name = await self.app.push_screen_wait(
            AskScreen("Save as a profile", "a short name, such as laptop", "")
        )
        if not name:
            return
        try:
            where = self.edge.services.save_profile(name, self.plan, self.asked)
        except EdgeLLMError as error:
            self.edge.report(error)
        else:
            self.notify(where, title="Profile saved")

    def commands(self) -> list[Command]:
        return [
            ("Save as a profile", "Keep these settings under a name", self.action_save),
            ("All automatic", "Give every value back to the planner", self.action_reset),
        ]


def _failure(error: EdgeLLMError, ink: dict[str, str]) -> Text:
    text = Text(f"✗ {error.message}", style=ink["error"])
    return text.append(f"\n→ {error.hint}", ink["muted"]) if error.hint else text


def _steppers(plan: Plan) -> list[Stepper]:
    n_all = plan.model.n_layer + 1
    contexts = [n for n in CONTEXTS if n <= max(plan.model.n_ctx_train, 512)]
    if plan.model.n_ctx_train > 0 and plan.model.n_ctx_train not in contexts:
        contexts.append(plan.model.n_ctx_train)
    steps = [
        Stepper("n_gpu_layers", "layers on the GPU", range(n_all + 1)),
        Stepper("n_ctx", "context", contexts),
        Stepper("type_k", "K cache", KV_TYPES),
        Stepper("type_v", "V cache", KV_TYPES),
        Stepper("n_seq_max", "conversations", SEQUENCES),
        Stepper("n_ubatch", "micro batch", UBATCHES),
    ]
    if plan.model.n_expert:
        steps.append(Stepper("n_cpu_moe", "experts on the host", range(plan.model.n_layer + 1)))
    return steps if plan.devices else steps[1:]


def _shown(plan: Plan) -> dict[str, str]:
    params = plan.params
    return {
        "n_gpu_layers": str(params.n_gpu_layers),
        "n_ctx": f"{params.n_ctx:,}",
        "type_k": params.type_k,
        "type_v": params.type_v,
        "n_seq_max": str(params.n_seq_max),
        "n_ubatch": str(params.n_ubatch),
        "n_cpu_moe": str(params.n_cpu_moe),
    }


def _verdict(plan: Plan, failure: EdgeLLMError | None, ink: dict[str, str]) -> Text:
    n, n_all = plan.params.n_gpu_layers, plan.model.n_layer + 1
    if failure is not None:
        asked = f" with {n} of {n_all} layers on the GPU" if plan.devices else ""
        return Text(f"✗ does not fit{asked}", f"bold {ink['error']}")
    words = {
        "gpu": ("● whole on the GPU", "success"),
        "partial": (f"◐ {n} of {n_all} layers on the GPU", "warning"),
        "cpu": ("○ on the CPU", "secondary"),
    }
    word, color = words.get(plan.verdict, ("✗ does not fit", "error"))
    return Text().append(word, f"bold {ink[color]}")


def _difference(before: Plan, after: Plan, ink: dict[str, str]) -> Text:
    """``CUDA0 +142 MiB · RAM −142 MiB · +3.1 tok/s``."""
    parts = [
        (new.id, new.used - old.used)
        for new, old in zip(after.devices, before.devices, strict=False)
    ]
    parts.append(("RAM", after.host.used - before.host.used))
    text = Text("last change  ", style=ink["muted"])
    for name, n_bytes in parts:
        if n_bytes:
            text.append(f"{name} {_signed(mib(n_bytes))}  ", ink["foreground"])
    speed = after.speed.decode_tps - before.speed.decode_tps
    color = ink["success" if speed > 0.05 else "warning" if speed < -0.05 else "muted"]
    return text.append(f"{_signed(f'{speed:.1f}')} tok/s", color)


def _signed(number: str) -> str:
    return number.replace("-", "−") if number.startswith("-") else f"+{number}"


def _section(title: str, ink: dict[str, str]) -> Table:
    return Table(
        title=title, title_style=f"bold {ink['primary']}", title_justify="left", box=None,
        expand=True, padding=(0, 1), pad_edge=False, header_style=ink["faint"], show_header=False,
    )  # fmt: skip


def _alternatives(choices: tuple[Alternative, ...], ink: dict[str, str]) -> Table:
    table = _section("Alternatives", ink)
    table.add_column(width=1, style=f"bold {ink['primary']}")
    table.add_column(style=ink["foreground"], ratio=3)
    table.add_column(style=ink["muted"], ratio=5)
    table.add_column(justify="right", no_wrap=True)
    for key, choice in zip("xyz", choices, strict=False):
        speed = "" if choice.decode_tps is None else f"{choice.decode_tps:.1f} tok/s"
        worth = f"{choice.gain}; {choice.cost}" if choice.cost else choice.gain
        table.add_row(key, choice.title, worth, speed)
    return table


def _alternative_lines(choices: tuple[Alternative, ...], ink: dict[str, str]) -> Text:
    """The same on a line each, after an empty one."""
    text = Text()
    for key, choice in zip("xyz", choices, strict=False):
        text.append("\n" if text.plain else "\n\n")
        text.append(f"{key} ", f"bold {ink['primary']}").append(choice.title, ink["foreground"])
        text.append(f"  {choice.gain}", ink["muted"])
        if choice.decode_tps is not None:
            text.append(f"  {choice.decode_tps:.1f} tok/s", ink["muted"])
    return text


def _reasons(plan: Plan, ink: dict[str, str]) -> Table:
    table = _section("Why", ink)
    table.add_column(style=ink["foreground"], no_wrap=True)
    table.add_column(style=f"bold {ink['foreground']}", justify="right", no_wrap=True)
    table.add_column(style=ink["muted"], ratio=1)
    for reason in plan.reasons:
        table.add_row(reason.param, reason.value, reason.why)
    if plan.speed.bottleneck:
        table.add_row("speed", f"{plan.speed.decode_tps:.0f}", f"limit: {plan.speed.bottleneck}")
    return table


def _measured(plan: Plan, report: LoadReport, ink: dict[str, str]) -> Table:
    table = _section(f"Measured after loading in {report.load_s:.1f} s", ink)
    table.show_header = True
    for name in ("", "planned", "measured", "off by"):
        table.add_column(name, justify="left" if not name else "right")
    for device in report.measured:
        ledger = next((d for d in plan.devices if d.id == device.id), None)
        if ledger is None:
            continue
        for field, label in (("weights", "weights"), ("kv_cache", "KV"), ("compute", "compute")):
            planned, seen = getattr(ledger, field), getattr(device, field)
            table.add_row(
                Text(f"{device.id} {label}", style=ink["muted"]), mib(planned), mib(seen),
                _signed(mib(seen - planned)),
            )  # fmt: skip
    return table


def make() -> PlanScreen:
    return PlanScreen()
