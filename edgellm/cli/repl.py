"""The chat at a plain terminal: lines in, answers out, commands that begin with a slash."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from edgellm import config, paths
from edgellm.chat import ChatModel
from edgellm.cli.answer import Answer, Message, PlainScreen, answer, figures, sampling
from edgellm.config import ChatSettings
from edgellm.engine.client import Engine
from edgellm.errors import ConfigError, EdgeLLMError, EngineDeadError
from edgellm.request import SamplingParams

T = TypeVar("T")
ReadLine = Callable[[str], str]

_PROMPT: Final = ">>> "
_CONTINUED: Final = "... "
_FENCE: Final = '"""'
_HISTORY_LINES: Final = 1000


class Repl:
    """A conversation with one engine; ``read`` is ``input`` or a test's stand-in for it."""

    def __init__(
        self,
        engine: Engine,
        model: ChatModel,
        chat: ChatSettings,
        *,
        loop: asyncio.AbstractEventLoop,
        stats: bool = False,
        read: ReadLine = input,
    ) -> None:
        self._engine = engine
        self._model = model
        self._chat = chat
        self._loop = loop
        self._stats = stats
        self._read = read
        self.messages: list[Message] = _opening(chat.system)

    def run(self) -> None:
        """Read and answer until /exit or the end of input."""
        print(f"{self._model.name}. /help lists the commands; Ctrl-D leaves.")
        with _history():
            while (text := self._next()) is not None:
                if text.startswith("/"):
                    if not self._command(text):
                        return
                elif text:
                    self._ask(text)

    def _next(self) -> str | None:
        """The next input, several lines of it when asked for; None at the end."""
        try:
            return read_text(self._read)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)")
            return ""
        except EOFError:
            print()
            return None

    def _ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        self._answer()

    def _answer(self) -> None:
        """Answer the messages so far; a failure leaves them as they were before the question."""
        screen = PlainScreen(shows_reasoning=True)
        said: list[Answer] = []
        work = answer(
            self._engine,
            self._model,
            self.messages,
            chat=self._chat,
            screen=screen,
            on_start=said.append,
        )
        try:
            done = run_interruptible(self._loop, work)
        except EngineDeadError:
            raise
        except EdgeLLMError as error:
            screen.close()
            self.messages.pop()
            _complain(error)
            return
        screen.close()
        self._remember(done or said[-1] if done or said else None, was_cut=done is None)

    def _remember(self, result: Answer | None, *, was_cut: bool) -> None:
        if result is None:
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": result.content})
        for warning in result.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if was_cut:
            print("(stopped)", file=sys.stderr)
        elif self._stats:
            print(figures(result), file=sys.stderr)

    def _command(self, text: str) -> bool:
        """Run one /command; False when it was to leave."""
        name, _, rest = text[1:].partition(" ")
        if name in ("exit", "quit", "bye"):
            return False
        action = _COMMANDS.get(name)
        if action is None:
            print(f"no command /{name}; /help lists them", file=sys.stderr)
        else:
            try:
                action[0](self, rest.strip())
            except EdgeLLMError as error:
                _complain(error)
            except OSError as error:
                print(f"error: {error}", file=sys.stderr)
        return True

    def help(self, _rest: str) -> None:
        for name, (_action, arguments, line) in _COMMANDS.items():
            print(f"  {f'/{name} {arguments}':<22} {line}")
        print(f"  {'/exit':<22} leave (also Ctrl-D)")
        print(f"\n  {_FENCE} begins and ends a text of several lines; a line ending in \\ goes on.")
        print("  Ctrl-C stops an answer; what was said until then stays.")

    def clear(self, _rest: str) -> None:
        self.messages = _opening(self._chat.system)
        print("a new conversation")

    def system(self, text: str) -> None:
        if not text:
            print(self._chat.system or "(no system prompt)")
            return
        self._chat = msgspec.structs.replace(self._chat, system=text)
        self.clear("")

    def set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            for field in self._chat.__struct_fields__:
                print(f"  {field} = {_value(self._chat, field)}")
            return
        self._chat = changed(self._chat, name, value)
        print(f"{name} = {_value(self._chat, name)}")

    def stats(self, text: str) -> None:
        self._stats = {"on": True, "off": False}.get(text, not self._stats)
        print(f"stats are {'on' if self._stats else 'off'}")

    def retry(self, _rest: str) -> None:
        if self._last_is("assistant"):
            self.messages.pop()
        if not self._last_is("user"):
            print("nothing to answer again", file=sys.stderr)
            return
        self._answer()

    def undo(self, _rest: str) -> None:
        if self._last_is("assistant"):
            self.messages.pop()
        if self._last_is("user"):
            removed = self.messages.pop()
            print(f"took back: {_short(str(removed['content']))}")

    def save(self, text: str) -> None:
        if not text:
            print("/save FILE.md or FILE.json", file=sys.stderr)
            return
        path = paths.expand(text)
        path.write_text(rendered(self.messages, as_json=path.suffix == ".json"), encoding="utf-8")
        print(f"saved to {path}")

    def plan(self, _rest: str) -> None:
        plan = self._engine.plan
        params = plan.params
        print(f"{plan.model.name} · {plan.verdict} · {params.n_gpu_layers} layers on the GPU")
        print(f"n_ctx {params.n_ctx} · cache {params.type_k}/{params.type_v}")

    def _last_is(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == role


_COMMANDS: Final[dict[str, tuple[Callable[[Repl, str], None], str, str]]] = {
    "help": (Repl.help, "", "these lines"),
    "clear": (Repl.clear, "", "begin a new conversation"),
    "system": (Repl.system, "[TEXT]", "show or set the system prompt (begins anew)"),
    "set": (Repl.set, "[NAME VALUE]", "show or change sampling: /set temperature 0.2"),
    "stats": (Repl.stats, "[on|off]", "figures after each answer"),
    "retry": (Repl.retry, "", "answer the last question again"),
    "undo": (Repl.undo, "", "take the last question and its answer back"),
    "save": (Repl.save, "FILE", "write the conversation (.json, or Markdown)"),
    "plan": (Repl.plan, "", "how the model is loaded"),
}


def changed(chat: ChatSettings, name: str, value: str) -> ChatSettings:
    """``chat`` with one setting changed; ConfigError on an unknown name or a wrong value."""
    flags = {f"chat.{name}": None if value in ("", "none", "default") else value}
    if f"chat.{name}" not in config.known_keys():
        known = ", ".join(chat.__struct_fields__)
        raise ConfigError(f"no setting {name!r}", hint=f"one of {known}")
    # Only what the flag says counts here, not the file: the rest of the settings stay.
    loaded = config.load(flags, environ={}, file=Path("/nonexistent"))
    new = msgspec.structs.replace(chat, **{name: getattr(loaded.settings.chat, name)})
    sampling(new)
    return new


def _value(chat: ChatSettings, name: str) -> str:
    """What holds for a setting: its value, or else the default it stands for."""
    value = getattr(chat, name)
    if value is not None:
        return str(value)
    default = getattr(SamplingParams(), name, None)
    return "-" if default is None else f"{default} (default)"


def read_text(read: ReadLine) -> str:
    """One input: a line, lines joined by a backslash at their end, or a text between fences."""
    line = read(_PROMPT)
    if line.strip().startswith(_FENCE):
        return "\n".join(_fenced(read, line.strip().removeprefix(_FENCE))).strip()
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(_CONTINUED))
    return "\n".join(lines).strip()


def _fenced(read: ReadLine, first: str) -> Iterator[str]:
    line = first
    while not line.rstrip().endswith(_FENCE):
        yield line
        line = read(_CONTINUED)
    yield line.rstrip().removesuffix(_FENCE)


def run_interruptible(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``; Ctrl-C cancels it alone. None when it was cancelled."""
    task = loop.create_task(work)
    try:
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises in the loop
            loop.add_signal_handler(signal.SIGINT, task.cancel)
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        return None
    except KeyboardInterrupt:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        return None
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)


def rendered(messages: list[Message], *, as_json: bool) -> str:
    """A conversation as JSON messages or as Markdown."""
    if as_json:
        return msgspec.json.format(msgspec.json.encode(messages), indent=2).decode() + "\n"
    return "".join(f"## {m['role']}\n\n{m['content']}\n\n" for m in messages)


def _opening(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []


def _complain(error: EdgeLLMError) -> None:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  try: {error.hint}", file=sys.stderr)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing with the history of earlier chats, where the platform has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = paths.state_dir() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)  # it holds what was asked
