"""Asking and answering: an answer as it streams, onto the screen, onto the disk, into numbers.

What :class:`edgellm.tui.screens.chat.ChatScreen` has beside this is conversations and commands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

import msgspec
from textual import work
from textual.css.query import NoMatches
from textual.reactive import reactive
from textual.worker import Worker

from edgellm.errors import (
    ContextOverflowError,
    EdgeLLMError,
    EngineDeadError,
)
from edgellm.request import Usage
from edgellm.tui.composer import Composer
from edgellm.tui.context import fit, to_chat, to_sampling
from edgellm.tui.live import Live, count_tokens, pacer_for
from edgellm.tui.pacing import PLENTY, Pacer
from edgellm.tui.ports import Endpoint
from edgellm.tui.screens.base import EdgeScreen
from edgellm.tui.screens.dialogs import ConfirmScreen
from edgellm.tui.sessions import Message, Session
from edgellm.tui.transcript import Transcript, Turn
from edgellm.tui.widgets import Meter

T = TypeVar("T")

RETRY_S: Final = 2.0
"""How long after the disk refused an answer it is written again."""
MEND_S: Final = 15.0
"""How long an engine that died may take to start itself again."""
SAVE_S: Final = 0.4
"""How much of an answer a crash may cost."""
READING: Final = "reading the prompt"
"""Said until the first word comes: a long prompt takes a minute on a slow CPU."""


class AnsweringScreen(EdgeScreen):
    """One conversation that is asked and answered. Subclasses compose a Transcript, a Composer and
    a Meter called ``#meter``."""

    session: reactive[Session | None] = reactive(None)
    speed: reactive[str] = reactive("")

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None
        self._thread: list[Message] = []
        self._branches: dict[str, tuple[int, int]] = {}
        self._frame: asyncio.TimerHandle | None = None
        self._next_frame = 0.0
        """When drawing is paid for again (monotonic)."""
        self._pacer = Pacer(PLENTY)
        self._drawing_s = 0.0
        self._answering: Worker[None] | None = None
        self._refused: dict[str, str] = {}
        """Calls of the store that the disk refused the last time, and why."""
        self._counts: dict[str, int] = {}

    @property
    def transcript(self) -> Transcript:
        return self.query_one("#transcript", Transcript)

    async def listed(self) -> None:
        """The conversation changed its place among the others."""

    async def _disk(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """A call of the store; what the disk refuses is said once and never ends anything."""
        try:
            result = await self.edge.disk(call, *args, **kwargs)
        except EdgeLLMError as error:
            if error.message not in self._refused.values():
                self.edge.report(error)
            self._refused[call.__name__] = error.message
            return None
        self._refused.pop(call.__name__, None)
        return result

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

    async def _fits(self, endpoint: Endpoint, text: str) -> bool:
        """Whether a message alone fits into the context; says so, with both numbers, when not.

        An engine would find out too, after it has read a megabyte.
        """
        n_ctx = endpoint.n_ctx
        if not n_ctx or len(text) < n_ctx:
            return True  # a token is a character at least, or close to it
        self.speed = "counting its tokens"
        try:
            n_tokens, is_exact = await count_tokens(endpoint, text)
        except EdgeLLMError:
            return True  # asking it says what is wrong
        finally:
            self.speed = ""
        if n_tokens < n_ctx:
            return True
        error = ContextOverflowError(n_tokens, n_ctx)
        about = "" if is_exact else "about "
        error.message = f"{about}{n_tokens:,} tokens; the context holds {n_ctx:,}"
        error.hint = "send a part of it, or plan a larger context on the Plan screen (F2)"
        self.edge.report(error)
        return False

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
        self._pacer = pacer_for(endpoint)
        self.query_one(Composer).cursor_blink = False  # each blink is a frame
        self._next_frame = 0.0
        self._answering = self._answer(endpoint, self._live, messages)
        await self.listed()

    @work(exclusive=True, group="answer")
    async def _answer(self, endpoint: Endpoint, live: Live, messages: list[dict[str, Any]]) -> None:
        state, note = "done", ""
        try:
            sampling = to_sampling({**self.edge.preferred.sampling, **live.session.sampling})
            stream = endpoint.chat(messages, sampling, request_id=f"chat-{live.message.id}")
            async with aclosing(stream):
                async for delta in stream:
                    live.take(delta)
                    self._arrived()
        except asyncio.CancelledError:
            await self._finish(live, "stopped", "stopped")
            raise
        except EdgeLLMError as error:
            state, note = self._failed(endpoint, error)
        if live.last is not None and live.last.finish == "length":
            note = "the answer reached its limit of tokens"
        await self._finish(live, state, note)

    def _failed(self, endpoint: Endpoint, error: EdgeLLMError) -> tuple[str, str]:
        """The state and the note of an answer that an error ended."""
        if self.edge.endpoint is not endpoint:
            return "stopped", "stopped: another model was chosen"
        self.edge.report(error)
        self._maybe_dead(error)
        return "error", error.message.splitlines()[0]

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
            again = self.edge.key("chat.again", "r")
            self.notify(f"the engine is back; {again} asks again", title="Started again")
            return
        text = "The model's process is gone. What was said is saved. Load the model again?"
        if await self.app.push_screen_wait(ConfirmScreen("The engine ended", text, "Restart")):
            self.edge.restart_engine()

    def _arrived(self) -> None:
        """There is more of the answer: draw it now, or as soon as the frames before are paid for.

        Nothing ticks while nothing comes. A timer that looked 30 times a second for text that
        comes five times a second took half of what the interface used.
        """
        if self._frame is not None:
            return
        wait = self._next_frame - time.monotonic()
        if wait <= 0:
            self._draw()
        else:
            loop = asyncio.get_running_loop()
            self._frame = loop.call_later(wait, self.call_next, self._frame_due)

    def _frame_due(self) -> None:
        self._frame = None
        if self._live is not None:
            self._draw()

    def _draw(self) -> None:
        self._next_frame = time.monotonic() + self._pacer.interval_s
        began = time.process_time()
        if self._show_frame():
            self._frame_shown(began)
        else:
            self.call_after_refresh(self._frame_shown, began)

    def _frame_shown(self, began: float) -> None:
        """Drawn; ``began`` is the CPU time before it. The next one is due when it is paid for."""
        now = time.monotonic()
        self._drawing_s += time.process_time() - began
        self._next_frame = now + self._pacer.note(now, self._drawing_s)

    def _show_frame(self) -> bool:
        """What arrived since the last frame, onto the screen: one layout for all of it.

        Returns whether it is drawn, and nothing is left for Textual to do.
        """
        live = self._live
        if live is None or not self.is_running:  # the screen is being taken down
            return True
        text, reasoning = live.unshown()
        if not text and not reasoning:
            return True
        if self.speed == READING:
            self.speed = ""
        turns = self.transcript.turns
        if turns and turns[-1] is live.turn:
            return self.transcript.stream(text, reasoning)
        live.turn.text += text
        live.turn.reasoning += reasoning
        return True

    async def _save(self) -> None:
        """Every SAVE_S: the pieces of the answer, or the draft."""
        live = self._live
        if live is None:
            await self._save_draft()
            return
        at = (len(live.text), len(live.reasoning))
        text, reasoning = live.unsaved()
        if not text and not reasoning:
            return
        before, live.n_saved = live.n_saved, at
        await self._disk(self.edge.store.append, live.message.id, text, reasoning)
        if "append" in self._refused:
            live.n_saved = before

    async def _save_draft(self) -> None:
        session = self.session
        draft = self.query_one(Composer).text
        if session is None or draft == session.draft:
            return
        await self._disk(self.edge.store.update, session.id, draft=draft)
        self.session = msgspec.structs.replace(session, draft=draft)

    def keep_now(self) -> None:
        """The program is ending by a defect: what is written and what came, onto the disk."""
        live, session = self._live, self.session
        with suppress(EdgeLLMError, NoMatches):
            if live is not None:
                self.edge.store.append(live.message.id, *live.unsaved())
                live.n_saved = (len(live.text), len(live.reasoning))
            if session is not None:
                draft = self.query_one(Composer).text
                self.edge.store.update(session.id, draft=draft)

    async def _finish(self, live: Live, state: str, note: str) -> None:
        self._show_frame()
        if self._frame is not None:
            self._frame.cancel()
            self._frame = None
        usage, timings = live.measured()
        values: dict[str, Any] = {
            "content": "".join(live.text), "reasoning": "".join(live.reasoning), "state": state,
            "note": note or None, "n_tokens": usage.n_output or live.n_tokens,
            "decode_tps": timings[0], "ttft_s": timings[1],
        }  # fmt: skip
        self._live = None
        if not (self.is_attached and self.is_running):
            # The program is ending: keep the words, there is no screen to show them on.
            self.edge.store.finish(live.message.id, **values)
            return
        self.query_one(Composer).cursor_blink = self.edge.preferred.animations
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
        """Write a finished answer; where the disk refuses, keep trying in the background."""
        await self._disk(self.edge.store.finish, message_id, **values)
        if "finish" in self._refused:
            self.set_timer(RETRY_S, lambda: self._try_again(message_id, values))

    async def _try_again(self, message_id: str, values: dict[str, Any]) -> None:
        await self._keep_until_saved(message_id, values)
        if "finish" not in self._refused:
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

    def say_busy(self) -> None:
        stop = self.edge.key("chat.escape", "Esc")
        self.notify(f"wait for the answer, or press {stop} to stop it")

    def _is_busy(self) -> bool:
        if self._live is not None:
            self.say_busy()
        return self._live is not None
