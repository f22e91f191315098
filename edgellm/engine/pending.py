"""Events of one request on their way from the child to whoever asked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from edgellm.request import Request, TokenEvent

Direct = Callable[[TokenEvent], bool]
"""Called where an event arrives, with no task woken for it; True: it was taken."""


class Pending:
    """What a consumer has not read yet, in order."""

    __slots__ = (
        "_direct",
        "_events",
        "_waiter",
        "alone",
        "n_replays",
        "n_sent",
        "request",
        "started",
    )

    def __init__(self, request: Request, direct: Direct | None = None) -> None:
        self.request = request
        self.started = False
        self.alone = True
        """No other request ran beside it."""
        self.n_sent = 0
        self.n_replays = 0
        self._direct = direct
        self._events: deque[TokenEvent | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        """Hand an event over: at once where ``direct`` takes it and nothing waits before it."""
        self.n_sent += 1
        if self._direct is not None and not self._events:
            try:
                if self._direct(event):
                    return
            except Exception as error:  # noqa: BLE001  (border: raised where the consumer awaits)
                self.fail(error)
                return
        self._events.append(event)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error, after what came before it."""
        self._direct = None
        self._events.append(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> TokenEvent | Exception:
        """The next event, or the error that ended the request."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()
