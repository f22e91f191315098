"""A defect of the interface ends it with a line to read, a log, and the state on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.worker import WorkerFailed

from edgellm.tui import crash
from edgellm.tui.app import EdgeApp
from edgellm.tui.demo import DemoServices


def failed() -> ZeroDivisionError:
    private = "what somebody wrote"
    try:
        assert private
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        return error
    raise AssertionError


def test_the_log_has_the_traceback_and_nobody_s_words(tmp_path: Path) -> None:
    path = tmp_path / "state" / crash.LOG
    said = crash.record(WorkerFailed(failed()), path)
    assert "unexpected ZeroDivisionError: division by zero" in said.message
    assert str(path) in (said.hint or "")
    log = path.read_text()
    assert "test_crash.py" in log
    assert "what somebody wrote" not in log.replace('private = "what somebody wrote"', "")


def test_a_second_one_is_appended_and_a_long_log_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / crash.LOG
    crash.record(failed(), path)
    crash.record(failed(), path)
    assert path.read_text().count("Traceback") == 2
    monkeypatch.setattr(crash, "MAX_LOG", 10)
    crash.record(failed(), path)
    assert path.read_text().count("Traceback") == 1


def test_an_unwritable_log_is_said_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = crash.record(failed(), tmp_path / "file" / crash.LOG)
    assert "could not be written" in (said.hint or "")


async def test_the_program_ends_with_what_to_say_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(self: EdgeApp) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(EdgeApp, "action_theme", defect)
    app = EdgeApp(DemoServices(str(tmp_path)))
    with pytest.raises(RuntimeError, match="boom"):
        async with app.run_test() as pilot:
            await pilot.press("f10")
    assert app.failure is not None
    assert "unexpected RuntimeError: boom" in app.failure.message
    assert app.return_code == 1
    assert not app._exit_renderables  # the command line prints the one line
