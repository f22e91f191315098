"""The conversation widget: a frame costs its tail, and every line can be reached."""

from __future__ import annotations

from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.geometry import Offset
from textual.selection import Selection

from edgellm.tui.context import Fit, fit
from edgellm.tui.palette import THEMES
from edgellm.tui.transcript import WINDOW_LINES, Transcript, Turn
from tests.tui.driving import settle

PARAGRAPH = "A paragraph of some words that goes on for a line or two, **bold** in the middle.\n\n"


class Alone(App[None]):
    def __init__(self) -> None:
        super().__init__()
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEMES[0].name

    def compose(self) -> ComposeResult:
        yield Transcript()

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)


def lines(transcript: Transcript) -> list[str]:
    return [transcript.render_line(y).text.rstrip() for y in range(transcript.size.height)]


async def test_a_frame_lays_out_the_open_block_and_nothing_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)):
        view = app.transcript
        view.add(Turn("1", "assistant", name="m", streaming=True))
        view.stream(PARAGRAPH * 300)
        made: list[Any] = []
        make = view._make
        monkeypatch.setattr(view, "_make", lambda chunk: made.append(chunk) or make(chunk))
        for word in ("one ", "two ", "three "):
            made.clear()
            view.stream(word)
            assert [chunk.kind for chunk in made] == ["block", "gap"]


async def test_streamed_text_looks_as_the_same_text_laid_out_at_once() -> None:
    text = PARAGRAPH * 3 + "- a\n- b\n\n```python\nx = 1\n```\n\nend"
    app = Alone()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.transcript
        view.add(Turn("1", "assistant", name="m", streaming=True))
        for start in range(0, len(text), 7):
            view.stream(text[start : start + 7])
        await pilot.pause()
        streamed = lines(view)
        view.finish()
        await pilot.pause()
        assert lines(view) == streamed


async def test_a_hidden_conversation_is_laid_out_when_it_has_a_width() -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.transcript
        view.display = False
        await pilot.pause()
        view.show([])
        view.display = True
        view.add(Turn("1", "user", text="Write a very long story about the sea."))
        assert all(chunk.lines is None for chunk in view.turns[0].chunks)
        await settle(pilot, lambda: "a very long story about the sea." in "".join(lines(view)))


async def test_more_text_draws_only_the_lines_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.transcript
        view.add(Turn("1", "assistant", name="m", streaming=True))
        view.stream(" ".join([PARAGRAPH.strip()] * 8))
        await pilot.pause()
        drawn: list[int] = []
        monkeypatch.setattr("edgellm.tui.transcript.paint", lambda _, y, __: drawn.append(y))
        monkeypatch.setattr(view, "refresh_lines", lambda y, _: drawn.append(y))
        n_lines = view.virtual_size.height
        view.stream(" and so on")
        assert drawn[0] >= n_lines - 3
        assert n_lines > 5


async def test_it_follows_the_end_unless_somebody_scrolled_away() -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.transcript
        view.add(Turn("1", "assistant", name="m", streaming=True))
        view.stream(PARAGRAPH * 30)
        assert view.is_vertical_scroll_end
        view.scroll_to(y=5, animate=False)
        await pilot.pause()
        view.stream(PARAGRAPH * 5)
        assert view.scroll_offset.y == 5


@pytest.mark.parametrize("size", [(80, 12), (60, 24), (100, 40)])
async def test_it_follows_the_end_through_a_resize(size: tuple[int, int]) -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.transcript
        view.add(Turn("1", "assistant", name="m", streaming=True))
        view.stream(PARAGRAPH * 30)
        await pilot.resize_terminal(*size)
        await pilot.pause()
        view.stream("the very last words")
        await pilot.pause()
        assert "the very last words" in "".join(lines(view))


async def test_a_long_conversation_is_laid_out_a_window_at_a_time() -> None:
    turns = [Turn(str(i), "assistant", name="m", text=PARAGRAPH * 4) for i in range(400)]
    app = Alone()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.transcript
        view.show(turns)
        await pilot.pause()
        laid_out = sum(chunk.lines is not None for turn in turns for chunk in turn.chunks)
        assert laid_out < sum(len(turn.chunks) for turn in turns) / 4
        assert view.virtual_size.height < 2 * WINDOW_LINES
        view.focus()
        for _ in range(400):
            view.action_select(-1)
        await pilot.pause()
        assert view.selected == 0
        assert "m" in lines(view)[0] or "m" in lines(view)[1]


async def test_fifty_thousand_tokens_stream_without_growing_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)):
        view = app.transcript
        view.add(Turn("1", "assistant", name="m", streaming=True))
        for _ in range(250):
            view.stream(PARAGRAPH * 10)
        asked: list[object] = []
        lines_of = view._lines
        monkeypatch.setattr(view, "_lines", lambda chunk: asked.append(chunk) or lines_of(chunk))
        view.stream("one more word")
        assert len(asked) < 10
        turn = view.turns[0]
        made = sum(chunk.lines is not None for chunk in turn.chunks)
        assert len(turn.chunks) == 2500 + 4
        assert made == len(turn.chunks)
        assert view.is_vertical_scroll_end


async def test_selected_text_comes_without_the_gutter() -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)):
        view = app.transcript
        view.show([Turn("1", "user", text="first line\nsecond line")])
        got = view.get_selection(Selection(Offset(2, 1), Offset(8, 2)))
        assert got is not None
        assert got[0] == "first line\nsecond"


async def test_a_click_selects_and_opens_the_thinking() -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.transcript
        view.show([Turn("1", "assistant", name="m", text="answer", reasoning="because")])
        await pilot.pause()
        assert "because" not in "".join(lines(view))
        await pilot.click(Transcript, offset=(6, 1))
        await settle(pilot, lambda: "because" in "".join(lines(view)))
        assert view.selected == 0


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([10, 100, 100], Fit(210, 1000, 0)),
        ([10, 400, 400, 50, 50], Fit(910, 1000, 2)),
        ([10, 400, 400, 400, 400, 50], Fit(1660, 1000, 4)),
        ([10, 2000], Fit(2010, 1000, 0)),
    ],
)
def test_the_oldest_whole_turns_slide_out_first(counts: list[int], expected: Fit) -> None:
    assert fit(counts, 1000) == expected
