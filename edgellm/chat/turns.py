"""Where the turns of a rendered prompt begin, so that a full context can lose the oldest whole.

A template is code and does not say. The prompt is rendered once more with a mark before each user
message's text; a second pair of renders shows what the template writes between the end of an
answer and a user's text. What does not come out exactly is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from edgellm.chat.messages import Message
from edgellm.errors import InvalidRequestError

_MARK: Final = "\ue010"
_PROBE: Final = "\ue011"
_TAG: Final = re.compile(r"^\s*<[^<>]*>\n?")

Render = Callable[[list[Message], bool], str]
"""Messages, and whether the assistant's turn is opened at the end -> the prompt."""


@dataclass(frozen=True)
class Turns:
    """``starts``: offsets of whole turns in the prompt; ``n_keep_chars``: what precedes them."""

    starts: tuple[int, ...] = ()
    n_keep_chars: int = 0


def find(
    prompt: str, messages: list[Message], render: Render, bos: str, *, keeps_first: bool = False
) -> Turns:
    """Turns of ``prompt``, which ``render(messages, ...)`` gave (a doubled BOS and an open end
    may have been cut). ``keeps_first``: the first turn carries the system prompt and stays."""
    has_parts = any(isinstance(message["content"], list) for message in messages)
    try:
        marked = render([_marked(message) for message in messages], True)
        header = _user_header(render, has_parts=has_parts)
    except InvalidRequestError:
        return Turns()
    while bos and marked.startswith(bos + bos):
        marked = marked[len(bos) :]
    pieces = marked.split(_MARK)
    if header is None or not "".join(pieces).startswith(prompt):
        return Turns()
    starts = []
    at = 0
    for piece in pieces[:-1]:
        at += len(piece)
        start = _header_start(prompt, at, header)
        if start is not None:
            starts.append(start)
    if keeps_first:
        del starts[:1]
    return Turns(tuple(starts), starts[0] if starts else 0)


def _marked(message: Message) -> Message:
    content = message["content"]
    if message["role"] != "user":
        return message
    if isinstance(content, str):
        return {**message, "content": _mark(content)}
    first = content[0] if content else {}
    if not isinstance(first.get("text"), str):
        return message
    return {**message, "content": [{**first, "text": _mark(first["text"])}, *content[1:]]}


def _mark(text: str) -> str:
    """The mark before the first letter: templates trim white space before it."""
    space = len(text) - len(text.lstrip())
    return text[:space] + _MARK + text[space:] if text.strip() else text


def _header_start(prompt: str, at: int, header: str) -> int | None:
    """Where ``header`` begins that ends before the user's text at ``at`` (spaces between)."""
    before = prompt[:at]
    for text in (before, before.rstrip()):
        for form in (header, header.rstrip()):
            if form and text.endswith(form):
                return len(text) - len(form)
    return None


def _user_header(render: Render, *, has_parts: bool) -> str | None:
    """What the template writes before a user's text, from the end of the answer before it."""
    content = [{"type": "text", "text": _PROBE}] if has_parts else _PROBE
    user = {"role": "user", "content": content}
    answer = {"role": "assistant", "content": content}
    parts = render([user, answer, user], False).split(_PROBE)
    closed = render([user, answer], False).split(_PROBE)
    if len(parts) != 4 or len(closed) != 3:
        return None
    between, tail = parts[2], closed[2]
    if between.startswith(tail):
        return between[len(tail) :] or None
    # Some templates end the last answer differently: then one tag ends an answer.
    return _TAG.sub("", between, count=1) or None
