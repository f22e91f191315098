"""Kimi K2.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from edgellm.chat.tool_parsers.family import (
    Family,
    Tools,
    choice,
    json_schema,
    literal,
)
from edgellm.chat.tool_parsers.stream import MAX_NAME, Steps, Stream, stream_value
from edgellm.request import control

SECTION = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>"
ARGS = "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"


def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    n_before = s.n_calls
    inside = tag == CALL
    while True:
        if not inside:
            yield from s.skip_space()
            if (yield from s.starts(CALL)) is None:
                break
        inside = False
        head, end = yield from s.collect(ARGS, CALL_END)
        name = head.strip().removeprefix("functions.").split(":", maxsplit=1)[0]
        if end != ARGS or not name or len(name) > MAX_NAME:
            s.text = head + (end or "") + s.text
            break
        s.start_call(name)
        yield from s.skip_space()
        if (yield from stream_value(s, s.arguments)):
            s.end_call()
        yield from s.collect(CALL_END)
    yield from s.starts(SECTION_END)
    return s.n_calls > n_before


def rules(tools: Tools, parallel: bool) -> str:
    more = f"({control(CALL)} {choice(tools)})*" if parallel else ""
    out = [f"calls: {control(CALL)} {choice(tools)} {more} {control(SECTION_END)}"]
    for i, tool in enumerate(tools):
        head = f"{literal('functions.' + tool.name + ':')} /[0-9]{{1,3}}/ {control(ARGS)}"
        out.append(f"call_{i}: {head} {json_schema(tool.parameters)} {control(CALL_END)}")
    return "\n".join(out)


FAMILY = Family(name="kimi", begins=(SECTION, CALL), read=read, rules=rules)
