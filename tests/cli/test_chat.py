from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm import config, runtime
from edgellm.cli import chat as chat_command
from edgellm.cli import repl as repl_
from edgellm.cli.answer import chat_model
from edgellm.cli.app import main
from edgellm.cli.repl import Repl
from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions, Script
from edgellm.errors import ConfigError, InvalidRequestError


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> str:
    """The starter's header with the scripted backend, which loads no weights."""
    monkeypatch.setenv("EDGELLM_ENGINE_BACKEND", "scripted")
    return "starter"


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def ask(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["chat", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_prompt_is_answered_on_stdout_alone(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, "")
    code, out, err = ask([model, "-p", "hello", "--seed", "1"], capsys)
    assert code == 0
    assert out.strip()
    assert out.endswith("\n")
    assert err == ""


def test_what_is_piped_in_is_the_prompt(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = prompts(monkeypatch)
    stdin(monkeypatch, "a long text\n")
    assert ask([model], capsys)[0] == 0
    stdin(monkeypatch, "a long text\n")
    assert ask([model, "-p", "Summarise:"], capsys)[0] == 0
    assert "a long text" in seen[0]
    assert seen[1].index("Summarise:") < seen[1].index("a long text")


def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every prompt that reaches the engine from here on."""
    seen: list[str] = []
    original = Engine.generate

    def generate(self: Engine, request: Any) -> Any:
        seen.append(request.prompt)
        return original(self, request)

    monkeypatch.setattr(Engine, "generate", generate)
    return seen


@pytest.mark.parametrize(("argv", "piped"), [(["-p", ""], ""), (["-p", "  \n"], ""), ([], " \n")])
def test_an_empty_prompt_is_wrong_usage_before_anything_loads(
    argv: list[str],
    piped: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded a model")

    monkeypatch.setattr(runtime, "open_engine", refuse)
    stdin(monkeypatch, piped)
    code, out, err = ask(["starter", *argv], capsys)
    assert (code, out) == (2, "")
    assert "the prompt is empty" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-tokens", "-1"], "max_tokens must be at least 1, got -1"),
        (["--temperature", "hot"], 'unable to convert "hot" into float'),
        (["--temperature", "11"], "temperature must be at least 0 and at most 10"),
        (["--top-p", "2"], "top_p must be at least 0 and at most 1"),
        (["--ctx", "many"], "ctx"),
        (["--overflow", "burst"], "overflow"),
    ],
)
def test_wrong_flags_are_refused_with_exit_code_2(
    flags: list[str],
    says: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stdin(monkeypatch, "")
    code, out, err = ask([model, "-p", "x", *flags], capsys)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) <= 2


def test_json_holds_text_usage_and_timings(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, "")
    code, out, _ = ask([model, "-p", "x", "--json", "-n", "7", "--temp", "0"], capsys)
    said = json.loads(out)
    assert (code, said["schema"]) == (0, "edgellm.chat/1")
    assert said["usage"]["n_output"] == 7
    assert said["finish_reason"] == "length"
    assert said["timings"]["ttft_s"] > 0


def test_stats_print_each_phases_rate_and_the_ttft(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, "")
    _, _, err = ask([model, "-p", "x", "--stats", "-n", "9", "--seed", "1"], capsys)
    for word in ("prefill_tps", "decode_tps", "TTFT", "answer 9 tokens", "length"):
        assert word in err


def test_the_system_prompt_comes_first(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = prompts(monkeypatch)
    stdin(monkeypatch, "")
    ask([model, "-p", "hello", "--system", "Be brief."], capsys)
    assert seen[0].index("Be brief.") < seen[0].index("hello")


def test_a_ten_megabyte_prompt_is_one_clear_error(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, "many words " * 1_000_000)
    code, out, err = ask([model], capsys)
    assert (code, out) == (2, "")
    assert "tokens, the context holds" in err
    assert len(err) < 1000


def test_json_without_a_prompt_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert ask(["starter", "--json"], capsys)[0] == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# -- the conversation -------------------------------------------------------------------------


class Person:
    """Someone at the terminal: lines to type; an exception in their place is raised."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


@pytest.fixture
def talk(model: str) -> Iterator[Callable[..., Repl]]:
    """Run a conversation in which a person types these lines; returns the Repl afterwards."""
    loop = asyncio.new_event_loop()
    loaded = config.load({"chat.max_tokens": 5, "chat.temperature": 0})
    engine = loop.run_until_complete(runtime.open_engine(model, settings=loaded.settings))

    def run(*lines: str | type[BaseException], stats: bool = False) -> Repl:
        repl = Repl(
            engine,
            chat_model(engine.info, "tiny"),
            loaded.settings.chat,
            loop=loop,
            stats=stats,
            read=Person(*lines),
        )
        repl.run()
        return repl

    yield run
    loop.run_until_complete(engine.close())
    loop.close()


def roles(repl: Repl) -> list[str]:
    return [m["role"] for m in repl.messages]


def test_a_conversation_remembers_what_was_said(talk: Callable[..., Repl]) -> None:
    repl = talk("one", "two")
    assert roles(repl) == ["user", "assistant", "user", "assistant"]
    assert [m["content"] for m in repl.messages if m["role"] == "user"] == ["one", "two"]
    assert all(m["content"] for m in repl.messages)


def test_several_lines_are_one_message(talk: Callable[..., Repl]) -> None:
    repl = talk('"""first', "second", 'third"""', "a\\", "b", "/exit")
    assert [m["content"] for m in repl.messages if m["role"] == "user"] == [
        "first\nsecond\nthird",
        "a\nb",
    ]


def test_an_empty_line_asks_nothing(talk: Callable[..., Repl]) -> None:
    assert talk("", "   ").messages == []


def test_ctrl_c_at_the_prompt_does_not_leave(talk: Callable[..., Repl]) -> None:
    assert roles(talk(KeyboardInterrupt, "hello")) == ["user", "assistant"]


def test_clear_begins_anew_and_system_stays(talk: Callable[..., Repl]) -> None:
    repl = talk("/system Be brief.", "one", "/clear")
    assert repl.messages == [{"role": "system", "content": "Be brief."}]


def test_undo_takes_back_the_last_question_and_answer(talk: Callable[..., Repl]) -> None:
    repl = talk("one", "two", "/undo")
    assert [m["content"] for m in repl.messages if m["role"] == "user"] == ["one"]


def test_retry_answers_the_last_question_again(talk: Callable[..., Repl]) -> None:
    assert roles(talk("one", "/retry")) == ["user", "assistant"]
    assert roles(talk("/retry")) == []


def test_set_changes_sampling_within_its_limits(
    talk: Callable[..., Repl], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("/set max_tokens 3", "/stats on", "hello")
    captured = capsys.readouterr()
    assert "answer 3 tokens" in captured.err
    talk("/set temperature hot", "/set temperature 99", "/set tempo 1", "hello")
    err = capsys.readouterr().err
    assert "got 'hot'" in err
    assert "at most 10" in err
    assert "no setting 'tempo'" in err


def test_set_alone_shows_what_holds(
    talk: Callable[..., Repl], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("/set temperature 0.2", "/set")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines.count("temperature = 0.2") == 2
    assert "top_k = 40 (default)" in lines
    assert "seed = -" in lines


def test_an_unknown_command_is_named_and_the_chat_goes_on(
    talk: Callable[..., Repl], capsys: pytest.CaptureFixture[str]
) -> None:
    assert roles(talk("/nope", "hello")) == ["user", "assistant"]
    assert "no command /nope" in capsys.readouterr().err


def test_help_lists_every_command(
    talk: Callable[..., Repl], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("/help")
    out = capsys.readouterr().out
    for name in repl_._COMMANDS:
        assert f"/{name}" in out


@pytest.mark.parametrize("name", ["c.json", "c.md"])
def test_save_writes_the_conversation(name: str, talk: Callable[..., Repl], tmp_path: Path) -> None:
    repl = talk("hello", f"/save {tmp_path / name}")
    text = (tmp_path / name).read_text()
    if name.endswith("json"):
        assert json.loads(text) == repl.messages
    else:
        assert "## user\n\nhello" in text


def test_save_into_a_missing_folder_is_an_error_not_the_end(
    talk: Callable[..., Repl], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert roles(talk("hello", f"/save {tmp_path / 'no' / 'c.md'}", "more"))[-1] == "assistant"
    assert "No such file" in capsys.readouterr().err


def test_a_question_that_cannot_be_answered_is_forgotten(
    talk: Callable[..., Repl], capsys: pytest.CaptureFixture[str]
) -> None:
    repl = talk("many words " * 200_000, "hello")
    assert roles(repl) == ["user", "assistant"]
    assert "tokens, the context holds" in capsys.readouterr().err


def test_stats_are_printed_after_each_answer(
    talk: Callable[..., Repl], capsys: pytest.CaptureFixture[str]
) -> None:
    talk("one", "two", stats=True)
    assert capsys.readouterr().err.count("decode_tps") == 2


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = repl_.PlainScreen.content

    def content(self: repl_.PlainScreen, text: str) -> None:
        shown(self, text)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(repl_.PlainScreen, "content", content)
    loop = asyncio.new_event_loop()
    endless = EngineOptions(script=Script(step_s=0.02, answer_tokens=0))
    plan = runtime.plan_model("starter")
    engine = loop.run_until_complete(Engine.load(plan, backend="scripted", options=endless))
    repl = Repl(
        engine,
        chat_model(engine.info, "tiny"),
        config.load().settings.chat,
        loop=loop,
        read=Person("hello", "and again"),
    )
    try:
        repl.run()
        stats = loop.run_until_complete(engine.stats())
    finally:
        loop.run_until_complete(engine.close())
        loop.close()
    assert capsys.readouterr().err.count("(stopped)") == 2
    assert roles(repl) == ["user", "assistant"] * 2
    assert all(m["content"] for m in repl.messages)
    assert (stats.running, stats.requests_cancelled) == (0, 2)


def test_changed_keeps_the_other_settings() -> None:
    chat = config.load({"chat.system": "s", "chat.top_k": 3}, environ={}).settings.chat
    new = repl_.changed(chat, "top_k", "5")
    assert (new.system, new.top_k) == ("s", 5)
    assert repl_.changed(new, "top_k", "default").top_k is None
    with pytest.raises(ConfigError):
        repl_.changed(chat, "topk", "5")
    with pytest.raises(InvalidRequestError):
        repl_.changed(chat, "top_p", "5")


def test_the_history_of_earlier_chats_is_kept_and_private(edgellm_home: Path) -> None:
    readline = pytest.importorskip("readline", reason="this Python has no readline")
    with repl_._history():
        readline.add_history("a question")
    path = edgellm_home / "state" / "chat_history"
    assert "a question" in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_chat_is_registered_with_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "edgellm chat starter -p" in shown
    assert chat_command.__doc__


@pytest.mark.model
def test_an_engine_whose_libraries_do_not_load_points_at_doctor(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgellm", "chat", "starter", "-p", "hi"],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "edgellm: error: the engine does not load" in done.stderr
    assert done.stderr.endswith("try: edgellm doctor\n")
