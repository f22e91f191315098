"""The ASGI application: a table of routes, and the border where every error becomes an answer."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from edgellm.errors import EdgeLLMError
from edgellm.server.access import preflight_headers
from edgellm.server.core import Server
from edgellm.server.errors import Problem, anthropic_body, openai_body, problem
from edgellm.server.http import JSON, Call, Receive, Scope, Send, encode
from edgellm.server.log import log_request
from edgellm.server.route import Route
from edgellm.server.routes import PARAMETER_ROUTES, ROUTES
from edgellm.server.upstream.passing import forward

Handler = Callable[[Server, Call], Awaitable[None]]

_CLOSED_BY_CLIENT: Final = 499  # nginx's number for it; only the log sees it
_DURING_DRAIN: Final = frozenset({"/health", "/v1/health", "/metrics"})


class App:
    """Routes a request, lets it in, runs its handler, and answers what went wrong."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(scope, receive, send)
        client = scope.get("client")
        call.client = client[0] if client else ""
        server = self.server
        server.in_flight += 1
        try:
            await self._answer(call)
        finally:
            server.in_flight -= 1
            self._record(call)

    async def _answer(self, call: Call) -> None:
        try:
            await self._route(call)
        except EdgeLLMError as error:
            await self._fail(call, problem(error))
        except asyncio.CancelledError:
            if not await self._ended(call):
                raise
        except Exception as error:  # noqa: BLE001 (the border: one request fails, the server goes on)
            traceback.print_exception(error, file=sys.stderr)
            await self._fail(call, problem(EdgeLLMError(f"unexpected {type(error).__name__}")))

    async def _route(self, call: Call) -> None:
        server = self.server
        server.access.check(call)
        if call.method == "OPTIONS":
            await call.reply(b"", headers=preflight_headers(server.access, call))
            return
        if server.is_draining and call.path not in _DURING_DRAIN:
            raise Problem(
                503,
                "the server is shutting down",
                type="server_error",
                code="shutting_down",
                headers=((b"connection", b"close"), (b"retry-after", b"5")),
            )
        route = find_route(call)
        if server.upstreams is not None and await forward(server, server.upstreams, call):
            return
        await route.handler(server, call)

    async def _ended(self, call: Call) -> bool:
        """Whether the cancellation was the client's going away, or the time limit's."""
        if call.gone:
            call.status = _CLOSED_BY_CLIENT
            return True
        if not call.expired:
            return False
        late = Problem(504, "the request took too long", type="server_error", code="timeout")
        if call.is_started:
            # A stream: its last event says so, and the missing end says that it was cut.
            await call.write(_as_event(call, late))
            await call.end()
        else:
            await self._fail(call, late)
        return True

    async def _fail(self, call: Call, failed: Problem) -> None:
        self.server.note_error(call, failed)
        if call.is_started:
            await call.write(_as_event(call, failed))
            await call.end()
            return
        headers = (*failed.headers, (b"request-id", call.request_id.encode()))
        await call.reply(
            encode(error_body(call, failed)), status=failed.status, headers=(JSON, *headers)
        )

    def _record(self, call: Call) -> None:
        self.server.metrics.add(
            "edgellm_requests_total", endpoint=_endpoint(call), status=str(call.status)
        )
        if self.server.options.log_requests:
            log_request(call, time.monotonic() - call.started_at)


def _endpoint(call: Call) -> str:
    """The path as a label: only paths that exist, so that a scanner cannot fill the page."""
    if (call.method, call.path) in ROUTES or call.path in _PATHS:
        return call.path
    return "other"


_PATHS: Final = {path for _, path in ROUTES}


def find_route(call: Call) -> Route:
    """The route of a request. Problem 404, or 405 that says what is allowed."""
    method = "GET" if call.method == "HEAD" else call.method
    path = call.path
    route = ROUTES.get((method, path))
    if route is not None:
        return route
    for candidate in PARAMETER_ROUTES:
        if candidate.method == method and candidate.matches(path):
            return candidate
    allowed = sorted({m for m, p in ROUTES if p == path})
    allowed += sorted({r.method for r in PARAMETER_ROUTES if r.matches(path)})
    if allowed:
        raise Problem(
            405,
            f"{call.method} is not allowed here; use {' or '.join(allowed)}",
            code="method_not_allowed",
            headers=((b"allow", ", ".join(allowed).encode()),),
        )
    raise Problem(
        404, f"no such endpoint: {call.method} {path[:200]}", code="not_found", hint="GET /docs"
    )


def error_body(call: Call, failed: Problem) -> dict[str, Any]:
    """The error in the shape of the API that was called."""
    if call.is_anthropic:
        return anthropic_body(failed, call.request_id)
    body = openai_body(failed)
    if failed.code == "context_length_exceeded" and not call.path.startswith("/v1/"):
        # llama-server's name for it, on llama-server's own paths.
        body["error"]["type"] = "exceed_context_size_error"
    return body


def _as_event(call: Call, failed: Problem) -> bytes:
    body = msgspec.json.encode(error_body(call, failed))
    return (b"event: error\n" if call.is_anthropic else b"") + b"data: " + body + b"\n\n"
