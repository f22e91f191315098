"""Draw the terminal interface's screens as SVG: python docs/screenshots.py [NAME ...]

The screens are the program's own, driven by keys, over the demo machine of edgellm/tui/demo.py (a
laptop with a 6 GiB card), so that the same pictures come out everywhere.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from edgellm.tui.app import EdgeApp
from edgellm.tui.demo import RUNS, DemoServices
from edgellm.tui.widgets import Metric

FOLDER = Path(__file__).parent / "images"
ROOMY = (124, 34)


async def until(pilot: Any, holds: Callable[[], Any]) -> None:
    for _ in range(500):
        if holds():
            await pilot.pause()
            return
        await pilot.pause(0.02)
    raise TimeoutError("the screen did not become what the picture needs")


async def welcome(pilot: Any) -> None:
    await until(pilot, lambda: len(getattr(pilot.app.screen, "suggestions", ())) == 4)


async def models(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("escape")
    await until(pilot, lambda: len(getattr(pilot.app.screen, "_verdicts", ())) == 3)
    await pilot.press("down", "down")


async def plan(pilot: Any) -> None:
    await models(pilot)
    await pilot.press("enter")
    await until(pilot, lambda: getattr(pilot.app.screen, "plan", None) is not None)
    await until(pilot, lambda: len(pilot.app.screen.query("Stepper")) == 6)
    await pilot.press("left")
    await pilot.pause(0.3)


async def chat(pilot: Any) -> None:
    await models(pilot)
    await pilot.press("c")
    await until(pilot, lambda: pilot.app.endpoint is not None)
    await pilot.pause(0.3)
    await pilot.press(*"What is a KV cache, and how do I make it smaller?", "enter")
    screen = pilot.app.screen
    await until(pilot, lambda: screen._live is None and len(screen.transcript.turns) == 2)
    await until(pilot, lambda: screen.speed)
    await pilot.pause(0.3)


async def monitor(pilot: Any) -> None:
    await models(pilot)
    await pilot.press("c")
    await until(pilot, lambda: pilot.app.endpoint is not None)
    await pilot.press("f4")
    await until(pilot, lambda: getattr(pilot.app.screen, "stats", None) is not None)
    await until(pilot, lambda: len(pilot.app.screen._plots) == 2)
    for phase, metric in enumerate(pilot.app.screen.query(Metric)):
        now = metric.data[-1] if metric.data else 0.0
        for i in range(180):
            wave = math.sin(i / 11 + phase) * 0.07 + math.sin(i / 3.1 + phase * 2) * 0.03
            metric.push(now * (0.98 + wave), "")
    pilot.app.screen._tick()
    await pilot.pause(0.5)


async def bench(pilot: Any) -> None:
    pilot.app.services.runs = RUNS
    await welcome(pilot)
    await pilot.press("6")
    await until(pilot, lambda: len(getattr(pilot.app.screen, "runs", ())) == 5)
    await pilot.press("down", "down", "space", "up", "up")
    await pilot.pause(0.5)


async def server(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("5")
    await until(pilot, lambda: pilot.app.focused is not None and pilot.app.focused.id == "start")
    await pilot.press("enter")
    await until(pilot, lambda: pilot.app.screen.handle is not None)


async def light(pilot: Any) -> None:
    await plan(pilot)
    await pilot.press("f10")
    await pilot.pause(0.3)


PICTURES: dict[str, tuple[Callable[[Any], Awaitable[None]], tuple[int, int]]] = {
    "welcome": (welcome, (100, 28)),
    "models": (models, ROOMY),
    "plan": (plan, ROOMY),
    "plan-light": (light, ROOMY),
    "chat": (chat, ROOMY),
    "monitor": (monitor, (140, 40)),
    "server": (server, (100, 28)),
    "bench": (bench, (124, 40)),
    "small": (plan, (80, 24)),
}


async def draw(name: str) -> Path:
    """One picture, from a program that was started for it."""
    drive, size = PICTURES[name]
    with tempfile.TemporaryDirectory() as folder:
        app = EdgeApp(DemoServices(folder))
        async with app.run_test(size=size) as pilot:
            await drive(pilot)
            svg = app.export_screenshot(title="edgellm")
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"tui-{name}.svg"
    path.write_text(svg, encoding="utf-8")
    return path


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        print(asyncio.run(draw(name)))


if __name__ == "__main__":
    main()
