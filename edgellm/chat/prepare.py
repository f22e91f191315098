"""prepare_chat: OpenAI-shaped messages in, everything the engine and the answer need out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.chat import template as templates
from edgellm.chat.deltas import OutputParser, PlainParser
from edgellm.chat.template import ChatModel
from edgellm.request import Grammar


class PreparedChat:
    """A rendered conversation. ``parser`` reads the first choice; each further choice of the
    same request needs its own ``new_parser()``."""

    def __init__(self, prompt: str, *, add_special: bool) -> None:
        self.prompt = prompt
        self.add_special = add_special
        self.stop: tuple[str, ...] = ()
        self.grammar: Grammar | None = None
        self.turn_starts: tuple[int, ...] = ()
        self.n_keep_chars = 0
        self.warnings: tuple[str, ...] = ()
        self.parser = self.new_parser()

    def new_parser(self) -> OutputParser:
        return PlainParser()


def prepare_chat(
    model: ChatModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    parallel_tool_calls: bool = True,
    response_format: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> PreparedChat:
    """Render ``messages`` with the model's template. InvalidRequestError names the parameter."""
    _ = (tool_choice, parallel_tool_calls, response_format, reasoning_effort)
    source = templates.choose(model, template, with_tools=bool(tools))
    names = templates.variables(
        model,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        extra=template_kwargs or {},
    )
    prompt, add_special = templates.settle_bos(model, templates.render(source, names))
    return PreparedChat(prompt, add_special=add_special)
