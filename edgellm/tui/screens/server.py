"""Server: serve a model to other programs, and the line that tries it."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.reactive import reactive
from textual.widgets import Button, Input, Label, Static

from edgellm.errors import EdgeLLMError
from edgellm.tui.ports import ServerHandle
from edgellm.tui.screens.base import Command, EdgeScreen


class ServerScreen(EdgeScreen):
    """A form, two buttons, the curl line, and what the server logs."""

    MODE = "server"
    AUTO_FOCUS = "#start"
    CSS = """
    ServerScreen #form { height: auto; padding: 1 3; }
    ServerScreen .row { height: 1; margin-bottom: 1; }
    ServerScreen .row Label { width: 14; color: $muted; }
    ServerScreen .row Input { width: 44; max-width: 70%; }
    ServerScreen Input:focus { background-tint: $primary 8%; }
    ServerScreen #state { height: 1; margin-bottom: 1; }
    ServerScreen #buttons { height: 3; }
    ServerScreen #buttons Button { margin-right: 2; }
    ServerScreen #try { height: auto; padding: 0 3; }
    ServerScreen #curl { background: $surface; padding: 0 1; height: auto; color: $foreground; }
    ServerScreen #log-box { height: 1fr; padding: 0 3; margin-top: 1; }
    /* A line a row: one that went on below would push the newest out of the box. */
    ServerScreen #log {
        color: $muted; height: 1fr; text-wrap: nowrap; text-overflow: ellipsis;
    }
    ServerScreen .head { color: $primary; text-style: bold; height: 1; }
    ServerScreen.-narrow #form { padding: 0 2; }
    ServerScreen.-short #form { padding: 1 2 0 2; }
    ServerScreen.-short .row { margin-bottom: 0; }
    ServerScreen.-short #buttons { margin-top: 1; }
    ServerScreen.-narrow #try, ServerScreen.-narrow #log-box { padding: 0 2; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "serve", "Start / stop", id="server.toggle"),
        Binding("y", "copy", "Copy the curl line", id="server.copy"),
        Binding("a", "attach", "Chat with it", id="server.attach"),
        Binding("escape", "leave", show=False),
    ]
    handle: reactive[ServerHandle | None] = reactive(None, always_update=True)
    starting: reactive[bool] = reactive(False)

    def body(self) -> ComposeResult:
        with Vertical(id="form"):
            yield Static(id="state")
            for name, label, placeholder in (
                ("model", "model", "a model's name, such as starter"),
                ("host", "address", "127.0.0.1"),
                ("port", "port", "8080"),
                ("key", "API key", "none: only this machine may call"),
            ):
                with Horizontal(classes="row"):
                    yield Label(label)
                    yield Input(
                        id=name, placeholder=placeholder, compact=True, password=name == "key"
                    )
            with Horizontal(id="buttons"):
                yield Button("Start", id="start")
                yield Button("Copy curl", id="copy")
        with Vertical(id="try"):
            yield Static("Try it", classes="head")
            yield Static(id="curl")
        with Vertical(id="log-box"):
            yield Static("Log", classes="head")
            yield Static(id="log")

    def ready(self) -> None:
        self._show()
        self.set_interval(1.0, self._tick)

    def shown(self) -> None:
        model = self.query_one("#model", Input)
        if not model.value:
            chosen = self.edge.chosen
            model.value = chosen.ref if chosen is not None else self.edge.store.setting("served")
        self.query_one("#start").focus()

    def recolored(self) -> None:
        self._show()

    def _value(self, name: str) -> str:
        field = self.query_one(f"#{name}", Input)
        return field.value.strip()

    @property
    def url(self) -> str:
        if self.handle is not None:
            return self.handle.url
        return f"http://{self._value('host') or '127.0.0.1'}:{self._value('port') or '8080'}"

    def curl(self) -> str:
        """A line that works in any shell."""
        key = ' \\\n  -H "Authorization: Bearer $EDGELLM_API_KEY"' if self._value("key") else ""
        model = self._value("model") or "starter"
        return (
            f"curl {self.url}/v1/chat/completions{key} \\\n"
            '  -H "Content-Type: application/json" \\\n'
            f'  -d \'{{"model": "{model}",\n'
            '       "messages": [{"role": "user", "content": "Hello"}]}\''
        )

    # -- showing ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self.is_current:
            return
        if self.handle is not None and not self.handle.is_alive:
            self._show()
        self._show_log()

    def _show(self) -> None:
        ink = self.app.theme_variables
        if self.starting:
            text = Text("◐ starting…", style=ink["warning"])
        elif self.handle is None:
            text = Text("○ not serving", style=ink["muted"])
        elif self.handle.is_alive:
            text = Text(f"● serving at {self.handle.url}", style=f"bold {ink['success']}")
        else:
            text = Text("✗ the server ended; its log says why", style=f"bold {ink['error']}")
        self.query_one("#state", Static).update(text)
        alive = self.handle is not None and self.handle.is_alive
        self.query_one("#start", Button).label = "Stop" if alive else "Start"
        self.query_one("#curl", Static).update(Text(self.curl()))
        self._show_log()

    def _show_log(self) -> None:
        box = self.query_one("#log", Static)
        lines = self.handle.tail(max(box.size.height, 4)) if self.handle is not None else []
        box.update(Text("\n".join(lines)))

    def watch_handle(self) -> None:
        if self.is_mounted:
            self._show()

    def watch_starting(self) -> None:
        if self.is_mounted:
            self._show()

    @on(Input.Changed)
    def _changed(self) -> None:
        self._show()

    # -- doing -----------------------------------------------------------------------------------

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "start":
            self.action_serve()
        else:
            self.action_copy()

    @on(Input.Submitted)
    def _submitted(self) -> None:
        self.action_serve()

    def action_serve(self) -> None:
        if self.starting:
            return
        if self.handle is not None and self.handle.is_alive:
            self._stop()
        else:
            self._start()

    @work(exclusive=True, group="serve")
    async def _start(self) -> None:
        port = self._value("port") or "8080"
        if not port.isdecimal() or not 0 < int(port) < 65536:
            self.notify(f"port {port!r} is not a number up to 65535", severity="warning")
            return
        self.starting = True
        ref = self._value("model") or "starter"
        try:
            self.handle = await self.edge.services.serve(
                ref, self._value("host") or "127.0.0.1", int(port), self._value("key") or None
            )
            self.edge.server = self.handle
            self.edge.remember("served", ref)
        except EdgeLLMError as error:
            self.edge.report(error)
        finally:
            self.starting = False

    @work(exclusive=True, group="serve")
    async def _stop(self) -> None:
        if self.handle is not None:
            await self.handle.stop()
            self.handle = None
            self.edge.server = None

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self.curl())
        self.notify("the curl line is on the clipboard")

    def action_attach(self) -> None:
        if self.handle is None or not self.handle.is_alive:
            self.notify("start a server first", severity="warning")
            return
        self.edge.attach(self.handle.url, self._value("key") or None)
        self.edge.action_go("chat")

    def action_leave(self) -> None:
        self.set_focus(None)

    def commands(self) -> list[Command]:
        return [
            ("Start or stop serving", "An OpenAI-compatible API", self.action_serve),
            ("Copy the curl line", "To try it in a shell", self.action_copy),
        ]


def make() -> ServerScreen:
    return ServerScreen()
