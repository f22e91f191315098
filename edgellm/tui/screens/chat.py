"""Chat: conversations on the left, the one you are in beside them, a place to write below."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from edgellm.errors import EdgeLLMError
from edgellm.tui.attachments import Attached, Attachments, read_text
from edgellm.tui.composer import Composer
from edgellm.tui.conversations import Conversations
from edgellm.tui.ports import Endpoint
from edgellm.tui.screens.answering import SAVE_S, AnsweringScreen
from edgellm.tui.screens.base import Command
from edgellm.tui.screens.dialogs import AskScreen, ConfirmScreen, PickScreen, SettingsScreen
from edgellm.tui.sessions import Message, Session, code_blocks
from edgellm.tui.transcript import Transcript
from edgellm.tui.widgets import Meter


class ChatScreen(AnsweringScreen):
    """Everything a conversation needs, on keys; letters work while it has the focus."""

    MODE = "chat"
    AUTO_FOCUS = "#composer"  # the search field stands before it; what is typed early went there
    CSS = """
    ChatScreen #sidebar {
        dock: left; width: 32; margin: 2 0 1 0; border-right: vkey $border; padding: 0 1;
        display: none;
    }
    ChatScreen.-sidebar #sidebar { display: block; }
    ChatScreen #transcript { padding: 0 1; }
    ChatScreen #hint { height: 1fr; align: center middle; display: none; }
    ChatScreen #hint Static { width: 62; max-width: 90%; color: $muted; text-align: center; }
    ChatScreen.-blank #hint { display: block; }
    ChatScreen.-blank #transcript { display: none; }
    ChatScreen #composer { margin: 0 1; }
    ChatScreen #meter { padding: 0 3; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "escape", "Stop", id="chat.escape", key_display="esc"),
        Binding("ctrl+n", "new", "New", id="chat.new"),
        Binding("ctrl+b", "sidebar", "List", id="chat.sidebar"),
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

    def __init__(self) -> None:
        super().__init__()
        self._written: tuple[str, tuple[Attached, ...]] = ("", ())
        """The last message as it was before it was sent: its words and what was attached."""
        self._editing: Message | None = None
        self._queued = ""
        self._beginning = asyncio.Lock()
        """Held while a conversation begins or its settings change: a message is sent with them."""

    def body(self) -> ComposeResult:
        # Few containers: Textual draws the lines of every one of them in every frame.
        yield Conversations(id="sidebar")
        yield Transcript(id="transcript")
        with Vertical(id="hint"):
            yield Static(id="hint-text")
        yield Attachments(id="attached")
        yield Composer(id="composer")
        yield Meter("ctx", id="meter")

    def ready(self) -> None:
        self.set_class(self.size.width >= 110, "-sidebar")
        self.add_class("-blank")
        self.query_one(Composer).cursor_blink = self.edge.preferred.animations
        self.query_one(Composer).use_keys(self.edge.preferred.keys)
        self.watch(self.app, "endpoint", self._endpoint_changed)
        self.watch(self.app, "loading", self._show_hint)
        self.set_interval(SAVE_S, self._save)
        self._open_last()

    def recolored(self) -> None:
        self._show_hint()
        self.run_worker(self.listed(), group="list", exclusive=True)

    def shown(self) -> None:
        composer = self.query_one(Composer)
        self.set_focus(composer)
        composer.type_early(self.edge.take_typed())

    # -- opening conversations -------------------------------------------------------------------

    @work(exclusive=True, group="open")
    async def _open_last(self) -> None:
        await self.listed()
        sessions = await self._disk(self.edge.store.find, limit=1)
        if sessions and self.session is None:
            await self._open(sessions[0], keeps_typed=True)

    async def listed(self) -> None:
        sidebar = self.query_one(Conversations)
        sessions = await self._disk(self.edge.store.find, sidebar.query_text) or []
        sidebar.show(sessions, self.edge.services.clock())
        sidebar.mark(self.session)

    async def _open(self, session: Session, *, keeps_typed: bool = False) -> None:
        """Show a conversation; ``keeps_typed``: what was typed meanwhile is the draft's end."""
        self.session = session
        self._editing = None
        await self._reload()
        composer = self.query_one(Composer)
        typed = composer.text if keeps_typed else ""
        composer.text = session.draft
        composer.move_cursor(composer.document.end)
        composer.insert(typed)
        composer.remember([m.content for m in self._thread if m.role == "user"])
        self.query_one(Conversations).mark(self.session)

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

    @on(Conversations.Chosen)
    def _session_chosen(self, event: Conversations.Chosen) -> None:
        self._switch(event.session_id)

    @work(exclusive=True, group="open")
    async def _switch(self, session_id: str) -> None:
        await self._save_draft()
        session = await self._disk(self.edge.store.get, session_id)
        if session is not None:
            await self._open(session)
            self.query_one(Composer).focus()

    @on(Conversations.Asked)
    async def _asked_for(self) -> None:
        await self.listed()

    # -- writing and answering -------------------------------------------------------------------

    @on(Composer.Submitted)
    def _submitted(self, event: Composer.Submitted) -> None:
        attached = self.query_one(Attachments)
        text = attached.before(event.text)
        if not text:
            return
        if self._live is not None:
            self.say_busy()
            return
        if self.edge.endpoint is None and not self.edge.loading:
            choose = self.edge.key("chat.model", "ctrl+l")
            self.notify(f"choose a model first: {choose}", severity="warning")
            return
        self._written = (event.text, attached.items)
        self.query_one(Composer).sent(event.raw)
        attached.show([])
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
        if not await self._fits(endpoint, text):
            self._take_back()
            return
        store = self.edge.store
        async with self._beginning:
            if self.session is None:
                self.session = await self._disk(
                    store.create, model=endpoint.name, system=self.edge.preferred.system
                )
        if self.session is None:
            self._take_back()
            return
        edited, self._editing = self._editing, None
        parent = edited.parent if edited else (self._thread[-1].id if self._thread else None)
        asked = await self._disk(store.add, self.session.id, "user", text, parent=parent)
        if asked is None:
            self._take_back()
            return
        if edited is not None:
            await self._reload()
        else:
            self._thread.append(asked)
            self.remove_class("-blank")
            self.transcript.add(self._turn(asked))
        await self._answer_to(asked)

    def _take_back(self) -> None:
        """What could not be sent is where it was written and attached."""
        composer, (text, attached) = self.query_one(Composer), self._written
        composer.text = f"{text}\n{composer.text}" if composer.text else text
        self.query_one(Attachments).show(attached)

    # -- the meter -------------------------------------------------------------------------------

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
        send, leave = self.edge.key("composer.send", "Enter"), self.edge.key("chat.escape", "Esc")
        self.notify(f"{send} sends it as a new branch, {leave} leaves it as it was")

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
        values: dict[str, Any] = {"system": chosen.system, "sampling": chosen.sampling}
        async with self._beginning:
            session = self.session or await self._disk(self.edge.store.create)
            if session is None:
                return
            await self._disk(self.edge.store.update, session.id, **values)
            self.session = msgspec.structs.replace(session, **values)
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
            text = await asyncio.to_thread(read_text, path)
        except (OSError, ValueError) as error:
            self.notify(f"{path}: {error}", title="Not attached", severity="warning", markup=False)
            return
        self.query_one(Attachments).add(path.name, text)

    @on(Composer.LongPaste)
    def _long_paste(self, event: Composer.LongPaste) -> None:
        self.query_one(Attachments).add("pasted text", event.text)

    @work
    async def action_rename(self) -> None:
        if self.session is None:
            return
        title = await self.app.push_screen_wait(AskScreen("Rename", "title", self.session.title))
        if title:
            await self._disk(self.edge.store.rename, self.session.id, title)
            self.session = msgspec.structs.replace(self.session, title=title)
            await self.listed()

    @work
    async def action_delete(self) -> None:
        session = self.session
        if session is None or self._is_busy():
            return
        text = f"“{session.title}” and all its branches are deleted."
        if await self.app.push_screen_wait(ConfirmScreen("Delete?", text, "Delete")):
            await self._disk(self.edge.store.delete, session.id)
            self.session = None
            await self.listed()
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
        if path.exists() and not await self._may_overwrite(path):
            return
        try:
            await self.edge.disk(self.edge.store.export, self.session.id, path)
        except EdgeLLMError as error:
            self.edge.report(error)
        else:
            self.notify(str(path.resolve()), title="Exported", markup=False)

    async def _may_overwrite(self, path: Path) -> bool:
        text = f"{path} is there already."
        question = ConfirmScreen("Write over it?", text, "Overwrite")
        overwrite: bool = await self.app.push_screen_wait(question)
        return overwrite

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
        ink, endpoint, key = self.app.theme_variables, self.edge.endpoint, self.edge.key
        text = Text(justify="center")
        if self.edge.loading:
            text.append(self.edge.loading, ink["primary"])
            text.append("\n\nYou can write already; it is sent when the model is ready.")
            if self._queued:
                text.append(f"\n\n▸ {self._queued[:200]}", ink["secondary"])
        elif endpoint is None:
            text.append("No model is loaded.\n\n", ink["foreground"])
            text.append(key("chat.model", "ctrl+l"), f"bold {ink['primary']}").append(
                " chooses one\n"
            )
            text.append(key("go.models", "1"), f"bold {ink['primary']}").append(
                " shows every model"
            )
        else:
            text.append(f"{endpoint.name}\n", f"bold {ink['primary']}")
            text.append(f"{endpoint.n_ctx:,} tokens of context\n\n" if endpoint.n_ctx else "\n")
            text.append("Write below. ")
            strong = f"bold {ink['foreground']}"
            text.append(key("composer.send", "Enter"), strong).append(" sends, ")
            text.append(key("composer.newline", "ctrl+j"), strong).append(" begins a new line.")
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


def make() -> ChatScreen:
    return ChatScreen()
