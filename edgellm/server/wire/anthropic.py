"""Bodies of Anthropic's messages API."""

from __future__ import annotations

from typing import Any, Literal

from edgellm.server.wire.common import SamplingFields, Wire


class Source(Wire, kw_only=True):
    """Where an image or document is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(Wire, kw_only=True):
    """A content block of a message; which fields it has depends on its type."""

    type: str
    text: str | None = None
    source: Any = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class MessageParam(Wire, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(Wire, kw_only=True):
    """A tool the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoiceParam(Wire, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Wire, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Wire, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Wire, kw_only=True):
    format: OutputFormat | None = None
    effort: str | None = None


class ThreadParam(Wire, kw_only=True):
    """A conversation that the server holds: begun here, or continued from a message's id."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class Conversation(SamplingFields, kw_only=True):
    """What counting and answering share."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    thread: ThreadParam | None = None


class CountBody(Conversation, kw_only=True):
    """``POST /v1/messages/count_tokens``."""


class MessagesBody(Conversation, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
