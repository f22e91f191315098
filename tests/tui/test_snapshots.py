"""Every screen as it looks at 80x24 and at 160x48, through the constructor that users get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edgellm.tui.app import EdgeApp
from edgellm.tui.demo import DemoServices
from edgellm.tui.screens.help import HelpScreen
from edgellm.tui.widgets import Stepper
from tests.tui.driving import (
    bench,
    chat,
    models,
    monitor,
    plan,
    server,
    settle,
    stepped,
    still,
    welcome,
)

SIZES = [(80, 24), (160, 48)]
Drive = Callable[[Any], Awaitable[None]]


async def plan_that_does_not_fit(pilot: Any) -> None:
    await plan(pilot)
    layers = pilot.app.screen.query(Stepper).first()
    for _ in range(6):
        await stepped(pilot, layers, "right")
    assert pilot.app.screen.plan.devices[0].headroom < 0


async def bench_empty(pilot: Any) -> None:
    await welcome(pilot)
    await pilot.press("6")
    await settle(pilot, lambda: pilot.app.screen.query("#empty"))


async def keys(pilot: Any) -> None:
    await models(pilot)
    await pilot.press("question_mark")
    await settle(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))


SCREENS: list[Drive] = [
    welcome, models, plan, plan_that_does_not_fit, chat, monitor, server, bench, bench_empty, keys,
]  # fmt: skip


def drawn(drive: Drive) -> Drive:
    """A drive to its end, where nothing moves any more."""

    async def whole(pilot: Any) -> None:
        await drive(pilot)
        await still(pilot)

    return whole


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
    assert snap_compare(app, terminal_size=size, run_before=drawn(drive))


@pytest.mark.parametrize("drive", [plan, chat], ids=lambda drive: drive.__name__)
def test_a_screen_in_the_light_theme(snap_compare: Any, tmp_path: Any, drive: Drive) -> None:
    app = EdgeApp(DemoServices(str(tmp_path)))

    async def light(pilot: Any) -> None:
        await drive(pilot)
        await pilot.press("f10")

    assert snap_compare(app, terminal_size=(120, 36), run_before=drawn(light))


def test_without_colour_every_meaning_is_still_there(
    snap_compare: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = EdgeApp(DemoServices(str(tmp_path)))
    assert app.no_color
    assert snap_compare(app, terminal_size=(120, 36), run_before=drawn(plan))
