"""A server started from here: ``edgellm serve`` in a child process, stopped with this program."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from datetime import datetime
from typing import Any, Final

import msgspec

from edgellm.errors import EngineError, QueueFullError
from edgellm.tui.http import Http
from edgellm.tui.ports import ServerLostError

START_S: Final = 120.0
STOP_S: Final = 10.0


class ServerProcess:
    """Implements :class:`edgellm.tui.ports.ServerHandle` over a child process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.url = url
        self._process = process
        self._lines: deque[str] = deque(maxlen=500)
        self._reader = asyncio.create_task(self._read())

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def tail(self, n: int) -> list[str]:
        return list(self._lines)[-n:]

    async def _read(self) -> None:
        stream = self._process.stdout
        while stream is not None and (line := await stream.readline()):
            shown = readable(line.decode("utf-8", "replace").rstrip())
            if shown is not None:
                self._lines.append(shown)

    async def stop(self) -> None:
        """Politely first: requests end, the model is unloaded."""
        if self.is_alive:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        await asyncio.gather(self._reader, return_exceptions=True)


def readable(line: str) -> str | None:
    """A line of the server's log for a person: its JSON as words, anything else as it stands.

    None for a health check: this program's own, while the model loads, would bury all others.
    """
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        at = datetime.fromisoformat(str(fields.pop("ts")).replace("Z", "+00:00")).astimezone()
        event = str(fields.pop("event"))
    except (msgspec.DecodeError, KeyError, ValueError):
        return line
    if event == "request" and fields.get("path") == "/health":
        return None
    fields.pop("id", None)
    first = ("method", "path", "status") if event == "request" else ()
    said = [event] if event != "request" else []
    said += [str(fields.pop(name)) for name in first if name in fields]
    return "  ".join([f"{at:%H:%M:%S}", " ".join(said), *(f"{k} {v}" for k, v in fields.items())])


async def start(ref: str, host: str, port: int, api_key: str | None) -> ServerProcess:
    """Start a server and wait until it answers. EngineError carries its last words."""
    env = {**os.environ, **({"EDGELLM_SERVE_API_KEY": api_key} if api_key else {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edgellm", "serve", ref, "--host", host, "--port", str(port),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, env=env, start_new_session=True,
    )  # fmt: skip
    server = ServerProcess(process, f"http://{host}:{port}")
    try:
        await asyncio.wait_for(_answers(server, api_key), START_S)
    except asyncio.TimeoutError:
        await server.stop()
        raise EngineError(f"the server did not answer within {START_S:.0f} s") from None
    except BaseException:
        await server.stop()
        raise
    return server


async def _answers(server: ServerProcess, api_key: str | None) -> None:
    http = Http(server.url, api_key)
    while True:
        if not server.is_alive:
            raise EngineError("the server ended at once: " + " ".join(server.tail(3)))
        try:
            await http.get("/health")
        except (ServerLostError, EngineError, QueueFullError):  # the last while its model loads
            await asyncio.sleep(0.2)
            continue
        return
