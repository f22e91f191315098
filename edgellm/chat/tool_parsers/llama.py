"""Llama 3.x: the whole answer is a call, with or without ``<|python_tag|>`` before it.

{"name": "get_weather", "parameters": {"city": "Paris"}}
<|python_tag|>brave_search.call(query="weather in Paris")
"""

from __future__ import annotations

import json

from edgellm.chat.tool_parsers import pythonic
from edgellm.chat.tool_parsers.family import Family, Tools, choice, object_rules, object_tails
from edgellm.chat.tool_parsers.stream import Steps, Stream, json_calls

TAG = "<|python_tag|>"
HEAD = '{"name": "'
CODE_TOOLS = ("code_interpreter", "python", "ipython")


def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    """Behind the tag: call objects, ``tool.call(...)``, or Python code for a code tool."""
    yield from s.skip_space()
    if s.text.startswith(("{", "[")) and (yield from json_calls(s)):
        return True
    parts: list[str] = []
    yield from s.until((TAG,), parts.append)
    text = "".join(parts)
    known = [tool.name for tool in tools]
    call = pythonic.parse_call(text.strip(), known)
    if call is not None and call[0].removesuffix(".call") in known:
        return _whole(s, call[0].removesuffix(".call"), call[1])
    code = next((name for name in CODE_TOOLS if name in known), None)
    if code is None:
        s.text = text + s.text
        return False
    return _whole(s, code, {"code": text.strip()})


def _whole(s: Stream, name: str, arguments: dict[str, object]) -> bool:
    s.start_call(name)
    s.arguments(json.dumps(arguments, ensure_ascii=False))
    s.end_call()
    return True


def read_bare(s: Stream, tools: Tools) -> Steps[bool]:
    """An answer that begins as a call of a known tool; several are parted by ``;``."""
    names = [tool.name for tool in tools]
    if not (yield from json_calls(s, names=names)):
        return False
    while True:
        yield from s.skip_space()
        yield from s.starts(";", ",")
        if not (yield from json_calls(s, names=names)):
            return True


def rules(tools: Tools, parallel: bool) -> str:
    more = f'("; " {choice(tools)})*' if parallel else ""
    return f"calls: {choice(tools)} {more}\n{object_rules(tools, arguments='parameters')}"


def rules_behind_name(tools: Tools, parallel: bool) -> str:
    """What follows :data:`HEAD`, with which an answer that is a call begins."""
    tails = object_tails(tools, HEAD, arguments="parameters")
    calls = rules(tools, parallel).replace("calls: ", "further: ", 1)
    more = '("; " further)?' if parallel else ""
    return f"calls: {choice(tools, 'tail')} {more}\n{tails}\n{calls if parallel else ''}"


FAMILY = Family(
    name="llama",
    begins=(TAG,),
    read=read,
    rules=rules,
    at_start=("{",),
    read_at_start=read_bare,
    needs_tag=False,
    trigger=HEAD,
    trigger_rules=rules_behind_name,
)
