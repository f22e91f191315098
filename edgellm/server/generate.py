"""From a prepared request to its events: what all generating endpoints share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from edgellm.engine.pending import Direct
from edgellm.errors import InvalidRequestError
from edgellm.metrics import RequestTimings
from edgellm.request import (
    FinishReason,
    Progress,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from edgellm.server.core import Server, View
from edgellm.server.errors import Problem, openai_body, problem_of_info
from edgellm.server.http import Call, encode
from edgellm.server.wire.common import SamplingFields, priority_of


def engine_request(
    server: Server,
    call: Call,
    view: View,
    fields: SamplingFields,
    *,
    prompt: str | tuple[int, ...],
    sampling: SamplingParams,
    **more: Any,
) -> Request:
    """The engine's request for one prompt of a body; ``more`` are further fields of it."""
    wants_progress = bool(fields.return_progress or fields.timings_per_token)
    common: dict[str, Any] = {
        "overflow": server.options.overflow,
        "cache_prompt": fields.cache_prompt is not False,
        "wants_progress": wants_progress and getattr(fields, "stream", None) is True,
    }
    return Request(
        id=call.next_id(),
        prompt=prompt,
        sampling=sampling,
        priority=priority_of(fields, server.options.priority),
        model=view.name,
        client=call.key or call.client,
        **(common | more),
    )


class Pace:
    """What a stream's chunks say of its prompt and its speed, where the client asked for it
    (llama-server's ``return_progress`` and ``timings_per_token``)."""

    __slots__ = ("_fields", "_n_output", "_read")

    def __init__(self, fields: SamplingFields) -> None:
        self._fields = fields
        self._read: dict[str, tuple[Progress, float]] = {}
        """By request: how far its prompt was read, and when that was."""
        self._n_output: dict[str, int] = {}

    def more(self, event: TokenEvent) -> dict[str, Any]:
        """What the chunk of this event carries beside the usual."""
        now, key = time.monotonic(), event.request_id
        if event.progress is not None:
            self._read[key] = event.progress, now
            return self._progress(event.progress) if self._fields.return_progress else {}
        n_output = self._n_output[key] = self._n_output.get(key, 0) + len(event.token_ids)
        if not self._fields.timings_per_token or event.finish_reason or key not in self._read:
            return {}
        read, since = self._read[key]
        usage = Usage(n_prompt=read.n_prompt, n_output=n_output, n_cached=read.n_cached)
        so_far = RequestTimings(ttft_s=read.seconds, e2e_s=read.seconds + now - since)
        return {"timings": timings_body(usage, so_far)}

    @staticmethod
    def _progress(read: Progress) -> dict[str, Any]:
        """server-task.cpp, result_prompt_progress::to_json."""
        body = {
            "total": read.n_prompt,
            "cache": read.n_cached,
            "processed": read.n_computed,
            "time_ms": round(read.seconds * 1e3),
        }
        return {"prompt_progress": body}


def pace_of(fields: SamplingFields) -> Pace | None:
    """A Pace where the client wants one, for the others nothing."""
    wants = fields.return_progress or fields.timings_per_token
    return Pace(fields) if wants else None


def with_more(chunk: bytes, more: Mapping[str, Any]) -> bytes:
    """The last of ``chunk``'s events with further fields."""
    if not more or not chunk:
        return chunk
    return chunk.removesuffix(b"}\n\n") + b"," + encode(more)[1:] + b"\n\n"


async def events(
    server: Server, call: Call, view: View, request: Request, direct: Direct | None = None
) -> AsyncGenerator[TokenEvent, None]:
    """The engine's events, counted; an error event is raised. ``direct`` is as in
    :meth:`Engine.generate`: it is shown plain text only, never an event that ends something.

    Closing this generator (or cancelling the task) ends the sequence within one step.
    """
    observer = server.metrics.observe(view.name, request.priority)

    def counted(event: TokenEvent) -> bool:
        if not _is_plain(event) or direct is None or not direct(event):
            return False
        observer.event(event)
        return True

    taken = None if direct is None else counted
    async with aclosing(view.engine.generate(request, taken)) as generated:
        async for event in generated:
            if event.error is not None:
                raise problem_of_info(event.error)
            if event.finish_reason is FinishReason.CANCELLED:
                # Somebody else ended it: what the client has must not look complete.
                raise Problem(
                    503, "the request was cancelled", type="server_error", code="cancelled"
                )
            if event.progress is not None:
                yield event
                continue
            observer.event(event)
            if event.is_last:
                _log(call, event)
            yield _without_end(event, view) if event.logprobs else event


def _is_plain(event: TokenEvent) -> bool:
    """Text that came in the middle of an answer, and nothing else."""
    if event.finish_reason is not None or event.logprobs is not None:
        return False
    return event.warning is None and event.progress is None


def _without_end(event: TokenEvent, view: View) -> TokenEvent:
    """``event`` without the log-probability of the token that only ends the answer: the entries
    then spell the text."""
    entries = event.logprobs or ()
    if event.finish_reason is not None and entries and entries[-1].token_id in view.info.eog_ids:
        return msgspec.structs.replace(event, logprobs=entries[:-1])
    return event


def _log(call: Call, event: TokenEvent) -> None:
    log, usage, timings = call.log, event.usage, event.timings
    if usage is not None:
        log["n_prompt"] = log.get("n_prompt", 0) + usage.n_prompt
        log["n_output"] = log.get("n_output", 0) + usage.n_output
        log["n_cached"] = log.get("n_cached", 0) + usage.n_cached
    if timings is not None and timings.ttft_s is not None:
        log["ttft_ms"] = round(timings.ttft_s * 1e3, 1)


def error_event(failed: Problem) -> bytes:
    """OpenAI's last event of an answer that broke; no [DONE] follows it."""
    return b"data: " + encode(openai_body(failed)) + b"\n\n"


async def merged(
    sources: Sequence[AsyncGenerator[TokenEvent, None]],
) -> AsyncIterator[tuple[int, TokenEvent]]:
    """Events of several requests as they come, each with its request's place in ``sources``."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, TokenEvent | BaseException | None]] = asyncio.Queue(64)
    tasks = [asyncio.create_task(_pump(i, source, queue)) for i, source in enumerate(sources)]
    left = len(tasks)
    try:
        while left:
            place, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    place: int,
    source: AsyncGenerator[TokenEvent, None],
    queue: asyncio.Queue[tuple[int, TokenEvent | BaseException | None]],
) -> None:
    try:
        async with aclosing(source) as opened:
            async for event in opened:
                await queue.put((place, event))
    except Exception as error:  # noqa: BLE001 (handed over, and raised where it is awaited)
        await queue.put((place, error))
        return
    await queue.put((place, None))


async def logit_bias(fields: SamplingFields, view: View) -> dict[int, float] | None:
    """``logit_bias`` by token id: OpenAI's object, or llama-server's pairs with ids or texts."""
    if not fields.logit_bias:
        return None
    pairs = fields.logit_bias
    items: list[tuple[int | str, float | bool]] = (
        list(pairs.items()) if isinstance(pairs, dict) else list(pairs)
    )
    built: dict[int, float] = {}
    for token, value in items:
        bias = -100.0 if value is False else float(value)
        if not isinstance(pairs, dict):
            # llama-server's pairs take any number; beyond 100 a token is certain, or never comes.
            bias = min(max(bias, -100.0), 100.0)
        if isinstance(token, int) or token.lstrip("-").isdigit():
            built[view.check_ids([int(token)], "logit_bias")[0]] = bias
        else:
            ids = await view.engine.tokenize(token, add_special=False)
            built.update(dict.fromkeys(ids, bias))
    return built


def usage_body(usage: Usage, *, n_reasoning: int = 0) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_output,
        "total_tokens": usage.n_prompt + usage.n_output,
        "prompt_tokens_details": {"cached_tokens": usage.n_cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": n_reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.n_accepted,
            "rejected_prediction_tokens": usage.n_drafted - usage.n_accepted,
        },
    }


def add_usage(a: Usage, b: Usage | None) -> Usage:
    """The sum of two requests' counts."""
    if b is None:
        return a
    return Usage(
        n_prompt=a.n_prompt + b.n_prompt,
        n_output=a.n_output + b.n_output,
        n_cached=a.n_cached + b.n_cached,
        n_drafted=a.n_drafted + b.n_drafted,
        n_accepted=a.n_accepted + b.n_accepted,
        n_slid=a.n_slid + b.n_slid,
    )


def timings_body(usage: Usage, timings: RequestTimings) -> dict[str, Any]:
    """llama-server's ``timings`` object (server-task.cpp, result_timings::to_json), and ours.

    ``predicted_ms`` runs from the first token: its rate counts the n - 1 tokens after it.
    """
    n_new = usage.n_prompt - usage.n_cached
    ttft = timings.ttft_s if timings.ttft_s is not None else timings.e2e_s
    prompt_ms = max(ttft - timings.queue_s, 0.0) * 1e3
    predicted_ms = max(timings.e2e_s - ttft, 0.0) * 1e3
    n_after = max(usage.n_output - 1, 0)
    return {
        "cache_n": usage.n_cached,
        "prompt_n": n_new,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / n_new if n_new else 0.0,
        "prompt_per_second": n_new / prompt_ms * 1e3 if prompt_ms > 0 else 0.0,
        "predicted_n": usage.n_output,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / n_after if n_after else 0.0,
        "predicted_per_second": n_after / predicted_ms * 1e3 if predicted_ms > 0 else 0.0,
        "draft_n": usage.n_drafted,
        "draft_n_accepted": usage.n_accepted,
        "queue_ms": timings.queue_s * 1e3,
        "ttft_ms": ttft * 1e3,
        "e2e_ms": timings.e2e_s * 1e3,
    }


def token_text(data: bytes) -> str:
    """A token's bytes as text; half a character shows as U+FFFD."""
    return data.decode("utf-8", errors="replace")


def chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    """One entry of a chat choice's ``logprobs.content``."""
    return {
        "id": entry.token_id,
        "token": token_text(entry.token_bytes),
        "logprob": entry.logprob,
        "bytes": list(entry.token_bytes),
        "top_logprobs": [
            {
                "id": t.token_id,
                "token": token_text(t.token_bytes),
                "logprob": t.logprob,
                "bytes": list(t.token_bytes),
            }
            for t in entry.top
        ],
    }


def finish_name(reason: FinishReason, n_calls: int = 0) -> str:
    """OpenAI's ``finish_reason``."""
    if reason is FinishReason.STOP:
        return "tool_calls" if n_calls else "stop"
    return "length" if reason is FinishReason.LENGTH else "stop"


def check_prompt(text: str, param: str) -> None:
    """Refuse an empty prompt."""
    if not text:
        raise InvalidRequestError("the prompt is empty", param=param)
