"""Waiting for what should come to hold, instead of sleeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot


async def settle(pilot: Pilot[Any], until: Callable[[], Any], tries: int = 400) -> None:
    """Let the application work until something holds; fails when it never does."""
    for _ in range(tries):
        if until():
            await pilot.pause()
            return
        await pilot.pause(0.02)
    raise AssertionError("it did not come to hold")
