"""One answer in the terminal: messages in, text on the screen as it arrives, figures at the end."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from edgellm.chat import ChatModel, ContentDelta, PreparedChat, ReasoningDelta, prepare_chat
from edgellm.config import ChatSettings
from edgellm.engine.client import Engine
from edgellm.engine.info import EngineInfo
from edgellm.engine.wire import rebuild_error
from edgellm.metrics import RequestTimings
from edgellm.request import (
    FinishReason,
    Overflow,
    Request,
    SamplingParams,
    TokenEvent,
    Usage,
)

_ids = itertools.count(1)

Message = dict[str, Any]


class Screen(Protocol):
    """Where an answer appears while it is made."""

    def content(self, text: str) -> None: ...
    def reasoning(self, text: str) -> None: ...


@dataclass
class Answer:
    """What the model said to one list of messages."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    usage: Usage = field(default_factory=Usage)
    timings: RequestTimings = field(default_factory=RequestTimings)
    warnings: list[str] = field(default_factory=list)

    def to_json(self, model: str) -> dict[str, Any]:
        return {
            "schema": "edgellm.chat/1",
            "model": model,
            "content": self.content,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "usage": msgspec.to_builtins(self.usage),
            "timings": msgspec.to_builtins(self.timings),
            "warnings": self.warnings,
        }


def chat_model(info: EngineInfo, name: str) -> ChatModel:
    """What the chat templates need to know of a loaded model."""
    return ChatModel(
        arch=info.arch,
        name=name,
        templates=info.chat_templates,
        bos_text=info.bos_text,
        eos_text=info.eos_text,
        add_bos=info.add_bos,
    )


def sampling(chat: ChatSettings, **extra: Any) -> SamplingParams:
    """The sampling parameters that the settings give; request.py's own defaults elsewhere."""
    names = SamplingParams.__struct_fields__
    given = {n: getattr(chat, n) for n in chat.__struct_fields__ if n in names}
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**chosen, **extra).validate()


async def answer(
    engine: Engine,
    model: ChatModel,
    messages: Sequence[Message],
    *,
    chat: ChatSettings,
    screen: Screen,
    on_start: Callable[[Answer], None] = lambda _: None,
) -> Answer:
    """Generate one answer and show it as it comes.

    ``on_start`` receives the Answer that fills while text arrives: whoever cancels this coroutine
    still holds what was said until then. Raises the engine's error when the answer failed.
    """
    prepared = prepare_chat(model, messages)
    result = Answer(warnings=list(prepared.warnings))
    on_start(result)
    events = engine.generate(await request_for(engine, prepared, chat))
    try:
        await _collect(events, prepared, result, screen)
    finally:
        await events.aclose()
    return result


async def request_for(engine: Engine, prepared: PreparedChat, chat: ChatSettings) -> Request:
    """The engine's request for a rendered chat."""
    request = Request(
        id=f"chat-{next(_ids)}",
        prompt=prepared.prompt,
        add_special=prepared.add_special,
        sampling=sampling(chat, stop=prepared.stop, grammar=prepared.grammar),
        overflow=Overflow(chat.overflow),
        client="terminal",
    )
    if request.overflow is not Overflow.SLIDE:
        return request
    # Where turns begin costs one more rendering of the template: only where it is used.
    head = prepared.prompt[: prepared.n_keep_chars]
    kept = await engine.tokenize(head, add_special=prepared.add_special)
    return msgspec.structs.replace(request, turn_starts=prepared.turn_starts, n_keep=len(kept))


async def _collect(
    events: AsyncGenerator[TokenEvent, None], prepared: PreparedChat, result: Answer, screen: Screen
) -> None:
    parser = prepared.parser
    async for event in events:
        _show(parser.feed(event.text), result, screen)
        if event.warning:
            result.warnings.append(event.warning)
        if event.finish_reason is not None:
            _show(parser.finish(), result, screen)
            _finish(event, result)


def _show(deltas: Sequence[Any], result: Answer, screen: Screen) -> None:
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            result.content += delta.text
            screen.content(delta.text)
        elif isinstance(delta, ReasoningDelta):
            result.reasoning += delta.text
            screen.reasoning(delta.text)


def _finish(event: TokenEvent, result: Answer) -> None:
    if event.error is not None:
        raise rebuild_error(event.error)
    reason = event.finish_reason or FinishReason.STOP
    result.finish_reason = reason.value
    result.usage = event.usage or result.usage
    result.timings = event.timings or result.timings


def figures(result: Answer) -> str:
    """One line of figures: tokens, time to first token, and a rate for each phase."""
    usage, timings = result.usage, result.timings
    cached = f" ({usage.n_cached} cached)" if usage.n_cached else ""
    parts = [f"prompt {usage.n_prompt} tokens{cached}", f"answer {usage.n_output} tokens"]
    if timings.ttft_s is not None:
        parts.append(f"TTFT {timings.ttft_s:.3f} s")
    for name in ("prefill_tps", "decode_tps"):
        rate = getattr(timings, name)
        if rate is not None:
            parts.append(f"{name} {rate:.1f}")
    return " · ".join([*parts, result.finish_reason])


class PlainScreen:
    """Text to stdout as it arrives; thinking dimmed, and only where a person is looking."""

    def __init__(self, *, shows_reasoning: bool) -> None:
        self._shows_reasoning = shows_reasoning
        self._is_thinking = False
        self._ends_line = True

    def content(self, text: str) -> None:
        if self._is_thinking:
            self._write("\x1b[0m\n\n")
            self._is_thinking = False
        self._write(text)

    def reasoning(self, text: str) -> None:
        if not self._shows_reasoning:
            return
        if not self._is_thinking:
            self._write("\x1b[2m")
            self._is_thinking = True
        self._write(text)

    def close(self) -> None:
        """End the line, and the dimmed part, wherever the answer stopped."""
        if self._is_thinking:
            self._write("\x1b[0m")
        if not self._ends_line:
            self._write("\n")

    def _write(self, text: str) -> None:
        if not text:
            return
        sys.stdout.write(text)
        sys.stdout.flush()
        self._ends_line = text.endswith("\n")


class SilentScreen:
    """Nowhere: the answer is printed as a whole afterwards."""

    def content(self, text: str) -> None: ...
    def reasoning(self, text: str) -> None: ...
