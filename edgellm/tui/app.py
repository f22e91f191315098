"""The terminal interface: an application of modes, one screen each, over the seam in ports.py.

The application owns what the screens share (the model that answers, the conversations, the chosen
model) and nothing else. Work runs in workers, results arrive as messages, and screens show them
through reactive attributes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, ParamSpec, TypeVar

from textual import events, work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.reactive import reactive
from textual.worker import WorkerFailed

from edgellm.errors import (
    ContextOverflowError,
    DoesNotFitError,
    DownloadError,
    EdgeLLMError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    StoreError,
)
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.tui import hangup
from edgellm.tui.composer import writes
from edgellm.tui.details import shown_name
from edgellm.tui.downloads import Downloads, DownloadsChanged
from edgellm.tui.palette import THEMES
from edgellm.tui.ports import (
    Endpoint,
    ModelRow,
    Progress,
    ServerHandle,
    ServerLostError,
    Services,
)
from edgellm.tui.sessions import SessionStore
from edgellm.tui.widgets import MODE_LABELS, NavBar

if TYPE_CHECKING:
    from textual.screen import Screen

P = ParamSpec("P")
T = TypeVar("T")

# One table: a class of error to the title of its notification and how loud it is.
SEVERITY: Final[tuple[tuple[type[EdgeLLMError], str, str], ...]] = (
    (EngineDeadError, "The engine ended", "error"),
    (DoesNotFitError, "Does not fit", "warning"),
    (ContextOverflowError, "Too long for the context", "warning"),
    (QueueFullError, "Busy", "warning"),
    (InvalidRequestError, "Not accepted", "warning"),
    (DownloadError, "The network", "error"),
    (StoreError, "Storage", "error"),
    (ServerLostError, "The server is gone", "error"),
    (EdgeLLMError, "Something failed", "error"),
)


def _screen(name: str) -> Callable[[], Screen[Any]]:
    """A screen by its mode's name, imported now: start-up pays for the first one only."""

    def make() -> Screen[Any]:
        from importlib import import_module

        screen: Screen[Any] = import_module(f"edgellm.tui.screens.{name}").make()
        return screen

    return make


class EdgeApp(App[int]):
    """What ``edgellm`` without arguments opens; tests run this same class."""

    TITLE = "edgellm"
    CSS_PATH = "edge.tcss"
    ENABLE_COMMAND_PALETTE = True
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {
        name: _screen(name) for name in ("welcome", *MODE_LABELS)
    }
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(f"{i}", f"go('{mode}')", label, show=False, id=f"go.{mode}")
            for i, (mode, label) in enumerate(MODE_LABELS.items(), 1)
        ),
        # Priority: a text field has the digits for itself, and uses some function keys.
        *(
            Binding(
                f"f{i},alt+{i}",
                f"go('{mode}')",
                label,
                show=False,
                id=f"jump.{mode}",
                priority=True,
            )
            for i, (mode, label) in enumerate(MODE_LABELS.items(), 1)
        ),
        Binding("question_mark", "help", "Keys", id="help", key_display="?"),
        Binding("f10", "theme", "Light/dark", show=False, id="theme"),
    ]

    endpoint: reactive[Endpoint | None] = reactive(None)
    """The model that answers, or None."""
    loading: reactive[str] = reactive("")
    """What is being loaded and how far, in words; empty when nothing is."""
    chosen: reactive[ModelRow | None] = reactive(None)
    """The model that the plan screen plans."""
    wanted: reactive[str] = reactive("")
    """What the models screen is asked to look for on the hub."""

    def __init__(
        self,
        services: Services,
        *,
        model: str | None = None,
        attach: str | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__()
        self.services = services
        self._start = (model, attach, api_key)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="conversations")
        self._notes: list[EdgeLLMError] = []
        self._typed: list[events.Key] | None = None
        """Keys pressed since the chat was asked for; None when it has them itself."""
        self.store = self._open_store()
        for theme in THEMES:
            self.register_theme(theme)
        self.preferred = services.preferences()
        self.theme = self._first_theme()
        if not self.preferred.animations:
            self.animation_level = "none"
        self.downloads = Downloads(services.pull, self._in_thread, self.post_message)
        self.server: ServerHandle | None = None
        self.failure: EdgeLLMError | None = None
        """What the program says after it had to end by a defect of its own."""

    def _in_thread(self, call: Callable[[], None]) -> None:
        self.run_worker(call, thread=True, group="downloads", exit_on_error=False)

    def _open_store(self) -> SessionStore:
        """The conversations; kept in memory, with a warning, where the disk refuses."""
        try:
            return SessionStore(self.services.state_file("chat.db"), clock=self.services.clock)
        except EdgeLLMError as error:
            hint = f"{error.hint}; until then conversations are in memory only"
            self._notes.append(StoreError(error.message, hint=hint))
            return SessionStore(":memory:", clock=self.services.clock)

    def _first_theme(self) -> str:
        """The theme that was last chosen here, else the configured one, else dark."""
        wanted = self.store.setting("theme") or self.preferred.theme or THEMES[0].name
        return wanted if wanted in self.available_themes else THEMES[0].name

    # -- start and end ---------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.set_keymap(self.preferred.keys)
        if not self.is_headless and sys.__stdin__ is not None:
            soon = asyncio.get_running_loop().call_soon_threadsafe
            hangup.watch(sys.__stdin__.fileno(), partial(soon, self.exit, hangup.EXIT_CODE))
        model, attach, api_key = self._start
        self._show_mode(self._first_mode(model, attach))
        for error in self._notes:
            self.report(error)
        if self.store.n_recovered:
            self.notify(f"{self.store.n_recovered} unfinished answer(s) were recovered")
        if attach is not None:
            self.attach(attach, api_key)
        elif model is not None:
            self.open_model(model)

    def _first_mode(self, model: str | None, attach: str | None) -> str:
        if model or attach:
            return "chat"
        return "models" if self.store.setting("welcomed") else "welcome"

    async def on_unmount(self) -> None:
        if self.server is not None:
            await self.server.stop()
        if self.endpoint is not None:
            await self.endpoint.close()
        self._disk.shutdown(wait=True)
        self.store.close()

    async def disk(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one call of the store on its own thread, in order; raises what it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._disk, partial(call, *args, **kwargs))

    def remember(self, key: str, value: str) -> None:
        """Keep a setting without waiting for the disk; one that is lost costs nobody anything."""
        self._disk.submit(self._remember, key, value)

    def _remember(self, key: str, value: str) -> None:
        with suppress(EdgeLLMError):
            self.store.save_setting(key, value)

    # -- errors ----------------------------------------------------------------------------------

    def report(self, error: EdgeLLMError) -> None:
        """Show an error as a notification: what happened, then the next step."""
        found = ((title, loud) for kind, title, loud in SEVERITY if isinstance(error, kind))
        title, severity = next(found)
        # Some messages end with a log; its place is the log, not a corner of the screen.
        lines = error.message.splitlines()[:3]
        body = "\n".join(lines if error.hint is None else [*lines, f"→ {error.hint}"])
        self.notify(
            body, title=title, severity="error" if severity == "error" else "warning", timeout=10,
            markup=False,
        )  # fmt: skip

    def _handle_exception(self, error: Exception) -> None:
        """Nobody misses a widget that is looked for while the screens are taken down."""
        cause = error.error if isinstance(error, WorkerFailed) else error
        if self.is_running or not isinstance(cause, NoMatches):
            super()._handle_exception(error)

    def _fatal_error(self) -> None:
        """Textual's end for an exception nobody handled: state first, then a log, then one line."""
        from edgellm.tui import crash

        for screen in self.screen_stack:
            keep = getattr(screen, "keep_now", None)
            if keep is not None:
                keep()
        if self.failure is None and self._exception is not None:
            path = Path(self.services.state_file(crash.LOG))
            self.failure = crash.record(self._exception, path)
        self._close_messages_no_wait()

    # -- the model that answers ------------------------------------------------------------------

    @work(exclusive=True, group="endpoint")
    async def open_model(self, ref: str) -> None:
        """Plan and load a model by name, then chat with it."""
        self.loading = "planning"
        try:
            plan = await asyncio.to_thread(self.services.plan, ref, PlanRequest())
        except EdgeLLMError as error:
            self.report(error)
            return
        finally:
            self.loading = ""
        await self._load(plan)

    @work(exclusive=True, group="endpoint")
    async def load_plan(self, plan: Plan) -> None:
        """Load exactly this plan."""
        await self._load(plan)

    async def _load(self, plan: Plan) -> None:
        name = shown_name(plan.model.path) or plan.model.name
        self.loading = f"{name}: starting"
        await self._close_endpoint()
        try:
            endpoint = await self.services.load(plan, partial(self._progress, name))
        except EdgeLLMError as error:
            self.report(error)
        else:
            self.endpoint = endpoint
            self.remember("model", plan.model.path)
        finally:
            self.loading = ""

    def _progress(self, name: str, progress: Progress) -> None:
        share = f" {progress.n_done * 100 // progress.n_total} %" if progress.n_total else ""
        self.loading = f"{name}: {progress.phase}{share}"

    @work(exclusive=True, group="endpoint")
    async def attach(self, url: str, api_key: str | None = None) -> None:
        """Answer from a running server instead of an engine of our own."""
        self.loading = f"connecting to {url}"
        try:
            endpoint = await self.services.attach(url, api_key)
        except EdgeLLMError as error:
            self.report(error)
            return
        finally:
            self.loading = ""
        await self._close_endpoint()
        self.endpoint = endpoint

    async def _close_endpoint(self) -> None:
        old, self.endpoint = self.endpoint, None
        if old is not None:
            await old.close()

    def restart_engine(self) -> None:
        """Load the last plan again after its engine died."""
        if self.endpoint is not None and self.endpoint.plan is not None:
            self.load_plan(self.endpoint.plan)

    # -- downloads -------------------------------------------------------------------------------

    def on_downloads_changed(self, event: DownloadsChanged) -> None:
        download = event.download
        if event.finished:
            self.notify("downloaded", title=download.row.name)
        elif download.state == "failed" and download.error is not None:
            self.report(download.error)
        show = getattr(self.screen, "show_download", None)
        if show is not None:
            show(event)

    # -- going places ----------------------------------------------------------------------------

    def on_nav_bar_chosen(self, event: NavBar.Chosen) -> None:
        self.action_go(event.mode)

    def action_go(self, mode: str) -> None:
        if self.current_mode != mode and len(self.screen_stack) == 1:
            self.remember("welcomed", "yes")
            self._show_mode(mode)

    def _show_mode(self, mode: str) -> None:
        self._typed = [] if mode == "chat" else None
        self.switch_mode(mode)

    async def on_event(self, event: events.Event) -> None:
        """What is typed while the chat opens is for its message, digits and Enter too."""
        if self._typed is not None and isinstance(event, events.Key) and writes(event):
            self._typed.append(event)
        else:
            await super().on_event(event)

    def key(self, binding: str, default: str) -> str:
        """The key of a binding (by its id) as hints name it: a person may have chosen another."""
        return self.preferred.keys.get(binding, default).split(",")[0].strip()

    def take_typed(self) -> list[events.Key]:
        """What was typed while the chat opened; from here on keys go where the focus is."""
        typed, self._typed = self._typed or [], None
        return typed

    def action_theme(self) -> None:
        self.theme = "edgellm-light" if self.current_theme.dark else "edgellm-dark"
        self.remember("theme", self.theme)

    def action_help(self) -> None:
        from edgellm.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.screen))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for mode, label in MODE_LABELS.items():
            yield SystemCommand(f"Go to {label}", f"Open the {label} screen", _go(self, mode))
        yield SystemCommand("First steps", "What runs well here", _go(self, "welcome"))
        yield SystemCommand("Light or dark", "Switch the theme", self.action_theme)
        yield SystemCommand("Keys", "Every key of this screen", self.action_help)
        for title, help_text, call in getattr(screen, "commands", tuple)():
            yield SystemCommand(title, help_text, call)
        yield SystemCommand("Quit", "Leave edgellm", self.action_quit)


def _go(app: EdgeApp, mode: str) -> Callable[[], None]:
    return partial(app.action_go, mode)
