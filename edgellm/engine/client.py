"""The parent's end of an engine: starts the child, speaks to it, and survives its death."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from edgellm.devices import probe
from edgellm.engine import wire
from edgellm.engine.child import Child, OnProgress, death, dry_run, first_answer, ignore, on_loading
from edgellm.engine.info import EngineInfo, EngineOptions, LoadProgress
from edgellm.engine.loading import Ladder, is_out_of_memory, lost_cards, nothing_smaller
from edgellm.engine.pending import Direct, Pending
from edgellm.engine.rpc import lost_worker, unreachable
from edgellm.errors import (
    EdgeLLMError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    PlanError,
)
from edgellm.metrics import EngineStats
from edgellm.planner.plan import LoadReport, Plan
from edgellm.request import EmbedRequest, EmbedResult, Request, TokenEvent

__all__ = ["Engine", "OnProgress", "Replan", "dry_run"]

Replan = Callable[[Plan, tuple[str, ...]], Plan]
"""A plan without the workers named (HOST:PORT); may raise PlanError. Called in a thread."""
HANG_S: Final = 120.0
HANG_STEPS: Final = 20
"""A step may last this many times what the plan predicts before it counts as hung."""
LONG_ANSWER: Final = 64
"""Tokens from which an answer's rate says how fast the model is here."""
MAX_REPLAYS: Final = 1
"""A request that was running when two children died is not given to a third."""


class Engine:
    """A model in a child process. Made by :meth:`load`, ended by :meth:`close`."""

    def __init__(
        self, plan: Plan, backend: str, options: EngineOptions, replan: Replan | None = None
    ) -> None:
        self.plan = plan
        self._replan = replan
        self.options = options
        self.info: EngineInfo
        self.report: LoadReport
        self.log: deque[str] = deque(maxlen=options.log_lines)
        self._backend = backend
        self._child: Child | None = None
        self._streams: dict[str, Pending] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._n_calls = 0
        self._deaths: deque[float] = deque()
        self._dead: EngineDeadError | None = None
        self._ready = asyncio.Event()
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._hung = ""
        self.alone_tps = 0.0
        """Tokens a second of the fastest long answer that nothing else ran beside; 0: none yet."""
        self.on_closed: Callable[[], None] | None = None
        """Called in a thread once the child has exited."""

    # -- life --------------------------------------------------------------------------------

    @classmethod
    async def load(
        cls,
        plan: Plan,
        *,
        backend: str = "llama",
        on_progress: OnProgress | None = None,
        options: EngineOptions = EngineOptions(),  # noqa: B008  (frozen)
        replan: Replan | None = None,
    ) -> Engine:
        """Start a child and load the plan's model in it.

        ``replan`` is asked for another plan when a device of this one is gone, before loading or
        later, and where its memory is not free any more; without it the first is an error, and
        the engine is dead when it loses a worker.
        Out of memory goes down a fixed ladder, each step said through ``on_progress`` and in
        ``report.fallbacks``; ``plan`` is then the plan that was loaded. Raises what went wrong.
        """
        engine = cls(plan, backend, options, replan)
        report = on_progress or ignore
        ladder = Ladder(plan, options.min_ctx)
        words = await engine._drop_lost_devices()
        before = await _driver_numbers(engine.plan)
        while True:
            if words is not None:
                report(LoadProgress(stage="fallback", fraction=0.0, message=words))
                ladder.restart(engine.plan, words)
            try:
                await engine._start(report)
                break
            except EdgeLLMError as error:
                words = await engine._with_what_is_free(error, ladder)
                if words is not None:
                    continue
                step = ladder.step_down(error)
                if step is None:
                    raise nothing_smaller(engine.plan, error, ladder.said) from error
                engine.plan = ladder.plan
                report(LoadProgress(stage="fallback", fraction=0.0, message=step))
        after = await _driver_numbers(engine.plan)
        engine.report = msgspec.structs.replace(
            engine.report,
            fallbacks=tuple(ladder.said),
            measured=tuple(
                msgspec.structs.replace(m, used_before=before.get(m.id), used_after=after.get(m.id))
                for m in engine.report.measured
            ),
        )
        report(LoadProgress(stage="ready", fraction=1.0))
        return engine

    async def _start(self, on_progress: OnProgress) -> None:
        began = time.monotonic()
        child = Child(self.log)
        answer: asyncio.Future[wire.Loaded] = asyncio.get_running_loop().create_future()
        child.on_message = lambda message: on_loading(message, answer, on_progress)
        on_progress(LoadProgress(stage="starting", fraction=0.0))
        await child.start()
        child.send(wire.Load(self.plan, self._backend, self.options))
        try:
            loaded = await first_answer(answer, child, self.options.load_timeout_s)
        except BaseException:
            child.kill()
            await child.stop(0.5)
            raise
        if loaded.info is None:
            raise EngineError("the child loaded nothing")
        self.info = loaded.info
        self.report = msgspec.structs.replace(loaded.report, load_s=time.monotonic() - began)
        child.on_message = self._on_message
        self._child = child
        self._dead = None
        self._ready.set()
        self._keeper = asyncio.create_task(self._keep(child))
        limit = _hang_timeout(self.plan, self.options)
        if limit > 0:
            self._watcher = asyncio.create_task(self._watch(child, limit))

    async def _watch(self, child: Child, limit: float) -> None:
        """End the child when its loop has work and does not answer within ``limit`` seconds.

        A decode that hangs in native code cannot be interrupted in any other way.
        """
        while True:
            await asyncio.sleep(limit / 4)
            if not self._streams and not self._calls:
                continue
            # Twice: a machine that slept through the first one gets another chance.
            if await self._answers(limit / 2) or await self._answers(limit / 2):
                continue
            self._hung = f"did not answer for {limit:g} s and "
            child.kill()
            return

    async def _answers(self, timeout: float) -> bool:
        try:
            await self.ping(timeout)
        except EngineDeadError:
            return True  # it is the keeper's
        except EngineError:
            return False
        return True

    async def _keep(self, child: Child) -> None:
        """Wait for the child's death and deal with it."""
        await child.lost.wait()
        if self._closing:
            return
        self._ready.clear()
        await _cancelled(self._watcher)
        how, self._hung = self._hung + await child.ended(), ""
        error = death(how, list(self.log), await self._lost_worker())
        await child.stop(0.0)
        replays = self._sort_out(error)
        if not self._may_restart():
            self._give_up(error)
            return
        try:
            await self._drop_lost_workers()
            self.log.clear()
            await self._start(ignore)
        except (EdgeLLMError, OSError) as failure:  # OSError: no process or socket to be had
            self._give_up(EngineDeadError(f"{error.message}\nand again: {failure}"))
            return
        for stream in replays:
            if stream.request.id in self._streams:
                self._send(wire.Generate(stream.request))

    async def _lost_worker(self) -> str | None:
        """The worker that took the child with it: the child says so, or llama.cpp was faster."""
        said = lost_worker(list(self.log))
        if said is not None or not self.plan.params.rpc:
            return said
        gone = await asyncio.to_thread(unreachable, self.plan.params.rpc)
        return gone[0] if gone else None

    async def _drop_lost_devices(self) -> str | None:
        """Another plan where devices of this one are gone since it was made: what is gone, in
        words. Raises EngineError without a replan, PlanError when nothing fits on what is left."""
        if self._backend != "llama":
            return None
        workers = await asyncio.to_thread(unreachable, self.plan.params.rpc)
        cards = lost_cards(self.plan, (await asyncio.to_thread(probe)).gpus)
        if not workers and not cards:
            return None
        gone = [f"the card {card} is gone" for card in cards]
        gone += [f"the worker {endpoint} does not answer" for endpoint in workers]
        if self._replan is None:
            hint = "edgellm worker, on that machine" if workers else "edgellm doctor"
            raise EngineError("; ".join(gone), hint=hint)
        self.plan = await asyncio.to_thread(self._replan, self.plan, workers)
        return "; ".join([*gone, "planned again"])

    async def _with_what_is_free(self, error: EdgeLLMError, ladder: Ladder) -> str | None:
        """Where memory ran out because others took it since the plan was made: another plan for
        what is free now, once. None: nothing else to plan, the ladder's turn."""
        if self._replan is None or ladder.said or not is_out_of_memory(error):
            return None
        try:
            plan = await asyncio.to_thread(self._replan, self.plan, ())
        except PlanError:
            return None
        if plan.params == self.plan.params:
            return None
        self.plan = plan
        return "out of memory: planned again for what is free now"

    async def _drop_lost_workers(self) -> None:
        """Another plan where a worker of this one is gone. Raises when nothing fits without it."""
        workers = self.plan.params.rpc
        if not workers:
            return
        gone = await asyncio.to_thread(unreachable, workers)
        # A worker that was ended and started again is there, and empty: it can be used as before.
        if not gone:
            return
        if self._replan is None:
            raise EngineDeadError(f"the worker {gone[0]} is gone", hint="edgellm worker")
        self.plan = await asyncio.to_thread(self._replan, self.plan, gone)

    def _sort_out(self, error: EngineDeadError) -> list[Pending]:
        """Fail what cannot be replayed; return what can."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        replays = []
        for stream in list(self._streams.values()):
            if stream.started:
                stream.n_replays += 1
            if stream.n_sent or stream.n_replays > MAX_REPLAYS:
                stream.fail(error)
            else:
                stream.started = False
                replays.append(stream)
        return replays

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - self.options.restart_window_s:
            self._deaths.popleft()
        return self.options.restart and len(self._deaths) <= self.options.max_restarts

    def _give_up(self, error: EngineDeadError) -> None:
        self._dead = error
        for stream in self._streams.values():
            stream.fail(error)
        self._ready.set()

    @property
    def is_alive(self) -> bool:
        """The child runs and has its model loaded."""
        return self._child is not None and self._ready.is_set() and self._dead is None

    @property
    def is_dead(self) -> bool:
        """The child is gone and will not be started again."""
        return self._dead is not None

    @property
    def pid(self) -> int:
        """The child's process id; -1 without one."""
        return self._child.pid if self._child is not None else -1

    async def close(self) -> None:
        """End the child. Requests that still run end with EngineDeadError."""
        if self._closing:
            return
        self._closing = True
        error = EngineDeadError("the engine was closed")
        if self._child is not None:
            await self._child.stop()
        await _cancelled(self._keeper)
        await _cancelled(self._watcher)
        self._sort_out(error)
        self._give_up(error)
        if self.on_closed is not None:
            await asyncio.to_thread(self.on_closed)

    # -- messages ----------------------------------------------------------------------------

    def _send(self, message: wire.ToChild) -> None:
        if self._child is not None:
            self._child.send(message)

    def _on_message(self, message: wire.FromChild) -> None:
        if isinstance(message, wire.Events):
            self._on_events(message)
        elif isinstance(message, (wire.Reply, wire.Failed)):
            future = self._calls.pop(message.call, None)
            if future is None or future.done():
                return
            if isinstance(message, wire.Reply):
                future.set_result(message.value)
            else:
                future.set_exception(wire.rebuild_error(message.error))

    def _on_events(self, message: wire.Events) -> None:
        streams = self._streams
        for request_id in message.started:
            if (stream := streams.get(request_id)) is not None:
                stream.started = True
        for event in message.events:
            if (stream := streams.get(event.request_id)) is not None:
                stream.put(event)

    async def _call(self, make: Callable[[int], wire.ToChild]) -> Any:
        await self._wait_ready()
        self._n_calls += 1
        call = self._n_calls
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._send(make(call))
        try:
            return await future
        finally:
            self._calls.pop(call, None)

    async def _wait_ready(self) -> None:
        await self._ready.wait()
        if self._dead is not None:
            raise self._dead

    # -- what an engine does -----------------------------------------------------------------

    async def generate(
        self, request: Request, direct: Direct | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Events of a request until ``is_last``.

        ``direct`` is shown each event first, in the callback that read it, when no earlier one
        waits; what it takes is not yielded. Waking a task costs more than most of what is done
        for a token. What it raises is raised here.
        Raises the error that ended it, also when events came before. Closing the generator, or
        cancelling the task that reads it, cancels the request within one step.
        """
        request.sampling.validate()
        if request.id in self._streams:
            raise InvalidRequestError(f"request id {request.id} is in use", param="id")
        await self._wait_ready()
        stream = self._streams[request.id] = Pending(request, direct)
        if len(self._streams) > 1:
            for other in self._streams.values():
                other.alone = False
        is_over = False
        try:
            self._send(wire.Generate(request))
            while not is_over:
                item = await stream.get()
                if isinstance(item, Exception):
                    is_over = isinstance(item, EdgeLLMError)
                    raise item
                is_over = item.is_last
                if item.error is not None:
                    raise wire.rebuild_error(item.error)
                if is_over and stream.alone:
                    self._note_speed(item)
                yield item
        finally:
            self._streams.pop(request.id, None)
            if not is_over:
                self._send(wire.Cancel(request.id))

    def _note_speed(self, last: TokenEvent) -> None:
        if last.timings is None or last.usage is None or last.usage.n_output < LONG_ANSWER:
            return
        if not last.usage.n_drafted:
            self.alone_tps = max(self.alone_tps, last.timings.decode_tps or 0.0)

    async def embed(self, request: EmbedRequest) -> EmbedResult:
        """A vector (or a score) for each input."""
        value = await self._call(lambda call: wire.Embed(call, request))
        return msgspec.convert(value, EmbedResult)

    async def score(self, tokens: list[int], *, first: int, out: str) -> int:
        """Write the logits of positions ``first`` to the end to the file ``out``: rows of float32
        (little endian), one value a token of the vocabulary. Returns the number of rows.

        The tokens are one fresh sequence; the engine must have no other request. Raises
        InvalidRequestError when they do not fit or it is busy.
        """
        value: int = await self._call(lambda call: wire.Score(call, list(tokens), first, out))
        return value

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The text's token ids."""
        value: list[int] = await self._call(
            lambda call: wire.Tokenize(call, text, add_special, parse_special)
        )
        return value

    async def detokenize(self, ids: list[int]) -> str:
        """The tokens' text; bytes that are no UTF-8 become U+FFFD."""
        value: str = await self._call(lambda call: wire.Detokenize(call, list(ids)))
        return value

    async def pieces(self, ids: list[int]) -> list[bytes]:
        """Each token's own bytes, which may be a part of a character."""
        value: list[bytes] = await self._call(lambda call: wire.Pieces(call, list(ids)))
        return value

    async def cancel(self, request_id: str) -> None:
        """End a request; its stream ends with finish_reason cancelled."""
        self._send(wire.Cancel(request_id))

    async def stats(self) -> EngineStats:
        """What the loop says of itself, asked now."""
        return msgspec.convert(await self._call(wire.Stats), EngineStats)

    async def ping(self, timeout: float) -> float:
        """Seconds until the loop's thread answered; EngineError when it does not in time."""
        began = time.monotonic()
        try:
            await asyncio.wait_for(self._call(wire.Ping), timeout)
        except asyncio.TimeoutError:
            raise EngineError(
                f"the engine's loop did not answer within {timeout:g} s", hint="edgellm doctor"
            ) from None
        return time.monotonic() - began


def _hang_timeout(plan: Plan, options: EngineOptions) -> float:
    if options.hang_timeout_s is not None:
        return options.hang_timeout_s
    slowest = plan.params.n_batch / max(plan.speed.prefill_tps, 1.0)
    return max(HANG_S, HANG_STEPS * slowest)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _driver_numbers(plan: Plan) -> dict[str, int]:
    """Bytes in use on each card, as the driver counts them; nothing when the plan uses none."""
    if plan.verdict not in ("gpu", "partial"):
        return {}
    found = await asyncio.to_thread(probe)
    return {gpu.id: gpu.total - gpu.free for gpu in found.gpus}
