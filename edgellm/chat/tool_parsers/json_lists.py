"""Families that write a JSON list of calls behind one tag.

Granite 3, Phi-4-mini:  <|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>
Command R7B, Command A: <|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>
Nemotron Nano v2:       <TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>
"""

from __future__ import annotations

from edgellm.chat.tool_parsers.family import Family, Tools, list_rules
from edgellm.chat.tool_parsers.stream import Steps, Stream, json_calls


def _family(
    name: str, begin: str, end: str, *, call: str = "name", args: str = "arguments"
) -> Family:
    def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
        return (yield from json_calls(s, end))

    def rules(tools: Tools, parallel: bool) -> str:
        return list_rules(tools, parallel, end=end, name=call, arguments=args)

    return Family(name=name, begins=(begin,), read=read, rules=rules)


GRANITE = _family("granite", "<|tool_call|>", "")
PHI = _family("phi", "<|tool_call|>", "<|/tool_call|>")
COMMAND = _family(
    "command", "<|START_ACTION|>", "<|END_ACTION|>", call="tool_name", args="parameters"
)
NEMOTRON = _family("nemotron", "<TOOLCALL>", "</TOOLCALL>")
