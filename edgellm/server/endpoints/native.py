"""llama-server's own ``/completion``, ``/infill`` and ``/embedding``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edgellm.errors import InvalidRequestError
from edgellm.metrics import RequestTimings
from edgellm.request import (
    FinishReason,
    Pooling,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from edgellm.server import generate
from edgellm.server.core import Server, View
from edgellm.server.endpoints.embeddings import count_tokens, embed, inputs_of
from edgellm.server.http import Call, decode, encode
from edgellm.server.wire.common import (
    explicit_grammar,
    format_grammar,
    sampling_params,
)
from edgellm.server.wire.native import CompletionBody, EmbeddingBody, InfillBody, PromptObject

COMPLETION: Final = msgspec.json.Decoder(CompletionBody)
INFILL: Final = msgspec.json.Decoder(InfillBody)
EMBEDDING: Final = msgspec.json.Decoder(EmbeddingBody)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A native completion ready to run."""

    requests: tuple[Request, ...]
    is_many: bool
    """The prompts were a list, so the answers are one."""
    fields: tuple[str, ...]
    wants_tokens: bool
    shows_probs: bool
    pace: generate.Pace | None = None


async def completion(server: Server, call: Call) -> None:
    """Continue one prompt or several."""
    body = decode(COMPLETION, await server.body(call))
    async with server.lease(call, body.model) as view:
        view.need_generation()
        prompts, is_many = await _prompts(view, body.prompt)
        probs = body.n_probs if body.n_probs is not None else body.logprobs
        n_probs = 0 if probs is None or probs is False else int(probs)
        sampling = await _sampling(server, view, body, _limit(body), n_probs)
        job = _job(server, call, view, body, prompts=prompts, is_many=is_many, sampling=sampling)
        await _run(server, call, view, job, bool(body.stream))


async def infill(server: Server, call: Call) -> None:
    """Fill in between a prefix and a suffix, with other files of the project before them."""
    body = decode(INFILL, await server.body(call))
    async with server.lease(call, body.model) as view:
        view.need_generation()
        marks = view.info.infill
        if marks is None:
            raise InvalidRequestError(
                f"{view.name} has no fill-in-the-middle tokens", param="model"
            )
        extra = "".join(f"{e.filename}\n{e.text}\n\n" for e in body.input_extra or ())
        before = f"{extra}{marks.prefix}{body.input_prefix}"
        prompt = f"{before}{marks.suffix}{body.input_suffix}{marks.middle}{body.prompt}"
        sampling = await _sampling(server, view, body, _limit(body), 0)
        job = _job(server, call, view, body, prompts=[prompt], is_many=False, sampling=sampling)
        await _run(server, call, view, job, bool(body.stream))


def _limit(body: CompletionBody | InfillBody) -> int | None:
    limit = body.n_predict if body.n_predict is not None else body.max_tokens
    return None if limit is None or limit < 0 else limit


async def _sampling(
    server: Server, view: View, body: CompletionBody | InfillBody, limit: int | None, n_probs: int
) -> SamplingParams:
    more: dict[str, Any] = {"logprobs": n_probs} if n_probs else {}
    grammar = explicit_grammar(body)
    if grammar is None and isinstance(body, CompletionBody):
        grammar = format_grammar(body.response_format)
    return sampling_params(
        body,
        server.options.sampling,
        # n_predict 0 evaluates the prompt; one token is made and not shown.
        max_tokens=1 if limit == 0 else limit,
        logit_bias=await generate.logit_bias(body, view),
        grammar=grammar,
        **more,
    )


def _job(
    server: Server,
    call: Call,
    view: View,
    body: CompletionBody | InfillBody,
    *,
    prompts: Sequence[str | tuple[int, ...]],
    is_many: bool,
    sampling: SamplingParams,
) -> Job:
    return Job(
        requests=tuple(
            generate.engine_request(server, call, view, body, prompt=prompt, sampling=sampling)
            for prompt in prompts
        ),
        is_many=is_many,
        fields=tuple(body.response_fields or ()),
        wants_tokens=bool(body.return_tokens),
        shows_probs=isinstance(body, CompletionBody) and bool(body.post_sampling_probs),
        pace=generate.pace_of(body),
    )


async def _prompts(view: View, prompt: Any) -> tuple[list[str | tuple[int, ...]], bool]:
    """The prompts, and whether they were a list of prompts."""
    if isinstance(prompt, str | PromptObject):
        return [_text(prompt)], False
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if any(isinstance(item, int) for item in prompt):
        return [await _mixed(view, prompt)], False
    found = [await _mixed(view, item) if isinstance(item, list) else _text(item) for item in prompt]
    # llama-server answers a list of one prompt as if it stood alone.
    return found, len(found) > 1


def _text(prompt: str | PromptObject) -> str:
    if isinstance(prompt, PromptObject):
        if prompt.multimodal_data:
            raise InvalidRequestError(
                "image input is not supported by this model", param="prompt.multimodal_data"
            )
        prompt = prompt.prompt_string
    generate.check_prompt(prompt, "prompt")
    return prompt


async def _mixed(view: View, items: Sequence[Any]) -> tuple[int, ...]:
    """Token ids with texts between them, as one prompt of ids."""
    ids: list[int] = []
    for item in items:
        if isinstance(item, int):
            ids.append(item)
        elif isinstance(item, str):
            ids += await view.engine.tokenize(item, add_special=not ids)
        else:
            raise InvalidRequestError("a list is mixed with token ids", param="prompt")
    if not ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    return view.check_ids(ids, "prompt")


class Answer:
    """One answer as it grows: of a prompt, or one of the ``n`` of a prompt."""

    def __init__(self, job: Job, request: Request, place: int) -> None:
        self.job = job
        self.request = request
        self.place = place
        self.prompt = ""
        """As text, also when token ids were sent."""
        self.parts: list[str] = []
        self.tokens: list[int] = []
        self.probs: list[dict[str, Any]] = []
        self.finish: FinishReason | None = None
        self.stop: str | None = None
        self.usage = Usage()
        self.timings = RequestTimings()

    def take(self, event: TokenEvent) -> None:
        self.parts.append(event.text)
        self.tokens += event.token_ids
        self.probs += [_prob(p, self.job.shows_probs) for p in event.logprobs or ()]
        if event.finish_reason is not None:
            self.finish, self.stop = event.finish_reason, event.stop
        if event.is_last:
            self.usage = event.usage or self.usage
            self.timings = event.timings or self.timings

    def body(self, view: View, *, is_stream: bool = False) -> dict[str, Any]:
        """The final object (server-task.cpp, server_task_result_cmpl_final)."""
        text = "".join(self.parts)
        kind = "limit" if self.finish is FinishReason.LENGTH else "word" if self.stop else "eos"
        body: dict[str, Any] = {
            "index": self.place,
            "content": "" if is_stream else text,
            "tokens": self.tokens if self.job.wants_tokens and not is_stream else [],
            "id_slot": 0,
            "stop": True,
            "model": view.name,
            "tokens_predicted": self.usage.n_output,
            "tokens_evaluated": self.usage.n_prompt,
            "generation_settings": settings_body(view, self.request.sampling),
            "prompt": self.prompt,
            "has_new_line": "\n" in text,
            "truncated": self.usage.n_slid > 0,
            "stop_type": kind,
            "stopping_word": self.stop or "",
            "tokens_cached": self.usage.n_prompt + self.usage.n_output,
            "timings": generate.timings_body(self.usage, self.timings),
        }
        if self.probs and not is_stream:
            body["completion_probabilities"] = self.probs
        return _chosen(body, self.job.fields)


# The settings of llama-server's samplers that are not here, as they are when they are off
# (server-task.cpp, task_params::to_json), and the order in which tokens are chosen.
_OFF: Final[dict[str, Any]] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.0,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "samplers": ["penalties", "top_k", "typ_p", "top_p", "min_p", "temperature"],
    "lora": [],
}


def settings_body(view: View, sampling: SamplingParams) -> dict[str, Any]:
    """The sampling as llama-server names it."""
    limit = -1 if sampling.max_tokens is None else sampling.max_tokens
    biases: list[dict[str, Any]] = [{"token": t, "bias": b} for t, b in sampling.logit_bias.items()]
    if sampling.ignore_eos:
        # llama-server forbids the end tokens with an infinite bias, which JSON writes as null.
        biases += [{"token": t, "bias": None} for t in view.info.eog_ids]
    return {
        **_OFF,
        "n_predict": limit,
        "max_tokens": limit,
        "seed": 4294967295 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": biases,
        "n_probs": sampling.logprobs or 0,
        "grammar": sampling.grammar.text if sampling.grammar is not None else "",
    }


def _chosen(body: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Only the fields that ``response_fields`` names; ``a/b`` looks inside."""
    if not fields:
        return body
    chosen: dict[str, Any] = {}
    for field in fields:
        value: Any = body
        for part in field.split("/"):
            value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            chosen[field] = value
    return chosen


_MISSING: Final = object()


def _prob(entry: TokenLogprob, as_probs: bool) -> dict[str, Any]:
    value = math.exp if as_probs else float
    name, top = ("prob", "top_probs") if as_probs else ("logprob", "top_logprobs")

    def one(token_id: int, data: bytes, logprob: float) -> dict[str, Any]:
        text = generate.token_text(data)
        return {"id": token_id, "token": text, "bytes": list(data), name: value(logprob)}

    shown = one(entry.token_id, entry.token_bytes, entry.logprob)
    shown[top] = [
        one(t.token_id, t.token_bytes, t.logprob)
        for t in entry.top
        if not as_probs or math.exp(t.logprob) > 0
    ]
    return shown


async def _run(server: Server, call: Call, view: View, job: Job, is_stream: bool) -> None:
    groups = await _answers(view, job)
    sources = [generate.events(server, call, view, request) for request in job.requests]
    if is_stream:
        await _stream(server, call, view, groups, sources)
        return
    async for place, event in generate.merged(sources):
        groups[place][event.index].take(event)
    bodies = [answer.body(view) for group in groups for answer in _shared(group)]
    await call.json(bodies if len(bodies) > 1 or job.is_many else bodies[0])


async def _answers(view: View, job: Job) -> list[list[Answer]]:
    """An empty answer for each of ``n`` of each prompt; the index counts through all."""
    groups: list[list[Answer]] = []
    for request in job.requests:
        n, prompt = request.sampling.n, request.prompt
        group = [Answer(job, request, len(groups) * n + k) for k in range(n)]
        text = prompt if isinstance(prompt, str) else await view.engine.detokenize(list(prompt))
        for answer in group:
            answer.prompt = text
        groups.append(group)
    return groups


def _shared(group: list[Answer]) -> list[Answer]:
    """The answers of one prompt with its counts, which came with the last event of all; of the
    generated tokens each has its own."""
    if len(group) > 1:
        last = max(group, key=lambda answer: answer.usage.n_prompt)
        for answer in group:
            n_output = len(answer.tokens)
            answer.usage = msgspec.structs.replace(last.usage, n_output=n_output)
            answer.timings = last.timings
    return group


async def _stream(
    server: Server, call: Call, view: View, groups: list[list[Answer]], sources: Any
) -> None:
    async with server.streaming(call, generate.error_event) as stream:
        async for place, event in generate.merged(sources):
            answer = groups[place][event.index]
            more = answer.job.pace.more(event) if answer.job.pace is not None else {}
            answer.take(event)
            if event.text or event.logprobs or (event.progress is not None and more):
                partial = _partial(answer, event) | more
                await stream.write(b"data: " + encode(partial) + b"\n\n")
            if event.is_last:
                for ended in _shared(groups[place]):
                    last = ended.body(view, is_stream=True)
                    await stream.write(b"data: " + encode(last) + b"\n\n")
        await stream.end()


def _partial(answer: Answer, event: TokenEvent) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": answer.place,
        "content": event.text,
        "tokens": event.token_ids,
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": len(answer.tokens),
        "tokens_evaluated": 0,
    }
    if event.logprobs:
        shows = answer.job.shows_probs
        body["completion_probabilities"] = [_prob(p, shows) for p in event.logprobs]
    return body


async def embedding(server: Server, call: Call) -> None:
    """``[{"index", "embedding": [[...]]}]``: a list of vectors an input."""
    body = decode(EMBEDDING, await server.body(call))
    given = body.content if body.content is not None else body.input
    if given is None:
        raise InvalidRequestError("content is missing", param="content")
    async with server.lease(call, body.model) as view:
        if view.info.pooling == Pooling.RANK.value:
            raise InvalidRequestError(f"{view.name} is a reranker", param="model")
        inputs = await inputs_of(view, given, "content")
        normalize = body.embd_normalize != -1 and view.info.pooling != Pooling.NONE.value
        result = await embed(server, call, view, inputs, normalize=normalize)
        count_tokens(server, view, result)
        await call.json(
            [{"index": i, "embedding": _rows(view, v)} for i, v in enumerate(result.vectors)]
        )


def _rows(view: View, vector: Sequence[float]) -> list[Sequence[float]]:
    """One row, or without pooling one for each token."""
    size = view.info.n_embd
    if view.info.pooling != Pooling.NONE.value:
        return [vector]
    return [vector[i : i + size] for i in range(0, len(vector), size)]
