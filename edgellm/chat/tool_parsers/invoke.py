"""MiniMax M2 and DeepSeek V3.2: XML with the names in attributes.

<minimax:tool_call><invoke name="get_weather">
<parameter name="city">Paris</parameter>
</invoke></minimax:tool_call>

<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter> ...
"""

from __future__ import annotations

from edgellm.chat.tool_parsers.family import (
    ANY_TEXT,
    Arguments,
    Family,
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


class _Invoke:
    """The format with one prefix before its tags (``｜DSML｜`` or none)."""

    def __init__(self, prefix: str, begin: str, end: str, *, tells_text: bool) -> None:
        self.prefix = prefix
        self.begin = begin
        self.end = end
        self.tells_text = tells_text
        self.param_end = f"</{prefix}parameter>"
        self.call_end = f"</{prefix}invoke>"

    def read(self, s: Stream, tag: str, tools: Tools) -> Steps[bool]:
        n_before = s.n_calls
        while True:
            yield from s.skip_space()
            if (yield from s.starts(f'<{self.prefix}invoke name="')) is None:
                break
            if not (yield from self._call(s, tools)):
                break
        yield from s.starts(self.end)
        return s.n_calls > n_before

    def _call(self, s: Stream, tools: Tools) -> Steps[bool]:
        name, _ = yield from s.collect('"')
        yield from s.collect(">")
        if not name or len(name) > MAX_NAME:
            return False
        s.start_call(name)
        out = Arguments(s)
        while True:
            yield from s.skip_space()
            if (yield from s.starts(f'<{self.prefix}parameter name="')) is None:
                break
            key, _ = yield from s.collect('"')
            attributes, _ = yield from s.collect(">")
            schema = parameter(tools, name, key)
            if 'string="true"' in attributes:
                schema = {"type": "string"}
            if (yield from stream_argument(s, out, key, schema, (self.param_end,))) is None:
                return False
        if (yield from s.starts(self.call_end)) is None and s.ended:
            return False
        out.close()
        return True

    def rules(self, tools: Tools, parallel: bool) -> str:
        more = f'("\\n" {choice(tools)})*' if parallel else ""
        out = [f'calls: "\\n" {choice(tools)} {more} "\\n" {control(self.end)}']
        for i, tool in enumerate(tools):
            names = [
                f"arg_{i}_{k}" + ("" if key in tool.required else "?")
                for k, key in enumerate(tool.properties)
            ]
            head = literal(f'<{self.prefix}invoke name="{tool.name}">\n')
            out.append(f"call_{i}: {head} {' '.join(names)} {literal(self.call_end)}")
            out += [self._argument(tool, i, k, key) for k, key in enumerate(tool.properties)]
        return "\n".join(out)

    def _argument(self, tool: Tool, i: int, k: int, key: str) -> str:
        schema = tool.properties[key]
        told = f' string="{str(is_text(schema)).lower()}"' if self.tells_text else ""
        head = literal(f'<{self.prefix}parameter name="{key}"{told}>')
        end = literal(self.param_end)
        if is_text(schema) and "enum" not in schema:
            text = f"text_{i}_{k}"
            return f'arg_{i}_{k}: {text} "\\n"\n{text}[lazy]: {head} {ANY_TEXT} {end}'
        value = json_schema(schema)
        if is_text(schema):
            value = "(" + " | ".join(literal(str(v)) for v in schema["enum"]) + ")"
        return f'arg_{i}_{k}: {head} {value} {end} "\\n"'


def _family(name: str, form: _Invoke) -> Family:
    return Family(name=name, begins=(form.begin,), read=form.read, rules=form.rules)


MINIMAX = _family(
    "minimax", _Invoke("", "<minimax:tool_call>", "</minimax:tool_call>", tells_text=False)
)
DSML = _family(
    "deepseek-dsml",
    _Invoke("｜DSML｜", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", tells_text=True),
)
