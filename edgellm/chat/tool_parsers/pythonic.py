"""LFM2 and Llama 4: calls as Python writes them.

<|tool_call_start|>[get_weather(city="Paris", days=2)]<|tool_call_end|>
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgellm.chat.tool_parsers.family import (
    Family,
    Tool,
    Tools,
    choice,
    json_schema,
    literal,
)
from edgellm.chat.tool_parsers.stream import MAX_NAME, Steps, Stream
from edgellm.request import control

BEGIN: Final = "<|tool_call_start|>"
END: Final = "<|tool_call_end|>"
MAX_CALL_CHARS: Final = 1 << 20
# JSON's names, which models write as often as Python's.
_NAMES: Final = {"true": True, "false": False, "null": None}
# Escapes that Python knows; others (JSON's \\/) are kept as two characters, without a warning.
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES: Final = frozenset("\\'\"abfnrtv01234567xuUN\n")

Call = tuple[str, dict[str, Any]]


def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    text, end = yield from s.collect(END)
    calls = parse_calls(text.strip(), [tool.name for tool in tools])
    if not calls:
        s.text = text + (end or "") + s.text
        return False
    for name, arguments in calls:
        s.start_call(name)
        s.arguments(json.dumps(arguments, ensure_ascii=False))
        s.end_call()
    return True


def parse_call(text: str, names: Sequence[str] = ()) -> Call | None:
    """``name(key=value, ...)``, None when it is something else."""
    calls = parse_calls(text, names)
    return calls[0] if len(calls) == 1 else None


def parse_calls(text: str, names: Sequence[str] = ()) -> list[Call]:
    """One call or a list of calls; [] when it is neither. ``names`` tells tools whose names are
    no Python names (``save-note``)."""
    if len(text) > MAX_CALL_CHARS:
        return []
    aliases = {f"tool_{i}_": name for i, name in enumerate(names) if not name.isidentifier()}
    for alias, name in aliases.items():
        text = text.replace(f"{name}(", f"{alias}(")
    text = _ESCAPE.sub(lambda m: m[0] if m[1] in _ESCAPES else f"\\\\{m[1]}", text)
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        return [_call(node, aliases) for node in nodes]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []


def _call(node: ast.expr, aliases: Mapping[str, str]) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    name = ast.unparse(node.func)
    if len(name) > MAX_NAME:
        raise ValueError("not a name")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a named argument")
        value = _value(keyword.value)
        json.dumps(value)
        arguments[keyword.arg] = value
    return aliases.get(name, name), arguments


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key for key in node.keys if key is not None]
        return {str(ast.literal_eval(k)): _value(v) for k, v in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if isinstance(value, str):  # two escaped surrogates are one character in JSON
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _arguments(tool: Tool, i: int) -> str:
    """Arguments in the schema's order, those that are not required left out or not."""
    required = [key for key in tool.properties if key in tool.required]
    optional = [key for key in tool.properties if key not in tool.required]
    pieces = []
    for n, key in enumerate((*required, *optional)):
        value = f"{literal(key + '=')} {json_schema(tool.properties[key])}"
        if key in required:
            pieces.append(value if n == 0 else f'", " {value}')
        elif required:
            pieces.append(f'(", " {value})?')
    if not required and optional:
        options = " | ".join(
            f"{literal(key + '=')} {json_schema(tool.properties[key])}" for key in optional
        )
        pieces.append(f'(opt_{i} (", " opt_{i})*)?')
        return f"args_{i}: {' '.join(pieces)}\nopt_{i}: {options}"
    return f"args_{i}: {' '.join(pieces) or literal('')}"


def rules(tools: Tools, parallel: bool) -> str:
    more = f'(", " {choice(tools)})*' if parallel else ""
    out = [f'calls: "[" {choice(tools)} {more} "]" {control(END)}']
    for i, tool in enumerate(tools):
        out.append(f'call_{i}: {literal(tool.name + "(")} args_{i} ")"')
        out.append(_arguments(tool, i))
    return "\n".join(out)


FAMILY = Family(name="pythonic", begins=(BEGIN,), read=read, rules=rules)
