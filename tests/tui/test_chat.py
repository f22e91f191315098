"""Chat, driven by keys over the demo machine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from textual import events
from textual.widgets import Input, OptionList

from edgellm.errors import DiskFullError, StoreError
from edgellm.tui.app import EdgeApp
from edgellm.tui.attachments import Attachments
from edgellm.tui.composer import PASTE_LIMIT, Composer
from edgellm.tui.demo import ANSWER, DemoEndpoint, DemoServices
from edgellm.tui.ports import Delta, Preferences
from edgellm.tui.screens.chat import ChatScreen
from edgellm.tui.sessions import Message, Session, SessionStore
from edgellm.tui.transcript import Transcript
from tests.tui.driving import settle

SIZE = (100, 30)
SLOW_S = 0.2
"""Between two words: the answer takes half a minute, and is not over before it is interrupted."""


def chat(app: EdgeApp) -> ChatScreen:
    assert isinstance(app.screen, ChatScreen)
    return app.screen


@pytest.fixture
def app(services: DemoServices) -> EdgeApp:
    """Opened with a model, as ``edgellm tui starter`` is."""
    return EdgeApp(services, model="starter")


async def open_chat(pilot: Any, app: EdgeApp) -> ChatScreen:
    if app.current_mode == "welcome":
        await settle(pilot, lambda: getattr(app.screen, "suggestions", None))
        await pilot.press("enter")
    await settle(pilot, lambda: app.endpoint is not None and isinstance(app.screen, ChatScreen))
    await settle(pilot, lambda: isinstance(app.focused, Composer))
    return chat(app)


def is_quiet(app: EdgeApp, n: int) -> bool:
    screen = app.screen
    return (
        isinstance(screen, ChatScreen)
        and screen._live is None
        and len(screen.transcript.turns) == n
        and not screen.transcript.turns[-1].streaming
    )


def texts(app: EdgeApp) -> list[str]:
    return [turn.text for turn in chat(app).transcript.turns]


async def test_first_run_to_first_answer_takes_four_keys(services: DemoServices) -> None:
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: app.screen.query(OptionList) and app.screen.suggestions)
        keys = ["enter", "h", "i", "enter"]
        await pilot.press(keys[0])
        await settle(pilot, lambda: isinstance(app.focused, Composer))
        await pilot.press(*keys[1:])
        await settle(pilot, lambda: is_quiet(app, 2))
        assert texts(app) == ["hi", ANSWER]
        assert len(keys) <= 4


async def test_a_message_written_while_the_model_loads_is_sent_when_it_is_ready(
    app: EdgeApp, services: DemoServices
) -> None:
    gate = asyncio.Event()
    load = services.load

    async def slow(plan: Any, on_progress: Any) -> Any:
        await gate.wait()
        return await load(plan, on_progress)

    services.load = slow  # type: ignore[method-assign]
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: isinstance(app.focused, Composer) and app.loading)
        await pilot.press("h", "i", "enter")
        await pilot.pause()
        assert app.endpoint is None
        gate.set()
        await settle(pilot, lambda: is_quiet(app, 2))
        assert texts(app)[0] == "hi"


def typed(app: EdgeApp, *keys: str) -> None:
    """Keys as a terminal sends them: at once, whatever the program is doing."""
    for key in keys:
        text = key if len(key) == 1 else None
        app.post_message(events.Key(key, "\r" if key == "enter" else text))


async def test_what_is_typed_right_after_the_choice_is_the_message(
    services: DemoServices,
) -> None:
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: len(getattr(app.screen, "suggestions", ())) == 4)
        typed(app, "down", "up", "enter", *"2 extra rows, xy", "backspace", "?", "enter", *"next")
        await settle(pilot, lambda: is_quiet(app, 2))
        assert texts(app)[0] == "2 extra rows, x?"
        composer = app.screen.query_one(Composer)
        assert app.focused is composer
        assert composer.text == "next"


async def test_arrows_and_enter_choose_in_the_order_of_typing(
    services: DemoServices,
) -> None:
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: len(getattr(app.screen, "suggestions", ())) == 4)
        wanted = app.screen.suggestions[1].row
        typed(app, "down", "enter", *"abc")
        await settle(pilot, lambda: app.current_mode == "models")
        assert wanted.ref in app.downloads.items


async def test_a_draft_is_followed_by_what_was_typed_before_it_was_read(
    services: DemoServices,
) -> None:
    before = EdgeApp(services)
    before.store.update(before.store.create().id, draft="a draft, ")
    before.store.close()
    again = EdgeApp(services, model="starter")
    asked, may = threading.Event(), threading.Event()
    read = again.store.thread

    def slow(session_id: str) -> list[Message]:
        asked.set()
        may.wait(60)
        return read(session_id)

    again.store.thread = slow  # type: ignore[method-assign]
    async with again.run_test(size=SIZE) as pilot:
        typed(again, *"ty")
        await settle(pilot, asked.is_set)
        typed(again, *"ped")
        composer = again.screen.query_one(Composer)
        await settle(pilot, lambda: composer.text == "typed")
        may.set()
        await settle(pilot, lambda: "draft" in composer.text)
        assert composer.text == "a draft, typed"


async def test_what_is_typed_after_enter_is_the_next_message(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await open_chat(pilot, app)
        typed(app, *"one", "enter", *"two")
        await settle(pilot, lambda: is_quiet(app, 2))
        assert texts(app)[0] == "one"
        assert app.screen.query_one(Composer).text == "two"


async def test_hints_name_the_keys_a_person_chose(services: DemoServices) -> None:
    services.preferred = Preferences(
        animations=False, keys={"composer.send": "ctrl+s", "chat.model": "ctrl+g,f8"}
    )
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        assert "ctrl+s sends" in screen._hint().plain
        await pilot.press("a", "enter", "b", "ctrl+s")
        await settle(pilot, lambda: is_quiet(app, 2))
        assert texts(app)[0] == "a\nb"
        app.endpoint = None
        assert "ctrl+g chooses one" in screen._hint().plain


async def test_what_was_said_is_there_after_a_restart(services: DemoServices) -> None:
    app = EdgeApp(services)
    async with app.run_test(size=SIZE) as pilot:
        await open_chat(pilot, app)
        await pilot.press(*"hello", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
    again = EdgeApp(services, model="starter")
    async with again.run_test(size=SIZE) as pilot:
        await settle(pilot, lambda: is_quiet(again, 2))
        assert texts(again) == ["hello", ANSWER]


async def test_escape_stops_an_answer_and_keeps_what_had_come(
    app: EdgeApp, services: DemoServices
) -> None:
    services.token_s = SLOW_S
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: screen._live is not None and len(screen._live.text) > 4)
        await pilot.press("escape")
        await settle(pilot, lambda: is_quiet(app, 2))
        stored = app.store.thread(app.store.find()[0].id)[-1]
        assert stored.state == "stopped"
        assert stored.content
        assert ANSWER.startswith(stored.content)
        assert screen.transcript.turns[-1].note == "stopped"


async def test_again_and_edit_make_branches_that_can_be_walked(
    app: EdgeApp, services: DemoServices
) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        services.answer = "Another answer."
        await pilot.press("escape", "r")
        await settle(pilot, lambda: texts(app)[1:] == ["Another answer."] and is_quiet(app, 2))
        assert "‹2/2›" in screen.transcript.turns[1].facts
        await pilot.press("left_square_bracket")
        await settle(pilot, lambda: texts(app)[1:] == [ANSWER])
        await pilot.press("e")
        await settle(pilot, lambda: isinstance(app.focused, Composer))
        await pilot.press("b", "enter")
        await settle(pilot, lambda: is_quiet(app, 2) and texts(app)[0] == "ab")
        session = app.store.find()[0]
        roles = [m["content"] for m in app.store.to_json(session.id)["messages"]]
        assert roles == ["a", ANSWER, "Another answer.", "ab", "Another answer."]


async def test_thinking_is_folded_until_it_is_asked_for(
    app: EdgeApp, services: DemoServices
) -> None:
    services.reasoning = "first this then that"
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        assert "first this" not in shown(screen)
        assert "▸ thought · 4 words" in shown(screen)
        await pilot.press("escape", "t")
        await pilot.pause()
        assert "first this then that" in shown(screen)


def shown(screen: ChatScreen) -> str:
    transcript = screen.transcript
    return "\n".join(transcript.render_line(y).text for y in range(transcript.size.height))


async def test_the_context_meter_counts_and_says_what_will_slide_out(
    app: EdgeApp, services: DemoServices
) -> None:
    services.answer = "word " * 7000
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        for n in (2, 4):
            await pilot.press("a", "enter")
            await settle(pilot, lambda n=n: is_quiet(app, n))
        from edgellm.tui.widgets import Meter

        meter = screen.query_one(Meter)
        await settle(pilot, lambda: "slide out" in meter.text)
        assert "/ 8,192" in meter.text


async def test_a_pasted_megabyte_becomes_an_attachment_and_is_sent_whole(
    app: EdgeApp, services: DemoServices
) -> None:
    from textual import events

    text = "x" * 1_000_000
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        app.endpoint.n_ctx = 1_000_000  # else it is refused, with the numbers
        composer = screen.query_one(Composer)
        app.post_message(events.Paste(text))
        await settle(pilot, lambda: screen.query_one(Attachments).items)
        assert composer.text == ""
        assert len(text) > PASTE_LIMIT
        await pilot.press("enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        asked = app.endpoint.asked[-1][0][-1]["content"]  # type: ignore[union-attr]
        assert text in asked
        assert "more characters (space unfolds)" in shown_all(screen)


def shown_all(screen: ChatScreen) -> str:
    transcript = screen.transcript
    lines = [line for chunk in transcript._chunks for line in transcript._lines(chunk)]
    return "\n".join("".join(segment.text for segment in line) for line in lines)


async def test_a_short_paste_is_inserted_once(app: EdgeApp) -> None:
    from textual import events

    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        composer = screen.query_one(Composer)
        app.post_message(events.Paste("two\nlines"))
        await settle(pilot, lambda: composer.text)
        assert composer.text == "two\nlines"


async def test_history_walks_back_and_forth_and_keeps_what_was_not_sent(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        composer = screen.query_one(Composer)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        await pilot.press("n", "up")
        assert composer.text == "a"
        await pilot.press("down")
        assert composer.text == "n"


async def test_an_engine_that_starts_itself_again_is_only_mentioned(
    app: EdgeApp, services: DemoServices
) -> None:
    services.token_s = SLOW_S
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: screen._live is not None and len(screen._live.text) > 4)
        services.endpoints[0].is_alive = False
        await settle(pilot, lambda: screen._live is None)
        services.endpoints[0].is_alive = True
        await settle(pilot, lambda: any("is back" in n.message for n in app._notifications))
        assert app.screen is screen


async def test_a_dead_engine_loses_nothing_and_offers_a_restart(
    app: EdgeApp, services: DemoServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.tui.screens.answering.MEND_S", 0.2)
    services.token_s = SLOW_S
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: screen._live is not None and len(screen._live.text) > 4)
        services.endpoints[0].is_alive = False
        from edgellm.tui.screens.dialogs import ConfirmScreen

        await settle(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert screen.transcript.turns[-1].note.startswith("the engine ended")
        await settle(pilot, lambda: app.store.thread(app.store.find()[0].id)[-1].state == "error")
        await pilot.press("y")
        await settle(pilot, lambda: len(services.endpoints) == 2 and app.endpoint is not None)
        assert app.endpoint.is_alive  # type: ignore[union-attr]


async def test_a_full_disk_is_said_once_and_saved_when_there_is_room(
    app: EdgeApp, services: DemoServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_finish = SessionStore.finish
    full = True

    def append(self: SessionStore, *_: Any) -> None:
        raise DiskFullError("the disk is full", required=1, available=0)

    def finish(self: SessionStore, *args: Any, **kwargs: Any) -> None:
        if full:
            raise DiskFullError("the disk is full", required=1, available=0)
        really_finish(self, *args, **kwargs)

    monkeypatch.setattr(SessionStore, "append", append)
    monkeypatch.setattr(SessionStore, "finish", finish)
    monkeypatch.setattr("edgellm.tui.screens.answering.RETRY_S", 0.05)
    async with app.run_test(size=SIZE) as pilot:
        await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        assert texts(app)[1] == ANSWER
        full = False
        await settle(pilot, lambda: app.store.thread(app.store.find()[0].id)[-1].state == "done")
        assert app.store.thread(app.store.find()[0].id)[-1].content == ANSWER


async def test_resizing_in_mid_stream_keeps_every_word(
    app: EdgeApp, services: DemoServices
) -> None:
    services.token_s = 0.004
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        for width in (60, 140, 80, 40, 160):
            await pilot.resize_terminal(width, 30)
            await pilot.pause(0.05)
        await settle(pilot, lambda: is_quiet(app, 2))
        assert texts(app)[1] == ANSWER
        assert "KV cache" in shown_all(screen)


async def test_another_conversation_can_be_read_while_an_answer_streams(
    app: EdgeApp, services: DemoServices
) -> None:
    async with app.run_test(size=(140, 30)) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        services.token_s = 0.01
        await pilot.press("ctrl+n")
        await settle(pilot, lambda: screen.session is None)
        await pilot.press("b", "enter")
        await settle(pilot, lambda: screen._live is not None and len(screen._live.text) > 3)
        first = app.store.find("a")[-1]
        screen._switch(first.id)
        await settle(pilot, lambda: texts(app)[0] == "a")
        await settle(pilot, lambda: screen._live is None)
        assert texts(app) == ["a", ANSWER]
        second = next(s for s in app.store.find() if s.id != first.id)
        await settle(pilot, lambda: app.store.thread(second.id)[-1].content == ANSWER)


async def test_settings_are_checked_and_used(app: EdgeApp, services: DemoServices) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("ctrl+t")
        await settle(pilot, lambda: app.screen is not screen)
        app.screen.query_one("#temperature", Input).value = "99"
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert "at most 10" in str(app.screen.query_one("#wrong").render())
        app.screen.query_one("#temperature", Input).value = "0.2"
        app.screen.query_one("#system").text = "be brief"  # type: ignore[attr-defined]
        await pilot.press("ctrl+s")
        await settle(pilot, lambda: app.screen is screen)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        messages, sampling = app.endpoint.asked[-1]  # type: ignore[union-attr]
        assert sampling.temperature == 0.2
        assert messages[0] == {"role": "system", "content": "be brief"}


async def test_a_message_right_after_the_settings_is_sent_with_them(
    app: EdgeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = threading.Event()
    create = app.store.create

    def slow(**kw: Any) -> Session:
        may.wait(60)
        return create(**kw)

    monkeypatch.setattr(app.store, "create", slow)
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("ctrl+t")
        await settle(pilot, lambda: app.screen is not screen)
        app.screen.query_one("#temperature", Input).value = "0.2"
        await pilot.press("ctrl+s")
        await settle(pilot, lambda: app.screen is screen)
        await pilot.press("a", "enter")
        may.set()
        await settle(pilot, lambda: is_quiet(app, 2))
        assert app.endpoint.asked[-1][1].temperature == 0.2  # type: ignore[union-attr]
        assert len(app.store.find()) == 1


async def test_until_the_first_word_the_prompt_is_being_read(
    app: EdgeApp, services: DemoServices
) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        services.token_s = 3600.0
        await pilot.press("a", "enter")
        await settle(pilot, lambda: screen.speed == "reading the prompt")
        await pilot.press("escape")
        await settle(pilot, lambda: screen._live is None and screen.speed == "")


async def test_settings_that_are_left_make_no_conversation(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("ctrl+t")
        await settle(pilot, lambda: app.screen is not screen)
        await pilot.press("escape")
        await settle(pilot, lambda: app.screen is screen)
        assert app.store.find() == []


async def test_export_writes_markdown_and_json(app: EdgeApp, tmp_path) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        for suffix in ("md", "json"):
            target = tmp_path / f"out.{suffix}"
            screen.transcript.focus()
            await pilot.press("x")
            await settle(pilot, lambda: app.screen is not screen)
            app.screen.query_one(Input).value = str(target)
            await pilot.press("enter")
            await settle(pilot, target.exists)
        assert (tmp_path / "out.md").read_text().startswith("# a\n")
        assert json.loads((tmp_path / "out.json").read_text())["messages"][0]["content"] == "a"


async def test_code_and_messages_can_be_copied(app: EdgeApp) -> None:
    async with app.run_test(size=SIZE) as pilot:
        await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        await pilot.press("escape", "b")
        await settle(pilot, lambda: app.clipboard.startswith("def kv_bytes"))
        await pilot.press("c")
        await pilot.pause()
        assert app.clipboard == ANSWER


async def test_a_text_file_is_attached_and_a_binary_one_is_refused(app: EdgeApp, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("remember this")
    (tmp_path / "image.bin").write_bytes(b"\0\1\2")
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        for name in ("image.bin", "notes.txt"):
            await pilot.press("ctrl+o")
            await settle(pilot, lambda: app.screen is not screen)
            app.screen.query_one(Input).value = str(tmp_path / name)
            await pilot.press("enter")
            await settle(pilot, lambda: app.screen is screen)
        await settle(pilot, lambda: screen.query_one(Attachments).items)
        assert screen.query_one(Attachments).items == (("notes.txt", "remember this"),)


async def test_the_model_can_be_switched_in_mid_conversation(
    app: EdgeApp, services: DemoServices
) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        await pilot.press("ctrl+l")
        await settle(pilot, lambda: app.screen is not screen)
        await pilot.press(*"qwen3-4b", "enter")
        await settle(pilot, lambda: app.endpoint is not None and "Qwen3-4B" in app.endpoint.name)
        await settle(pilot, lambda: isinstance(app.focused, Composer))
        await pilot.press("b", "enter")
        await settle(pilot, lambda: is_quiet(app, 4))
        names = [turn.name for turn in screen.transcript.turns if turn.role == "assistant"]
        assert names == ["SmolLM2-135M-Instruct", "Qwen3-4B-Instruct"]
        asked = app.endpoint.asked[-1][0]  # type: ignore[union-attr]
        assert [m["content"] for m in asked] == ["a", ANSWER, "b"]


async def test_another_model_chosen_in_mid_answer_ends_it_and_nothing_else(
    app: EdgeApp, services: DemoServices
) -> None:
    services.token_s = SLOW_S
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: screen._live is not None and screen._live.n_tokens > 2)
        app.open_model(next(r.ref for r in services.local_models() if "Qwen3-4B" in r.name))
        await settle(pilot, lambda: is_quiet(app, 2))
        await settle(pilot, lambda: app.endpoint is not None and "Qwen3-4B" in app.endpoint.name)
        (answer,) = (m for m in screen._thread if m.role == "assistant")
        assert (answer.state, answer.note) == ("stopped", "stopped: another model was chosen")
        assert ANSWER.startswith(answer.content)
        assert answer.content
        assert app.screen is screen
        assert not app._notifications


async def test_leaving_in_mid_answer_keeps_the_words_without_a_traceback(
    app: EdgeApp, services: DemoServices
) -> None:
    services.token_s = SLOW_S
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: screen._live is not None and len(screen._live.text) > 4)
        await pilot.press("ctrl+q")
    store = SessionStore(services.state_file("chat.db"))
    answer = store.thread(store.find()[0].id)[-1]
    store.close()
    assert answer.state in ("stopped", "interrupted")
    assert len(answer.content) > 4
    assert ANSWER.startswith(answer.content)


async def test_words_that_come_while_the_screen_is_taken_down_are_kept(
    app: EdgeApp, services: DemoServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()

    async def words(self: DemoEndpoint, *_: Any, **__: Any) -> AsyncGenerator[Delta, None]:
        yield Delta(text="before", n_tokens=1)
        await gate.wait()
        yield Delta(text=" and after", n_tokens=1)

    def gone(self: Transcript) -> None:
        screen.call_next(screen._frame_due)
        gate.set()

    monkeypatch.setattr(DemoEndpoint, "chat", words)
    monkeypatch.setattr(Transcript, "on_unmount", gone, raising=False)
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        await pilot.press("a", "enter")
        await settle(pilot, lambda: screen._live is not None and screen._live.text)
    store = SessionStore(services.state_file("chat.db"))
    answer = store.thread(store.find()[0].id)[-1]
    store.close()
    assert answer.content == "before and after"
    assert app.failure is None


async def test_a_widget_that_is_missed_while_the_program_ends_is_no_defect(
    app: EdgeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(self: Composer) -> None:
        screen.call_next(screen.query_one, Composer)

    monkeypatch.setattr(Composer, "on_unmount", late, raising=False)
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
    assert app.failure is None


async def test_a_message_beyond_the_context_is_refused_at_once_and_can_be_changed(
    app: EdgeApp,
) -> None:
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        screen.query_one(Attachments).add("book", "word " * 200_000)
        screen.query_one(Composer).insert("Sum it up.")
        await pilot.press("enter")
        await settle(pilot, lambda: app._notifications)
        (notice,) = app._notifications
        assert notice.title == "Too long for the context"
        assert "about 250," in notice.message
        assert "the context holds 8,192" in notice.message
        assert "F2" in notice.message
        assert app.endpoint.asked == []
        assert screen.query_one(Composer).text == "Sum it up."
        assert screen.query_one(Attachments).items == (("book", "word " * 200_000),)
        assert app.store.find() == []


async def test_what_a_defect_interrupts_is_on_disk(app: EdgeApp, services: DemoServices) -> None:
    services.token_s = SLOW_S
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        screen.query_one(Composer).insert("hello")
        await pilot.press("enter")
        await settle(pilot, lambda: screen._live is not None and len(screen._live.text) > 3)
        screen.query_one(Composer).insert("a draft")
        came = "".join(screen._live.text)
        screen.keep_now()
        (session,) = app.store.find()
        pieces = app.store._all("SELECT content FROM piece ORDER BY rowid")
        assert "".join(row["content"] for row in pieces) == came
        assert session.draft == "a draft"


async def test_a_disk_that_refuses_is_said_once_however_often_it_is_tried(
    app: EdgeApp, services: DemoServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file-size limit is an I/O error to SQLite, not a full disk: it came each 0.4 s again."""
    monkeypatch.setattr("edgellm.tui.screens.answering.RETRY_S", 0.05)
    services.token_s = 0.005
    async with app.run_test(size=SIZE) as pilot:
        screen = await open_chat(pilot, app)
        real = app.store.append, app.store.finish

        def append(*_: Any, **__: Any) -> None:
            raise StoreError("chat.db: disk I/O error")

        def finish(*_: Any, **__: Any) -> None:
            raise StoreError("chat.db: disk I/O error")

        app.store.append, app.store.finish = append, finish  # type: ignore[method-assign]
        screen.query_one(Composer).insert("hello")
        await pilot.press("enter")
        await settle(pilot, lambda: is_quiet(app, 2))
        for _ in range(3):
            await screen._save()
        assert [n.message for n in app._notifications if "I/O" in n.message] != []
        assert len([n for n in app._notifications if "I/O" in n.message]) == 1
        app.store.append, app.store.finish = real  # type: ignore[method-assign]
        await settle(pilot, lambda: app.store.thread(app.store.find()[0].id)[1].content == ANSWER)
