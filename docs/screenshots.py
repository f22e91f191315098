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
from edgellm.tui.demo import DemoServices
from edgellm.tui.widgets import Metric

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tui import driving

FOLDER = Path(__file__).parent / "images"
ROOMY = (124, 34)


async def watched(pilot: Any) -> None:
    """The monitor after three minutes, which it did not take."""
    await driving.monitor(pilot)
    for phase, metric in enumerate(pilot.app.screen.query(Metric)):
        now = metric.data[-1] if metric.data else 0.0
        for i in range(180):
            wave = math.sin(i / 11 + phase) * 0.07 + math.sin(i / 3.1 + phase * 2) * 0.03
            metric.push(now * (0.98 + wave), "")
    pilot.app.screen._tick()


async def light(pilot: Any) -> None:
    await driving.plan(pilot)
    await pilot.press("f10")


PICTURES: dict[str, tuple[Callable[[Any], Awaitable[None]], tuple[int, int]]] = {
    "welcome": (driving.welcome, (100, 28)),
    "models": (driving.models, ROOMY),
    "plan": (driving.plan, ROOMY),
    "plan-light": (light, ROOMY),
    "chat": (driving.chat, ROOMY),
    "monitor": (watched, (140, 40)),
    "server": (driving.server, (100, 28)),
    "bench": (driving.bench, (124, 40)),
    "small": (driving.plan, (80, 24)),
}


async def draw(name: str) -> Path:
    """One picture, from a program that was started for it."""
    drive, size = PICTURES[name]
    with tempfile.TemporaryDirectory() as folder:
        app = EdgeApp(DemoServices(folder))
        async with app.run_test(size=size) as pilot:
            await drive(pilot)
            await driving.still(pilot)
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
