"""Tools of a request: checked, offered to the model, and enforced by a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgellm.chat import schema as schemas
from edgellm.chat.reasoning import Thinking
from edgellm.chat.tool_parsers import Family, Tool
from edgellm.chat.tool_parsers.harmony import CHANNEL, CONSTRAIN, MESSAGE, analysis
from edgellm.errors import InvalidRequestError
from edgellm.request import Grammar, GrammarKind, control

MAX_TOOLS: Final = 512
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
MODES: Final = ("none", "auto", "required")

GENERIC_PROMPT: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class ToolPlan:
    """What a request says about tools: those the model sees, those it may call, and how."""

    shown: tuple[dict[str, Any], ...] = ()
    callable: tuple[Tool, ...] = ()
    mode: str = "none"
    parallel: bool = True
    warnings: tuple[str, ...] = ()


def plan_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool,
) -> ToolPlan:
    """Check ``tools`` and ``tool_choice`` as OpenAI's API defines them."""
    warnings: list[str] = []
    known = _read_tools(tools or (), warnings)
    mode, names = _read_choice(tool_choice, bool(known))
    missing = [name for name in names if name not in known]
    if missing:
        raise InvalidRequestError(
            f"tool_choice names {missing[0]!r}, which is not among the tools", param="tool_choice"
        )
    if mode == "required" and not known:
        raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
    return ToolPlan(
        shown=tuple(shown for _, shown in known.values()),
        callable=tuple(tool for name, (tool, _) in known.items() if not names or name in names),
        mode=mode if known else "none",
        parallel=parallel and len(names) != 1,
        warnings=tuple(warnings),
    )


def _read_tools(
    tools: Sequence[Mapping[str, Any]], warnings: list[str]
) -> dict[str, tuple[Tool, dict[str, Any]]]:
    if not isinstance(tools, (list, tuple)) or len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools is a list of at most {MAX_TOOLS}", param="tools")
    known: dict[str, tuple[Tool, dict[str, Any]]] = {}
    for i, tool in enumerate(tools):
        read, shown = _read_tool(tool, f"tools[{i}]", warnings)
        if read.name in known:
            raise InvalidRequestError(
                f"two tools are named {read.name!r}", param=f"tools[{i}].function.name"
            )
        known[read.name] = (read, shown)
    return known


def _read_tool(tool: Any, path: str, warnings: list[str]) -> tuple[Tool, dict[str, Any]]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise InvalidRequestError(
            f"{path}: only function tools are supported", param=f"{path}.type"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{path}.function is missing", param=f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{path}.function.name must be 1 to 256 of A-Z a-z 0-9 _ . : / -",
            param=f"{path}.function.name",
        )
    description = function.get("description") or ""
    given = function.get("parameters")
    relaxed, dropped = schemas.relax(given, f"{path}.function.parameters")
    warnings.extend(dropped)
    shown = {
        "type": "function",
        "function": {
            **function,
            "name": name,
            "description": str(description),
            "parameters": _shown(given),
        },
    }
    return Tool(name, str(description), relaxed), shown


def _shown(parameters: Any) -> dict[str, Any]:
    """Parameters as templates walk through them: an object that has properties."""
    given = dict(parameters) if isinstance(parameters, Mapping) else {}
    if not isinstance(given.get("properties", {}), Mapping):
        del given["properties"]
    return {"type": "object", "properties": {}, **given}


def described(shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools whose every property has a description, which some templates do without asking."""
    out = []
    for tool in shown:
        function = tool["function"]
        parameters = function["parameters"]
        properties = {
            name: {"description": "", **sub} if isinstance(sub, Mapping) else sub
            for name, sub in parameters["properties"].items()
        }
        filled = {**function, "parameters": {**parameters, "properties": properties}}
        out.append({**tool, "function": filled})
    return out


def _read_choice(choice: Any, has_tools: bool) -> tuple[str, tuple[str, ...]]:
    """The mode, and the only tools allowed (none named: all)."""
    if choice is None:
        return ("auto" if has_tools else "none"), ()
    if choice == "any":
        return "required", ()
    if isinstance(choice, str) and choice in MODES:
        return choice, ()
    if isinstance(choice, Mapping):
        function = choice.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return "required", (function["name"],)
        if choice.get("type") == "allowed_tools":
            return _read_allowed(choice.get("allowed_tools", choice))
        if isinstance(choice.get("name"), str):
            return "required", (choice["name"],)
    raise InvalidRequestError(
        'tool_choice must be "none", "auto", "required" or name a function', param="tool_choice"
    )


def _read_allowed(allowed: Any) -> tuple[str, tuple[str, ...]]:
    if not isinstance(allowed, Mapping) or allowed.get("mode", "auto") not in MODES:
        raise InvalidRequestError("tool_choice.mode is auto or required", param="tool_choice")
    names = []
    for tool in allowed.get("tools") or ():
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str):
            raise InvalidRequestError("an allowed tool has no name", param="tool_choice.tools")
        names.append(name)
    return allowed.get("mode", "auto"), tuple(names)


def generic_prompt(shown: Sequence[Mapping[str, Any]]) -> str:
    """What a model whose template knows no tools is told about them."""
    return GENERIC_PROMPT.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in shown))


@dataclass(frozen=True)
class Shape:
    """What surrounds an answer: thinking before it, opened by the prompt or by the model."""

    thinking: Thinking | None
    is_open: bool
    family: Family | None

    @property
    def is_harmony(self) -> bool:
        return self.family is not None and self.family.name == "harmony"

    @property
    def after(self) -> str | None:
        return self.thinking.close if self.thinking and self.is_open else None

    def document(self, answer: str, rules: str) -> Grammar:
        """A LARK grammar of an answer, with room for thinking before it."""
        if self.is_harmony:
            head, rules = "think?", f"{rules}\n{analysis()}"
        elif self.thinking and not self.is_open:
            head, rules = "think?", f"{rules}\n{self.thinking.rule()}"
        else:
            head = "/\\s*/" if self.is_open else ""
        text = f"start: {head} {answer}\n{rules}\n"
        return Grammar(kind=GrammarKind.LARK, text=text, after=self.after)


def build_grammar(
    plan: ToolPlan, shape: Shape, response: Mapping[str, Any] | None
) -> Grammar | None:
    """What the answer must match; None when any text will do."""
    if plan.mode == "none" or shape.family is None:
        return None if response is None else _response_grammar(shape, response)
    rules = shape.family.rules(plan.callable, plan.parallel)
    calls = f"{shape.family.leads_with} calls"
    if plan.mode == "required":
        return shape.document(calls, rules)
    if response is not None:
        return shape.document(f"({calls} | answer)", f"{rules}\n{_answer_rule(shape, response)}")
    at_start = shape.family.trigger_rules
    if at_start is not None:
        rules = at_start(plan.callable, plan.parallel)
    return Grammar(
        kind=GrammarKind.LARK,
        text=f"start: calls\n{rules}\n",
        trigger=shape.family.wakes_at,
        trigger_at_start=at_start is not None,
        after=shape.after,
    )


def _answer_rule(shape: Shape, response: Mapping[str, Any]) -> str:
    if shape.is_harmony:
        form = f'(" "? {control(CONSTRAIN)} "json")?'
        lead = f'{control(CHANNEL)} "final" {form} {control(MESSAGE)}'
    elif shape.thinking and shape.thinking.ignored:
        lead = f"{control(shape.thinking.ignored[0])}?"
    else:
        lead = ""
    schema = json.dumps(schemas.readable(response), ensure_ascii=False)
    return f"answer: {lead} %json {schema}"


def _response_grammar(shape: Shape, response: Mapping[str, Any]) -> Grammar:
    if not shape.is_harmony and shape.thinking is None:
        return schemas.grammar(response)
    return shape.document("answer", _answer_rule(shape, response))
