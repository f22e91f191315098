"""Mistral: a list of objects, or since version 11 a name and its arguments.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

from edgellm.chat.tool_parsers.family import (
    Family,
    Tools,
    choice,
    json_schema,
    list_rules,
    literal,
)
from edgellm.chat.tool_parsers.stream import MAX_NAME, Steps, Stream, json_calls, stream_value
from edgellm.request import control

BEGIN = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    before = yield from s.skip_space()
    if s.text.startswith(("[", "{")):
        done = yield from json_calls(s)
    else:
        done = yield from _named(s)
    if not done:
        s.text = before + s.text
    return done


def _named(s: Stream) -> Steps[bool]:
    name, end = yield from s.collect(CALL_ID, ARGS, "{", "\n")
    taken = name + (end or "")
    if end == CALL_ID:
        call_id, end = yield from s.collect(ARGS, "{")
        taken += call_id + (end or "")
    if end not in (ARGS, "{") or not name.strip() or len(name) > MAX_NAME:
        s.text = taken + s.text
        return False
    if end == "{":  # some builds of the model leave [ARGS] out
        s.text = "{" + s.text
    s.start_call(name.strip())
    yield from s.skip_space()
    if (yield from stream_value(s, s.arguments)):
        s.end_call()
    return True


def list_format(tools: Tools, parallel: bool) -> str:
    return list_rules(tools, parallel)


def named_format(tools: Tools, parallel: bool) -> str:
    more = f"({control(BEGIN)} {choice(tools)})*" if parallel else ""
    out = [f"calls: {choice(tools)} {more}"]
    for i, tool in enumerate(tools):
        out.append(f"call_{i}: {literal(tool.name)} {control(ARGS)} {json_schema(tool.parameters)}")
    return "\n".join(out)


LIST = Family(name="mistral", begins=(BEGIN,), read=read, rules=list_format)
NAMED = Family(name="mistral-args", begins=(BEGIN,), read=read, rules=named_format)
