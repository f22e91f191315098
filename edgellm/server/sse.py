"""Server-sent events: whole events only, headers with the first, comments while nothing comes.

The headers wait for the first event, so that what fails before it is an HTTP status. When the
first event takes longer than the keep-alive interval (a long prefill, a long queue, a model that
loads), the headers go out with a comment, so that proxies and clients do not give up; from then on
an error is an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from edgellm.engine.pending import Direct
from edgellm.request import TokenEvent
from edgellm.server.http import PUSH, Call, Push

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise gather events before it passes them on.
    (b"x-accel-buffering", b"no"),
)
COMMENT: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"


class Stream:
    """One answer made of events."""

    __slots__ = ("_hub", "_push", "call", "is_writing", "last", "ping")

    def __init__(self, call: Call, hub: Hub, ping: bytes) -> None:
        self.call = call
        self.last = time.monotonic()
        self.ping = ping
        self.is_writing = False
        self._hub = hub
        self._push: Push | None = call.scope.get(PUSH)

    def direct(self, render: Callable[[TokenEvent], bytes]) -> Direct | None:
        """What writes events where they arrive, as :meth:`Engine.generate` takes it; None where
        the connection cannot. ``render`` gives an event's bytes.

        It takes nothing before the first write, nor while a write waits for the client.
        """
        push = self._push
        if push is None:
            return None

        def take(event: TokenEvent) -> bool:
            if not self.call.is_started or self.is_writing or not push(b""):
                return False
            chunk = render(event)
            if chunk:
                push(chunk)
                self.last = time.monotonic()
            return True

        return take

    async def write(self, events: bytes) -> None:
        """Send one or more whole events."""
        call = self.call
        self.is_writing = True
        if not call.is_started:
            await call.start(200, HEADERS)
        await call.send({"type": "http.response.body", "body": events, "more_body": True})
        self.is_writing = False
        self.last = time.monotonic()

    async def comment(self) -> None:
        """Show that the server is alive, unless the stream has ended meanwhile."""
        if self in self._hub.streams and not self.is_writing:
            await self.write(self.ping)

    async def end(self) -> None:
        """No more events."""
        self._hub.streams.discard(self)
        if not self.call.is_started:
            await self.call.start(200, HEADERS)
        await self.call.end()

    def drop(self) -> None:
        """The stream ended without an orderly end; no more comments."""
        self._hub.streams.discard(self)


class Hub:
    """Every open stream, and the one task that writes comments on the silent ones."""

    def __init__(self, interval: float = 10.0) -> None:
        self.interval = interval
        self.streams: set[Stream] = set()

    def open(self, call: Call, ping: bytes = COMMENT) -> Stream:
        """A stream for ``call``; nothing is sent yet."""
        stream = Stream(call, self, ping)
        self.streams.add(stream)
        return stream

    async def run(self) -> None:
        """Until cancelled: look at every stream a few times an interval."""
        comments: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(self.interval / 4)
            now = time.monotonic()
            for stream in self.streams:
                # A client that reads nothing has a write under way, and its own limits.
                if now - stream.last >= self.interval and not stream.is_writing:
                    task = asyncio.create_task(stream.comment())
                    comments.add(task)
                    task.add_done_callback(comments.discard)
