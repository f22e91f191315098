"""Passing a request to an upstream server and its answer back.

An answer is begun towards the client when its first byte of substance is here; until then a server
that fails costs the client nothing but time, because another one is asked.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

import msgspec

from edgellm.errors import ModelNotFoundError
from edgellm.request import Priority
from edgellm.server.errors import Problem
from edgellm.server.http import Call, Message, Receive
from edgellm.server.upstream.http1 import Answer, UpstreamError
from edgellm.server.upstream.replicas import Group, Replica, Upstreams, starts
from edgellm.server.wire.common import SamplingFields, priority_of

if TYPE_CHECKING:
    from edgellm.server.core import Server

_RETRIED_STATUSES: Final = frozenset({502, 503, 504})
_NOT_PASSED: Final = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server")
) | {b"x-request-id", b"access-control-allow-origin", b"access-control-allow-credentials"}
_PASSED_ON: Final = frozenset((b"content-type", b"accept", b"anthropic-version", b"anthropic-beta"))
_STORED: Final = "/v1/responses/"
_RESPONSE_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[^"]{1,100})"')
_USAGE: Final = (
    ("edgellm_prompt_tokens_total", re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')),
    ("edgellm_generated_tokens_total", re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')),
)


class _Body(msgspec.Struct):
    """What is looked at; every other field is passed on unread."""

    model: str | None = None
    priority: int | str | None = None
    previous_response_id: str | None = None
    system: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")

    def begins(self) -> tuple[int, ...]:
        """The starts of what the model is to read."""
        parts = (self.system, self.messages, self.prompt, self.input)
        return starts(b"".join(bytes(part) for part in parts))


async def forward(server: Server, upstreams: Upstreams, call: Call) -> bool:
    """Answer ``call`` from an upstream when its model is one; False: it is for this server."""
    if call.path.startswith(_STORED):
        return await _stored(upstreams, call)
    if call.method != "POST" or call.path.startswith("/v1/edgellm/"):
        return False
    body = await server.body(call)
    asked = _asked(body)
    group = None if asked is None else _group(server, upstreams, asked.model or None)
    if asked is None or group is None:
        # What is not JSON, or of another shape, this server's own handler explains best.
        call.receive = _replay(body, call.receive)
        return False
    await _pass(server, upstreams, call, (group, asked, body))
    return True


def _group(server: Server, upstreams: Upstreams, name: str | None) -> Group | None:
    """The group of a request's model; None when the model is this server's."""
    runs_models = bool(server.runtime.models())
    if name is None and runs_models:
        return None
    group = upstreams.find(name)
    if group is None and not runs_models:
        said = f"the model {name[:200]!r} does not exist here" if name else "no model is served"
        raise ModelNotFoundError(said, hint="GET /v1/models lists all")
    return group


async def _stored(upstreams: Upstreams, call: Call) -> bool:
    """A stored response, from the server that made it."""
    response_id = call.path.removeprefix(_STORED).partition("/")[0]
    maker = upstreams.maker(response_id)
    if maker is None:
        return False
    answer = await maker.origin.send(call.method, call.path, maker.credentials())
    try:
        body = await answer.body()
    finally:
        answer.close()
    await call.reply(body, status=answer.status, headers=_headers(answer))
    return True


def _asked(body: bytes) -> _Body | None:
    try:
        return msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` that gives the body once more before what comes next."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


async def _pass(
    server: Server, upstreams: Upstreams, call: Call, asked: tuple[Group, _Body, bytes]
) -> None:
    group, wanted, body = asked
    server.access.enter(call)
    stop = call.watch(time_limit=server.options.limits.request_timeout_s)
    call.log["model"] = group.name
    passing = _Passing(server, call, group, wanted)
    fields = SamplingFields(priority=wanted.priority)
    priority = priority_of(fields, server.options.priority)
    try:
        await passing.run(upstreams, priority, body)
    finally:
        stop()
        server.access.leave(call)


class _Passing:
    """One request on its way."""

    def __init__(self, server: Server, call: Call, group: Group, wanted: _Body) -> None:
        self.server = server
        self.call = call
        self.group = group
        self.has_begun = False
        """Something of the answer's substance went to the client."""
        self._has_priority = wanted.priority is not None
        self.previous = wanted.previous_response_id
        self._begins = wanted.begins()
        self.made = ""
        """The id of the stored response that this request made."""
        self._usage = b""

    async def run(self, upstreams: Upstreams, priority: Priority, body: bytes) -> None:
        """Ask one replica after another until one answers."""
        tried: list[Replica] = []
        last: Exception | None = None
        only = upstreams.maker(self.previous) if self.previous else None
        while True:
            try:
                replica, there = await self.group.take(priority, tried, only, self._begins)
            except Problem as problem:
                raise _failed(last) if last is not None else problem from last
            try:
                if await self._ask(replica, self._body(body, replica, there), there, tried):
                    self._count("ok")
                    self.group.answered(replica, self._begins)
                    if self.made:
                        upstreams.remember(self.made, replica)
                    return
            except UpstreamError as error:
                replica.failed(error)
                last = error
                if self.has_begun:
                    self._count("broken")
                    raise _failed(error) from error
            finally:
                self.group.release(replica)
            tried.append(replica)
            upstreams.n_retries += 1
            self._count("retried")

    def _body(self, body: bytes, replica: Replica, there: str) -> bytes:
        """The request as the server there takes it: with its own name of the model, and without a
        priority that it would refuse."""
        drops = self._has_priority and not replica.takes_priority
        if there == self.group.name and not drops:
            return body
        fields: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        fields["model"] = msgspec.Raw(msgspec.json.encode(there))
        if drops:
            del fields["priority"]
        return msgspec.json.encode(fields)

    async def _ask(self, replica: Replica, body: bytes, there: str, tried: list[Replica]) -> bool:
        """One replica's answer, passed on; False when another should be asked."""
        call = self.call
        query = call.scope.get("query_string", b"").decode("latin-1")
        path = f"{call.path}?{query}" if query else call.path
        headers = [(n, v) for n, v in call.headers.items() if n in _PASSED_ON]
        headers += [(b"x-request-id", call.request_id.encode()), *replica.credentials()]
        answer = await replica.origin.send(call.method, path, headers, body)
        try:
            others = [r for r, _ in self.group.members if r.is_up and r not in (*tried, replica)]
            if answer.status in _RETRIED_STATUSES and others and not call.is_started:
                return False
            await self._relay(answer, there)
            return True
        finally:
            answer.close()

    async def _relay(self, answer: Answer, there: str) -> None:
        is_stream = any(
            n == b"content-type" and v.startswith(b"text/event-stream") for n, v in answer.headers
        )
        if not is_stream:
            body = self._renamed(await answer.body(), there)
            self._begin(body)
            await self._reply(answer, body)
            return
        async for chunk in self._lines(answer, there):
            if not self.call.is_started:
                await self.call.start(answer.status, _headers(answer))
            if not chunk.startswith(b":"):
                self._begin(chunk)
            await self.call.write(chunk)
        await self.call.end()
        self._note_usage(self._usage)

    async def _lines(self, answer: Answer, there: str) -> AsyncIterator[bytes]:
        """The body in whole events, with this server's name of the model."""
        rest = b""
        async for chunk in answer.chunks():
            rest += chunk
            # Some servers end their lines with CR LF.
            cut = max(rest.rfind(b"\n\n") + 2, rest.rfind(b"\n\r\n") + 3)
            whole, rest = (rest[:cut], rest[cut:]) if cut > 2 else (b"", rest)
            if whole:
                if b"_tokens" in whole:
                    self._usage = whole
                yield self._renamed(whole, there)
        if rest:
            yield self._renamed(rest, there)

    def _renamed(self, data: bytes, there: str) -> bytes:
        if there == self.group.name:
            return data
        ours, theirs = msgspec.json.encode(self.group.name), msgspec.json.encode(there)
        for colon in (b":", b": "):
            data = data.replace(b'"model"' + colon + theirs, b'"model"' + colon + ours)
        return data

    async def _reply(self, answer: Answer, body: bytes) -> None:
        self._note_usage(body)
        if self.call.is_started:  # a stream's comments went out before its server was lost
            await self.call.write(b"data: " + body + b"\n\n")
            await self.call.end()
            return
        await self.call.reply(body, status=answer.status, headers=_headers(answer))

    def _begin(self, data: bytes) -> None:
        if self.has_begun:
            return
        found = _RESPONSE_ID.search(data)
        self.made = found[1].decode("latin-1") if found else ""
        self.has_begun = True
        seconds = time.monotonic() - self.call.started_at
        self.call.log["ttft_ms"] = round(seconds * 1e3, 1)
        labels = (("model", self.group.name), ("priority", "normal"))
        self.server.metrics.histogram("edgellm_ttft_seconds", labels).observe(seconds)

    def _note_usage(self, body: bytes) -> None:
        """Count the tokens that the last numbers in an answer tell of."""
        for name, pattern in _USAGE:
            found = pattern.findall(body)
            if found:
                self.server.metrics.add(name, int(found[-1]), model=self.group.name)

    def _count(self, outcome: str) -> None:
        self.server.metrics.add(
            "edgellm_upstream_requests_total", model=self.group.name, outcome=outcome
        )


def _headers(answer: Answer) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((n, v) for n, v in answer.headers if n not in _NOT_PASSED)


def _failed(error: Exception | None) -> Problem:
    message = error.message if isinstance(error, UpstreamError) else str(error)
    return Problem(
        502,
        f"the server behind this one failed: {message}",
        type="server_error",
        code="upstream_failed",
    )
