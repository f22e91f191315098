"""Every screen as it looks at 80x24 and at 160x48, through the constructor that users get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.widgets import DataTable

from edgellm.tui.app import EdgeApp
from edgellm.tui.composer import Composer
from edgellm.tui.demo import RUNS, DemoServices
from edgellm.tui.screens.help import HelpScreen
from tests.tui.driving import settle

SIZES = [(80, 24), (160, 48)]
Drive = Callable[[Any], Awaitable[None]]


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
    before = pilot.app.screen.plan
    await pilot.press("down", "right")
    await settle(pilot, lambda: pilot.app.screen.plan is not before)
    await settle(pilot, lambda: pilot.app.screen.plan.alternatives)


async def plan_that_does_not_fit(pilot: Any) -> None:
    await plan(pilot)
    before = pilot.app.screen.plan
    pilot.app.screen.query("Stepper").first().focus()
    await pilot.press(*["right"] * 6)
    await settle(pilot, lambda: pilot.app.screen.plan.devices[0].headroom < 0)
    await settle(pilot, lambda: pilot.app.screen.plan.alternatives)
    assert pilot.app.screen.plan is not before


async def chat(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("enter")
    await settle(pilot, lambda: isinstance(pilot.app.focused, Composer) and pilot.app.endpoint)
    pilot.app.screen.query_one(Composer).insert("What is a KV cache?")
    await pilot.press("enter")
    screen = pilot.app.screen
    await settle(pilot, lambda: screen._live is None and len(screen.transcript.turns) == 2)
    await settle(pilot, lambda: "/ 8,192" in screen.query_one("#meter").text and screen.speed)


async def monitor(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("enter")
    await settle(pilot, lambda: pilot.app.endpoint is not None)
    await pilot.press("f4")
    await settle(pilot, lambda: getattr(pilot.app.screen, "stats", None) is not None)
    if pilot.app.size.width > 100:
        await settle(pilot, lambda: len(pilot.app.screen._plots) == 2)
    await pilot.pause(0.2)


async def server(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("5")
    await settle(pilot, lambda: pilot.app.focused is not None and pilot.app.focused.id == "start")
    await pilot.press("enter")
    await settle(pilot, lambda: pilot.app.screen.handle is not None)


async def bench(pilot: Any) -> None:
    pilot.app.services.runs = RUNS
    await welcome(pilot)
    await pilot.press("6")
    await settle(pilot, lambda: len(getattr(pilot.app.screen, "runs", ())) == 5)
    await pilot.press("down", "down", "space", "up", "up")
    await pilot.pause(0.3)


async def bench_empty(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("6")
    await settle(pilot, lambda: pilot.app.screen.query("#empty"))
    await pilot.pause(0.1)


async def keys(pilot: Any) -> None:
    await models(pilot)
    await pilot.press("question_mark")
    await settle(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))


SCREENS: list[Drive] = [
    welcome, models, plan, plan_that_does_not_fit, chat, monitor, server, bench, bench_empty, keys,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor reads once: how many readings fit into a test would depend on the machine."""
    monkeypatch.setattr("edgellm.tui.screens.monitor.TICK_S", 3600.0)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("drive", SCREENS, ids=lambda drive: drive.__name__)
def test_a_screen_looks_as_it_should(
    snap_compare: Any, tmp_path: Any, drive: Drive, size: tuple[int, int]
) -> None:
    app = EdgeApp(DemoServices(str(tmp_path)))
    assert snap_compare(app, terminal_size=size, run_before=drive)


@pytest.mark.parametrize("drive", [plan, chat], ids=lambda drive: drive.__name__)
def test_a_screen_in_the_light_theme(snap_compare: Any, tmp_path: Any, drive: Drive) -> None:
    app = EdgeApp(DemoServices(str(tmp_path)))

    async def light(pilot: Any) -> None:
        await drive(pilot)
        await pilot.press("f10")
        await pilot.pause(0.1)

    assert snap_compare(app, terminal_size=(120, 36), run_before=light)


def test_without_colour_every_meaning_is_still_there(
    snap_compare: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EdgeApp(DemoServices(str(tmp_path)))
    assert app.no_color
    assert snap_compare(app, terminal_size=(120, 36), run_before=plan)
