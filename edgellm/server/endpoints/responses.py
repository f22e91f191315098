"""``/v1/responses``: stateless, or continued from a stored response; every streaming event."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edgellm.chat import ContentDelta, PreparedChat, ReasoningDelta, ToolCallStart, prepare_chat
from edgellm.errors import InvalidRequestError
from edgellm.metrics import RequestTimings
from edgellm.request import FinishReason, Overflow, Request, TokenEvent, Usage
from edgellm.server import generate
from edgellm.server.core import Server, View
from edgellm.server.endpoints.chat import Choice, grammar_of, make_request, refuse_media
from edgellm.server.errors import Problem
from edgellm.server.http import Call, decode, encode
from edgellm.server.wire.common import sampling_params
from edgellm.server.wire.responses import InputItem, InputPart, ResponseBody

BODY: Final = msgspec.json.Decoder(ResponseBody)
LOGPROBS: Final = "message.output_text.logprobs"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A response ready to run."""

    id: str
    created: int
    body: ResponseBody
    request: Request
    prepared: Any
    messages: tuple[dict[str, Any], ...]
    """The conversation so far, without instructions: what the next response continues."""
    input_items: tuple[dict[str, Any], ...]
    wants_logprobs: bool
    pace: generate.Pace | None


async def create(server: Server, call: Call) -> None:
    """Answer an input, streamed or whole."""
    body = decode(BODY, await server.body(call))
    if body.background:
        raise InvalidRequestError("background responses are not supported", param="background")
    async with server.lease(call, body.model) as view:
        view.need_generation()
        job = await _prepare(server, call, view, body)
        if body.stream:
            await _stream(server, call, view, job)
        else:
            await _whole(server, call, view, job)


async def input_tokens(server: Server, call: Call) -> None:
    """``{"input_tokens": n}`` of a response with this body."""
    body = decode(BODY, await server.body(call))
    async with server.lease(call, body.model) as view:
        messages = _conversation(server, call, body, _items(body.input))
        prepared = _render(view, body, messages)
        ids = await view.engine.tokenize(prepared.prompt, add_special=prepared.add_special)
        await call.json({"object": "response.input_tokens", "input_tokens": len(ids)})


def _conversation(
    server: Server, call: Call, body: ResponseBody, items: list[InputItem]
) -> list[dict[str, Any]]:
    """What was said before, and this input."""
    earlier = _earlier(server, call, body.previous_response_id)
    messages = [*earlier, *_messages(items)]
    if not messages:
        raise InvalidRequestError("input is empty", param="input")
    return messages


async def _prepare(server: Server, call: Call, view: View, body: ResponseBody) -> Job:
    items = _items(body.input)
    messages = _conversation(server, call, body, items)
    prepared = _render(view, body, messages)
    wants_logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    more: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if wants_logprobs else {}
    sampling = sampling_params(
        body,
        server.options.sampling,
        max_tokens=body.max_output_tokens,
        stop=prepared.stop,
        logit_bias=await generate.logit_bias(body, view),
        grammar=grammar_of(prepared, body),
        n=1,
        **more,
    )
    request = await make_request(server, call, view, body, prepared=prepared, sampling=sampling)
    if body.truncation == "auto":
        turns = prepared.turn_starts
        request = msgspec.structs.replace(request, overflow=Overflow.SLIDE, turn_starts=turns)
    return Job(
        id="resp_" + secrets.token_hex(24),
        created=int(time.time()),
        body=body,
        request=request,
        prepared=prepared,
        messages=tuple(messages),
        input_items=tuple(_shown_items(items)),
        wants_logprobs=wants_logprobs,
        pace=generate.pace_of(body),
    )


def _earlier(server: Server, call: Call, id: str | None) -> list[dict[str, Any]]:
    if id is None:
        return []
    stored = server.responses.get(id, call.key)
    if stored is None:
        raise Problem(
            404,
            f"the response {id[:100]!r} is not (or no longer) stored here",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return list(stored.messages)


def _items(given: str | list[InputItem]) -> list[InputItem]:
    if isinstance(given, str):
        return [InputItem(role="user", content=given)] if given else []
    return given


def _shown_items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The input as /input_items lists it: every item has an id and its parts are objects."""
    shown = []
    for item in items:
        plain = {"type": item.type, **msgspec.to_builtins(item)}
        plain.setdefault(
            "id", ("msg_" if item.type == "message" else "item_") + secrets.token_hex(12)
        )
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            plain["content"] = [{"type": kind, "text": item.content}]
        shown.append(plain)
    return shown


def _messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Items as chat messages: calls join the assistant's message before them."""
    built: list[dict[str, Any]] = []
    thinking: str | None = None
    for i, item in enumerate(items):
        param = f"input[{i}]"
        if item.type == "message":
            message = _message(item, param)
            if message["role"] == "assistant" and thinking:
                message["reasoning_content"], thinking = thinking, None
            built.append(message)
        elif item.type == "function_call":
            _join_call(built, item, param, thinking)
            thinking = None
        elif item.type == "function_call_output":
            built.append(_output(item, param))
        elif item.type == "reasoning":
            thinking = _parts(item.content, param) or _parts(item.summary, param) or None
        else:
            raise InvalidRequestError(
                f"input items of type {item.type!r} are not supported", param=f"{param}.type"
            )
    return built


def _message(item: InputItem, param: str) -> dict[str, Any]:
    if item.role is None:
        raise InvalidRequestError("a message has no role", param=f"{param}.role")
    if item.content is None:
        raise InvalidRequestError("a message has no content", param=f"{param}.content")
    return {"role": item.role, "content": _parts(item.content, f"{param}.content")}


def _parts(content: str | list[InputPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [p for p in content if p.type in ("summary_text", "reasoning_text")]
    refuse_media([p for p in content if p not in texts], param)
    return "".join(part.text or part.refusal or "" for part in content)


def _join_call(
    built: list[dict[str, Any]], item: InputItem, param: str, thinking: str | None
) -> None:
    if not item.name or not item.call_id:
        raise InvalidRequestError("a function_call has name and call_id", param=param)
    if not built or built[-1]["role"] != "assistant":
        built.append({"role": "assistant", "content": None})
    if thinking:
        built[-1]["reasoning_content"] = thinking
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    call = {"id": item.call_id, "type": "function", "function": function}
    built[-1].setdefault("tool_calls", []).append(call)


def _output(item: InputItem, param: str) -> dict[str, Any]:
    if not item.call_id or item.output is None:
        raise InvalidRequestError("a function_call_output has call_id and output", param=param)
    text = _parts(item.output, f"{param}.output")
    return {"role": "tool", "tool_call_id": item.call_id, "content": text}


def _render(view: View, body: ResponseBody, messages: list[dict[str, Any]]) -> PreparedChat:
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    prepared = prepare_chat(
        view.chat,
        [*system, *messages],
        tools=_tools(body),
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )
    skipped = [tool.type for tool in body.tools or () if tool.type != "function"]
    said = [f"the tool {name!r} is not supported and was left out" for name in skipped]
    prepared.warnings = (*prepared.warnings, *said)
    return prepared


def _tools(body: ResponseBody) -> list[dict[str, Any]] | None:
    """The functions. Beside them agents offer tools that OpenAI runs itself, which are left out;
    where there is nothing else, the client wants one of those, and is told."""
    built = []
    given = body.tools or []
    has_functions = any(tool.type == "function" for tool in given)
    for i, tool in enumerate(given):
        if tool.type != "function" and has_functions:
            continue
        if tool.type != "function" or not tool.name:
            what = "a function has no name" if tool.type == "function" else "is not supported"
            raise InvalidRequestError(f"tool {tool.type!r}: {what}", param=f"tools[{i}]")
        function: dict[str, Any] = {"name": tool.name}
        function["parameters"] = tool.parameters or {"type": "object"}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        built.append({"type": "function", "function": function})
    return built or None


def _choice(body: ResponseBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice == "required" and not body.tools:
            raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
        return choice
    if choice.type == "allowed_tools":
        names = [{"function": {"name": t.get("name")}} for t in choice.tools or ()]
        allowed = {"mode": choice.mode or "auto", "tools": names}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if choice.name not in [tool.name for tool in body.tools or ()]:
        raise InvalidRequestError(f"no tool is named {choice.name!r}", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _format(body: ResponseBody) -> dict[str, Any] | None:
    fmt = body.text.format if body.text is not None else None
    if fmt is None or fmt.type == "text":
        return None
    if fmt.type == "json_object":
        return {"type": "json_object"}
    if fmt.schema is None:
        raise InvalidRequestError("text.format has no schema", param="text.format.schema")
    inner = {
        "name": fmt.name or "response",
        "schema": fmt.schema,
        "strict": fmt.strict is not False,
    }
    return {"type": "json_schema", "json_schema": inner}


class Output:
    """The output items as they grow; each change is also an event."""

    def __init__(self, job: Job, view: View) -> None:
        self.job = job
        self.view = view
        self.choice = Choice(0, job.prepared.parser)
        self.items: list[dict[str, Any]] = []
        self.usage = Usage()
        self._sequence = 0
        self._logprobs: list[dict[str, Any]] = []
        self._closing: dict[str, Any] = {}

    # -- events ------------------------------------------------------------------------------

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event, numbered."""
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(body))

    def begin(self) -> bytes:
        """created and in_progress, the first time."""
        if self._sequence:
            return b""
        response = self.body("in_progress")
        return self.event("response.created", response=response) + self.event(
            "response.in_progress", response=response
        )

    def more(self, event: TokenEvent) -> dict[str, Any]:
        """What llama-server's clients asked to be told beside the usual."""
        pace = self.job.pace
        if pace is None:
            return {}
        more = pace.more(event)
        if event.is_last and event.usage is not None and self.job.body.timings_per_token:
            total = generate.timings_body(event.usage, event.timings or RequestTimings())
            self._closing = {"timings": total}
        return more

    def read(self, event: TokenEvent) -> bytes:
        """in_progress once more, for the client that wants to hear how far its prompt was read."""
        read = event.progress
        if read is None or read.n_computed == read.n_cached or not self.job.body.return_progress:
            return b""  # the first one goes with what begin() sends
        return self.event("response.in_progress", response=self.body("in_progress"))

    def take(self, event: TokenEvent) -> bytes:
        """The events of one engine event."""
        self._logprobs = [_logprob(p) for p in event.logprobs or ()]
        chunks = [self._delta(delta) for delta in self.choice.take(event)]
        if event.is_last and event.usage is not None:
            self.usage = event.usage
        if event.finish_reason is not None:
            if not self.items:
                chunks.append(self._open_message())
            chunks.append(self._close())
        return b"".join(chunks)

    def end(self) -> bytes:
        """completed, or incomplete when the budget ended first."""
        status = self.status()
        last = self.event(f"response.{status}", response=self.body(status))
        return generate.with_more(last, self._closing)

    def fail(self, failed: Problem) -> bytes:
        """The last event of an answer that broke."""
        response = self.body("failed")
        response["error"] = {"code": "server_error", "message": failed.message}
        return self.begin() + self.event("response.failed", response=response)

    def _delta(self, delta: Any) -> bytes:
        if isinstance(delta, ContentDelta):
            return self._text(delta.text)
        if isinstance(delta, ReasoningDelta):
            return self._thinking(delta.text)
        if isinstance(delta, ToolCallStart):
            return self._call(delta)
        item = self.items[-1]
        item["arguments"] += delta.fragment
        return self.event(
            "response.function_call_arguments.delta", **self._where(), delta=delta.fragment
        )

    def _text(self, text: str) -> bytes:
        begun = b"" if self._is_open("message") else self._close() + self._open_message()
        part = self.items[-1]["content"][0]
        part["text"] += text
        if self.job.wants_logprobs:
            part["logprobs"] += self._logprobs
        logprobs, self._logprobs = self._logprobs, []
        return begun + self.event(
            "response.output_text.delta",
            **self._where(),
            content_index=0,
            delta=text,
            logprobs=logprobs if self.job.wants_logprobs else [],
        )

    def _thinking(self, text: str) -> bytes:
        begun = b""
        if not self._is_open("reasoning"):
            item = {"type": "reasoning", "summary": [], "content": []}
            begun = self._close() + self._open(item, "rs_")
            part = {"type": "reasoning_text", "text": ""}
            self.items[-1]["content"].append(part)
            begun += self.event(
                "response.content_part.added", **self._where(), content_index=0, part=part
            )
        self.items[-1]["content"][0]["text"] += text
        return begun + self.event(
            "response.reasoning_text.delta", **self._where(), content_index=0, delta=text
        )

    def _call(self, delta: ToolCallStart) -> bytes:
        item = {
            "type": "function_call",
            "call_id": delta.id,
            "name": delta.name,
            "arguments": "",
        }
        return self._close() + self._open(item, "fc_")

    def _open_message(self) -> bytes:
        item = {"type": "message", "role": "assistant", "content": []}
        opened = self._open(item, "msg_")
        part: dict[str, Any] = {
            "type": "output_text",
            "text": "",
            "annotations": [],
            "logprobs": [],
        }
        self.items[-1]["content"].append(part)
        return opened + self.event(
            "response.content_part.added", **self._where(), content_index=0, part=part
        )

    def _open(self, item: dict[str, Any], prefix: str) -> bytes:
        opened = {"id": prefix + secrets.token_hex(12), "status": "in_progress", **item}
        self.items.append(opened)
        return self.event(
            "response.output_item.added", output_index=len(self.items) - 1, item=opened
        )

    def _is_open(self, kind: str) -> bool:
        return bool(self.items) and (
            self.items[-1]["type"] == kind and self.items[-1]["status"] == "in_progress"
        )

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _close(self) -> bytes:
        """End the open item, if any."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return b""
        item = self.items[-1]
        done = b""
        if item["type"] == "function_call":
            done = self.event(
                "response.function_call_arguments.done",
                **self._where(),
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            done = self._close_part(item)
        is_cut = self.choice.finish is FinishReason.LENGTH
        item["status"] = "incomplete" if is_cut else "completed"
        return done + self.event(
            "response.output_item.done", output_index=len(self.items) - 1, item=item
        )

    def _close_part(self, item: dict[str, Any]) -> bytes:
        part, where = item["content"][0], {**self._where(), "content_index": 0}
        if item["type"] == "reasoning":
            done = self.event("response.reasoning_text.done", **where, text=part["text"])
        else:
            done = self.event(
                "response.output_text.done",
                **where,
                text=part["text"],
                logprobs=part["logprobs"],
            )
        return done + self.event("response.content_part.done", **where, part=part)

    # -- the whole ---------------------------------------------------------------------------

    def status(self) -> str:
        return "incomplete" if self.choice.finish is FinishReason.LENGTH else "completed"

    def body(self, status: str) -> dict[str, Any]:
        """The response object."""
        job, body, sampling = self.job, self.job.body, self.job.request.sampling
        is_over = status != "in_progress"
        built: dict[str, Any] = {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self.view.name,
            "output": self.items if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": msgspec.to_builtins(body.reasoning)
            if body.reasoning
            else {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": _shown_text(body),
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown_tool(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if is_over else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        choice = self.choice
        warnings = [*job.prepared.warnings, *choice.warnings, *choice.parser.warnings]
        if warnings:
            built["warnings"] = warnings
        return built

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.n_prompt,
            "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
            "output_tokens": usage.n_output,
            "output_tokens_details": {"reasoning_tokens": self.choice.n_reasoning},
            "total_tokens": usage.n_prompt + usage.n_output,
        }

    def messages(self) -> list[dict[str, Any]]:
        """The output as the chat message that the next response continues."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for item in self.items:
            if item["type"] == "message":
                message["content"] = (message["content"] or "") + item["content"][0]["text"]
            elif item["type"] == "reasoning":
                message["reasoning_content"] = item["content"][0]["text"]
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return [message]


def _logprob(entry: Any) -> dict[str, Any]:
    built = generate.chat_logprob(entry)
    built.pop("id")
    for top in built["top_logprobs"]:
        top.pop("id")
    return built


def _shown_text(body: ResponseBody) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"format": {"type": "text"}}
    fmt = body.text.format
    shown: dict[str, Any] = {"type": fmt.type}
    if fmt.type == "json_schema":
        shown |= {
            "name": fmt.name or "response",
            "schema": fmt.schema,
            "strict": fmt.strict is not False,
            "description": fmt.description,
        }
    return {"format": shown}


def _shown_tool(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict is not False,
    }


def _store(server: Server, call: Call, job: Job, output: Output, body: dict[str, Any]) -> None:
    if job.body.store is False:
        return
    server.responses.put(
        body,
        input_items=list(job.input_items),
        messages=[*job.messages, *output.messages()],
        owner=call.key,
    )


async def _whole(server: Server, call: Call, view: View, job: Job) -> None:
    output = Output(job, view)
    async for event in generate.events(server, call, view, job.request):
        output.take(event)
    body = output.body(output.status())
    _store(server, call, job, output, body)
    await call.json(body)


async def _stream(server: Server, call: Call, view: View, job: Job) -> None:
    output = Output(job, view)
    async with server.streaming(call, output.fail) as stream:

        def render(event: TokenEvent) -> bytes:
            chunk = output.begin() + (output.read(event) if event.progress else output.take(event))
            return generate.with_more(chunk, output.more(event))

        direct = stream.direct(render)
        async for event in generate.events(server, call, view, job.request, direct):
            chunk = render(event)
            if chunk:
                await stream.write(chunk)
        _store(server, call, job, output, output.body(output.status()))
        await stream.write(output.end())
        await stream.end()


def _id(call: Call, suffix: str = "") -> str:
    return call.path.removeprefix("/v1/responses/").removesuffix(suffix)


def _not_found(id: str) -> Problem:
    return Problem(404, f"the response {id[:100]!r} is not stored here", code="not_found")


async def retrieve(server: Server, call: Call) -> None:
    """A stored response."""
    stored = server.responses.get(_id(call), call.key)
    if stored is None:
        raise _not_found(_id(call))
    await call.json(stored.body)


async def delete(server: Server, call: Call) -> None:
    """Forget a stored response."""
    id = _id(call)
    if not server.responses.delete(id, call.key):
        raise _not_found(id)
    await call.json({"id": id, "object": "response", "deleted": True})


async def input_items(server: Server, call: Call) -> None:
    """What a stored response was asked, newest first."""
    id = _id(call, "/input_items")
    stored = server.responses.get(id, call.key)
    if stored is None:
        raise _not_found(id)
    items = list(reversed(stored.input_items))
    await call.json(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": False,
        }
    )
