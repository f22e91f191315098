"""DeepSeek V3, R1 and V3.1.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1: <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>
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

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"


def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    n_before = s.n_calls
    inside = tag == CALL
    while True:
        if not inside:
            yield from s.skip_space()
            if (yield from s.starts(CALL)) is None:
                break
        inside = False
        if not (yield from _one(s)):
            break
    yield from s.skip_space()
    yield from s.starts(CALLS_END)
    return s.n_calls > n_before


def _one(s: Stream) -> Steps[bool]:
    head, end = yield from s.collect(SEP, CALL_END)
    if end != SEP:
        s.text = head + (end or "") + s.text
        return False
    name = head.strip()
    if name in ("function", ""):
        name, end = yield from s.collect("\n", "```json", "{")
        if end == "{":
            s.text = "{" + s.text
    if not name.strip() or len(name) > MAX_NAME:
        return False
    s.start_call(name.strip())
    yield from s.skip_space()
    if (yield from s.starts("```json", "```")) is not None:
        yield from s.skip_space()
    if (yield from stream_value(s, s.arguments)):
        s.end_call()
    yield from s.collect(CALL_END)
    return True


def _rules(tools: Tools, parallel: bool, head: str, tail: str) -> str:
    more = f'("\\n"? {control(CALL)} {choice(tools)})*' if parallel else ""
    out = [f"calls: {control(CALL)} {choice(tools)} {more} {control(CALLS_END)}"]
    for i, tool in enumerate(tools):
        start = head.replace("NAME", literal(tool.name))
        schema = json_schema(tool.parameters)
        out.append(f"call_{i}: {start} {schema} {tail} {control(CALL_END)}")
    return "\n".join(out)


def fenced(tools: Tools, parallel: bool) -> str:
    return _rules(tools, parallel, f'"function" {control(SEP)} NAME "\\n```json\\n"', '"\\n```"')


def plain(tools: Tools, parallel: bool) -> str:
    return _rules(tools, parallel, f"NAME {control(SEP)}", "")


V3 = Family(name="deepseek-v3", begins=(CALLS, CALL), read=read, rules=fenced)
V31 = Family(name="deepseek-v3.1", begins=(CALLS, CALL), read=read, rules=plain)
