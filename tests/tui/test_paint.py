"""Frames that go to the terminal past the compositor show what the compositor would."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip

from edgellm.tui.app import EdgeApp
from edgellm.tui.composer import Composer
from edgellm.tui.demo import DemoServices
from edgellm.tui.paint import Rows, bar_rows, is_clear
from edgellm.tui.screens.chat import ChatScreen
from tests.tui.driving import settle

SIZE = (60, 20)


def test_rows_are_written_from_their_place_downwards() -> None:
    rows = Rows(4, 2, [Strip([Segment("one")]), Strip([Segment("two")])])
    assert rows.render_segments(Console()) == "\x1b[3;5Hone\x1b[4;5Htwo"


async def streaming(pilot: Any, app: EdgeApp) -> ChatScreen:
    await settle(pilot, lambda: getattr(app.screen, "suggestions", None))
    await pilot.press("enter")
    await settle(pilot, lambda: app.endpoint is not None and isinstance(app.screen, ChatScreen))
    screen = app.screen
    assert isinstance(screen, ChatScreen)
    await settle(pilot, lambda: isinstance(app.focused, Composer))
    screen.query_one(Composer).insert("hello")
    await pilot.press("enter")
    await settle(pilot, lambda: screen._live is not None and screen.transcript.scroll_y > 3)
    return screen


async def test_only_a_transcript_with_nothing_over_it_paints(
    app: EdgeApp, services: DemoServices
) -> None:
    services.token_s = 0.2
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        transcript = (await streaming(pilot, app)).transcript
        assert is_clear(transcript)
        app.notify("something", timeout=0.5)
        await settle(pilot, lambda: not is_clear(transcript))
        await settle(pilot, lambda: is_clear(transcript))
        app.action_help()
        await settle(pilot, lambda: not is_clear(transcript))


async def test_what_was_painted_is_what_would_be_rendered(
    app: EdgeApp, services: DemoServices, monkeypatch: Any
) -> None:
    services.token_s = 0.01
    painted: dict[int, str] = {}

    def paint(widget: Any, first: int, strips: list[Strip], *others: Rows) -> None:
        widget._styles_cache.clear()
        for y, strip in enumerate(strips, first):
            painted[y] = strip.text
        for y in range(first, widget.size.height):
            assert widget.render_line(y).text == painted[y]
        assert widget.scroll_y == widget.max_scroll_y

    monkeypatch.setattr("edgellm.tui.transcript.paint", paint)
    async with app.run_test(size=SIZE) as pilot:
        screen = await streaming(pilot, app)
        await settle(pilot, lambda: screen._live is None)
        transcript = screen.transcript
        assert len(painted) == transcript.size.height
        bar = transcript.vertical_scrollbar
        await settle(pilot, lambda: bar.position == transcript.scroll_y > 0)
        assert bar.window_virtual_size == transcript.virtual_size.height


async def test_a_painted_scroll_bar_looks_as_the_bar_itself(
    app: EdgeApp, services: DemoServices
) -> None:
    services.token_s = 0.001
    async with app.run_test(size=SIZE) as pilot:
        screen = await streaming(pilot, app)
        await settle(pilot, lambda: screen._live is None)
        transcript = screen.transcript
        bar = transcript.vertical_scrollbar
        await settle(pilot, lambda: bar.position == transcript.scroll_y > 0)
        n_lines = transcript.virtual_size.height
        painted = bar_rows(bar, n_lines, round(transcript.scroll_y)).render_segments(app.console)
        region = Region(0, 0, *bar.size)
        rendered = Rows(bar.region.x, bar.region.y, bar.render_lines(region))
        assert painted == rendered.render_segments(app.console)
        assert painted != bar_rows(bar, n_lines, 0).render_segments(app.console)


async def test_frames_come_with_text_and_never_between(
    app: EdgeApp, services: DemoServices, monkeypatch: Any
) -> None:
    services.token_s = 0.2
    frames: list[str] = []
    show = ChatScreen._show_frame
    monkeypatch.setattr(ChatScreen, "_show_frame", lambda self: frames.append("") or show(self))
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: getattr(app.screen, "suggestions", None))
        await pilot.press("enter")
        await settle(pilot, lambda: isinstance(app.focused, Composer) and app.endpoint)
        app.screen.query_one(Composer).insert("hello")
        await pilot.press("enter")
        await settle(pilot, lambda: getattr(app.screen, "_live", None) is not None)
        live = app.screen._live
        await settle(pilot, lambda: live.n_tokens >= 5)
        assert 0 < len(frames) <= live.n_tokens
