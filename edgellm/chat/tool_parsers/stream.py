"""Reading text that comes in pieces: the primitives every family's parser is written with.

A parser is a generator that yields whenever it needs more text. It looks at ``Stream.text`` (what
came and was not taken yet), takes from its front, and makes deltas. Because it decides only on
text it has seen whole, the deltas add up to the same answer however the text was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar
from uuid import uuid4

from edgellm.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallStart,
)

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]

NAME_KEYS: Final = ("name", "tool_name", "function_name")
ARGS_KEYS: Final = ("arguments", "parameters", "args", "input", "params")
# Beside these, an object written without a tag is an answer in JSON and no call.
KNOWN_KEYS: Final = (*NAME_KEYS, *ARGS_KEYS, "function", "type", "id", "tool_call_id")
MAX_NAME: Final = 256
_STRUCTURE: Final = re.compile(r'["{}\[\]<]')
_STRING_END: Final = re.compile(r'["\\]')
_SCALAR_END: Final = re.compile(r"[,}\]\s<]")


def new_id() -> str:
    return f"call_{uuid4().hex[:24]}"


def encodable(text: str) -> str:
    """``text`` with each lone surrogate (an escape a model wrote) as a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class Trimmed:
    """Gives text on without the white space at its two ends."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.spaces = ""
        self.has_text = False

    def feed(self, text: str) -> None:
        if not self.has_text:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self.sink(self.spaces + body)
            self.spaces = ""
            self.has_text = True
        self.spaces += text[len(body) :]


class Stream:
    """Text not taken yet, and the deltas made so far. ``is_continued``: the answer began in the
    prompt, so that white space at its start belongs to it."""

    def __init__(self, *, is_continued: bool = False) -> None:
        self.text = ""
        self.ended = False
        self.deltas: list[Delta] = []
        self.n_calls = 0
        self.in_call = False
        self.in_reasoning = False
        self._content = Trimmed(lambda text: self.deltas.append(ContentDelta(text)))
        self._content.has_text = is_continued

    # Making deltas

    def content(self, text: str) -> None:
        """Text of the answer. White space waits: before a call or at the start it is dropped."""
        self._content.feed(text)

    @property
    def has_content(self) -> bool:
        return self._content.has_text

    def flush(self) -> None:
        """The answer is over: white space at its end counts unless calls came."""
        if self._content.has_text and self._content.spaces and not self.n_calls:
            self.deltas.append(ContentDelta(self._content.spaces))
        self._content.spaces = ""

    def reasoning(self) -> Sink:
        """Where the text of one stretch of thinking goes."""
        return Trimmed(lambda text: self.deltas.append(ReasoningDelta(text))).feed

    def start_call(self, name: str) -> None:
        self._content.spaces = ""
        self.deltas.append(ToolCallStart(self.n_calls, new_id(), encodable(name)))
        self.n_calls += 1
        self.in_call = True

    def arguments(self, fragment: str) -> None:
        if fragment:
            self.deltas.append(ToolArgsDelta(self.n_calls - 1, encodable(fragment)))

    def end_call(self) -> None:
        self.in_call = False

    # Taking text

    def take(self, n: int) -> str:
        taken, self.text = self.text[:n], self.text[n:]
        return taken

    def need(self, n: int) -> Steps[bool]:
        """Wait for ``n`` characters; False when the text ends before."""
        while len(self.text) < n:
            if self.ended:
                return False
            yield
        return True

    def skip_space(self) -> Steps[str]:
        """Take white space and return it."""
        taken = ""
        while True:
            rest = self.text.lstrip()
            taken += self.take(len(self.text) - len(rest))
            if rest or self.ended:
                return taken
            yield

    def starts(self, *options: str) -> Steps[str | None]:
        """Take the longest of ``options`` that the text starts with."""
        while True:
            may_come = any(len(o) > len(self.text) and o.startswith(self.text) for o in options)
            if self.ended or not may_come:
                break
            yield
        found = max((o for o in options if self.text.startswith(o)), key=len, default=None)
        if found is not None:
            self.take(len(found))
        return found

    def until(self, tags: Sequence[str], sink: Sink) -> Steps[str | None]:
        """Give the text before the first of ``tags`` to ``sink``, take the tag and return it;
        None when the text ended without one."""
        pattern = re.compile("|".join(re.escape(t) for t in sorted(tags, key=len, reverse=True)))
        while True:
            found = pattern.search(self.text)
            if found:
                sink(self.take(found.start()))
                return self.take(len(found[0]))
            sink(self.take(len(self.text) - held(self.text, tags)))
            if self.ended:
                sink(self.take(len(self.text)))
                return None
            yield

    def collect(self, *tags: str) -> Steps[tuple[str, str | None]]:
        """The text before the first of ``tags``, and that tag; both are taken."""
        parts: list[str] = []
        tag = yield from self.until(tags, parts.append)
        return "".join(parts), tag


def held(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a tag."""
    longest = max(map(len, tags), default=1) - 1
    tail = text[-longest:] if longest else ""
    for i, char in enumerate(tail):
        for tag in tags:
            if tag[0] == char and tag.startswith(tail[i:]):
                return len(tail) - i
    return 0


# JSON, looked at without taking it


def space_end(s: Stream, i: int) -> Steps[int]:
    while True:
        while i < len(s.text) and s.text[i].isspace():
            i += 1
        if i < len(s.text) or s.ended:
            return i
        yield


def string_end(s: Stream, i: int) -> Steps[int]:
    """The index behind the JSON string that begins at ``i``; -1 when it never ends."""
    i += 1
    while True:
        found = _STRING_END.search(s.text, i)
        if found is None:
            i = len(s.text)
        elif found[0] == '"':
            return found.end()
        elif found.end() < len(s.text):
            i = found.end() + 1
            continue
        else:
            i = found.start()
        if s.ended:
            return -1
        yield


def value_end(s: Stream, i: int) -> Steps[int]:
    """The index behind the JSON value that begins at ``i``; -1 when it is none."""
    if not (yield from s.need(i + 1)):
        return -1
    if s.text[i] == '"':
        return (yield from string_end(s, i))
    if s.text[i] not in "{[":
        return (yield from _scalar_end(s, i))
    return (yield from _nested_end(s, i))


def _nested_end(s: Stream, i: int) -> Steps[int]:
    depth = 0
    while True:
        found = _STRUCTURE.search(s.text, i)
        if found is None:
            if s.ended:
                return -1
            i = len(s.text)
            yield
        elif found[0] == '"':
            i = yield from string_end(s, found.start())
            if i < 0:
                return -1
        elif found[0] == "<":  # never JSON: the closing tag of a call that was cut
            return -1
        else:
            depth += 1 if found[0] in "{[" else -1
            i = found.end()
            if depth == 0:
                return i


def _scalar_end(s: Stream, i: int) -> Steps[int]:
    while True:
        found = _SCALAR_END.search(s.text, i)
        if found:
            return found.start()
        if s.ended:
            return len(s.text)
        yield


def stream_value(s: Stream, sink: Sink) -> Steps[bool]:
    """Take the JSON value the text starts with, giving its text to ``sink`` as it comes. A value
    written as a JSON string (arguments in quotes) is given unquoted, at its end."""
    if not (yield from s.need(1)):
        return False
    if s.text[0] == '"':
        return (yield from _stream_quoted(s, sink))
    if s.text[0] not in "{[":
        end = yield from _scalar_end(s, 0)
        sink(plain_arguments(s.take(end)))
        return True
    return (yield from _stream_nested(s, sink))


def _stream_quoted(s: Stream, sink: Sink) -> Steps[bool]:
    end = yield from string_end(s, 0)
    quoted = s.take(end if end > 0 else len(s.text))
    text = loads(quoted)
    sink(text if isinstance(text, str) and text.strip() else "{}")
    return end > 0


def _stream_nested(s: Stream, sink: Sink) -> Steps[bool]:
    scan = _Nesting()
    while True:
        end = scan.feed(s.text)
        sink(s.take(end if end >= 0 else len(s.text)))
        if end >= 0 or s.ended:
            return scan.is_complete
        yield


class _Nesting:
    """Finds where a JSON object or list ends, over pieces of it."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.escaped = False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """The index in ``text`` behind the end, or of a ``<`` that cuts the value; else -1."""
        for i, char in enumerate(text):
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.in_string = char != '"'
                self.escaped = char == "\\"
            elif char == '"':
                self.in_string = True
            elif char == "<":
                return i
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.is_complete = True
                    return i + 1
        return -1


def loads(text: str) -> Any:
    """The JSON value of ``text``, None when it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def call_object(s: Stream, names: Sequence[str] = ()) -> Steps[bool]:
    """Take ``{"name": ..., "arguments": ...}`` and make a call of it; keys in any order, wrapped
    as ``{"function": {...}}`` too. False, and nothing taken, when it is no call. With ``names``,
    only those are calls."""
    return (yield from _CallObject(s, names).read())


class _CallObject:
    """One call written as a JSON object; indexes are into the stream's text."""

    def __init__(self, s: Stream, names: Sequence[str]) -> None:
        self.s = s
        self.names = names
        self.name = ""
        self.raw = ""
        self.wraps = 0
        self.streamed = False

    def read(self) -> Steps[bool]:
        i = yield from space_end(self.s, 0)
        if (yield from _char(self.s, i)) != "{":
            return False
        i += 1
        while i >= 0:
            i = yield from space_end(self.s, i)
            char = yield from _char(self.s, i)
            if char == '"':
                i = yield from self._member(i)
            elif char == ",":
                i += 1
            elif char == "}" and self.wraps:
                self.wraps -= 1
                i += 1
            elif char == "}":
                return self._close(i + 1)
            else:
                break
        return self.streamed

    def _close(self, end: int) -> bool:
        if not self.name:
            return False
        self.s.take(end)
        if not self.streamed:
            self.s.start_call(self.name)
            self.s.arguments(plain_arguments(self.raw))
        self.s.end_call()
        return True

    def _member(self, i: int) -> Steps[int]:
        """Read ``"key": value`` at ``i``; the index behind it, -1 when it is none."""
        end = yield from string_end(self.s, i)
        if end < 0:
            return -1
        key = loads(self.s.text[i:end])
        i = yield from space_end(self.s, end)
        if (yield from _char(self.s, i)) != ":":
            return -1
        i = yield from space_end(self.s, i + 1)
        char = yield from _char(self.s, i)
        if key == "function" and char == "{" and not self.streamed:
            self.wraps += 1
            return i + 1
        if key in ARGS_KEYS and self.name and not self.streamed:
            return (yield from self._stream(i))
        return (yield from self._keep(key, i)) if char else -1

    def _stream(self, i: int) -> Steps[int]:
        self.s.take(i)
        self.s.start_call(self.name)
        self.streamed = True
        return 0 if (yield from stream_value(self.s, self.s.arguments)) else -1

    def _keep(self, key: Any, i: int) -> Steps[int]:
        if self.names and key not in KNOWN_KEYS:
            return -1
        end = yield from value_end(self.s, i)
        if end < 0:
            return -1
        value = self.s.text[i:end]
        if key in (*NAME_KEYS, "function") and not self.name:
            text = loads(value)
            self.name = text if isinstance(text, str) and len(text) <= MAX_NAME else ""
            if self.names and self.name not in self.names:
                return -1
        elif key in ARGS_KEYS and not self.raw:
            self.raw = value
        return end


def _char(s: Stream, i: int) -> Steps[str]:
    """The character at ``i``, empty when the text ends before."""
    return s.text[i] if (yield from s.need(i + 1)) else ""


def plain_arguments(raw: str) -> str:
    """Arguments as JSON text: those in quotes unquoted, none at all as ``{}``."""
    raw = raw.strip()
    if raw.startswith('"'):
        text = loads(raw)
        raw = text.strip() if isinstance(text, str) else ""
    return raw if raw and raw != "null" else "{}"


def json_calls(s: Stream, end: str = "", names: Sequence[str] = ()) -> Steps[bool]:
    """Take one call object or a list of them, and ``end`` behind it when it is there. False, and
    nothing taken, when there is no call."""
    before = yield from s.skip_space()
    before += (yield from s.starts("[")) or ""
    n_before = s.n_calls
    while (yield from call_object(s, names)):
        yield from s.skip_space()
        if "[" not in before or (yield from s.starts(",", ";")) is None:
            break
    if s.n_calls == n_before:
        s.text = before + s.text
        return False
    yield from s.skip_space()
    if "[" in before and (yield from s.starts("]")) is not None:
        yield from s.skip_space()
    if end:
        yield from s.starts(end)
    return True
