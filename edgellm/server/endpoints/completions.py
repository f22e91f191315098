"""``POST /v1/completions``: prompts as text or token ids, several at once, echo and logprobs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edgellm.errors import InvalidRequestError
from edgellm.metrics import RequestTimings
from edgellm.request import (
    FinishReason,
    Overflow,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from edgellm.server import generate
from edgellm.server.core import Server, View
from edgellm.server.http import Call, decode, encode
from edgellm.server.sse import DONE, Stream
from edgellm.server.wire.common import (
    explicit_grammar,
    first_limit,
    format_grammar,
    sampling_params,
)
from edgellm.server.wire.openai import CompletionBody

BODY: Final = msgspec.json.Decoder(CompletionBody)
# OpenAI's own default for this endpoint.
DEFAULT_MAX_TOKENS: Final = 16
MAX_PROMPTS: Final = 1024

Prompt = str | tuple[int, ...]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one call, ready to run."""

    requests: tuple[Request, ...]
    n: int
    id: str
    created: int
    echo: bool
    echo_texts: tuple[str, ...]
    wants_logprobs: bool
    wants_usage: bool
    wants_timings: bool
    only_prompt: bool
    """max_tokens 0: the one token that must be generated is not shown."""
    pace: generate.Pace | None = None


class Choice:
    """One choice: its text and the four parallel lists of ``logprobs``."""

    def __init__(self, index: int, echo: str) -> None:
        self.index = index
        self.parts: list[str] = []
        self.finish: FinishReason | None = None
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []
        self.echo = echo
        self._offset = 0

    def take(self, event: TokenEvent, *, only_prompt: bool) -> str:
        """Add an event; the text it shows (the echoed prompt with the first)."""
        text, self.echo = self.echo, ""
        if event.prompt_logprobs:
            self._add_prompt(event.prompt_logprobs, text)
        if not only_prompt:
            text += event.text
            self._add_all(event.logprobs or ())
        if event.finish_reason is not None:
            self.finish = event.finish_reason
        self.parts.append(text)
        return text

    def _add_prompt(self, entries: Sequence[TokenLogprob | None], text: str) -> None:
        """The prompt's tokens; of the first, which has no probability, the text is what is left."""
        rest = sum(len(generate.token_text(e.token_bytes)) for e in entries if e is not None)
        self._add(None, text[: max(len(text) - rest, 0)])
        self._add_all(entries[1:])

    def _add_all(self, entries: Any) -> None:
        for entry in entries:
            self._add(entry)

    def _add(self, entry: TokenLogprob | None, text: str = "") -> None:
        if entry is not None:
            text = generate.token_text(entry.token_bytes)
        self.tokens.append(text)
        self.token_logprobs.append(None if entry is None else entry.logprob)
        top = None
        if entry is not None:
            top = {generate.token_text(t.token_bytes): t.logprob for t in entry.top}
        self.top_logprobs.append(top)
        self.text_offset.append(self._offset)
        self._offset += len(text)

    def logprobs(self) -> dict[str, Any]:
        """The lists so far, which are emptied (a streamed chunk carries its own)."""
        body = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs = [], []
        self.top_logprobs, self.text_offset = [], []
        return body

    def finish_reason(self) -> str:
        """OpenAI's name for why this choice ended."""
        return generate.finish_name(self.finish or FinishReason.LENGTH)


async def completions(server: Server, call: Call) -> None:
    """Continue one or several prompts, streamed or whole."""
    body = decode(BODY, await server.body(call))
    async with server.lease(call, body.model) as view:
        job = await prepare(server, call, view, body)
        if body.stream:
            await _stream(server, call, view, job)
        else:
            await call.json(await _whole(server, call, view, job))


async def prepare(server: Server, call: Call, view: View, body: CompletionBody) -> Job:
    """Everything that can be wrong, before anything runs."""
    view.need_generation()
    prompts = prompts_of(view, body.prompt)
    texts = await _echo_texts(view, prompts) if body.echo else ()
    if body.suffix:
        prompts = [_infill(view, p, body.suffix) for p in prompts]
    sampling = await _sampling(server, view, body)
    options = body.stream_options
    # The whole prompt is computed, and nothing of it may slide away.
    scoring = (
        {"overflow": Overflow.ERROR, "cache_prompt": False} if sampling.prompt_logprobs else {}
    )
    return Job(
        requests=tuple(
            generate.engine_request(
                server, call, view, body, prompt=prompt, sampling=sampling, **scoring
            )
            for prompt in prompts
        ),
        n=sampling.n,
        id="cmpl-" + secrets.token_hex(12),
        created=int(time.time()),
        echo=bool(body.echo),
        echo_texts=tuple(texts),
        wants_logprobs=sampling.logprobs is not None,
        wants_usage=bool(options and options.include_usage),
        wants_timings=body.timings is not False,
        only_prompt=body.max_tokens == 0,
        pace=generate.pace_of(body),
    )


async def _sampling(server: Server, view: View, body: CompletionBody) -> SamplingParams:
    more: dict[str, Any] = {}
    if body.logprobs is not None and body.logprobs is not False:
        # true is the chat endpoint's way to ask: the chosen token's alone.
        more["logprobs"] = 0 if body.logprobs is True else body.logprobs
        more["prompt_logprobs"] = bool(body.echo)
    if body.best_of is not None:
        more["best_of"] = body.best_of
        if body.stream and body.best_of > (body.n or 1):
            raise InvalidRequestError("best_of cannot be streamed", param="best_of")
    # max_tokens 0 (scoring or warming a prompt): the engine makes one token that nobody is shown.
    max_tokens = max_tokens_of(body)
    return sampling_params(
        body,
        server.options.sampling,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        logit_bias=await generate.logit_bias(body, view),
        grammar=explicit_grammar(body) or format_grammar(body.response_format),
        **more,
    )


def max_tokens_of(body: CompletionBody) -> int | None:
    """max_tokens, else llama-server's n_predict (-1: no limit), else OpenAI's 16."""
    if body.max_tokens is None and body.n_predict is None:
        return DEFAULT_MAX_TOKENS
    return first_limit(body.max_tokens, n_predict=body.n_predict)


def prompts_of(view: View, prompt: Any, param: str = "prompt") -> list[Prompt]:
    """The prompts of a body: one text, one list of token ids, or a list of either."""
    if isinstance(prompt, str):
        generate.check_prompt(prompt, param)
        return [prompt]
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param=param)
    if all(isinstance(item, int) for item in prompt):
        return [view.check_ids(prompt, param)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts in one call", param=param)
    return [_one_prompt(view, item, f"{param}[{i}]") for i, item in enumerate(prompt)]


def _one_prompt(view: View, item: Any, param: str) -> Prompt:
    if isinstance(item, int):
        raise InvalidRequestError("token ids and texts are mixed in one prompt", param=param)
    if isinstance(item, str):
        generate.check_prompt(item, param)
        return item
    if not item:
        raise InvalidRequestError("the prompt is empty", param=param)
    return view.check_ids(item, param)


async def _echo_texts(view: View, prompts: list[Prompt]) -> list[str]:
    return [p if isinstance(p, str) else await view.engine.detokenize(list(p)) for p in prompts]


def _infill(view: View, prompt: Prompt, suffix: str) -> Prompt:
    """The prompt before, the suffix after: written with the model's own markers."""
    marks = view.info.infill
    if marks is None:
        raise InvalidRequestError(
            f"{view.name} has no fill-in-the-middle tokens, so suffix cannot be used",
            param="suffix",
        )
    if not isinstance(prompt, str):
        raise InvalidRequestError("suffix needs the prompt as text", param="suffix")
    return f"{marks.prefix}{prompt}{marks.suffix}{suffix}{marks.middle}"


def _choices(job: Job) -> list[list[Choice]]:
    """Choices by prompt; the index counts through all prompts."""
    return [
        [Choice(i * job.n + k, job.echo_texts[i] if job.echo else "") for k in range(job.n)]
        for i in range(len(job.requests))
    ]


async def _whole(server: Server, call: Call, view: View, job: Job) -> dict[str, Any]:
    choices = _choices(job)
    usage, timings = Usage(), RequestTimings()
    sources = [generate.events(server, call, view, request) for request in job.requests]
    async for place, event in generate.merged(sources):
        choices[place][event.index].take(event, only_prompt=job.only_prompt)
        if event.is_last:
            usage = generate.add_usage(usage, event.usage)
            timings = event.timings or timings
    body: dict[str, Any] = {
        **_base(view, job),
        "choices": [
            {
                "index": choice.index,
                "text": "".join(choice.parts),
                "logprobs": choice.logprobs() if job.wants_logprobs else None,
                "finish_reason": choice.finish_reason(),
            }
            for group in choices
            for choice in group
        ],
        "usage": _usage(job, usage),
    }
    if job.wants_timings:
        body["timings"] = generate.timings_body(usage, timings)
    return body


def _usage(job: Job, usage: Usage) -> dict[str, Any]:
    if job.only_prompt:
        usage = msgspec.structs.replace(usage, n_output=0)
    return generate.usage_body(usage)


def _base(view: View, job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": "text_completion",
        "created": job.created,
        "model": view.name,
        "system_fingerprint": view.fingerprint,
    }


async def _stream(server: Server, call: Call, view: View, job: Job) -> None:
    async with server.streaming(call, generate.error_event) as stream:
        await _stream_events(server, call, stream, view, job)


async def _stream_events(server: Server, call: Call, stream: Stream, view: View, job: Job) -> None:
    choices = _choices(job)
    writer = ChunkWriter(view, job)
    usage, timings = Usage(), RequestTimings()
    # Several prompts take turns in a queue; one alone can be written as it comes.
    direct = stream.direct(lambda event: writer.event(choices[0][event.index], event))
    direct = direct if len(job.requests) == 1 else None
    sources = [generate.events(server, call, view, request, direct) for request in job.requests]
    async for place, event in generate.merged(sources):
        chunk = writer.event(choices[place][event.index], event)
        if chunk:
            await stream.write(chunk)
        if event.is_last:
            usage = generate.add_usage(usage, event.usage)
            timings = event.timings or timings
    end = DONE
    if job.wants_usage:
        body = {**_base(view, job), "choices": [], "usage": _usage(job, usage)}
        if job.wants_timings:
            body["timings"] = generate.timings_body(usage, timings)
        end = b"data: " + encode(body) + b"\n\n" + DONE
    await stream.write(end)
    await stream.end()


class ChunkWriter:
    """The chunks of a streamed completion. What every chunk repeats is encoded once."""

    __slots__ = ("_head", "_job", "_tail")

    def __init__(self, view: View, job: Job) -> None:
        self._job = job
        self._head = b"data: " + encode(_base(view, job))[:-1] + b',"choices":[{"index":'
        self._tail = (b'}],"usage":null}' if job.wants_usage else b"}]}") + b"\n\n"

    def event(self, choice: Choice, event: TokenEvent) -> bytes:
        """The chunks of one event; the end of a choice is a chunk of its own."""
        more = self._job.pace.more(event) if self._job.pace is not None else {}
        if event.progress is not None:
            return generate.with_more(self._chunk(choice, "", b"null"), more) if more else b""
        text = choice.take(event, only_prompt=self._job.only_prompt)
        chunks = b""
        if text or (self._job.wants_logprobs and choice.tokens):
            chunks = self._chunk(choice, text, b"null")
        if event.finish_reason is not None:
            chunks += self._chunk(choice, "", encode(choice.finish_reason()))
            chunks = self._with_timings(chunks, event)
        return generate.with_more(chunks, more)

    def _with_timings(self, chunk: bytes, event: TokenEvent) -> bytes:
        """The last chunk carries the timings where no chunk with the usage follows."""
        job = self._job
        alone = len(job.requests) == 1 and job.wants_timings and not job.wants_usage
        if not alone or event.usage is None:
            return chunk
        timings = generate.timings_body(event.usage, event.timings or RequestTimings())
        return generate.with_more(chunk, {"timings": timings})

    def _chunk(self, choice: Choice, text: str, finish: bytes) -> bytes:
        logprobs = b"null"
        if self._job.wants_logprobs and choice.tokens:
            logprobs = encode(choice.logprobs())
        return b'%s%d,"text":%s,"logprobs":%s,"finish_reason":%s%s' % (
            self._head,
            choice.index,
            encode(text),
            logprobs,
            finish,
            self._tail,
        )
