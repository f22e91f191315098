"""Every fixture of the server's tests, with another edgellm between the client and the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from edgellm.engine.info import EngineOptions
from edgellm.request import SamplingParams
from edgellm.runtime import make_runtime
from edgellm.server.core import Options, Server
from edgellm.server.run import Bind, open_sockets, serve
from edgellm.server.upstream.replicas import Upstreams, UpstreamSpec
from tests.server.conftest import FAST, STARTER, Running, default_settings

QUIET = Options(log_requests=False)


class Front(Running):
    """A server without models of its own, before others."""

    def __init__(
        self, urls: Sequence[str], *, options: Options = QUIET, limit: int | None = None
    ) -> None:
        super().__init__(specs=(), options=options, preload=False)
        self.urls = urls
        self.limit = limit
        self.upstreams: Upstreams

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        specs = [UpstreamSpec.parse(url) for url in self.urls]
        self.upstreams = Upstreams(specs, limit=self.limit, check_s=0.2)
        runtime = make_runtime((), default_settings(), backend="scripted")
        self.server = Server(runtime, self._options, self.upstreams)

        def ready(url: str) -> None:
            self.url = url
            self._ready.set()

        bind = Bind(port=0, drain_s=10)
        await serve(self.server, bind, sockets=open_sockets(bind), on_ready=ready)


@pytest.fixture(scope="session")
def behind() -> Iterator[Running]:
    with Running() as running:
        yield running


@pytest.fixture(scope="session")
def scripted(behind: Running) -> Iterator[Running]:
    with Front([behind.url]) as front:
        yield front


@pytest.fixture(scope="session")
def starter() -> Iterator[Running]:
    options = Options(log_requests=False, sampling=SamplingParams(temperature=0.0, seed=1))
    real = Running(specs=(STARTER,), backend="llama", engine=EngineOptions(), options=options)
    with real as running, Front([running.url + "/v1"]) as front:
        yield front


__all__ = ["FAST", "Front"]
