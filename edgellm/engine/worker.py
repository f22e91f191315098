"""The child process: ``python -m edgellm.engine.worker FD``, FD being its end of a socket pair.

The main thread loads and then owns the context. A second thread reads frames and tokenises; what
takes longer than a moment is left to a third, so that nothing waits for it.
"""

from __future__ import annotations

import gc
import os
import queue
import select
import socket
import sys
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

from msgspec import structs

from edgellm.engine import wire
from edgellm.engine.backend import Backend, LoadBackend
from edgellm.engine.constrain import ConstraintFactory, Vocabulary, make_factory
from edgellm.engine.embed import EmbedJob
from edgellm.engine.info import EngineOptions, LoadProgress
from edgellm.engine.loop import Arrived, Loop, Refused, Withdrawn
from edgellm.engine.score import ScoreJob
from edgellm.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    InvalidRequestError,
)
from edgellm.planner.plan import Plan
from edgellm.request import FinishReason, Overflow, Request, TokenEvent, Usage

LONG_TEXT: Final = 8 * 1024
"""Characters; tokenising less takes a few milliseconds at most."""
SWITCH_S: Final = 0.0002
RECV_BYTES: Final = 1 << 18
EXIT_GRACE_S: Final = 5.0


class Outbox:
    """Sends frames without ever blocking the caller: what the socket does not take at once is
    left to a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._backlog: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._n_backlog = 0
        threading.Thread(target=self._drain, name="engine-send", daemon=True).start()

    def send(self, message: wire.FromChild) -> None:
        """Send now what the socket takes; order is kept. Any thread."""
        frame = bytes(wire.pack(message))
        with self._lock:
            n = 0 if self._n_backlog else self._try(frame)
            if n < len(frame):
                self._n_backlog += 1
                self._backlog.put(frame[n:])

    def _try(self, frame: bytes) -> int:
        try:
            return self._sock.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)  # the parent is gone; the reader notices

    def _drain(self) -> None:
        while True:
            rest = self._backlog.get()
            try:
                self._sock.sendall(rest)
            except OSError:
                return
            with self._lock:
                self._n_backlog -= 1

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until everything has left."""
        end = time.monotonic() + timeout_s
        while self._n_backlog and time.monotonic() < end:
            time.sleep(0.005)


class Reader:
    """Frames in, messages for the loop out.

    What takes longer than a few milliseconds (long texts, grammars) is left to a thread of its
    own, so that a cancel or a ping behind it is heard at once.
    """

    def __init__(self, sock: socket.socket, outbox: Outbox, backend: Backend, loop: Loop) -> None:
        self._sock = sock
        self._outbox = outbox
        self._backend = backend
        self._loop = loop
        self._slow: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._in_slow: set[str] = set()
        self._lock = threading.Lock()
        """A request in ``_in_slow`` goes to the loop or is cancelled: whoever takes it out."""
        self._factory: ConstraintFactory | None = None

    def start(self, unframer: wire.Unframer, early: Iterable[bytes]) -> None:
        """Read for good; ``early`` came while loading."""
        threading.Thread(target=self._run, args=(unframer, list(early)), daemon=True).start()
        threading.Thread(target=self._work_slowly, daemon=True).start()

    def _run(self, unframer: wire.Unframer, early: list[bytes]) -> None:
        for body in early:
            self._take(body)
        while True:
            try:
                # A thread asleep in recv is woken each time the parent reads a frame: the socket
                # then has room to write, and the kernel asks no sleeper what it waits for. One in
                # select is asked. On two busy cores that was a context switch a token.
                select.select([self._sock], [], [])
                data = self._sock.recv(RECV_BYTES)
            except OSError:
                data = b""
            if not data:
                break
            for body in unframer.feed(data):
                self._take(body)
        self._loop.inbox.put(wire.Close())
        time.sleep(EXIT_GRACE_S)
        os._exit(0)  # the parent is gone and the loop hangs in native code

    def _work_slowly(self) -> None:
        while True:
            self._slow.get()()

    def _take(self, body: bytes) -> None:
        message = wire.to_child_decoder.decode(body)
        if isinstance(message, wire.Generate):
            self._generate(message.request)
        elif isinstance(message, wire.Cancel):
            self._cancel(message)
        elif n_chars(message) > LONG_TEXT:
            self._slow.put(lambda: self._answer(message))
        else:
            self._answer(message)

    def _cancel(self, message: wire.Cancel) -> None:
        request_id = message.request_id
        with self._lock:
            if request_id not in self._in_slow:
                self._loop.inbox.put(message)
                return
            self._in_slow.discard(request_id)
        # The loop never heard of it.
        end = TokenEvent(
            request_id=request_id,
            finish_reason=FinishReason.CANCELLED,
            is_last=True,
            usage=Usage(),
        )
        self._outbox.send(wire.Events([end], []))
        self._loop.inbox.put(Withdrawn())

    def _answer(self, message: wire.ToChild) -> None:
        try:
            self._route(message)
        except Exception as error:  # noqa: BLE001  (border: one bad message, not the reader)
            call = getattr(message, "call", None)
            if call is not None:
                self._outbox.send(wire.Failed(call, wire.error_info(error)))

    def _route(self, message: wire.ToChild) -> None:
        backend, inbox = self._backend, self._loop.inbox
        if isinstance(message, wire.Tokenize):
            ids = backend.tokenize(
                message.text,
                add_special=message.add_special,
                parse_special=message.parse_special,
            )
            self._outbox.send(wire.Reply(message.call, ids))
        elif isinstance(message, wire.Detokenize):
            pieces = b"".join(map(backend.piece, self._checked(message.ids)))
            self._outbox.send(wire.Reply(message.call, pieces.decode("utf-8", "replace")))
        elif isinstance(message, wire.Pieces):
            each = [backend.piece(token) for token in self._checked(message.ids)]
            self._outbox.send(wire.Reply(message.call, each))
        elif isinstance(message, wire.Embed):
            inputs = tuple(self._ids(text) for text in message.request.inputs)
            inbox.put(EmbedJob(message.call, message.request, inputs))
        elif isinstance(message, wire.Score):
            tokens = self._checked(message.ids)
            inbox.put(ScoreJob(message.call, tokens, message.first, message.out))
        elif isinstance(message, (wire.Stats, wire.Ping, wire.Close)):
            inbox.put(message)

    def _generate(self, request: Request) -> None:
        arrival = time.monotonic()
        is_long = len(request.prompt) > LONG_TEXT
        if is_long or request.sampling.grammar is not None:
            self._in_slow.add(request.id)
            self._slow.put(lambda: self._admit_later(request, arrival))
        else:
            self._admit(request, arrival)

    def _admit_later(self, request: Request, arrival: float) -> None:
        if request.id in self._in_slow:
            self._admit(request, arrival, is_late=True)

    def _admit(self, request: Request, arrival: float, *, is_late: bool = False) -> None:
        try:
            refuse_overlong(self._backend, request)
            prompt = self._ids(
                request.prompt,
                add_special=request.add_special,
                parse_special=request.parse_special,
            )
            turns = turn_tokens(self._backend, request, prompt)
            constraint = self._compile(request)
        except Exception as error:  # noqa: BLE001  (border: this request, not the reader)
            self._hand_over(request.id, Refused(request.id, wire.error_info(error)), is_late)
            return
        arrived = Arrived(request, prompt, arrival, turns, constraint)
        self._hand_over(request.id, arrived, is_late)

    def _hand_over(self, request_id: str, message: Arrived | Refused, is_late: bool) -> None:
        with self._lock:
            if not is_late or request_id in self._in_slow:
                self._in_slow.discard(request_id)
                self._loop.inbox.put(message)

    def _compile(self, request: Request) -> Any:
        """The request's grammar, compiled; the vocabulary is indexed when first needed."""
        if request.sampling.grammar is None:
            return None
        if self._factory is None:
            self._factory = make_factory(vocabulary_of(self._backend))
        return self._factory.compile(request.sampling.grammar)

    def _ids(
        self, text: str | tuple[int, ...], *, add_special: bool = True, parse_special: bool = True
    ) -> array[int]:
        if not isinstance(text, str):
            return self._checked(text)
        return array(
            "i",
            self._backend.tokenize(text, add_special=add_special, parse_special=parse_special),
        )

    def _checked(self, ids: Sequence[int]) -> array[int]:
        n_vocab = self._backend.info.n_vocab
        if ids and not (min(ids) >= 0 and max(ids) < n_vocab):
            bad = next(i for i in ids if not 0 <= i < n_vocab)
            raise InvalidRequestError(
                f"token {bad} is not in the vocabulary of {n_vocab}", param="prompt"
            )
        return array("i", ids)


def n_chars(message: wire.ToChild) -> int:
    """Characters (or token ids) of a message that must be turned into the other."""
    if isinstance(message, wire.Tokenize):
        return len(message.text)
    if isinstance(message, wire.Detokenize):
        return len(message.ids)
    if isinstance(message, wire.Embed):
        return sum(map(len, message.request.inputs))
    return 0


def refuse_overlong(backend: Backend, request: Request) -> None:
    """Raise ContextOverflowError when a text is too long whatever its tokens are.

    No token has more bytes than the longest one: a megabyte need not be tokenised to know that it
    does not fit.
    """
    text, n_ctx = request.prompt, backend.info.n_ctx_seq
    if not isinstance(text, str) or len(text) <= max(LONG_TEXT, n_ctx):
        return
    what = "the prompt"
    if request.overflow is Overflow.SLIDE:
        if not request.turn_starts:
            return
        text = text[max(request.turn_starts) :]
        what = "the last message"
    fewest = len(text.encode("utf-8", "replace")) // max(map(len, backend.vocabulary()))
    if fewest >= n_ctx:
        raise ContextOverflowError(
            fewest, n_ctx, what=f"{what} of {len(text):,} characters has at least"
        )


def vocabulary_of(backend: Backend) -> Vocabulary:
    """The backend's tokens as grammars need them."""

    def spell(data: bytes) -> list[int]:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return []  # a part of a character: nothing is forced then
        return backend.tokenize(text, add_special=False, parse_special=False)

    return Vocabulary(
        tokens=backend.vocabulary(),
        special=backend.special_tokens(),
        eog_ids=backend.info.eog_ids,
        tokenize=spell,
    )


def turn_tokens(backend: Backend, request: Request, prompt: array[int]) -> tuple[int, ...]:
    """Where the request's turns begin, in tokens: the first token at or after each character.

    Asked for where a context may slide; no step of it is a Python loop over all tokens, since the
    loop's thread waits for the interpreter meanwhile.
    """
    if request.overflow is not Overflow.SLIDE or not isinstance(request.prompt, str):
        return ()
    text, at = request.prompt, 0
    offsets: list[int] = []
    for start in sorted(request.turn_starts):
        offsets.append((offsets[-1] if offsets else 0) + len(text[at:start].encode()))
        at = start
    size = {token: len(backend.piece(token)) for token in set(prompt)}
    sizes = list(map(size.__getitem__, prompt))
    if prompt and prompt[0] == backend.info.bos_id:
        sizes[0] = 0
    begins = list(accumulate(sizes, initial=0))[:-1]
    found = (bisect_left(begins, offset) for offset in offsets)
    return tuple(i for i in found if i < len(begins))


def open_backend(name: str) -> LoadBackend:
    """The loader of a backend by its name; imports nothing of the others."""
    if name == "scripted":
        from edgellm.engine.scripted import ScriptedBackend

        return ScriptedBackend
    if name == "llama":
        try:
            from edgellm.engine.llama import load
        except (OSError, RuntimeError) as error:  # a library that the build needs is not here
            raise EngineError(
                f"the engine does not load: {error}", hint="edgellm doctor"
            ) from error
        return load
    raise ConfigError(f"no backend is called {name!r}", hint="use llama or scripted")


def _first_message(sock: socket.socket) -> tuple[wire.ToChild | None, wire.Unframer, list[bytes]]:
    unframer = wire.Unframer()
    while True:
        data = sock.recv(RECV_BYTES)
        if not data:
            return None, unframer, []
        bodies = unframer.feed(data)
        if bodies:
            return wire.to_child_decoder.decode(bodies[0]), unframer, bodies[1:]


def within_plan(plan: Plan, options: EngineOptions) -> EngineOptions:
    """Options that take no more host memory for checkpoints than the plan leaves for them."""
    left = plan.host.prompt_cache or options.checkpoint_bytes
    return structs.replace(options, checkpoint_bytes=min(left, options.checkpoint_bytes))


def serve(sock: socket.socket) -> int:
    """Load what the first frame asks for and serve until told to close. The exit status."""
    outbox = Outbox(sock)
    message, unframer, early = _first_message(sock)
    if not isinstance(message, (wire.Load, wire.DryRun)):
        return 2

    def on_progress(value: LoadProgress) -> None:
        outbox.send(wire.Progress(value))

    try:
        if isinstance(message, wire.DryRun):
            from edgellm.engine.llama import dry_run

            outbox.send(wire.Loaded(None, dry_run(message.plan, message.options)))
            outbox.flush()
            return 0
        backend = open_backend(message.backend)(message.plan, message.options, on_progress)
    except Exception as error:  # noqa: BLE001  (border: the parent hears what went wrong)
        outbox.send(wire.Failed(0, wire.error_info(error)))
        outbox.flush()
        return 1
    loop = Loop(backend, within_plan(message.plan, message.options), outbox.send)
    Reader(sock, outbox, backend, loop).start(unframer, early)
    # What was loaded stays; a full collection in the middle of a stream would walk all of it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    outbox.send(wire.Loaded(backend.info, backend.report))
    loop.run()
    backend.close()
    outbox.flush()
    return 0


def main() -> None:
    """Entry point of the child."""
    # The loop waits for the interpreter lock after a native call: let others hold it briefly.
    sys.setswitchinterval(SWITCH_S)
    status = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # native threads must not outlive this


if __name__ == "__main__":
    main()
