"""Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4, and models without a format of their own:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from edgellm.chat.tool_parsers import glm, qwen_coder
from edgellm.chat.tool_parsers.family import Family, Tools, choice, object_rules
from edgellm.chat.tool_parsers.stream import Steps, Stream, json_calls
from edgellm.request import control

BEGIN = "<tool_call>"
END = "</tool_call>"


def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    """What stands in the tag decides: JSON, ``<function=``, or a bare name (GLM)."""
    if tag == qwen_coder.FUNCTION:
        return (yield from qwen_coder.read(s, tag, tools))
    before = yield from s.skip_space()
    if s.text.startswith(("{", "[")):
        done = yield from json_calls(s, END)
    elif (yield from s.starts(qwen_coder.FUNCTION)) is not None:
        done = yield from qwen_coder.read(s, qwen_coder.FUNCTION, tools)
    else:
        done = yield from glm.read(s, tag, tools)
    if not done:
        s.text = before + s.text
    return done


def read_bare(s: Stream, tools: Tools) -> Steps[bool]:
    """Models often forget the tag: an answer that begins as a call of a known tool is one."""
    return (yield from json_calls(s, END, [tool.name for tool in tools]))


def rules(tools: Tools, parallel: bool) -> str:
    one = f'"\\n" {choice(tools)} "\\n" {control(END)}'
    more = f'("\\n" {control(BEGIN)} {one})*' if parallel else ""
    return f"calls: {one} {more}\n{object_rules(tools)}"


FAMILY = Family(
    name="hermes",
    begins=(BEGIN, qwen_coder.FUNCTION),
    read=read,
    rules=rules,
    at_start=("{",),
    read_at_start=read_bare,
)
