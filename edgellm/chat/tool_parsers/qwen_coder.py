"""Qwen3-Coder, Qwen 3.5, Nemotron 3: arguments between tags, text unquoted.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from edgellm.chat.tool_parsers.family import (
    ANY_TEXT,
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
FUNCTION = "<function="
PARAMETER = "<parameter="
ENDS = ("\n</parameter>", "</parameter>")


def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    """Take one function behind ``<function=``."""
    name, end = yield from s.collect(">", "\n")
    name = name.strip().strip('"')
    if end is None or not name or len(name) > MAX_NAME:
        s.text = name + (end or "") + s.text
        return False
    s.start_call(name)
    out = Arguments(s)
    while (yield from _parameter(s, out, name, tools)):
        pass
    yield from s.skip_space()
    if s.ended and not s.text:
        return True  # cut by the token limit: what is open stays open
    out.close()
    yield from _skip_ends(s)
    return True


def _parameter(s: Stream, out: Arguments, function: str, tools: Tools) -> Steps[bool]:
    yield from s.skip_space()
    if (yield from s.starts(PARAMETER)) is None:
        return False
    key, _ = yield from s.collect(">")
    yield from s.starts("\n")
    schema = parameter(tools, function, key)
    return (yield from stream_argument(s, out, key, schema, ENDS)) is not None


def _skip_ends(s: Stream) -> Steps[None]:
    for end in ("</function>", "</tool_call>"):
        yield from s.skip_space()
        yield from s.starts(end)


def _argument(tool: Tool, i: int, k: int, key: str) -> str:
    schema = tool.properties[key]
    head = literal(f"<parameter={key}>\n")
    end = literal("</parameter>")
    if is_text(schema) and "enum" not in schema:
        return f'arg_{i}_{k}: text_{i}_{k} "\\n"\ntext_{i}_{k}[lazy]: {head} {ANY_TEXT} {end}'
    value = json_schema(schema)
    if is_text(schema):
        value = "(" + " | ".join(literal(str(v)) for v in schema["enum"]) + ")"
    return f'arg_{i}_{k}: {head} {value} "\\n" {end} "\\n"'


def function_rules(tools: Tools) -> str:
    """``call_i``: ``<function=...>`` with the arguments in the schema's order."""
    out = []
    for i, tool in enumerate(tools):
        names = [
            f"arg_{i}_{k}" + ("" if key in tool.required else "?")
            for k, key in enumerate(tool.properties)
        ]
        out.append(
            f"call_{i}: {literal(f'<function={tool.name}>' + chr(10))} {' '.join(names)} "
            f"{literal('</function>' + chr(10))}"
        )
        out += [_argument(tool, i, k, key) for k, key in enumerate(tool.properties)]
    return "\n".join(out)


def rules(tools: Tools, parallel: bool) -> str:
    one = f'"\\n" {choice(tools)} {control("</tool_call>")}'
    more = f'("\\n" {control(BEGIN)} {one})*' if parallel else ""
    return f"calls: {one} {more}\n{function_rules(tools)}"
