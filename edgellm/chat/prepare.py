"""prepare_chat: OpenAI-shaped messages in, everything the engine and the answer need out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from edgellm.chat import messages as shapes
from edgellm.chat import reasoning, schema, turns
from edgellm.chat import template as templates
from edgellm.chat.caps import Caps, find_caps, fit
from edgellm.chat.deltas import OutputParser, PlainParser
from edgellm.chat.messages import Message
from edgellm.chat.reasoning import ChatParser, Thinking
from edgellm.chat.template import CHATML, ChatModel, TemplateRefusedError
from edgellm.chat.tool_parsers import Family, generic
from edgellm.chat.tool_parsers import choose as choose_family
from edgellm.chat.tool_parsers.stream import encodable
from edgellm.chat.tools import (
    Shape,
    ToolPlan,
    build_grammar,
    described,
    generic_prompt,
    plan_tools,
)
from edgellm.errors import InvalidRequestError
from edgellm.request import Grammar


class PreparedChat:
    """A rendered conversation and how its answer is constrained and read.

    ``parser`` reads the first choice; each further choice of the same request needs its own
    ``new_parser()``. ``turn_starts`` and ``n_keep_chars`` cost a few renders when first read.
    """

    def __init__(
        self,
        prompt: str,
        *,
        add_special: bool,
        stop: tuple[str, ...],
        grammar: Grammar | None,
        grammar_after: str | None,
        warnings: tuple[str, ...],
        new_parser: Callable[[], OutputParser],
        find_turns: Callable[[], turns.Turns],
    ) -> None:
        self.prompt = prompt
        self.add_special = add_special
        self.stop = stop
        self.grammar = grammar
        self.grammar_after = grammar_after
        """Where a client's own grammar begins to apply: the end of thinking that the prompt
        opened; None for the start."""
        self.warnings = warnings
        self.new_parser = new_parser
        self._find_turns = find_turns

    @cached_property
    def parser(self) -> OutputParser:
        """The parser of the first choice."""
        return self.new_parser()

    @cached_property
    def _turns(self) -> turns.Turns:
        return self._find_turns()

    @property
    def turn_starts(self) -> tuple[int, ...]:
        """Character offsets in ``prompt`` where whole turns (a user message and what answers it)
        begin, in order; empty when the template does not let them be found."""
        return self._turns.starts

    @property
    def n_keep_chars(self) -> int:
        """Characters at the start (BOS, system prompt, tools) that sliding must keep."""
        return self._turns.n_keep_chars


def prepare_chat(
    model: ChatModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = "auto",
    parallel_tool_calls: bool = True,
    response_format: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> PreparedChat:
    """Render ``messages`` with the model's template.

    ``template`` is a named template of the model's or Jinja text; ``template_kwargs`` reach it as
    they are. With ``continue_final_message`` the last (assistant) message is left open for the
    model to go on with. InvalidRequestError names the parameter.
    """
    plan = plan_tools(tools, tool_choice, parallel=parallel_tool_calls)
    wanted, dropped = schema.response_schema(response_format)
    conversation = shapes.read_messages(messages, can_see=model.can_see)
    extra = _extra(reasoning_effort, template_kwargs)
    source = templates.choose(model, template, with_tools=plan.mode != "none")
    caps = find_caps(source)
    render = _renderer(model, source, plan, caps, extra)
    offered = _offer_generic(conversation, plan, caps)
    is_continued = continue_final_message and conversation[-1]["role"] == "assistant"
    fitted, prompt = _fit_and_render(
        offered,
        caps,
        render,
        open_turn=add_generation_prompt and not is_continued,
    )
    if is_continued:
        _check_continuable(plan, wanted)
        prompt = _cut_after(prompt, fitted[-1]["content"])
    prompt, add_special = templates.settle_bos(model, encodable(prompt))
    thinking = reasoning.find_style(source)
    shape = Shape(
        thinking=None if reasoning.is_thinking_off(extra) else thinking,
        is_open=thinking is not None and thinking.is_open(prompt),
        family=_family(model, source, plan, caps),
    )
    return PreparedChat(
        prompt,
        add_special=add_special,
        stop=("<|im_end|>",) if source == CHATML else (),
        grammar=_sendable(build_grammar(plan, shape, wanted)),
        warnings=(*plan.warnings, *dropped),
        new_parser=_parser_maker(thinking, shape, plan, is_continued=is_continued),
        grammar_after=shape.after,
        find_turns=lambda: turns.find(
            prompt, fitted, render, model.bos_text, keeps_first=_is_folded(offered, fitted)
        ),
    )


def _sendable(grammar: Grammar | None) -> Grammar | None:
    """The grammar as UTF-8 can carry it: a client's schema may hold half a surrogate pair."""
    if grammar is None:
        return None
    return msgspec.structs.replace(grammar, text=encodable(grammar.text))


def _is_folded(before: list[Message], after: list[Message]) -> bool:
    """Whether the system prompt became a part of the first turn."""
    return shapes.has_system(before) and not shapes.has_system(after)


def _extra(effort: str | None, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The template's further variables; explicit ones win over what the effort implies."""
    if effort is not None and effort not in reasoning.EFFORTS:
        raise InvalidRequestError(
            f"reasoning_effort must be one of {', '.join(reasoning.EFFORTS)}",
            param="reasoning_effort",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidRequestError("chat_template_kwargs is an object", param="chat_template_kwargs")
    return {**reasoning.effort_variables(effort), **(kwargs or {})}


def _renderer(
    model: ChatModel, source: str, plan: ToolPlan, caps: Caps, extra: Mapping[str, Any]
) -> turns.Render:
    shown = plan.shown if plan.mode != "none" and caps.shows_tools else None

    def render_with(tools: Any, messages: list[Message], open_turn: bool) -> str:
        names = templates.variables(
            model, messages, tools=tools, add_generation_prompt=open_turn, extra=extra
        )
        return templates.render(source, names)

    def render(messages: list[Message], open_turn: bool) -> str:
        try:
            return render_with(shown, messages, open_turn)
        except TemplateRefusedError:
            raise
        except InvalidRequestError:
            if not shown:
                raise
            return render_with(described(shown), messages, open_turn)

    return render


def _offer_generic(messages: list[Message], plan: ToolPlan, caps: Caps) -> list[Message]:
    """Tell a model about tools in the system prompt when its template cannot."""
    if plan.mode == "none" or caps.shows_tools:
        return messages
    return shapes.with_system(messages, generic_prompt(plan.shown))


def _fit_and_render(
    messages: list[Message], caps: Caps, render: turns.Render, *, open_turn: bool
) -> tuple[list[Message], str]:
    """The messages in the first form the template accepts, and the prompt."""
    fitted = fit(messages, caps)
    merged = shapes.merged(fitted)
    refused: TemplateRefusedError | None = None
    for form in (fitted, merged, shapes.system_in_user(fitted), shapes.system_in_user(merged)):
        form = shapes.merged(form) if refused and form is not fitted else form  # noqa: PLW2901
        try:
            prompt = render(form, open_turn)
        except TemplateRefusedError as error:
            refused = refused or error
            continue
        if not _has_system(form, prompt):
            form = shapes.system_in_user(form)  # noqa: PLW2901
            prompt = render(form, open_turn)
        return form, prompt
    raise refused or InvalidRequestError("the chat template fails", param="messages")


def _has_system(messages: list[Message], prompt: str) -> bool:
    """Whether every system text reached the prompt: some templates drop them silently."""
    texts = (m["content"] for m in messages if m["role"] in ("system", "developer"))
    return all(text.strip() in prompt for text in texts if isinstance(text, str))


def _check_continuable(plan: ToolPlan, wanted: Mapping[str, Any] | None) -> None:
    if wanted is not None or plan.mode == "required":
        raise InvalidRequestError(
            "a message cannot be continued under a response format or a required call",
            param="messages",
        )


def _cut_after(prompt: str, content: Any) -> str:
    """The prompt up to the end of the last message's text."""
    text = content.rstrip() if isinstance(content, str) else ""
    at = prompt.rfind(text)
    if not text or at < 0:
        raise InvalidRequestError(
            "the last message cannot be continued with this chat template", param="messages"
        )
    return prompt[: at + len(text)]


def _family(model: ChatModel, source: str, plan: ToolPlan, caps: Caps) -> Family | None:
    """How calls are written; gpt-oss's channels matter without tools too."""
    family = choose_family(source, model.arch)
    if family is not None and family.parse is not None:
        return family
    if plan.mode == "none":
        return None
    return family if family is not None and caps.shows_tools else generic(family)


def _parser_maker(
    thinking: Thinking | None, shape: Shape, plan: ToolPlan, *, is_continued: bool
) -> Callable[[], OutputParser]:
    family: Family | None = shape.family
    if thinking is None and family is None:
        return PlainParser
    return lambda: ChatParser(
        thinking, family, plan.callable, is_open=shape.is_open, is_continued=is_continued
    )
