"""``POST /v1/messages``: Anthropic's API, events and errors in its shapes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from edgellm.chat import ContentDelta, PreparedChat, ReasoningDelta, ToolCallStart, prepare_chat
from edgellm.errors import InvalidRequestError
from edgellm.request import FinishReason, Request, TokenEvent, Usage
from edgellm.server import generate
from edgellm.server.core import Server, View
from edgellm.server.endpoints.chat import Choice, grammar_of, is_prefill, make_request
from edgellm.server.errors import Problem, anthropic_body
from edgellm.server.http import Call, decode, encode
from edgellm.server.wire.anthropic import Block, Conversation, CountBody, MessagesBody, ToolParam
from edgellm.server.wire.common import sampling_params

BODY: Final = msgspec.json.Decoder(MessagesBody)
COUNT: Final = msgspec.json.Decoder(CountBody)
ConversationT = TypeVar("ConversationT", bound=Conversation)
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_IGNORED: Final = frozenset({"redacted_thinking"})


async def create(server: Server, call: Call) -> None:
    """Answer a conversation, streamed or whole."""
    body = decode(BODY, await server.body(call))
    call.extra_headers.append((b"request-id", call.request_id.encode()))
    body = with_thread(server, call, body)
    async with server.lease(call, body.model) as view:
        view.need_generation()
        prepared = render(view, body)
        if body.max_tokens < 1:
            raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
        sampling = sampling_params(
            _with_stops(body),
            server.options.sampling,
            max_tokens=body.max_tokens,
            stop=prepared.stop,
            grammar=grammar_of(prepared, body),
            n=1,
        )
        request = await make_request(server, call, view, body, prepared=prepared, sampling=sampling)
        answer = Answer(view, Choice(0, prepared.parser), "msg_" + secrets.token_hex(12), body)
        if body.stream:
            await _stream(server, call, answer, request)
        else:
            await _whole(server, call, answer, request)
        _keep_thread(server, call, body, answer)


async def count_tokens(server: Server, call: Call) -> None:
    """``{"input_tokens": n}``."""
    body = with_thread(server, call, decode(COUNT, await server.body(call)))
    async with server.lease(call, body.model) as view:
        view.need_generation()
        prepared = render(view, body)
        ids = await view.engine.tokenize(prepared.prompt, add_special=prepared.add_special)
        await call.json({"input_tokens": len(ids)})


def with_thread(server: Server, call: Call, body: ConversationT) -> ConversationT:
    """``body`` with what came before in its thread, which has the system prompt and the tools."""
    thread = body.thread
    if thread is None or thread.type == "create":
        return body
    stored = server.threads.get(thread.previous_message_id or "", call.key)
    if stored is None:
        raise Problem(
            404,
            "no such thread is (or is no longer) stored here",
            code="thread_not_found",
            param="thread.previous_message_id",
            extra={"details": {"error_code": "thread_not_found"}},
        )
    earlier = msgspec.convert(stored.body["conversation"], CountBody)
    return msgspec.structs.replace(
        body,
        messages=[*earlier.messages, *body.messages],
        system=earlier.system,
        tools=earlier.tools,
    )


def _keep_thread(server: Server, call: Call, body: MessagesBody, answer: Answer) -> None:
    """Store the conversation, this answer included, under the answer's id."""
    if body.thread is None:
        return
    whole = CountBody(messages=body.messages, system=body.system, tools=body.tools)
    conversation: dict[str, Any] = msgspec.to_builtins(whole)
    conversation["messages"].append({"role": "assistant", "content": _content(answer.choice)})
    server.threads.put(
        {"id": answer.id, "conversation": conversation},
        input_items=[],
        messages=[],
        owner=call.key,
    )


def _with_stops(body: MessagesBody) -> MessagesBody:
    stops = [s for s in body.stop_sequences or () if s.strip()]
    return msgspec.structs.replace(body, stop=stops or None)


def render(view: View, body: Conversation) -> PreparedChat:
    """The conversation as a prompt. A last assistant message is continued, as Anthropic does."""
    messages = chat_messages(body)
    return prepare_chat(
        view.chat,
        messages,
        tools=_tools(body.tools),
        tool_choice=_choice(body),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        response_format=_format(body),
        reasoning_effort=body.output_config.effort if body.output_config else None,
        template_kwargs=_thinking(body),
        continue_final_message=is_prefill(messages[-1]),
    )


def _thinking(body: Conversation) -> dict[str, Any] | None:
    """Templates of models that can think read ``enable_thinking``."""
    if body.thinking is None:
        return None
    return {"enable_thinking": body.thinking.type != "disabled"}


def _format(body: Conversation) -> dict[str, Any] | None:
    given = body.output_format
    if given is None and body.output_config is not None:
        given = body.output_config.format
    if given is None:
        return None
    inner = {"name": "response", "schema": given.schema, "strict": True}
    return {"type": "json_schema", "json_schema": inner}


_OWN: Final = (None, "custom")


def _tools(tools: Sequence[ToolParam] | None) -> list[dict[str, Any]] | None:
    """Client tools as chat tools. Tools that Anthropic runs itself cannot run here: they are left
    out beside others, and refused where there is nothing else."""
    built = []
    has_own = any(tool.type in _OWN for tool in tools or ())
    for i, tool in enumerate(tools or ()):
        if tool.type not in _OWN and has_own:
            continue
        if tool.type not in _OWN:
            raise InvalidRequestError(
                f"the server tool {tool.type!r} is not supported", param=f"tools[{i}].type"
            )
        if tool.input_schema is None:
            raise InvalidRequestError(
                "a tool has no input_schema", param=f"tools[{i}].input_schema"
            )
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        built.append({"type": "function", "function": function})
    return built or None


def _choice(body: Conversation) -> str | dict[str, Any]:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if not body.tools:
        raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
    if choice.type == "any":
        return "required"
    if choice.name not in [tool.name for tool in body.tools]:
        raise InvalidRequestError(f"no tool is named {choice.name!r}", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def chat_messages(body: Conversation) -> list[dict[str, Any]]:
    """Anthropic's messages as chat messages: tool results become messages of their own."""
    if not body.messages:
        raise InvalidRequestError("messages is empty", param="messages")
    built: list[dict[str, Any]] = []
    if body.system:
        built.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        param = f"messages[{i}].content"
        content = message.content
        if isinstance(content, str):
            if not content and message.role == "user":
                raise InvalidRequestError("user messages must not be empty", param=param)
            built.append({"role": message.role, "content": content})
        elif message.role == "assistant":
            built.append(_assistant(content, param))
        else:
            built += _user(content, param, message.role)
    return built


def _text(content: str | list[Block] | None, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(b, f"{param}[{i}]") for i, b in enumerate(content))


def _block_text(block: Block, param: str) -> str:
    if block.type == "text":
        if block.text is None:
            raise InvalidRequestError("a text block has no text", param=f"{param}.text")
        return block.text
    if block.type == "document" and isinstance(block.source, dict):
        kind, data = block.source.get("type"), block.source.get("data")
        if kind == "text" and isinstance(data, str):
            return data
    what = "image" if block.type == "image" else block.type
    raise InvalidRequestError(f"{what} input is not supported by this model", param=f"{param}.type")


def _assistant(blocks: Sequence[Block], param: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if not block.name:
                raise InvalidRequestError("a tool_use has no name", param=f"{param}[{i}].name")
            arguments = json.dumps(block.input if block.input is not None else {})
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id or _new_id(), "type": "function", "function": function})
        elif block.type not in _IGNORED:
            texts.append(_block_text(block, f"{param}[{i}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if message["content"] is None and not calls:
        message["content"] = ""
    return message


def _user(blocks: Sequence[Block], param: str, role: str) -> list[dict[str, Any]]:
    """Tool results first, in their order, then the text: as templates want them."""
    if not blocks:
        raise InvalidRequestError("user messages must not be empty", param=param)
    results, texts = [], []
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            if not block.tool_use_id:
                raise InvalidRequestError(
                    "a tool_result has no tool_use_id", param=f"{param}[{i}].tool_use_id"
                )
            text = _text(block.content, f"{param}[{i}].content")
            if block.is_error:
                text = f"Error: {text}"
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        else:
            texts.append(_block_text(block, f"{param}[{i}]"))
    if texts:
        results.append({"role": role, "content": "\n".join(texts)})
    return results


def _new_id() -> str:
    return "toolu_" + secrets.token_hex(12)


class Answer:
    """What a message's answer needs to be told."""

    def __init__(self, view: View, choice: Choice, id: str, body: MessagesBody) -> None:
        self.view = view
        self.choice = choice
        self.id = id
        self.stops = tuple(body.stop_sequences or ())
        self.usage = Usage()

    def base(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.view.name,
            "content": content,
        }

    def stop_reason(self) -> tuple[str, str | None]:
        """Anthropic's reason, and the stop sequence when that is it."""
        choice = self.choice
        if choice.finish is FinishReason.LENGTH:
            full = self.usage.n_prompt + self.usage.n_output >= self.view.info.n_ctx_seq
            return ("model_context_window_exceeded" if full else "max_tokens"), None
        if choice.parser.n_calls:
            return "tool_use", None
        if choice.stop is not None and choice.stop in self.stops:
            return "stop_sequence", choice.stop
        return "end_turn", None


def usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic counts what was read from the cache apart from the input."""
    return {
        "input_tokens": usage.n_prompt - usage.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.n_cached,
        "output_tokens": usage.n_output,
    }


async def _whole(server: Server, call: Call, answer: Answer, request: Request) -> None:
    choice = answer.choice
    async for event in generate.events(server, call, answer.view, request):
        choice.keep(choice.take(event))
        if event.is_last and event.usage is not None:
            answer.usage = event.usage
    reason, stop = answer.stop_reason()
    await call.json(
        {
            **answer.base(_content(choice)),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage_body(answer.usage),
        }
    )


def _content(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        thinking = "".join(choice.reasoning)
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    text = "".join(choice.content)
    if text or not (choice.calls or choice.reasoning):
        blocks.append({"type": "text", "text": text, "citations": None})
    for call in choice.calls:
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": _input(function["arguments"]),
            }
        )
    return blocks


def _input(arguments: str) -> Any:
    """Arguments as an object; those that were cut off as text under ``_raw``."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {"_raw": arguments}
    return value if isinstance(value, dict) else {"_raw": arguments}


async def _stream(server: Server, call: Call, answer: Answer, request: Request) -> None:
    # message_start carries the input's tokens, so they are counted before the first comes.
    prompt = request.prompt
    n_prompt = len(
        await answer.view.engine.tokenize(prompt, add_special=request.add_special)
        if isinstance(prompt, str)
        else prompt
    )

    def failed(what: Problem) -> bytes:
        return _event("error", anthropic_body(what, call.request_id))

    render = _renderer(answer, n_prompt)
    async with server.streaming(call, failed, PING) as stream:
        direct = stream.direct(render)
        async for event in generate.events(server, call, answer.view, request, direct):
            chunk = render(event)
            if chunk:
                await stream.write(chunk)
        await stream.write(_ending(answer))
        await stream.end()


def _renderer(answer: Answer, n_prompt: int) -> Callable[[TokenEvent], bytes]:
    """The wire's events of an engine's event, the answer's beginning with the first."""
    choice = answer.choice
    writer = BlockWriter()
    start = _start(answer, n_prompt) + PING

    def render(event: TokenEvent) -> bytes:
        nonlocal start
        chunk, start = start, b""
        deltas = choice.take(event)
        choice.keep(deltas)
        chunk += writer.deltas(deltas)
        if event.is_last and event.usage is not None:
            answer.usage = event.usage
        return chunk + writer.finish() if event.finish_reason is not None else chunk

    return render


def _ending(answer: Answer) -> bytes:
    reason, stop = answer.stop_reason()
    delta = {"stop_reason": reason, "stop_sequence": stop}
    last = {"type": "message_delta", "delta": delta, "usage": usage_body(answer.usage)}
    return _event("message_delta", last) + _event("message_stop", _STOP)


_STOP: Final = {"type": "message_stop"}


def _start(answer: Answer, n_prompt: int) -> bytes:
    usage = usage_body(Usage(n_prompt=n_prompt, n_output=1))
    message = {**answer.base([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
    return _event("message_start", {"type": "message_start", "message": message})


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(body))


class BlockWriter:
    """Content blocks as events: each block starts, gets its deltas, and stops, one at a time."""

    def __init__(self) -> None:
        self.index = -1
        self._kind = ""

    def deltas(self, deltas: Sequence[Any]) -> bytes:
        return b"".join(self._delta(delta) for delta in deltas)

    def finish(self) -> bytes:
        """Stop the open block; an answer of nothing still has one empty text block."""
        opened = self._open("text", {"type": "text", "text": ""}) if self.index < 0 else b""
        return opened + self._close()

    def _delta(self, delta: Any) -> bytes:
        if isinstance(delta, ContentDelta):
            begun = self._ensure("text", {"type": "text", "text": ""})
            return begun + self._piece(b'{"type":"text_delta","text":%s}' % encode(delta.text))
        if isinstance(delta, ReasoningDelta):
            thought = {"type": "thinking", "thinking": "", "signature": ""}
            begun = self._ensure("thinking", thought)
            text = encode(delta.text)
            return begun + self._piece(b'{"type":"thinking_delta","thinking":%s}' % text)
        if isinstance(delta, ToolCallStart):
            tool = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            return self._open("tool_use", tool)
        text = encode(delta.fragment)
        return self._piece(b'{"type":"input_json_delta","partial_json":%s}' % text)

    def _ensure(self, kind: str, block: dict[str, Any]) -> bytes:
        return b"" if self._kind == kind else self._open(kind, block)

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self.index += 1
        self._kind = kind
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        return closed + _event("content_block_start", start)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signature = b""
        if self._kind == "thinking":
            signature = self._piece(b'{"type":"signature_delta","signature":""}')
        self._kind = ""
        stop = {"type": "content_block_stop", "index": self.index}
        return signature + _event("content_block_stop", stop)

    def _piece(self, delta: bytes) -> bytes:
        body = b'{"type":"content_block_delta","index":%d,"delta":%s}' % (self.index, delta)
        return b"event: content_block_delta\ndata: " + body + b"\n\n"
