"""Thinking: how a template marks it, whether the prompt already opened it, and the common parser.

The parser splits an answer into thinking, text and calls while it streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgellm.chat.deltas import Delta
from edgellm.chat.tool_parsers import Family, Tools
from edgellm.chat.tool_parsers.stream import Steps, Stream
from edgellm.request import control, until

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class Thinking:
    """The marks around thinking; ``ignored`` marks wrap the answer and are left out."""

    open: str
    close: str
    ignored: tuple[str, ...] = ()

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends inside thinking (the template opened it for the model)."""
        tail = prompt.rstrip()
        return tail.endswith(self.open) and tail.rfind(self.open) > tail.rfind(self.close)

    def rule(self) -> str:
        """LARK ``think``: one stretch of thinking and the white space behind it."""
        return f"think: {control(self.open)} thought /\\s*/\n{until('thought', self.close)}"


DEFAULT: Final = Thinking("<think>", "</think>")
STYLES: Final = (
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<mm:think>", "</mm:think>"),
    Thinking("<|channel>thought", "<channel|>"),
    Thinking("<think:opensource>", "</think:opensource>"),
    DEFAULT,
)


def find_style(template: str) -> Thinking | None:
    """The marks this template knows; None for a model that does not think."""
    for style in STYLES:
        if style.close in template:
            return style
    return None


def effort_variables(effort: str | None) -> dict[str, Any]:
    """What templates call the wish for more or less thinking: gpt-oss reads reasoning_effort,
    Qwen and GLM enable_thinking, DeepSeek and Granite thinking."""
    if effort is None:
        return {}
    thinks = effort != "none"
    level = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}.get(effort, effort)
    return {"reasoning_effort": level, "enable_thinking": thinks, "thinking": thinks}


def is_thinking_off(variables: Mapping[str, Any]) -> bool:
    return variables.get("enable_thinking") is False or variables.get("thinking") is False


class ChatParser:
    """Splits one choice's text. Never raises; the pieces' cut does not matter."""

    def __init__(
        self,
        thinking: Thinking | None,
        family: Family | None,
        tools: Tools,
        *,
        is_open: bool,
        is_continued: bool = False,
    ) -> None:
        self.warnings: list[str] = []
        self._stream = Stream(is_continued=is_continued)
        self._family = family
        self._tools = tools
        self._thinking = thinking or DEFAULT
        self._steps = self._parse(is_open)
        next(self._steps, None)

    @property
    def n_calls(self) -> int:
        return self._stream.n_calls

    def feed(self, text: str) -> list[Delta]:
        self._stream.text += text
        return self._advance()

    def finish(self) -> list[Delta]:
        if self._stream.ended:
            return []
        self._stream.ended = True
        deltas = self._advance()
        if self._stream.in_reasoning:
            self.warnings.append(
                "the answer ended inside the model's thinking: allow more tokens, or ask for less "
                "reasoning effort"
            )
        if self._stream.in_call:
            self.warnings.append("the answer ended inside a tool call: its arguments are cut")
        return deltas

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        deltas, self._stream.deltas = self._stream.deltas, []
        return deltas

    def _parse(self, is_open: bool) -> Steps[None]:
        s = self._stream
        if self._family is not None and self._family.parse is not None:
            yield from self._family.parse(s)
        else:
            if is_open:
                yield from self._think()
            while not s.ended or s.text:
                yield from self._next()
                if not s.text and not s.ended:
                    yield
        s.flush()

    def _think(self) -> Steps[None]:
        s = self._stream
        s.in_reasoning = True
        tag = yield from s.until((self._thinking.close,), s.reasoning())
        s.in_reasoning = tag is None

    def _next(self) -> Steps[None]:
        """The thinking, the call, or the text that comes next."""
        s = self._stream
        if not s.has_content and not s.n_calls:
            yield from s.skip_space()
            if (yield from s.starts(self._thinking.open)) is not None:
                yield from self._think()
                return
            if (yield from self._bare_call()):
                return
        begins = self._family.begins if self._family else ()
        tags = (*begins, *self._thinking.ignored)
        if not tags:
            s.content(s.take(len(s.text)))
            return
        tag = yield from s.until(tags, s.content)
        if self._family is None or tag is None or tag not in begins:
            return
        if not (yield from self._family.read(s, tag, self._tools)):
            s.content(tag)

    def _bare_call(self) -> Steps[bool]:
        family = self._family
        if family is None or family.read_at_start is None:
            return False
        yield from self._stream.need(1)
        if not self._stream.text.startswith(family.at_start):
            return False
        return (yield from family.read_at_start(self._stream, self._tools))
