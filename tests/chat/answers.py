"""Helpers: run a parser over text cut in some way, and what it made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from edgellm.chat import (
    ContentDelta,
    Delta,
    OutputParser,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallStart,
)
from edgellm.chat.reasoning import ChatParser, Thinking
from edgellm.chat.tool_parsers import Family, Tool

WEATHER = Tool(
    "get_weather",
    "Weather of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["c", "f"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOTE = Tool(
    "save-note",
    "",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "tags": {"type": "array", "items": {}}},
        "required": ["text", "tags"],
        "additionalProperties": False,
    },
)
PING = Tool("ping", "", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, NOTE, PING)


@dataclass
class Answer:
    """All deltas of one choice, added up."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if isinstance(delta, ContentDelta):
            self.content += delta.text
        elif isinstance(delta, ReasoningDelta):
            self.reasoning += delta.text
        elif isinstance(delta, ToolCallStart):
            assert delta.index == len(self.calls)
            assert delta.name
            self.calls.append((delta.name, ""))
            self.ids.append(delta.id)
        elif isinstance(delta, ToolArgsDelta):
            assert delta.index == len(self.calls) - 1
            assert delta.fragment
            name, text = self.calls[-1]
            self.calls[-1] = (name, text + delta.fragment)

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in self.calls]

    @property
    def summary(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.content, self.reasoning, self.calls


def answer_of(parser: OutputParser, pieces: Iterable[str]) -> Answer:
    answer = Answer()
    for piece in pieces:
        for delta in parser.feed(piece):
            answer.add(delta)
    for delta in parser.finish():
        answer.add(delta)
    assert parser.n_calls == len(answer.calls)
    assert len(set(answer.ids)) == len(answer.ids)
    return answer


def parser_of(
    family: Family | None, *, thinking: Thinking | None = None, is_open: bool = False
) -> ChatParser:
    return ChatParser(thinking, family, TOOLS, is_open=is_open)


def every_cut(text: str) -> Iterator[list[str]]:
    """Whole, letter by letter, and cut in two at every place."""
    yield [text]
    yield list(text)
    for i in range(1, len(text)):
        yield [text[:i], text[i:]]
