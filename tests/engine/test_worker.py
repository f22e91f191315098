"""The child's reader: nothing waits behind a long text, and too much text is refused unread."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgellm.engine import wire
from edgellm.engine.info import EngineOptions
from edgellm.engine.loop import Message, Refused, Withdrawn
from edgellm.engine.scripted import ScriptedBackend, tokenize
from edgellm.engine.worker import LONG_TEXT, Reader, refuse_overlong, turn_tokens, within_plan
from edgellm.errors import ContextOverflowError
from edgellm.request import EmbedRequest, FinishReason, Overflow
from tests.engine.factories import plan, request


class Inbox:
    """What a Reader needs of the loop."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()


class Held(ScriptedBackend):
    """Tokenises only once it may."""

    def __init__(self) -> None:
        super().__init__(plan(), EngineOptions(), lambda progress: None)
        self.may = threading.Event()

    def tokenize(self, text: str, **kw: Any) -> list[int]:
        assert self.may.wait(60)
        return super().tokenize(text, **kw)


def reader_of(backend: ScriptedBackend) -> tuple[Reader, Inbox, list[wire.FromChild]]:
    sent: list[wire.FromChild] = []
    outbox: Any = type("Outbox", (), {"send": staticmethod(sent.append)})
    ours, theirs = socket.socketpair()
    inbox = Inbox()
    reader = Reader(theirs, outbox, backend, inbox)  # type: ignore[arg-type]
    reader.start(wire.Unframer(), [])
    ours.detach()  # closing it would end this process
    return reader, inbox, sent


def encoded(message: wire.ToChild) -> bytes:
    return msgspec.msgpack.encode(message)


LONG = "x" * (LONG_TEXT + 1)


@pytest.mark.parametrize(
    "message",
    [
        wire.Tokenize(1, LONG, add_special=True, parse_special=True),
        wire.Embed(1, EmbedRequest(id="e", inputs=(LONG, LONG))),
        wire.Generate(request(LONG, overflow=Overflow.SLIDE)),
    ],
    ids=["tokenize", "embed", "generate"],
)
def test_a_ping_behind_a_long_text_is_heard_at_once(message: wire.ToChild) -> None:
    backend = Held()
    reader, inbox, _ = reader_of(backend)
    reader._take(encoded(message))
    reader._take(encoded(wire.Ping(2)))
    assert inbox.inbox.get(timeout=60) == wire.Ping(2)
    backend.may.set()


def test_a_request_cancelled_while_it_is_tokenised_never_arrives() -> None:
    backend = Held()
    reader, inbox, sent = reader_of(backend)
    r = request(LONG, overflow=Overflow.SLIDE)
    reader._take(encoded(wire.Generate(r)))
    reader._take(encoded(wire.Cancel(r.id)))
    backend.may.set()
    (told,) = sent  # the loop never gets it, so it could not say that it has ended
    assert isinstance(told, wire.Events)
    (event,) = told.events
    assert (event.request_id, event.finish_reason) == (r.id, FinishReason.CANCELLED)
    assert event.is_last
    assert inbox.inbox.get(timeout=60) == Withdrawn()  # and counts it
    reader._take(encoded(wire.Cancel("another")))
    assert inbox.inbox.get(timeout=60) == wire.Cancel("another")
    time.sleep(0.05)
    assert inbox.inbox.empty()


def test_a_megabyte_beyond_the_context_is_refused_without_tokenising_it() -> None:
    reader, inbox, _ = reader_of(Held())
    reader._take(encoded(wire.Generate(request("word " * 200_000))))
    refused = inbox.inbox.get(timeout=60)
    assert isinstance(refused, Refused)
    assert refused.error.type == "ContextOverflowError"
    assert refused.error.attributes["n_ctx"] == 1024
    assert "1,000,000 characters has at least" in refused.error.message


def test_what_may_fit_is_not_refused_by_its_bytes() -> None:
    backend = ScriptedBackend(plan(), EngineOptions(), lambda progress: None)
    longest = max(backend.vocabulary(), key=len).decode()
    fits = longest * 1023
    assert len(tokenize(fits, add_special=False)) == 1023
    refuse_overlong(backend, request(fits))
    with pytest.raises(ContextOverflowError):
        refuse_overlong(backend, request(fits + longest))
    sliding = request(fits * 3, overflow=Overflow.SLIDE)
    refuse_overlong(backend, sliding)
    turns = msgspec.structs.replace(sliding, turn_starts=(0, len(fits)))
    with pytest.raises(ContextOverflowError, match="the last message"):
        refuse_overlong(backend, turns)


def test_turns_begin_at_the_first_token_at_or_after_their_character() -> None:
    backend = ScriptedBackend(plan(), EngineOptions(), lambda progress: None)
    text = "é the of and to"
    prompt = array("i", tokenize(text))
    starts = (0, 1, 4, 7, len(text) + 5)
    r = request(text, overflow=Overflow.SLIDE, turn_starts=starts)
    found = turn_tokens(backend, r, prompt)
    rest = [b"".join(map(backend.piece, prompt[i:])).decode() for i in found]
    assert rest == [text, " the of and to", " of and to", " and to"]
    assert turn_tokens(backend, request(text, turn_starts=starts), prompt) == ()


def test_checkpoints_take_what_the_plan_leaves_for_them_at_most() -> None:
    def bytes_of(left: int, wanted: int) -> int:
        host = msgspec.structs.replace(plan().host, prompt_cache=left)
        planned = msgspec.structs.replace(plan(), host=host)
        return within_plan(planned, EngineOptions(checkpoint_bytes=wanted)).checkpoint_bytes

    assert bytes_of(100, 512) == 100
    assert bytes_of(512, 100) == 100
    assert bytes_of(0, 512) == 512


def asleep(thread_ids: set[int]) -> dict[int, int]:
    """How often each thread gave up its processor by itself, once all of them sleep for good."""
    before: list[tuple[str, int]] = []
    n_same = 0
    while n_same < 10:
        now = [status(thread_id) for thread_id in thread_ids]
        is_same = now == before and all(state == "S" for state, _ in now)
        n_same = n_same + 1 if is_same else 0
        before = now
        time.sleep(0.005)
    return dict(zip(thread_ids, (n for _, n in before), strict=True))


def status(thread_id: int) -> tuple[str, int]:
    """A thread's state, and how often it gave up its processor by itself."""
    text = Path(f"/proc/self/task/{thread_id}/status").read_text()
    state, n = (text.split(f"\n{name}:")[1] for name in ("State", "voluntary_ctxt_switches"))
    return state.split()[0], int(n.split()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="reads a thread's counters from /proc")
def test_frames_that_the_parent_reads_do_not_wake_the_reader() -> None:
    before = set(os.listdir("/proc/self/task"))
    ours, theirs = socket.socketpair()
    outbox: Any = None
    inbox: Any = Inbox()
    Reader(theirs, outbox, Held(), inbox).start(wire.Unframer(), [])
    new = {int(t) for t in set(os.listdir("/proc/self/task")) - before}
    counted = asleep(new)
    for _ in range(50):
        theirs.send(b"a step's events")
        ours.recv(1000)
        time.sleep(0.0005)
    assert {t: status(t)[1] for t in new} == counted
    ours.detach()  # closing it would end this process
