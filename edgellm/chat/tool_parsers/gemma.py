"""Gemma 4 and FunctionGemma: arguments without quotes around keys, text between its own marks.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>
<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from edgellm.chat.tool_parsers.family import (
    Family,
    Tool,
    Tools,
    choice,
    is_text,
    json_schema,
    literal,
)
from edgellm.chat.tool_parsers.stream import MAX_NAME, Steps, Stream, loads
from edgellm.request import control

MAX_DEPTH: Final = 64
_JSON: Final = json.JSONDecoder(strict=False)
_KEY: Final = re.compile(r'\s*(?:"([^"]*)"|([^\s:{}\[\],"]+))\s*:')
_SCALAR: Final = re.compile(r"[^,{}\[\]]*")


class _Gemma:
    def __init__(self, begin: str, end: str, quote: str) -> None:
        self.begin = begin
        self.end = end
        self.quote = quote

    def read(self, s: Stream, tag: str, tools: Tools) -> Steps[bool]:
        text, end = yield from s.collect(self.end)
        head, brace, _ = text.partition("{")
        name = head.strip().removeprefix("call:").strip()
        arguments = self._parse(text[len(head) :]) if brace else {}
        if not name or len(name) > MAX_NAME or arguments is None or end is None:
            s.text = text + (end or "") + s.text
            return False
        s.start_call(name)
        s.arguments(json.dumps(arguments, ensure_ascii=False))
        s.end_call()
        return True

    def _parse(self, text: str) -> dict[str, Any] | None:
        try:
            value, _ = self._value(text, 0, 0)
        except (ValueError, IndexError):
            return None
        return value if isinstance(value, dict) else None

    def _value(self, text: str, i: int, depth: int) -> tuple[Any, int]:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        if text.startswith(self.quote, i):
            start = i + len(self.quote)
            end = text.index(self.quote, start)
            return text[start:end], end + len(self.quote)
        if text[i] == '"':  # JSON's own, inside lists and objects
            return _JSON.raw_decode(text, i)
        if text[i] == "{":
            return self._items(text, i + 1, depth, "}")
        if text[i] == "[":
            return self._items(text, i + 1, depth, "]")
        scalar = _SCALAR.match(text, i)
        raw = scalar[0].strip() if scalar else ""
        value = loads(raw)
        return (raw if value is None and raw != "null" else value), i + len(
            scalar[0] if scalar else ""
        )

    def _items(self, text: str, i: int, depth: int, close: str) -> tuple[Any, int]:
        pairs: dict[str, Any] = {}
        items: list[Any] = []
        while True:
            while text[i].isspace() or text[i] == ",":
                i += 1
            if text[i] == close:
                return (pairs if close == "}" else items), i + 1
            if close == "}":
                key = _KEY.match(text, i)
                if key is None:
                    raise ValueError("no key")
                i = key.end()
                while text[i].isspace():
                    i += 1
                pairs[key[1] or key[2]], i = self._value(text, i, depth + 1)
            else:
                value, i = self._value(text, i, depth + 1)
                items.append(value)

    def rules(self, tools: Tools, parallel: bool) -> str:
        one = f"{choice(tools)} {control(self.end)}"
        out = [f"calls: {one} " + (f"({control(self.begin)} {one})*" if parallel else "")]
        for i, tool in enumerate(tools):
            out.append(f"call_{i}: {literal(f'call:{tool.name}{{')} args_{i} {literal('}')}")
            out += self._arguments(tool, i)
        return "\n".join(out)

    def _arguments(self, tool: Tool, i: int) -> list[str]:
        """Required arguments first, so that every comma has its place."""
        required = [key for key in tool.properties if key in tool.required]
        optional = [key for key in tool.properties if key not in tool.required]
        order = [*required, *optional]
        out = [f"arg_{i}_{k}: {self._argument(tool, key)}" for k, key in enumerate(order)]
        pieces = [f"arg_{i}_{k}" if k == 0 else f'"," arg_{i}_{k}' for k in range(len(required))]
        rest = range(len(required), len(order))
        if required:
            pieces += [f'("," arg_{i}_{k})?' for k in rest]
        elif optional:
            options = " | ".join(f"arg_{i}_{k}" for k in rest)
            pieces = [f'(opt_{i} ("," opt_{i})*)?']
            out.append(f"opt_{i}: {options}")
        return [*out, f"args_{i}: {' '.join(pieces) or literal('')}"]

    def _argument(self, tool: Tool, key: str) -> str:
        schema = tool.properties[key]
        quote = control(self.quote)
        if is_text(schema):
            options = [literal(str(value)) for value in schema.get("enum", ())]
            text = f"({' | '.join(options)})" if options else "/[^<]*/"
            return f"{literal(key + ':')} {quote} {text} {quote}"
        return f"{literal(key + ':')} {json_schema(schema)}"


def _family(name: str, form: _Gemma) -> Family:
    return Family(name=name, begins=(form.begin,), read=form.read, rules=form.rules)


GEMMA4 = _family("gemma4", _Gemma("<|tool_call>", "<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = _family(
    "function-gemma", _Gemma("<start_function_call>", "<end_function_call>", "<escape>")
)
