"""The program's screens, reached by keys as a person would; what should come is waited for.

The tests check these states and docs/screenshots.py draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.pilot import Pilot
from textual.widgets import DataTable

from edgellm.tui.composer import Composer
from edgellm.tui.demo import RUNS


async def settle(pilot: Pilot[Any], until: Callable[[], Any], tries: int = 400) -> None:
    """Let the application work until something holds; fails when it never does."""
    for _ in range(tries):
        if until():
            await pilot.pause()
            return
        await pilot.pause(0.02)
    raise AssertionError("it did not come to hold")


async def still(pilot: Pilot[Any], tries: int = 200) -> None:
    """Until no widget has changed its size or place for a fifth of a second: a page grows a frame
    after what it shows is known, and its scroll bar another frame later."""
    before: list[Any] = []
    n_same = 0
    for _ in range(tries):
        now = [(w.region, w.virtual_size, w.scroll_offset) for w in pilot.app.screen.query("*")]
        n_same = n_same + 1 if now == before else 0
        if n_same >= 10:
            return
        before = now
        await pilot.pause(0.02)
    raise AssertionError("the screen never came to rest")


async def welcome(pilot: Any) -> None:
    await settle(pilot, lambda: len(getattr(pilot.app.screen, "suggestions", ())) == 4)


async def models(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("escape")
    await settle(pilot, lambda: len(getattr(pilot.app.screen, "_verdicts", ())) == 3)
    await settle(pilot, lambda: pilot.app.screen.query_one(DataTable).row_count == 6)
    await pilot.press("down", "down")


async def plan(pilot: Any) -> None:
    await models(pilot)
    await pilot.press("enter")
    await settle(pilot, lambda: getattr(pilot.app.screen, "plan", None) is not None)
    await settle(pilot, lambda: len(pilot.app.screen.query("Stepper")) == 6)
    context = list(pilot.app.screen.query("Stepper"))[1]
    context.focus()
    await pilot.press("right")
    await settle(pilot, lambda: pilot.app.screen.plan.params.n_ctx == context.value)
    await settle(pilot, lambda: pilot.app.screen.plan.alternatives)
    await still(pilot)


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
    await pilot.pause(0.2)  # the scroll bar follows a frame later


async def monitor(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("enter")
    await settle(pilot, lambda: pilot.app.endpoint is not None)
    await pilot.press("f4")
    await settle(pilot, lambda: getattr(pilot.app.screen, "stats", None) is not None)
    if pilot.app.size.width >= 120:
        await settle(pilot, lambda: len(pilot.app.screen._plots) == 2)
    await pilot.pause(0.2)


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
    await pilot.pause(0.3)
