"""GLM 4.5 and later: a name, then keys and values between tags.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from __future__ import annotations

from edgellm.chat.tool_parsers.family import (
    Arguments,
    Tool,
    Tools,
    choice,
    is_text,
    json_schema,
    literal,
    parameter,
    stream_argument,
)
from edgellm.chat.tool_parsers.stream import MAX_NAME, Steps, Stream
from edgellm.request import control

BEGIN = "<tool_call>"
KEY = "<arg_key>"
END = "</tool_call>"
VALUE_END = "</arg_value>"


def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    name, end = yield from s.collect("\n", KEY, END)
    text = name + (end or "")
    name = name.strip()
    if end is None or not name or len(name) > MAX_NAME or not name.replace("-", "_").isidentifier():
        s.text = text + s.text
        return False
    s.start_call(name)
    out = Arguments(s)
    while end is not None and end != END:
        if end != KEY:
            yield from s.skip_space()
            end = yield from s.starts(KEY, END)
        if end == KEY:
            key, _ = yield from s.collect("</arg_key>")
            yield from s.skip_space()
            yield from s.starts("<arg_value>")
            schema = parameter(tools, name, key.strip())
            end = yield from stream_argument(s, out, key.strip(), schema, (VALUE_END,))
            if end is None:
                return True
    out.close()
    return True


def _argument(tool: Tool, i: int, k: int, key: str) -> str:
    schema = tool.properties[key]
    head = " ".join(
        (control(KEY), literal(key), control("</arg_key>"), '"\\n"', control("<arg_value>"))
    )
    tail = f'{control("</arg_value>")} "\\n"'
    if not is_text(schema):
        return f"arg_{i}_{k}: {head} {json_schema(schema)} {tail}"
    if "enum" in schema:
        options = " | ".join(literal(str(v)) for v in schema["enum"])
        return f"arg_{i}_{k}: {head} ({options}) {tail}"
    return f"arg_{i}_{k}: {head} text_{i}_{k} {tail}\ntext_{i}_{k}: /[^<]*/"


def rules(tools: Tools, parallel: bool) -> str:
    one = f"{choice(tools)} {control(END)}"
    out = [f"calls: {one} " + (f'("\\n" {control(BEGIN)} {one})*' if parallel else "")]
    for i, tool in enumerate(tools):
        names = [
            f"arg_{i}_{k}" + ("" if key in tool.required else "?")
            for k, key in enumerate(tool.properties)
        ]
        out.append(f"call_{i}: {literal(tool.name + chr(10))} {' '.join(names)}")
        out += [_argument(tool, i, k, key) for k, key in enumerate(tool.properties)]
    return "\n".join(out)
