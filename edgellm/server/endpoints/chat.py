"""``POST /v1/chat/completions``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edgellm.chat import (
    ContentDelta,
    OutputParser,
    PreparedChat,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallStart,
    prepare_chat,
)
from edgellm.errors import InvalidRequestError
from edgellm.metrics import RequestTimings
from edgellm.request import (
    FinishReason,
    Grammar,
    Overflow,
    Request,
    SamplingParams,
    TokenEvent,
    Usage,
)
from edgellm.server import generate
from edgellm.server.core import Server, View
from edgellm.server.http import Call, decode, encode
from edgellm.server.sse import DONE, Stream
from edgellm.server.wire.common import (
    ResponseFormat,
    SamplingFields,
    explicit_grammar,
    first_limit,
    format_schema,
    sampling_params,
)
from edgellm.server.wire.openai import ChatBody, ChatMessage, Tool, ToolChoice

BODY: Final = msgspec.json.Decoder(ChatBody)
_MEDIA: Final = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "input_video": "video",
    "file": "file",
}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A chat ready to run: the request and what its answer needs."""

    request: Request
    prepared: Any
    """The PreparedChat."""
    id: str
    created: int
    wants_logprobs: bool
    wants_timings: bool
    wants_usage: bool
    is_verbose: bool = False
    pace: generate.Pace | None = None


class Choice:
    """One choice of an answer, as it grows."""

    __slots__ = (
        "calls",
        "content",
        "finish",
        "index",
        "logprobs",
        "n_reasoning",
        "parser",
        "reasoning",
        "stop",
        "warnings",
    )

    def __init__(self, index: int, parser: OutputParser) -> None:
        self.index = index
        self.parser = parser
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.n_reasoning = 0
        self.finish: FinishReason | None = None
        self.stop: str | None = None
        self.warnings: list[str] = []
        """What the engine had to say (a request it relaxed)."""

    def take(self, event: TokenEvent) -> Sequence[Any]:
        """The deltas of one event; the parser's rest with the last."""
        deltas: list[Any] = list(self.parser.feed(event.text)) if event.text else []
        if event.warning is not None:
            self.warnings.append(event.warning)
        if event.finish_reason is not None:
            deltas += self.parser.finish()
            self.finish = event.finish_reason
            self.stop = event.stop
        if deltas and isinstance(deltas[0], ReasoningDelta):
            self.n_reasoning += len(event.token_ids)
        return deltas

    def keep(self, deltas: Sequence[Any]) -> None:
        """Add deltas to the whole message."""
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self.content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self.reasoning.append(delta.text)
            elif isinstance(delta, ToolCallStart):
                function = {"name": delta.name, "arguments": ""}
                self.calls.append({"id": delta.id, "type": "function", "function": function})
            elif isinstance(delta, ToolArgsDelta):
                self.calls[delta.index]["function"]["arguments"] += delta.fragment

    def finish_reason(self) -> str:
        """OpenAI's name for why this choice ended."""
        reason = self.finish or FinishReason.LENGTH
        return generate.finish_name(reason, self.parser.n_calls)

    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        text = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not (self.calls or self.reasoning) else None,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


async def chat(server: Server, call: Call) -> None:
    """Answer one conversation, streamed or whole."""
    body = decode(BODY, await server.body(call))
    async with server.lease(call, body.model) as view:
        job = await prepare(server, call, view, body)
        if body.stream:
            await _stream(server, call, view, job)
        else:
            await call.json(await _whole(server, call, view, job))


async def prepare(server: Server, call: Call, view: View, body: ChatBody) -> Job:
    """Everything that can be wrong with a chat, before anything runs."""
    view.need_generation()
    prepared = render(view, body)
    more: dict[str, Any] = {}
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    grammar = grammar_of(prepared, body)
    sampling = sampling_params(
        body,
        server.options.sampling,
        max_tokens=first_limit(
            body.max_completion_tokens, body.max_tokens, n_predict=body.n_predict
        ),
        stop=prepared.stop,
        logit_bias=await generate.logit_bias(body, view),
        grammar=grammar,
        **more,
    )
    options = body.stream_options
    return Job(
        request=await make_request(server, call, view, body, prepared=prepared, sampling=sampling),
        prepared=prepared,
        id="chatcmpl-" + secrets.token_hex(12),
        created=int(time.time()),
        wants_logprobs=bool(body.logprobs),
        wants_timings=body.timings is not False,
        wants_usage=bool(options and options.include_usage),
        is_verbose=bool(body.verbose),
        pace=generate.pace_of(body),
    )


async def make_request(
    server: Server,
    call: Call,
    view: View,
    fields: SamplingFields,
    *,
    prepared: PreparedChat,
    sampling: SamplingParams,
    **more: Any,
) -> Request:
    """The engine's request for a rendered chat."""
    slides = server.options.overflow is Overflow.SLIDE
    n_keep = 0
    if slides and prepared.n_keep_chars:
        kept = prepared.prompt[: prepared.n_keep_chars]
        n_keep = len(await view.engine.tokenize(kept, add_special=prepared.add_special))
    return generate.engine_request(
        server,
        call,
        view,
        fields,
        prompt=prepared.prompt,
        sampling=sampling,
        add_special=prepared.add_special,
        # Reading these renders the conversation once more.
        turn_starts=prepared.turn_starts if slides else (),
        n_keep=n_keep,
        **more,
    )


def grammar_of(prepared: PreparedChat, fields: SamplingFields) -> Grammar | None:
    """The grammar the client wrote itself, or the one of its tools and response format."""
    own = explicit_grammar(fields)
    if own is None:
        return prepared.grammar
    if prepared.grammar is not None:
        raise InvalidRequestError(
            "a grammar cannot be combined with tools or a response format", param="grammar"
        )
    return msgspec.structs.replace(own, after=prepared.grammar_after)


def render(view: View, body: ChatBody) -> PreparedChat:
    """The conversation as a prompt. A last message of the assistant is continued."""
    messages = plain_messages(body.messages)
    if not messages:
        raise InvalidRequestError("messages is empty", param="messages")
    _check_end(body, messages)
    return prepare_chat(
        view.chat,
        messages,
        tools=tools_of(body),
        tool_choice=choice_of(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=format_of(body.response_format),
        reasoning_effort=body.reasoning_effort,
        template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=is_prefill(messages[-1]),
    )


def _check_end(body: ChatBody, messages: Sequence[dict[str, Any]]) -> None:
    """Refuse what cannot be continued in one way only, as llama-server does."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude one another",
            param="continue_final_message",
        )
    if [message["role"] for message in messages[-2:]] == ["assistant", "assistant"]:
        raise InvalidRequestError(
            "two messages of the assistant stand at the end", param=f"messages[{len(messages) - 1}]"
        )


def is_prefill(message: dict[str, Any]) -> bool:
    """Whether the model shall go on with this last message, as llama-server and Anthropic do."""
    return (
        message["role"] == "assistant"
        and bool(message.get("content"))
        and not message.get("tool_calls")
    )


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as prepare_chat takes them: media refused, null ids filled in."""
    built: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for i, message in enumerate(messages):
        refuse_media(message.content, f"messages[{i}].content")
        plain: dict[str, Any] = msgspec.to_builtins(message)
        if plain.get("reasoning") and not plain.get("reasoning_content"):
            plain["reasoning_content"] = plain.pop("reasoning")
        if message.tool_calls:
            open_ids = _fill_ids(plain["tool_calls"])
        if message.role == "tool" and not message.tool_call_id and open_ids:
            plain["tool_call_id"] = open_ids.pop(0)
        built.append(plain)
    return built


def _fill_ids(calls: list[dict[str, Any]]) -> list[str]:
    """Give calls without an id one; return all ids in order."""
    for call in calls:
        call.pop("index", None)
        if not call.get("id"):
            call["id"] = "call_" + secrets.token_hex(12)
        call.setdefault("type", "function")
        call["function"].setdefault("arguments", "{}")
    return [call["id"] for call in calls]


def refuse_media(content: Any, param: str) -> None:
    """Raise InvalidRequestError when a part is not text: no model here sees or hears."""
    if content is None or isinstance(content, str):
        return
    for i, part in enumerate(content):
        if part.type in ("text", "input_text", "output_text", "refusal"):
            if part.text is None and part.refusal is None:
                raise InvalidRequestError(
                    f"a {part.type} part has no text", param=f"{param}[{i}].text"
                )
            continue
        kind = _MEDIA.get(part.type)
        what = f"{kind} input is not supported" if kind else f"unknown part type {part.type!r}"
        raise InvalidRequestError(what + " by this model", param=f"{param}[{i}].type")


def tools_of(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools as dicts; ``functions`` is the old name of the same."""
    tools = list(body.tools or ())
    tools += [Tool(type="function", function=f) for f in body.functions or ()]
    for i, tool in enumerate(tools):
        if tool.type == "function" and tool.function is None:
            raise InvalidRequestError("a tool has no function", param=f"tools[{i}].function")
        if tool.type != "function":
            raise InvalidRequestError(
                f"tools of type {tool.type!r} are not supported", param=f"tools[{i}].type"
            )
    return [msgspec.to_builtins(tool) | {"type": "function"} for tool in tools] or None


def choice_of(body: ChatBody) -> str | dict[str, Any]:
    """``tool_choice`` as prepare_chat takes it."""
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        # Mistral's and Anthropic's word for required.
        choice = "required" if choice == "any" else choice
        if choice == "required" and not body.tools and not body.functions:
            raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
        return choice
    return _named_choice(choice, body)


def _named_choice(choice: ToolChoice, body: ChatBody) -> dict[str, Any]:
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = msgspec.to_builtins(choice.allowed_tools)
        return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", **allowed}}
    if choice.function is None:
        raise InvalidRequestError("tool_choice names no function", param="tool_choice.function")
    name = choice.function.name
    if name not in [t.function.name for t in body.tools or () if t.function is not None]:
        raise InvalidRequestError(f"no tool is named {name!r}", param="tool_choice.function.name")
    return {"type": "function", "function": {"name": name}}


def format_of(fmt: ResponseFormat | None) -> dict[str, Any] | None:
    """``response_format`` as prepare_chat takes it; a schema beside json_object is a schema."""
    if fmt is None or fmt.type == "text":
        return None
    if fmt.type not in ("json_object", "json_schema"):
        raise InvalidRequestError(
            f"response_format {fmt.type!r} is for completions; use the grammar field",
            param="response_format.type",
        )
    schema = format_schema(fmt)
    if schema is None:
        return {"type": "json_object"}
    given = fmt.json_schema
    name = given.name if given is not None else "response"
    strict = True if given is None or given.strict is None else given.strict
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "schema": schema, "strict": strict},
    }


def choices_of(job: Job) -> list[Choice]:
    """An empty choice for each of ``n``."""
    n = job.request.sampling.n
    prepared = job.prepared
    return [Choice(i, prepared.parser if i == 0 else prepared.new_parser()) for i in range(n)]


async def _whole(server: Server, call: Call, view: View, job: Job) -> dict[str, Any]:
    choices = choices_of(job)
    usage, timings = Usage(), RequestTimings()
    async for event in generate.events(server, call, view, job.request):
        choice = choices[event.index]
        choice.keep(choice.take(event))
        if event.logprobs:
            choice.logprobs += map(generate.chat_logprob, event.logprobs)
        if event.is_last:
            usage, timings = event.usage or usage, event.timings or timings
    return whole_body(view, job, choices, usage, timings)


def whole_body(
    view: View, job: Job, choices: Sequence[Choice], usage: Usage, timings: RequestTimings
) -> dict[str, Any]:
    """The ``chat.completion`` object."""
    n_reasoning = sum(choice.n_reasoning for choice in choices)
    body: dict[str, Any] = {
        "id": job.id,
        "object": "chat.completion",
        "created": job.created,
        "model": view.name,
        "choices": [
            {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None}
                if job.wants_logprobs
                else None,
                "finish_reason": choice.finish_reason(),
            }
            for choice in choices
        ],
        "usage": generate.usage_body(usage, n_reasoning=n_reasoning),
        "service_tier": "default",
        "system_fingerprint": view.fingerprint,
    }
    warnings = warnings_of(job, choices)
    if warnings:
        body["warnings"] = warnings
    if job.wants_timings:
        body["timings"] = generate.timings_body(usage, timings)
    if job.is_verbose:
        body["__verbose"] = {"prompt": job.request.prompt}
    return body


def warnings_of(job: Job, choices: Sequence[Choice]) -> list[str]:
    """What the client should know: relaxed schemas, a budget that ended inside thinking."""
    found = list(job.prepared.warnings)
    for choice in choices:
        said = [*choice.warnings, *choice.parser.warnings]
        found += [w for w in said if w not in found]
    return found


async def _stream(server: Server, call: Call, view: View, job: Job) -> None:
    async with server.streaming(call, generate.error_event) as stream:
        await _stream_events(server, call, stream, view, job)


async def _stream_events(server: Server, call: Call, stream: Stream, view: View, job: Job) -> None:
    choices = choices_of(job)
    writers = [ChunkWriter(view, job, choice) for choice in choices]
    usage, timings = Usage(), RequestTimings()

    def render(event: TokenEvent) -> bytes:
        return writers[event.index].event(event)

    direct = stream.direct(render)
    async for event in generate.events(server, call, view, job.request, direct):
        chunk = render(event)
        if chunk:
            await stream.write(chunk)
        if event.is_last:
            usage, timings = event.usage or usage, event.timings or timings
    await stream.write(_closing(view, job, choices, usage, timings) + DONE)
    await stream.end()


def _closing(
    view: View, job: Job, choices: Sequence[Choice], usage: Usage, timings: RequestTimings
) -> bytes:
    """The usage chunk, when it was asked for."""
    if not job.wants_usage:
        return b""
    n_reasoning = sum(choice.n_reasoning for choice in choices)
    body: dict[str, Any] = {
        "id": job.id,
        "object": "chat.completion.chunk",
        "created": job.created,
        "model": view.name,
        "service_tier": "default",
        "system_fingerprint": view.fingerprint,
        "choices": [],
        "usage": generate.usage_body(usage, n_reasoning=n_reasoning),
    }
    if job.wants_timings:
        body["timings"] = generate.timings_body(usage, timings)
    return b"data: " + encode(body) + b"\n\n"


class ChunkWriter:
    """One choice's chunks as bytes. What every chunk repeats is encoded once."""

    __slots__ = ("_choice", "_head", "_is_begun", "_job", "_pending", "_tail", "_text_tail")

    def __init__(self, view: View, job: Job, choice: Choice) -> None:
        self._choice = choice
        self._job = job
        self._is_begun = False
        self._pending: list[dict[str, Any]] = []
        self._head = (
            b'data: {"id":"%s","object":"chat.completion.chunk","created":%d,"model":%s,'
            b'"service_tier":"default","system_fingerprint":%s,"choices":[{"index":%d,"delta":'
            % (
                job.id.encode(),
                job.created,
                view.name_json,
                encode(view.fingerprint),
                choice.index,
            )
        )
        self._tail = (b'],"usage":null}' if job.wants_usage else b"]}") + b"\n\n"
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def event(self, event: TokenEvent) -> bytes:
        """The chunks of one event; empty when it shows nothing yet."""
        choice = self._choice
        more = self._job.pace.more(event) if self._job.pace is not None else {}
        if event.progress is not None:
            return generate.with_more(self._read_on(), more) if more else b""
        if event.logprobs:
            self._pending += map(generate.chat_logprob, event.logprobs)
        deltas = choice.take(event)
        chunks = [] if self._is_begun else [self._begin()]
        for delta in deltas:
            if isinstance(delta, ContentDelta) and not self._job.wants_logprobs:
                text = encode(delta.text)
                chunks.append(self._head + b'{"content":' + text + self._text_tail)
            else:
                chunks.append(self._chunk(_delta_body(delta)))
        if event.finish_reason is not None:
            chunks.append(self._finish(event))
        return generate.with_more(b"".join(chunks), more if deltas else {})

    def _read_on(self) -> bytes:
        """A chunk that only says how far the prompt was read; the role goes with the first."""
        return self._chunk({}) if self._is_begun else self._begin()

    def _begin(self) -> bytes:
        self._is_begun = True
        delta = b'{"role":"assistant","content":null,"refusal":null'
        return self._head + delta + self._text_tail

    def _finish(self, event: TokenEvent) -> bytes:
        choice, job = self._choice, self._job
        extra: dict[str, Any] = {}
        warnings = warnings_of(job, [choice])
        if warnings:
            extra["warnings"] = warnings
        chunk = self._chunk({}, finish=choice.finish_reason(), extra=extra)
        if job.wants_usage or not job.wants_timings or event.usage is None:
            return chunk
        # No chunk with the usage follows: the timings close this one, as llama-server does it.
        timings = generate.timings_body(event.usage, event.timings or RequestTimings())
        return generate.with_more(chunk, {"timings": timings})

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        logprobs = None
        if self._job.wants_logprobs and (finish is None or self._pending):
            logprobs = {"content": self._pending, "refusal": None}
            self._pending = []
        rest = {"logprobs": logprobs, "finish_reason": finish, **(extra or {})}
        return self._head + encode(delta) + b"," + encode(rest)[1:] + self._tail


def _delta_body(delta: Any) -> dict[str, Any]:
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ToolCallStart):
        function = {"name": delta.name, "arguments": ""}
        call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.fragment}}]}
