"""Every fixture of the server's tests, with another edgellm between the client and the engine.

TEST_UPSTREAMS (URLs, separated by commas) puts the front before servers that run already, and
TEST_DIRECT (one URL) asks such a server itself: benchmarks/upstream.py --sdk compares the two.
"""

from __future__ import annotations

import asyncio
import os
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


class Direct(Running):
    """A server that somebody else runs."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def others() -> Running | None:
    """What the environment asks for in place of servers of this test's own."""
    if url := os.environ.get("TEST_DIRECT"):
        return Direct(url)
    urls = os.environ.get("TEST_UPSTREAMS")
    return Front([f"starter={url}" for url in urls.split(",")]) if urls else None


@pytest.fixture(scope="session")
def behind() -> Iterator[Running]:
    with Running() as running:
        yield running


@pytest.fixture(scope="session")
def scripted(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Two edgellms behind."""
    asked = others()
    if asked is not None:
        with asked as running:
            yield running
        return
    behind: Running = request.getfixturevalue("behind")
    with Running() as second, Front([behind.url, second.url]) as front:
        yield front


@pytest.fixture
def fresh() -> Iterator[Running]:
    with Running() as one, Running() as other, Front([one.url, other.url]) as front:
        yield front


@pytest.fixture(scope="session")
def starter() -> Iterator[Running]:
    asked = others()
    if asked is not None:
        with asked as running:
            yield running
        return
    options = Options(log_requests=False, sampling=SamplingParams(temperature=0.0, seed=1))
    real = Running(specs=(STARTER,), backend="llama", engine=EngineOptions(), options=options)
    with real as running, Front([running.url + "/v1"]) as front:
        yield front


__all__ = ["FAST", "Front"]
