"""Chat: conversations on the left, the one you are in beside them, a place to write below."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.reactive import reactive
from textual.timer import Timer
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option, OptionDoesNotExist
from textual.worker import Worker

from edgellm.errors import DiskFullError, EdgeLLMError, EngineDeadError
from edgellm.request import Usage
from edgellm.tui.composer import Composer
from edgellm.tui.context import fit, to_chat, to_sampling
from edgellm.tui.pacing import PLENTY, Pacer, share_for
from edgellm.tui.ports import HERE, Delta, Endpoint
from edgellm.tui.screens.base import Command, EdgeScreen
from edgellm.tui.screens.dialogs import AskScreen, ConfirmScreen, PickScreen, SettingsScreen
from edgellm.tui.sessions import Message, Session, code_blocks
from edgellm.tui.transcript import Transcript, Turn
from edgellm.tui.widgets import Meter

T = TypeVar("T")

RETRY_S: Final = 2.0
"""How long after a full disk an answer is written again."""
MEND_S: Final = 15.0
"""How long an engine that died may take to start itself again."""
SAVE_S: Final = 0.4
"""How much of an answer a crash may cost."""
TITLE_CELLS: Final = 28
"""What the list of conversations has room for on a line."""
READING: Final = "reading the prompt"
"""Said until the first word comes: a long prompt takes a minute on a slow CPU."""
MAX_ATTACHMENT: Final = 4 * 1024 * 1024


@dataclass
class Live:
    """An answer that is being written."""

    session: Session
    message: Message
    turn: Turn
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    n_shown: int = 0
    n_reasoned: int = 0
    n_saved: tuple[int, int] = (0, 0)
    n_tokens: int = 0
    last: Delta | None = None


class ChatScreen(EdgeScreen):
    """Everything a conversation needs, on keys; letters work while it has the focus."""

    MODE = "chat"
    CSS = """
    ChatScreen #sidebar {
        dock: left; width: 32; margin: 2 0 1 0; border-right: vkey $border; padding: 0 1;
        display: none;
    }
    ChatScreen.-sidebar #sidebar { display: block; }
    ChatScreen #find { background: $background; height: 1; }
    ChatScreen #sessions {
        border: none; background: $background; height: 1fr; margin-top: 1; padding: 0;
        scrollbar-size-vertical: 1;
    }
    ChatScreen #sessions:focus { background-tint: $background 0%; }
    ChatScreen #transcript { padding: 0 1; }
    ChatScreen #hint { height: 1fr; align: center middle; display: none; }
    ChatScreen #hint Static { width: 62; max-width: 90%; color: $muted; text-align: center; }
    ChatScreen.-blank #hint { display: block; }
    ChatScreen.-blank #transcript { display: none; }
    ChatScreen #attached { height: auto; padding: 0 2; color: $accent; display: none; }
    ChatScreen #composer { margin: 0 1; }
    ChatScreen #meter { padding: 0 3; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "escape", "Stop / leave", id="chat.escape", key_display="esc"),
        Binding("ctrl+n", "new", "New", id="chat.new"),
        Binding("ctrl+b", "sidebar", "Conversations", id="chat.sidebar"),
        Binding("ctrl+t", "settings", "Settings", id="chat.settings"),
        Binding("ctrl+l", "model", "Model", id="chat.model"),
        Binding("ctrl+o", "attach", "Attach", id="chat.attach"),
        Binding("ctrl+r", "restart", "Restart the engine", id="chat.restart", show=False),
        Binding("r", "regenerate", "Again", id="chat.again"),
        Binding("e", "edit", "Edit and branch", id="chat.edit", show=False),
        Binding("c", "copy", "Copy message", id="chat.copy", show=False),
        Binding("b", "copy_code", "Copy code block", id="chat.code", show=False),
        Binding("t", "thinking", "Thinking", id="chat.thinking", show=False),
        Binding("left_square_bracket", "branch(-1)", "Other branch", show=False, id="chat.before"),
        Binding("right_square_bracket", "branch(1)", "Other branch", show=False, id="chat.after"),
        Binding("i", "write", "Write", show=False, id="chat.write"),
        Binding("slash", "find", "Find a conversation", show=False, id="chat.find"),
        Binding("m", "rename", "Rename", show=False, id="chat.rename"),
        Binding("x", "export", "Export", show=False, id="chat.export"),
        Binding("delete", "delete", "Delete the conversation", show=False, id="chat.delete"),
    ]
    session: reactive[Session | None] = reactive(None)
    speed: reactive[str] = reactive("")

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None
        self._thread: list[Message] = []
        self._branches: dict[str, tuple[int, int]] = {}
        self._attachments: list[tuple[str, str]] = []
        self._editing: Message | None = None
        self._queued = ""
        self._frame: Timer | None = None
        self._pacer = Pacer(PLENTY)
        self._answering: Worker[None] | None = None
        self._disk_full = False
        self._counts: dict[str, int] = {}

    def body(self) -> ComposeResult:
        # Few containers: Textual draws the lines of every one of them in every frame.
        with Vertical(id="sidebar"):
            yield Input(placeholder="find in conversations", id="find", compact=True)
            yield OptionList(id="sessions")
        yield Transcript(id="transcript")
        with Vertical(id="hint"):
            yield Static(id="hint-text")
        yield Static(id="attached")
        yield Composer(id="composer")
        yield Meter("ctx", id="meter")

    def ready(self) -> None:
        self.set_class(self.size.width >= 110, "-sidebar")
        self.add_class("-blank")
        self.query_one(Composer).cursor_blink = self.edge.preferred.animations
        self.watch(self.app, "endpoint", self._endpoint_changed)
        self.watch(self.app, "loading", self._show_hint)
        self.set_interval(SAVE_S, self._save)
        self._open_last()

    def shown(self) -> None:
        self.query_one(Composer).focus()

    @property
    def transcript(self) -> Transcript:
        return self.query_one("#transcript", Transcript)

    async def _disk(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """A call of the store; a full disk is said once and never ends anything."""
        try:
            result = await self.edge.disk(call, *args, **kwargs)
        except EdgeLLMError as error:
            if not (isinstance(error, DiskFullError) and self._disk_full):
                self.edge.report(error)
            self._disk_full = isinstance(error, DiskFullError)
            return None
        self._disk_full = False
        return result

    # -- opening conversations -------------------------------------------------------------------

    @work(exclusive=True, group="open")
    async def _open_last(self) -> None:
        await self._list()
        sessions = await self._disk(self.edge.store.find, limit=1)
        if sessions and self.session is None:
            await self._open(sessions[0])

    async def _list(self, query: str = "") -> None:
        sessions = await self._disk(self.edge.store.find, query) or []
        options = self.query_one("#sessions", OptionList)
        options.clear_options()
        now = self.edge.services.clock()
        ink = self.app.theme_variables
        for session in sessions:
            text = Text(session.title)
            text.truncate(TITLE_CELLS, overflow="ellipsis")
            below = Text(f"{_ago(now - session.updated)} · {session.model}", ink["faint"])
            below.truncate(TITLE_CELLS, overflow="ellipsis")
            text.append("\n").append_text(below)
            options.add_option(Option(text, id=session.id))
        self._mark_session()

    def _mark_session(self) -> None:
        options = self.query_one("#sessions", OptionList)
        if self.session is None:
            options.highlighted = None
            return
        with suppress(OptionDoesNotExist):  # the search may have left it out
            options.highlighted = options.get_option_index(self.session.id)

    async def _open(self, session: Session) -> None:
        self.session = session
        self._editing = None
        await self._reload()
        composer = self.query_one(Composer)
        composer.text = session.draft
        composer.remember([m.content for m in self._thread if m.role == "user"])
        self._mark_session()

    async def _reload(self) -> None:
        """Show the branch that the store says is shown."""
        if self.session is None:
            return
        self._thread = await self._disk(self.edge.store.thread, self.session.id) or []
        await self._find_branches()
        live = self._live
        turns = [
            live.turn if live is not None and live.message.id == message.id else self._turn(message)
            for message in self._thread
        ]
        self.transcript.show(turns)
        self.set_class(not turns, "-blank")
        self._show_hint()
        self._count()

    async def _find_branches(self) -> None:
        """Where this branch has siblings: message id -> (place, how many)."""
        self._branches = {}
        for message in self._thread:
            family = await self._disk(self.edge.store.siblings, message) or []
            if len(family) > 1:
                ids = [other.id for other in family]
                self._branches[message.id] = (ids.index(message.id) + 1, len(ids))

    def _turn(self, message: Message) -> Turn:
        note = message.note or ("stopped" if message.state == "stopped" else "")
        return Turn(
            message.id, message.role, text=message.content, reasoning=message.reasoning,
            name=message.model, facts=self._facts(message), note=note,
        )  # fmt: skip

    def _facts(self, message: Message) -> str:
        parts = []
        if message.decode_tps:
            parts.append(f"{message.decode_tps:.1f} tok/s")
        if message.ttft_s is not None:
            parts.append(f"first token {message.ttft_s:.2f} s")
        if message.id in self._branches:
            at, n = self._branches[message.id]
            parts.append(f"‹{at}/{n}›")
        return " · ".join(parts)

    @on(OptionList.OptionSelected, "#sessions")
    def _session_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option.id is not None:
            self._switch(event.option.id)

    @work(exclusive=True, group="open")
    async def _switch(self, session_id: str) -> None:
        await self._save_draft()
        session = await self._disk(self.edge.store.get, session_id)
        if session is not None:
            await self._open(session)
            self.query_one(Composer).focus()

    @on(Input.Changed, "#find")
    async def _find_changed(self, event: Input.Changed) -> None:
        await self._list(event.value)

    # -- writing and answering -------------------------------------------------------------------

    @on(Composer.Submitted)
    def _submitted(self, event: Composer.Submitted) -> None:
        text = self._with_attachments(event.text)
        if not text:
            return
        if self._live is not None:
            self.notify("wait for the answer, or press Esc to stop it")
            return
        if self.edge.endpoint is None and not self.edge.loading:
            self.notify("choose a model first: ctrl+l", severity="warning")
            return
        self.query_one(Composer).text = ""
        self._clear_attachments()
        if self.edge.endpoint is None:
            self._queued = text
            self._show_hint()
            return
        self._send(text)

    @work(exclusive=True, group="send")
    async def _send(self, text: str) -> None:
        """Put the message on disk and on the screen, then ask."""
        endpoint = self.edge.endpoint
        if endpoint is None:
            return
        store = self.edge.store
        if self.session is None:
            self.session = await self._disk(
                store.create, model=endpoint.name, system=self.edge.preferred.system
            )
        if self.session is None:
            self.query_one(Composer).text = text
            return
        edited, self._editing = self._editing, None
        parent = edited.parent if edited else (self._thread[-1].id if self._thread else None)
        asked = await self._disk(store.add, self.session.id, "user", text, parent=parent)
        if asked is None:
            self.query_one(Composer).text = text
            return
        if edited is not None:
            await self._reload()
        else:
            self._thread.append(asked)
            self.remove_class("-blank")
            self.transcript.add(self._turn(asked))
        await self._answer_to(asked)

    async def _answer_to(self, asked: Message) -> None:
        """A new answer under a question; the questions before it are the context."""
        endpoint, session = self.edge.endpoint, self.session
        if endpoint is None or session is None:
            return
        store = self.edge.store
        message = await self._disk(
            store.add, session.id, "assistant", "", parent=asked.id, model=endpoint.name,
            state="streaming",
        )  # fmt: skip
        if message is None:
            return
        messages = to_chat(session.system, self._thread)
        self._thread.append(message)
        turn = Turn(message.id, "assistant", name=endpoint.name, streaming=True)
        self.transcript.add(turn)
        self._live = Live(session, message, turn)
        self.speed = READING
        self._pacer = _pacer(endpoint)
        self.query_one(Composer).cursor_blink = False  # each blink is a frame
        self._frame = self.set_timer(self._pacer.interval_s, self._frame_due)
        self._answering = self._answer(endpoint, self._live, messages)
        await self._list(self.query_one("#find", Input).value)

    @work(exclusive=True, group="answer")
    async def _answer(self, endpoint: Endpoint, live: Live, messages: list[dict[str, Any]]) -> None:
        state, note = "done", ""
        try:
            sampling = to_sampling({**self.edge.preferred.sampling, **live.session.sampling})
            stream = endpoint.chat(messages, sampling, request_id=f"chat-{live.message.id}")
            async with aclosing(stream):
                async for delta in stream:
                    _take(live, delta)
        except asyncio.CancelledError:
            await self._finish(live, "stopped", "stopped")
            raise
        except EdgeLLMError as error:
            state, note = "error", error.message.splitlines()[0]
            self.edge.report(error)
            self._maybe_dead(error)
        if live.last is not None and live.last.finish == "length":
            note = "the answer reached its limit of tokens"
        await self._finish(live, state, note)

    def _maybe_dead(self, error: EdgeLLMError) -> None:
        self.refresh_status()
        if isinstance(error, EngineDeadError):
            self._wait_for_engine()

    @work(exclusive=True, group="dead")
    async def _wait_for_engine(self) -> None:
        """An engine mends itself a few times; when it does not, a person decides."""
        endpoint = self.edge.endpoint
        end = time.monotonic() + MEND_S
        while endpoint is not None and not endpoint.is_alive and time.monotonic() < end:
            await asyncio.sleep(0.1)
        self.refresh_status()
        if endpoint is not None and endpoint.is_alive:
            self.notify("the engine is back; r asks again", title="Started again")
            return
        text = "The model's process is gone. What was said is saved. Load the model again?"
        if await self.app.push_screen_wait(ConfirmScreen("The engine ended", text, "Restart")):
            self.edge.restart_engine()

    def _frame_due(self) -> None:
        if self._live is None:
            return
        self._show_frame()
        pause = self._pacer.note(time.monotonic(), time.process_time())
        self._frame = self.set_timer(pause, self._frame_due)

    def _show_frame(self) -> None:
        """What arrived since the last frame, onto the screen: one layout for all of it."""
        live = self._live
        if live is None:
            return
        text = "".join(live.text[live.n_shown :])
        reasoning = "".join(live.reasoning[live.n_reasoned :])
        live.n_shown, live.n_reasoned = len(live.text), len(live.reasoning)
        if not text and not reasoning:
            return
        if self.speed == READING:
            self.speed = ""
        turns = self.transcript.turns
        if turns and turns[-1] is live.turn:
            self.transcript.stream(text, reasoning)
        else:
            live.turn.text += text
            live.turn.reasoning += reasoning

    async def _save(self) -> None:
        """Every SAVE_S: the pieces of the answer, or the draft."""
        live = self._live
        if live is None:
            await self._save_draft()
            return
        at = (len(live.text), len(live.reasoning))
        text = "".join(live.text[live.n_saved[0] :])
        reasoning = "".join(live.reasoning[live.n_saved[1] :])
        if not text and not reasoning:
            return
        before, live.n_saved = live.n_saved, at
        await self._disk(self.edge.store.append, live.message.id, text, reasoning)
        if self._disk_full:
            live.n_saved = before

    async def _save_draft(self) -> None:
        session = self.session
        draft = self.query_one(Composer).text
        if session is None or draft == session.draft:
            return
        await self._disk(self.edge.store.update, session.id, draft=draft)
        self.session = _replace(session, draft=draft)

    async def _finish(self, live: Live, state: str, note: str) -> None:
        if self.is_attached:
            self._show_frame()
        if self._frame is not None:
            self._frame.stop()
        usage, timings = _measured(live)
        values: dict[str, Any] = {
            "content": "".join(live.text), "reasoning": "".join(live.reasoning), "state": state,
            "note": note or None, "n_tokens": usage.n_output or live.n_tokens,
            "decode_tps": timings[0], "ttft_s": timings[1],
        }  # fmt: skip
        self._live = None
        if self.is_attached:
            self.query_one(Composer).cursor_blink = self.edge.preferred.animations
        if not self.is_attached:
            # The program is ending: keep the words, there is no screen to show them on.
            self.edge.store.finish(live.message.id, **values)
            return
        await self._keep_until_saved(live.message.id, values)
        if self.session is not None and self.session.id == live.session.id:
            self._thread = await self._disk(self.edge.store.thread, self.session.id) or self._thread
            await self._find_branches()
        done = next((m for m in self._thread if m.id == live.message.id), None)
        live.turn.streaming = False
        if self.transcript.turns and self.transcript.turns[-1] is live.turn:
            facts = self._facts(done) if done is not None else ""
            self.transcript.finish(facts=facts, note=note)
        self._show_speed(usage, timings)
        self._count()

    async def _keep_until_saved(self, message_id: str, values: dict[str, Any]) -> None:
        """Write a finished answer; on a full disk keep trying in the background."""
        await self._disk(self.edge.store.finish, message_id, **values)
        if self._disk_full:
            self.set_timer(RETRY_S, lambda: self._try_again(message_id, values))

    async def _try_again(self, message_id: str, values: dict[str, Any]) -> None:
        await self._keep_until_saved(message_id, values)
        if not self._disk_full:
            self.notify("there is room again: the answer is saved")

    def _show_speed(self, usage: Usage, timings: tuple[float | None, float | None]) -> None:
        decode, ttft = timings
        parts = [f"{decode:.1f} tok/s"] if decode else []
        if ttft is not None:
            parts.append(f"first token {ttft:.2f} s")
        if usage.n_cached:
            parts.append(f"{usage.n_cached:,} cached")
        self.speed = " · ".join(parts)

    def watch_speed(self, speed: str) -> None:
        self.query_one(Meter).right = speed

    # -- the meter -------------------------------------------------------------------------------

    @work(exclusive=True, group="count")
    async def _count(self) -> None:
        """How full the context is; each message is counted once."""
        endpoint, session = self.edge.endpoint, self.session
        meter = self.query_one(Meter)
        if endpoint is None or session is None:
            meter.fraction, meter.text = 0.0, ""
            return
        try:
            counts = await self._token_counts(endpoint, session)
        except EdgeLLMError:
            return  # the meter keeps what it showed; asking again tells the person more
        reserve = session.sampling.get("max_tokens") or 256
        fitting = fit(counts, endpoint.n_ctx, int(reserve))
        meter.fraction, meter.text = fitting.fraction, fitting.text

    async def _token_counts(self, endpoint: Endpoint, session: Session) -> list[int]:
        system = to_chat(session.system, [])
        counts = [await endpoint.count(system) if system else 0]
        for message in self._thread:
            key = f"{endpoint.name}:{message.id}:{len(message.content)}"
            if key not in self._counts:
                self._counts[key] = await endpoint.count(to_chat("", [message]))
            counts.append(self._counts[key])
        return counts

    # -- what Esc, letters and commands do -------------------------------------------------------

    def action_escape(self) -> None:
        if self._live is not None and self._answering is not None:
            self._answering.cancel()
        elif self._editing is not None:
            self._editing = None
            self.query_one(Composer).text = ""
        elif self.focused is self.transcript:
            self.query_one(Composer).focus()
        else:
            self.transcript.focus()

    def action_write(self) -> None:
        self.query_one(Composer).focus()

    def action_find(self) -> None:
        self.add_class("-sidebar")
        self.query_one("#find").focus()

    def action_sidebar(self) -> None:
        self.toggle_class("-sidebar")
        if self.has_class("-sidebar"):
            self.query_one("#sessions").focus()
        else:
            self.query_one(Composer).focus()

    @work(exclusive=True, group="open")
    async def action_new(self) -> None:
        await self._save_draft()
        self.session, self._thread, self._editing = None, [], None
        self.transcript.show([])
        self.add_class("-blank")
        self._show_hint()
        self.speed = ""
        self._count()
        self.query_one(Composer).text = ""
        self.query_one(Composer).focus()

    def _message(self, role: str | None = None) -> Message | None:
        """The selected message, or the last one (of that role)."""
        turn = self.transcript.selected_turn()
        for message in reversed(self._thread):
            chosen = turn is None or message.id == turn.id
            if chosen and (role is None or message.role == role):
                return message
        return None

    def _is_busy(self) -> bool:
        if self._live is not None:
            self.notify("wait for the answer, or press Esc to stop it")
        return self._live is not None

    @work(exclusive=True, group="send")
    async def action_regenerate(self) -> None:
        answer = self._message("assistant") or self._message()
        if answer is None or self._is_busy():
            return
        index = self._thread.index(answer)
        asked = answer if answer.role == "user" else self._thread[index - 1]
        self._thread = self._thread[: self._thread.index(asked) + 1]
        self.transcript.show([self._turn(message) for message in self._thread])
        await self._answer_to(asked)

    def action_edit(self) -> None:
        message = self._message("user")
        if message is None or self._is_busy():
            return
        self._editing = message
        composer = self.query_one(Composer)
        composer.text = message.content
        composer.move_cursor(composer.document.end)
        composer.focus()
        self.notify("Enter sends it as a new branch, Esc leaves it as it was")

    @work(exclusive=True, group="open")
    async def action_branch(self, step: int) -> None:
        turn = self.transcript.selected_turn()
        chosen = [m for m in self._thread if m.id in self._branches]
        if turn is not None:
            chosen = [m for m in chosen if m.id == turn.id] or chosen
        if not chosen or self._is_busy():
            return
        await self._disk(self.edge.store.switch_branch, chosen[-1], step)
        await self._reload()

    def action_copy(self) -> None:
        message = self._message()
        if message is not None:
            self.app.copy_to_clipboard(message.content)
            self.notify(f"{len(message.content):,} characters copied")

    @work
    async def action_copy_code(self) -> None:
        message = self._message("assistant")
        blocks = code_blocks(message.content) if message else []
        if not blocks:
            self.notify("no code block in this message", severity="warning")
            return
        index: str | None = "0"
        if len(blocks) > 1:
            lines = [(str(i), f"block {i + 1}", b.split("\n")[0]) for i, b in enumerate(blocks)]
            index = await self.app.push_screen_wait(PickScreen("Copy a code block", lines))
        if index is not None:
            self.app.copy_to_clipboard(blocks[int(index)])
            self.notify("code copied")

    def action_thinking(self) -> None:
        turn = self.transcript.selected_turn()
        if turn is None:
            turn = next((t for t in reversed(self.transcript.turns) if t.reasoning), None)
        if turn is not None:
            self.transcript.toggle_thinking(turn)

    @work
    async def action_settings(self) -> None:
        now = self.session
        system, sampling = (now.system, now.sampling) if now else (self.edge.preferred.system, {})
        chosen = await self.app.push_screen_wait(SettingsScreen(system, sampling))
        if chosen is None:
            return
        session = self.session or await self._disk(self.edge.store.create)
        if session is None:
            return
        await self._disk(
            self.edge.store.update, session.id, system=chosen.system, sampling=chosen.sampling
        )
        self.session = _replace(session, system=chosen.system, sampling=chosen.sampling)
        self._count()

    @work
    async def action_model(self) -> None:
        rows = await asyncio.to_thread(self.edge.services.local_models)
        choices = [(row.ref, row.name, f"{row.quant} · {row.owner}") for row in rows]
        choices.append(("url:", "Attach to a server…", "an address such as http://127.0.0.1:8080"))
        ref = await self.app.push_screen_wait(PickScreen("Answer with", choices))
        if ref == "url:":
            url = await self.app.push_screen_wait(
                AskScreen("Attach to a server", "http://127.0.0.1:8080", "")
            )
            if url:
                self.edge.attach(url)
        elif ref:
            self.edge.open_model(ref)

    @work
    async def action_attach(self) -> None:
        name = await self.app.push_screen_wait(AskScreen("Attach a text file", "path", ""))
        if not name:
            return
        path = Path(name).expanduser()
        try:
            text = await asyncio.to_thread(_read_text, path)
        except (OSError, ValueError) as error:
            self.notify(f"{path}: {error}", title="Not attached", severity="warning", markup=False)
            return
        self._add_attachment(path.name, text)

    @on(Composer.LongPaste)
    def _long_paste(self, event: Composer.LongPaste) -> None:
        self._add_attachment("pasted text", event.text)

    def _add_attachment(self, name: str, text: str) -> None:
        self._attachments.append((name, text))
        self._show_attachments()

    def _clear_attachments(self) -> None:
        self._attachments.clear()
        self._show_attachments()

    def _show_attachments(self) -> None:
        line = self.query_one("#attached", Static)
        line.display = bool(self._attachments)
        words = [f"⊞ {name} ({len(text):,} characters)" for name, text in self._attachments]
        line.update(Text("   ".join(words)))

    def _with_attachments(self, text: str) -> str:
        parts = [f"{name}:\n```\n{content.rstrip()}\n```" for name, content in self._attachments]
        return "\n\n".join([*parts, text] if text else parts)

    @work
    async def action_rename(self) -> None:
        if self.session is None:
            return
        title = await self.app.push_screen_wait(AskScreen("Rename", "title", self.session.title))
        if title:
            await self._disk(self.edge.store.rename, self.session.id, title)
            self.session = _replace(self.session, title=title)
            await self._list()

    @work
    async def action_delete(self) -> None:
        session = self.session
        if session is None or self._is_busy():
            return
        text = f"“{session.title}” and all its branches are deleted."
        if await self.app.push_screen_wait(ConfirmScreen("Delete?", text, "Delete")):
            await self._disk(self.edge.store.delete, session.id)
            self.session = None
            await self._list()
            self.action_new()

    @work
    async def action_export(self) -> None:
        if self.session is None:
            return
        default = f"{self.session.title[:40].replace('/', '-').rstrip('… ')}.md"
        name = await self.app.push_screen_wait(
            AskScreen("Export: .md for Markdown, .json for every branch", "file name", default)
        )
        if not name:
            return
        path = Path(name).expanduser()
        store, session_id = self.edge.store, self.session.id
        if path.suffix == ".json":
            data = await self._disk(store.to_json, session_id)
            text = json.dumps(data, ensure_ascii=False, indent=2)
        else:
            text = await self._disk(store.to_markdown, session_id) or ""
        try:
            await asyncio.to_thread(path.write_text, text, "utf-8")
        except OSError as error:
            self.notify(str(error), title="Not exported", severity="error", markup=False)
        else:
            self.notify(str(path.resolve()), title="Exported", markup=False)

    def action_restart(self) -> None:
        self.edge.restart_engine()

    # -- the model -------------------------------------------------------------------------------

    def _endpoint_changed(self, endpoint: Endpoint | None) -> None:
        self._show_hint()
        if endpoint is None:
            return
        self._count()
        if self._queued:
            text, self._queued = self._queued, ""
            self._send(text)

    def _show_hint(self) -> None:
        self.query_one("#hint-text", Static).update(self._hint())

    def _hint(self) -> Text:
        ink, endpoint = self.app.theme_variables, self.edge.endpoint
        text = Text(justify="center")
        if self.edge.loading:
            text.append(self.edge.loading, ink["primary"])
            text.append("\n\nYou can write already; it is sent when the model is ready.")
            if self._queued:
                text.append(f"\n\n▸ {self._queued[:200]}", ink["secondary"])
        elif endpoint is None:
            text.append("No model is loaded.\n\n", ink["foreground"])
            text.append("ctrl+l", f"bold {ink['primary']}").append(" chooses one\n")
            text.append("1", f"bold {ink['primary']}").append(" shows every model")
        else:
            text.append(f"{endpoint.name}\n", f"bold {ink['primary']}")
            text.append(f"{endpoint.n_ctx:,} tokens of context\n\n" if endpoint.n_ctx else "\n")
            text.append("Write below. ")
            text.append("Enter", f"bold {ink['foreground']}").append(" sends, ")
            text.append("ctrl+j", f"bold {ink['foreground']}").append(" begins a new line.")
        return text

    def commands(self) -> list[Command]:
        return [
            ("New conversation", "Begin an empty one", self.action_new),
            ("Rename", "Give this conversation a title", self.action_rename),
            ("Export", "Write this conversation to a file", self.action_export),
            ("Delete", "Delete this conversation", self.action_delete),
            ("Settings", "System prompt and sampling", self.action_settings),
            ("Model", "Answer with another model", self.action_model),
            ("Attach a file", "Put a text file into the message", self.action_attach),
            ("Again", "Another answer to the same question", self.action_regenerate),
            ("Edit", "Change a message and branch", self.action_edit),
            ("Copy code", "Copy a code block", self.action_copy_code),
            ("Restart the engine", "Load the model again", self.action_restart),
        ]


def _take(live: Live, delta: Delta) -> None:
    if delta.text:
        live.text.append(delta.text)
    if delta.reasoning:
        live.reasoning.append(delta.reasoning)
    live.n_tokens += delta.n_tokens
    if delta.finish is not None:
        live.last = delta


def _measured(live: Live) -> tuple[Usage, tuple[float | None, float | None]]:
    """Token counts, decode speed and time to first token, as the engine said them."""
    if live.last is None:
        return Usage(n_output=live.n_tokens), (None, None)
    timings = live.last.timings
    speed = (None, None) if timings is None else (timings.decode_tps, timings.ttft_s)
    return live.last.usage or Usage(n_output=live.n_tokens), speed


def _pacer(endpoint: Endpoint) -> Pacer:
    """Frames as often as eyes want them, unless they would be taken from the model's own cores."""
    plan = endpoint.plan if endpoint.where == HERE else None
    if plan is None:
        return Pacer(share_for(None, 0, 0))
    return Pacer(share_for(plan.verdict, plan.params.n_threads, os.cpu_count() or 1))


def _replace(session: Session, **changes: Any) -> Session:
    return msgspec.structs.replace(session, **changes)


def _read_text(path: Path) -> str:
    """A UTF-8 file that fits into a message; ValueError says what is wrong with it."""
    if path.stat().st_size > MAX_ATTACHMENT:
        raise ValueError("larger than 4 MiB")
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        raise ValueError("not a text file")
    return data.decode("utf-8", errors="replace")


def _ago(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name} ago"
    return "now"


def make() -> ChatScreen:
    return ChatScreen()
