"""The child process as its parent holds it: the socket, the log, loading, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import edgellm
from edgellm.engine import wire
from edgellm.engine.info import EngineOptions, LoadProgress
from edgellm.errors import EngineDeadError, EngineError
from edgellm.planner.plan import LoadReport, Plan

OnProgress = Callable[[LoadProgress], None]
CLOSE_GRACE_S: Final = 3.0
LOG_TAIL: Final = 12
"""Lines of the child's log that an EngineDeadError carries."""


def ignore(_: object) -> None:
    """Nobody wants to know."""


class _Link(asyncio.Protocol):
    """Bytes from the child, as messages."""

    def __init__(
        self, on_message: Callable[[wire.FromChild], None], on_lost: Callable[[], None]
    ) -> None:
        self._unframer = wire.Unframer()
        self._on_message = on_message
        self._on_lost = on_lost

    def data_received(self, data: bytes) -> None:
        for body in self._unframer.feed(data):
            self._on_message(wire.from_child_decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's)
        self._on_lost()


class Child:
    """One child process: its socket, its log, its end."""

    def __init__(self, log: deque[str]) -> None:
        self.log = log
        self.lost = asyncio.Event()
        self.on_message: Callable[[wire.FromChild], None] = ignore
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._log_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    async def start(self) -> None:
        """Start the process and connect to it."""
        ours, theirs = socket.socketpair()
        try:
            await self._spawn(theirs)
            ours.setblocking(False)
            self._transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: _Link(self._receive, self.lost.set), sock=ours
            )
        except BaseException:
            ours.close()  # closed while it starts again: the child, if there is one, then ends
            raise
        self._log_task = asyncio.create_task(self._read_log())

    async def _spawn(self, theirs: socket.socket) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "edgellm.engine.worker",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,  # Ctrl-C in a terminal stops an answer, not the engine
            )
        finally:
            theirs.close()

    def _receive(self, message: wire.FromChild) -> None:
        self.on_message(message)

    async def _read_log(self) -> None:
        stream = self._process.stdout if self._process is not None else None
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the reader's limit
                continue
            if not line:
                return
            self.log.append(line.decode("utf-8", "replace").rstrip())

    def send(self, message: wire.ToChild) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.pack(message))

    async def ended(self) -> str:
        """Wait for the end; how the process ended, in words."""
        if self._process is None:
            return "was never started"
        code = await self._process.wait()
        if self._log_task is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._log_task), 1.0)
        if code >= 0:
            return f"exited with status {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    async def stop(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Close politely, then by force. Its memory is back when this returns."""
        if self._process is None:
            return
        self.send(wire.Close())
        try:
            await asyncio.wait_for(self.ended(), grace_s)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.ended()
        if self._transport is not None:
            self._transport.close()
        if self._log_task is not None:
            await asyncio.gather(self._log_task, return_exceptions=True)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _environment() -> dict[str, str]:
    root = str(Path(edgellm.__file__).parents[1])
    path = os.environ.get("PYTHONPATH", "")
    # Cards in the order devices.probe lists them, unless a person said otherwise.
    defaults = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # Iterations that OpenMP threads spin at a barrier before they sleep. Without a limit, one
        # other busy process makes every barrier of every layer wait for a time slice.
        "GOMP_SPINCOUNT": "10000",
        # ggml_abort would start a debugger for seconds before a lost worker is known.
        "GGML_NO_BACKTRACE": "1",
    }
    return {**defaults, **os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


def death(how: str, log: list[str], worker: str | None) -> EngineDeadError:
    """The error of a child that ended."""
    if worker is not None:
        return EngineDeadError(
            f"the worker {worker} was lost, and with it what this model was computing",
            hint="send it again; edgellm worker starts one on that machine",
        )
    tail = "\n".join(log[-LOG_TAIL:])
    return EngineDeadError(
        f"the engine's process {how}" + (f"; its last words:\n{tail}" if tail else ""),
        hint="edgellm doctor",
    )


def on_loading(
    message: wire.FromChild, answer: asyncio.Future[wire.Loaded], on_progress: OnProgress
) -> None:
    if isinstance(message, wire.Progress):
        on_progress(message.value)
    elif answer.done():
        return
    elif isinstance(message, wire.Loaded):
        answer.set_result(message)
    elif isinstance(message, wire.Failed):
        answer.set_exception(wire.rebuild_error(message.error))


async def first_answer(
    answer: asyncio.Future[wire.Loaded], child: Child, timeout_s: float | None
) -> wire.Loaded:
    """The child's answer, or an error when it dies or takes too long."""
    lost: asyncio.Future[Any] = asyncio.ensure_future(child.lost.wait())
    either: set[asyncio.Future[Any]] = {answer, lost}
    try:
        await asyncio.wait(either, timeout=timeout_s, return_when="FIRST_COMPLETED")
    finally:
        lost.cancel()
    if answer.done():
        return answer.result()
    if not child.lost.is_set():
        raise EngineError(f"loading took longer than {timeout_s:g} s")
    how = await child.ended()
    tail = "\n".join(list(child.log)[-LOG_TAIL:])
    raise EngineDeadError(f"the engine's process {how} while loading; its last words:\n{tail}")


async def dry_run(
    plan: Plan,
    options: EngineOptions = EngineOptions(),  # noqa: B008  (frozen)
) -> LoadReport:
    """The buffers that a plan would allocate, measured in a child that allocates none of them."""
    child = Child(deque(maxlen=options.log_lines))
    answer: asyncio.Future[wire.Loaded] = asyncio.get_running_loop().create_future()
    child.on_message = lambda message: on_loading(message, answer, ignore)
    await child.start()
    child.send(wire.DryRun(plan, "llama", options))
    try:
        return (await first_answer(answer, child, options.load_timeout_s)).report
    finally:
        await child.stop()
