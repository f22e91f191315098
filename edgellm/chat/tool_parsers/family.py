"""What a model family is to the chat code: how its calls begin, are read, and are enforced."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from edgellm.chat.tool_parsers.stream import Steps, Stream, loads, value_end
from edgellm.request import control

# What a model may write instead of a call's text where a text argument ends.
ANY_TEXT: Final = "/(?s:.*)/"


@dataclass(frozen=True)
class Tool:
    """A function the model may call; ``parameters`` is its relaxed JSON Schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> Sequence[str]:
        found = self.parameters.get("required")
        return found if isinstance(found, list) else []


Tools = Sequence[Tool]


@dataclass(frozen=True)
class Family:
    """A way of writing tool calls.

    ``begins``: the texts a call (or list of calls) begins with; ``read`` takes what follows one
    and returns False, nothing taken, when it was no call. ``rules`` gives LARK rules that define
    ``calls``: what follows ``begins[0]``, one call, or several when ``parallel``.
    """

    name: str
    begins: tuple[str, ...]
    read: Callable[[Stream, str, Tools], Steps[bool]]
    rules: Callable[[Tools, bool], str]
    at_start: tuple[str, ...] = ()
    """Calls that begin without a tag, when the answer begins so (``{``)."""
    read_at_start: Callable[[Stream, Tools], Steps[bool]] | None = None
    needs_tag: bool = True
    """False when a call is usually written without ``begins[0]``."""
    trigger: str | None = None
    """Where the grammar wakes under ``auto`` when it is not ``begins[0]``."""
    trigger_rules: Callable[[Tools, bool], str] | None = None
    """Like ``rules``, but ``calls`` is what follows ``trigger`` at the start of an answer."""
    lead: str | None = None
    """LARK for what a call begins with under ``required`` when it is not ``begins[0]``."""
    parse: Callable[[Stream], Steps[None]] | None = None
    """Reads the whole answer, thinking included, in place of the common loop."""

    @property
    def wakes_at(self) -> str:
        return self.begins[0] if self.trigger is None else self.trigger

    @property
    def leads_with(self) -> str:
        if self.lead is not None:
            return self.lead
        return control(self.begins[0]) if self.needs_tag else ""


def literal(text: str) -> str:
    """A LARK string."""
    return json.dumps(text, ensure_ascii=False)


# One space behind a comma or colon and nothing else, as templates show calls to the model
# (Python's json.dumps): nowhere to wander, and more of a call is certain.
_COMPACT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": True,
}


def json_schema(schema: Any) -> str:
    """LARK for an argument, or all of them, as JSON of this (relaxed) schema."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _COMPACT}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def choice(tools: Tools, rule: str = "call") -> str:
    """``(call_0 | call_1 | ...)``."""
    return "(" + " | ".join(f"{rule}_{i}" for i in range(len(tools))) + ")"


def object_rules(tools: Tools, *, name: str = "name", arguments: str = "arguments") -> str:
    """``call_i``: each tool's call as one JSON object."""
    rules = []
    for i, tool in enumerate(tools):
        head = f'{{"{name}": {json.dumps(tool.name)}, "{arguments}": '
        rules.append(f"call_{i}: {literal(head)} {json_schema(tool.parameters)} {literal('}')}")
    return "\n".join(rules)


def object_tails(tools: Tools, head: str, *, arguments: str = "arguments") -> str:
    """``tail_i``: each tool's call without ``head``, which begins them all."""
    rules = []
    for i, tool in enumerate(tools):
        text = f'{{"name": {json.dumps(tool.name)}, "{arguments}": '.removeprefix(head)
        rules.append(f"tail_{i}: {literal(text)} {json_schema(tool.parameters)} {literal('}')}")
    return "\n".join(rules)


def list_rules(
    tools: Tools, parallel: bool, *, end: str = "", arguments: str = "arguments", name: str = "name"
) -> str:
    """``calls``: a JSON list of call objects, then ``end``."""
    more = f'(", " {choice(tools)})*' if parallel else ""
    tail = control(end) if end else ""
    return (
        f'calls: "[" {choice(tools)} {more} "]" {tail}\n'
        f"{object_rules(tools, name=name, arguments=arguments)}"
    )


def is_text(schema: Any) -> bool:
    """Whether an argument of this schema is text, which the XML-like formats do not quote."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind is None and isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    return kind == "string"


def may_be_text(schema: Any) -> bool:
    """Whether text is among what an argument of this schema may be; no schema allows it."""
    if not isinstance(schema, dict) or not schema:
        return True
    kind = schema.get("type")
    if isinstance(kind, list):
        return "string" in kind
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(may_be_text(option) for option in options)
    return kind == "string" or (kind is None and not schema.get("$ref"))


def parameter(tools: Tools, function: str, key: str) -> Any:
    """The schema of one argument; {} when nobody knows it."""
    for tool in tools:
        if tool.name == function:
            return tool.properties.get(key, {})
    return {}


def as_json(text: str, schema: Any) -> str:
    """An unquoted argument as JSON: text where the schema says so or nothing else fits."""
    if not is_text(schema):
        value = loads(text.strip())
        if value is not None and not (isinstance(value, str) and not may_be_text(schema)):
            return text.strip()
        if text.strip() == "null":
            return "null"
        if text.strip() in ("True", "False", "None"):
            return {"True": "true", "False": "false", "None": "null"}[text.strip()]
    return json.dumps(text, ensure_ascii=False)


class Arguments:
    """Writes ``{"key": value, ...}`` piece by piece into the current call."""

    def __init__(self, s: Stream) -> None:
        self.s = s
        self.lead = "{"

    def key(self, key: str) -> None:
        self.s.arguments(f"{self.lead}{json.dumps(key, ensure_ascii=False)}: ")
        self.lead = ", "

    def text(self, fragment: str) -> None:
        """A piece of an open string."""
        self.s.arguments(json.dumps(fragment, ensure_ascii=False)[1:-1])

    def close(self) -> None:
        self.s.arguments("{}" if self.lead == "{" else "}")
        self.s.end_call()


def stream_argument(
    s: Stream, out: Arguments, key: str, schema: Any, ends: Sequence[str]
) -> Steps[str | None]:
    """Write argument ``key``, whose unquoted text runs to one of ``ends``; returns that end."""
    out.key(key)
    if is_text(schema):
        s.arguments('"')
        tag = yield from s.until(ends, out.text)
        if tag is not None:
            s.arguments('"')
        return tag
    if not may_be_text(schema) and (yield from _json_argument(s)):
        _, tag = yield from s.collect(*ends)
        return tag
    text, tag = yield from s.collect(*ends)
    s.arguments(as_json(text, schema))
    return tag


def _json_argument(s: Stream) -> Steps[bool]:
    """Write the JSON object, list or string that comes; its strings may hold the end tag."""
    space = yield from s.skip_space()
    if s.text[:1] in ("{", "[", '"'):
        end = yield from value_end(s, 0)
        if end > 0:
            s.arguments(s.take(end))
            return True
    s.text = space + s.text
    return False
