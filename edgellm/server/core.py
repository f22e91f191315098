"""What every handler is given: the runtime, the limits, the metrics, and a view of each model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from edgellm import __version__
from edgellm.chat import ChatModel
from edgellm.engine.client import Engine
from edgellm.errors import EdgeLLMError, InvalidRequestError
from edgellm.request import Overflow, Priority, SamplingParams
from edgellm.runtime import Runtime
from edgellm.server.access import Access, Policy
from edgellm.server.errors import Problem, problem
from edgellm.server.http import Call, encode
from edgellm.server.prom import Metrics
from edgellm.server.sse import COMMENT, Hub, Stream
from edgellm.server.store import ResponseStore
from edgellm.server.upstream.replicas import Upstreams
from edgellm.units import MiB


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may take."""

    max_body: int = 32 * MiB
    body_timeout_s: float = 30.0
    """For the whole body to arrive."""
    request_timeout_s: float | None = 3600.0
    """For the whole answer; None: no limit."""
    keepalive_s: float = 10.0
    """Silence on a stream before a comment is sent."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the server behaves; fixed when it starts."""

    policy: Policy = Policy()
    limits: Limits = Limits()
    sampling: SamplingParams = SamplingParams()
    """The values where a request gives none."""
    priority: Priority = Priority.NORMAL
    overflow: Overflow = Overflow.ERROR
    log_prompts: bool = False
    log_requests: bool = True
    ui: bool = True


class View:
    """A loaded model as handlers see it; made once a load."""

    __slots__ = (
        "chat",
        "created",
        "engine",
        "fingerprint",
        "info",
        "name",
        "name_json",
    )

    def __init__(self, name: str, engine: Engine, created: int) -> None:
        info = engine.info
        self.name = name
        self.name_json = encode(name)
        self.engine = engine
        self.info = info
        self.created = created
        build = "-".join(info.build.split()[:2]) or __version__
        self.fingerprint = build if build.startswith("b") else f"b-{build}"
        self.chat = ChatModel(
            arch=info.arch,
            name=info.name,
            templates=info.chat_templates,
            bos_text=info.bos_text,
            eos_text=info.eos_text,
            add_bos=info.add_bos,
        )

    def need_generation(self) -> None:
        """Raise InvalidRequestError for a model that only embeds or scores."""
        if self.info.is_encoder:
            raise InvalidRequestError(
                f"{self.name} embeds or scores text and does not generate",
                param="model",
                hint="use /v1/embeddings or /v1/rerank",
            )

    def check_ids(self, ids: list[int], param: str) -> tuple[int, ...]:
        """Token ids from a client, each inside the vocabulary."""
        n_vocab = self.info.n_vocab
        for i in ids:
            if not 0 <= i < n_vocab:
                raise InvalidRequestError(
                    f"{i} is not a token id of {self.name} (0 to {n_vocab - 1})", param=param
                )
        return tuple(ids)


class Server:
    """Everything the handlers share."""

    def __init__(
        self,
        runtime: Runtime,
        options: Options | None = None,
        upstreams: Upstreams | None = None,
    ) -> None:
        options = options or Options()
        self.runtime = runtime
        self.upstreams = upstreams
        """Other servers whose models this one offers too."""
        self.options = options
        self.access = Access(options.policy)
        self.metrics = Metrics()
        self.hub = Hub(options.limits.keepalive_s)
        self.responses = ResponseStore()
        self.threads = ResponseStore()
        """Conversations of Anthropic's ``thread`` field, by the id of their last message."""
        self.started_at = time.time()
        self.is_loading = False
        """The models to begin with are not loaded yet."""
        self.is_draining = False
        self.in_flight = 0
        self.on_stop: Callable[[], None] | None = None
        """What ends the process, for the admin endpoint."""
        self._views: dict[str, View] = {}

    async def body(self, call: Call) -> bytes:
        """The request's body within the limits."""
        limits = self.options.limits
        return await call.body(limit=limits.max_body, timeout=limits.body_timeout_s)

    @asynccontextmanager
    async def lease(self, call: Call, model: str | None) -> AsyncIterator[View]:
        """The model, loaded, for as long as the block runs; queued and counted by key.

        A client that goes away, or a request that takes too long, cancels the block.
        """
        self.access.enter(call)
        stop = call.watch(time_limit=self.options.limits.request_timeout_s)
        try:
            async with self.runtime.lease(model or None) as lease:
                call.log["model"] = lease.name
                yield self._view(lease.name, lease.engine)
        finally:
            stop()
            self.access.leave(call)

    @asynccontextmanager
    async def streaming(
        self, call: Call, as_event: Callable[[Problem], bytes], ping: bytes = COMMENT
    ) -> AsyncIterator[Stream]:
        """A stream of events. An error after the first becomes the last, as ``as_event`` writes it;
        before the first it is raised, to be an HTTP status."""
        stream = self.hub.open(call, ping)
        try:
            yield stream
        except EdgeLLMError as error:
            if not call.is_started:
                raise
            failed = problem(error)
            self.note_error(call, failed)
            await stream.write(as_event(failed))
            await stream.end()
        finally:
            stream.drop()

    def note_error(self, call: Call, failed: Problem) -> None:
        """Count an error and put it on the request's log line."""
        name = str(failed.code if failed.kind == "HTTP" else failed.kind)
        call.log["error"] = name
        self.metrics.add("edgellm_errors_total", **{"class": name})

    def _view(self, name: str, engine: Engine) -> View:
        view = self._views.get(name)
        if view is None or view.engine is not engine:
            view = self._views[name] = View(name, engine, int(time.time()))
        return view

    async def run_background(self) -> list[asyncio.Task[Any]]:
        """Start what runs beside the requests; whoever called cancels the tasks."""
        tasks = [asyncio.create_task(self.hub.run(), name="sse-comments")]
        if self.upstreams is not None:
            await self.upstreams.check()
            tasks.append(asyncio.create_task(self.upstreams.watch(), name="upstreams"))
        return tasks
