"""Bodies of OpenAI's chat completions, completions and embeddings, with others' extensions."""

from __future__ import annotations

from typing import Any, Literal

from edgellm.server.wire.common import ResponseFormat, SamplingFields, StreamOptions, Wire

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(Wire, kw_only=True):
    """One part of a message: text, a refusal, or media (which text models refuse)."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class FunctionCall(Wire, kw_only=True):
    """A call as the model made it; ``arguments`` is JSON text (an object is accepted too)."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Wire, kw_only=True):
    """A tool call of an assistant message. A null id is filled in."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"
    index: int | None = None


class ChatMessage(Wire, kw_only=True):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None


class FunctionDefinition(Wire, kw_only=True):
    """A tool's function: its name, what it does, and the JSON Schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire, kw_only=True):
    """A tool the model may call."""

    type: str
    function: FunctionDefinition | None = None


class ToolChoiceFunction(Wire, kw_only=True):
    name: str


class AllowedTools(Wire, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None


class ToolChoice(Wire, kw_only=True):
    """One named tool, or a subset of the tools."""

    type: str = "function"
    function: ToolChoiceFunction | None = None
    allowed_tools: AllowedTools | None = None


class ChatBody(SamplingFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required", "any"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbose: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    suffix: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | bool | None = None
    echo: bool | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None


class EmbeddingPart(Wire, kw_only=True):
    type: str
    text: str | None = None


class EmbeddingInput(Wire, kw_only=True):
    """llama-server's object entries."""

    prompt_string: str | None = None
    content: list[EmbeddingPart] | None = None


class EmbeddingBody(Wire, kw_only=True):
    """``POST /v1/embeddings``."""

    input: str | list[str | int | list[int | str] | EmbeddingInput] | EmbeddingInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    priority: int | str | None = None
