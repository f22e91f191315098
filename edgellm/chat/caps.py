"""What a template can express, found by rendering small conversations with it.

A template is code: whether it shows tools, walks through arguments or only joins texts cannot be
read off it, so it is tried once (the same idea as llama.cpp's common/chat.cpp capabilities).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from edgellm.chat import messages as shapes
from edgellm.chat import template as templates
from edgellm.chat.messages import Message
from edgellm.chat.template import ChatModel
from edgellm.errors import InvalidRequestError

_NEEDLE: Final = "needle7"
_MODEL: Final = ChatModel(bos_text="<s>", eos_text="</s>")
_NINE: Final = re.compile(r"length\s*!=\s*9")
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _NEEDLE,
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "d"}},
            "required": ["a"],
        },
    },
}


@dataclass(frozen=True)
class Caps:
    """``shows_tools``: tools reach the prompt. ``takes_calls``: earlier calls and results do.
    ``text_arguments``: calls want JSON text. ``null_content``: a call must have no content."""

    shows_tools: bool = False
    takes_calls: bool = False
    text_arguments: bool = False
    null_content: bool = False
    wants_parts: bool = False
    keeps_developer: bool = False
    short_ids: bool = False


@lru_cache(maxsize=64)
def find_caps(source: str) -> Caps:
    """Try ``source``; at most nine renders, once a template."""
    short_ids = _NINE.search(source) is not None
    wants_parts = _wants_parts(source)
    calls = _call_form(source) if "tool" in source else None
    return Caps(
        shows_tools="tools" in source and _NEEDLE in _try(source, [_user("hi")], [_TOOL]),
        takes_calls=calls is not None,
        text_arguments=calls is not None and calls[0],
        null_content=calls is not None and calls[1],
        wants_parts=wants_parts,
        keeps_developer="'developer'" in source or '"developer"' in source,
        short_ids=short_ids,
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _try(source: str, messages: list[Message], tools: list[Any] | None = None) -> str:
    """The prompt, empty when the template fails."""
    names = templates.variables(_MODEL, messages, tools=tools, add_generation_prompt=True, extra={})
    try:
        return templates.render(source, names)
    except InvalidRequestError:
        return ""


def _wants_parts(source: str) -> bool:
    if _NEEDLE in _try(source, [_user(_NEEDLE)]):
        return False
    return _NEEDLE in _try(source, shapes.as_parts([_user(_NEEDLE)]))


def _call_form(source: str) -> tuple[bool, bool] | None:
    """(arguments as text, no content beside a call) as this template takes it."""
    for text_arguments in (False, True):
        for null_content in (False, True):
            prompt = _try(source, _called(text_arguments, None if null_content else ""), [_TOOL])
            if (
                re.search(r"arg_needle\W", prompt)
                and "value_needle" in prompt
                and '\\"' not in prompt
            ):
                return text_arguments, null_content
    return None


def _called(text_arguments: bool, content: str | None) -> list[Message]:
    call = {
        "id": "abcdef123",
        "type": "function",
        "function": {"name": "other", "arguments": {"arg_needle": "value_needle"}},
    }
    messages: list[Message] = [
        _user("hi"),
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "result", "tool_call_id": "abcdef123", "name": "other"},
    ]
    return shapes.with_text_arguments(messages) if text_arguments else messages


def fit(messages: list[Message], caps: Caps) -> list[Message]:
    """``messages`` in the forms this template takes."""
    out = shapes.with_roles(messages, keeps_developer=caps.keeps_developer)
    uses_tools = any(m.get("tool_calls") or m["role"] == "tool" for m in out)
    if uses_tools and not caps.takes_calls:
        out = shapes.as_plain_text(out)
    if caps.text_arguments:
        out = shapes.with_text_arguments(out)
    if caps.short_ids:
        out = shapes.with_short_ids(out)
    for message in out:
        if not message["content"] and message["role"] == "assistant":
            message["content"] = None if caps.null_content and message.get("tool_calls") else ""
    return shapes.as_parts(out) if caps.wants_parts else out
