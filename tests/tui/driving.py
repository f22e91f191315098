"""The program's screens, reached by keys as a person would; what should come is waited for.

The tests check these states and docs/screenshots.py draws them, once the screen is still.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot
from textual.widgets import DataTable

from edgellm.tui.composer import Composer
from edgellm.tui.demo import RUNS
from edgellm.tui.widgets import Stepper

PATIENCE_S = 60.0
"""What comes at all comes by then, on any machine."""


async def at_rest(min_sleep: float = 0.0, max_sleep: float = PATIENCE_S) -> None:
    """Until the event loop can but wait: for a timer, a thread or a socket.

    Stands in for Textual's ``wait_for_idle``. That one looks whether the process uses the CPU, so
    it takes one that does not get any, on a busy machine, for one that has no use for it.
    """
    loop: Any = asyncio.get_running_loop()
    end = time.monotonic() + max_sleep
    await asyncio.sleep(max(min_sleep, 0.005))
    while loop._ready and time.monotonic() < end:
        await asyncio.sleep(0)


async def settle(pilot: Pilot[Any], until: Callable[[], Any]) -> None:
    """Let the application work until something holds; fails when it never does."""
    end = time.monotonic() + PATIENCE_S
    while not until():
        if time.monotonic() > end:
            raise AssertionError("it did not come to hold")
        await pilot.pause(0.02)
    await pilot.pause()


async def still(pilot: Pilot[Any]) -> None:
    """Until no worker runs and no widget has changed its size or place for a fifth of a second: a
    page grows a frame after what it shows is known, and its scroll bar another frame later."""
    await settle(pilot, lambda: not any(worker.is_running for worker in pilot.app.workers))
    end = time.monotonic() + PATIENCE_S
    before: list[Any] = []
    n_same = 0
    while n_same < 10:
        now = [(w.region, w.virtual_size, w.scroll_offset) for w in pilot.app.screen.query("*")]
        n_same = n_same + 1 if now == before else 0
        if time.monotonic() > end:
            raise AssertionError("the screen never came to rest")
        before = now
        await pilot.pause(0.02)
        await pilot.pause()


async def welcome(pilot: Any) -> None:
    await settle(pilot, lambda: len(getattr(pilot.app.screen, "suggestions", ())) == 4)


async def models(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("escape")
    await settle(pilot, lambda: len(getattr(pilot.app.screen, "_verdicts", ())) == 3)
    await settle(pilot, lambda: pilot.app.screen.query_one(DataTable).row_count == 6)
    await pilot.press("down", "down")


async def stepped(pilot: Any, stepper: Stepper, key: str) -> None:
    """One step, planned with its alternatives before the next one: which plans of many quick steps
    are shown, and so what the last one is compared with, would depend on the machine."""
    stepper.focus()
    before = pilot.app.screen.plan
    await pilot.press(key)
    screen = pilot.app.screen
    await settle(pilot, lambda: screen.plan is not before and screen.plan.alternatives)


async def plan(pilot: Any) -> None:
    await models(pilot)
    await pilot.press("enter")
    await settle(pilot, lambda: getattr(pilot.app.screen, "plan", None) is not None)
    await settle(pilot, lambda: len(pilot.app.screen.query("Stepper")) == 6)
    await settle(pilot, lambda: pilot.app.screen.plan.alternatives)
    await stepped(pilot, list(pilot.app.screen.query(Stepper))[1], "right")


async def chat(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("enter")
    await settle(pilot, lambda: isinstance(pilot.app.focused, Composer) and pilot.app.endpoint)
    pilot.app.screen.query_one(Composer).insert("What is a KV cache?")
    await pilot.press("enter")
    screen = pilot.app.screen
    await settle(pilot, lambda: screen._live is None and len(screen.transcript.turns) == 2)
    await settle(pilot, lambda: "/ 8,192" in screen.query_one("#meter").text and screen.speed)
    view = screen.transcript
    await settle(pilot, lambda: view.scroll_offset.y == view.max_scroll_y)


async def monitor(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("enter")
    await settle(pilot, lambda: pilot.app.endpoint is not None)
    await pilot.press("f4")
    await settle(pilot, lambda: getattr(pilot.app.screen, "stats", None) is not None)
    if pilot.app.size.width >= 120:
        await settle(pilot, lambda: len(pilot.app.screen._plots) == 2)


async def server(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("5")
    await settle(pilot, lambda: pilot.app.focused is not None and pilot.app.focused.id == "start")
    await pilot.press("enter")
    await settle(pilot, lambda: pilot.app.screen.handle is not None)
    button = pilot.app.screen.query_one("#start")
    await settle(pilot, lambda: not button.has_class("-active"))  # pressed, for a moment


async def bench(pilot: Any) -> None:
    pilot.app.services.runs = RUNS
    await welcome(pilot)
    await pilot.press("6")
    await settle(pilot, lambda: len(getattr(pilot.app.screen, "runs", ())) == 5)
    await pilot.press("down", "down", "space", "up", "up")
