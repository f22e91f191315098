from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any

import pytest

from edgellm.engine.child import Child


async def test_a_child_whose_start_is_cancelled_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[socket.socket] = []
    pair = socket.socketpair

    def remember() -> tuple[socket.socket, socket.socket]:
        made.extend(pair())
        return made[0], made[1]

    async def never(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(socket, "socketpair", remember)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
    with pytest.raises(asyncio.CancelledError):
        await Child(deque()).start()
    assert [end.fileno() for end in made] == [-1, -1]
