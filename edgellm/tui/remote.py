"""A model of a running server, over its OpenAI-compatible API: chat, and what it says of itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec

from edgellm.errors import EdgeLLMError
from edgellm.metrics import EngineStats, RequestTimings
from edgellm.planner.plan import LoadReport, Plan
from edgellm.request import SamplingParams, Usage
from edgellm.tui.http import Http, error_of
from edgellm.tui.ports import Delta, Json, ServerLostError

# Ours and theirs: only what differs from the default is sent, so that any server understands.
SENT: Final = (
    "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty",
    "frequency_penalty", "seed", "max_tokens",
)  # fmt: skip


class RemoteEndpoint:
    """Implements :class:`edgellm.tui.ports.Endpoint` over HTTP."""

    def __init__(self, http: Http, name: str, plan: Plan | None, report: LoadReport | None) -> None:
        self._http = http
        self.name = name
        self.where = http.url
        self.plan = plan
        self.report = report
        self.is_alive = True

    @classmethod
    async def attach(cls, url: str, api_key: str | None = None) -> RemoteEndpoint:
        """Ask a server which model it serves. Raises ServerLostError, or what it answers."""
        http = Http(url, api_key)
        models = await http.get("/v1/models")
        data = models.get("data") or [] if isinstance(models, dict) else []
        name = str(data[0]["id"]) if data else "model"
        plan, report = await _plan_of(http, name)
        return cls(http, name, plan, report)

    @property
    def n_ctx(self) -> int:
        return self.plan.params.n_ctx_seq if self.plan is not None else 0

    async def chat(
        self,
        messages: Sequence[Json],
        sampling: SamplingParams,
        *,
        request_id: str,  # noqa: ARG002  (the server names its requests itself)
    ) -> AsyncGenerator[Delta, None]:
        default = SamplingParams()
        chosen = {k: getattr(sampling, k) for k in SENT}
        body = {
            "model": self.name, "messages": list(messages), "stream": True,
            "stream_options": {"include_usage": True}, "priority": "interactive",
            "timings": self.plan is not None,  # an extension: only where the server is ours
            **{k: v for k, v in chosen.items() if v != getattr(default, k)},
        }  # fmt: skip
        last = Delta()
        try:
            events = self._http.events("/v1/chat/completions", body)
            async with aclosing(events):
                async for event in events:
                    delta = _delta(event)
                    last = _merge(last, delta)
                    if delta.text or delta.reasoning:
                        yield delta
        except ServerLostError:
            self.is_alive = False
            raise
        self.is_alive = True
        yield msgspec.structs.replace(last, finish=last.finish or "stop")

    async def count(self, messages: Sequence[Json]) -> int:
        text = "\n".join(str(message.get("content", "")) for message in messages)
        if not text:
            return 0
        try:
            answer = await self._http.post("/tokenize", {"content": text})
            return len(answer["tokens"]) + 5 * len(messages)
        except (EdgeLLMError, KeyError, TypeError):
            return len(text) // 4 + 5 * len(messages)  # a server without /tokenize: about 4 a token

    async def stats(self) -> EngineStats:
        try:
            found = find_stats(await self._http.get("/v1/edgellm/stats"), self.name)
        except ServerLostError:
            self.is_alive = False
            raise
        self.is_alive = True
        return msgspec.convert(found, EngineStats, strict=False)

    async def cancel(self, request_id: str) -> None:
        await self._http.post("/v1/edgellm/cancel", {"request_id": request_id})

    async def close(self) -> None:
        """Nothing is held open, and the server goes on."""


async def _plan_of(http: Http, name: str) -> tuple[Plan | None, LoadReport | None]:
    """The plan a server runs by, where it is one of ours."""
    try:
        data = await http.get(f"/v1/edgellm/plan?model={name}")
    except EdgeLLMError:
        return None, None  # another program's server: chat works, the plan stays unknown
    found = data.get("plan", data) if isinstance(data, dict) else {}
    try:
        plan = Plan.from_json({k: v for k, v in found.items() if k != "report"})
    except (ValueError, msgspec.ValidationError):
        return None, None
    report = data.get("report") or found.get("report")
    return plan, msgspec.convert(report, LoadReport) if report else None


def find_stats(data: Any, name: str = "") -> Mapping[str, Any]:
    """The EngineStats object in a server's answer: the one of a model, else the first."""
    if isinstance(data, dict):
        if "n_steps" in data:
            return data
        inner = [data[name]] if name in data else []
        for value in [*inner, *data.values()]:
            if found := find_stats(value, name):
                return found
    if isinstance(data, list):
        for value in data:
            if found := find_stats(value, name):
                return found
    return {}


def _delta(event: Json) -> Delta:
    """One event of the stream. Raises what an error event says."""
    if "error" in event:
        said = event["error"]
        raise error_of(
            str(said.get("message")), str(said.get("code")), int(said.get("status", 500))
        )
    choice = (event.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    text = delta.get("content") or ""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return Delta(
        text=text, reasoning=reasoning, n_tokens=1 if text or reasoning else 0,
        finish=choice.get("finish_reason"), usage=_usage(event.get("usage")),
        timings=_timings(event.get("timings")),
    )  # fmt: skip


def _merge(last: Delta, new: Delta) -> Delta:
    return msgspec.structs.replace(
        last, finish=new.finish or last.finish, usage=new.usage or last.usage,
        timings=new.timings or last.timings,
    )  # fmt: skip


def _usage(data: Json | None) -> Usage | None:
    if not data:
        return None
    details = data.get("prompt_tokens_details") or {}
    return Usage(
        n_prompt=data.get("prompt_tokens", 0), n_output=data.get("completion_tokens", 0),
        n_cached=details.get("cached_tokens") or 0,
    )  # fmt: skip


def _timings(data: Json | None) -> RequestTimings | None:
    """llama-server's and our own ``timings`` object."""
    if not data:
        return None
    # TTFT runs from arrival: the queue and the prompt.
    waited = data.get("queue_ms", 0.0)
    ttft = (data["prompt_ms"] + waited) / 1000 if "prompt_ms" in data else None
    return RequestTimings(
        ttft_s=ttft,
        decode_tps=data.get("predicted_per_second"),
        prefill_tps=data.get("prompt_per_second"),
    )
