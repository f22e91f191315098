"""A real server on a loopback port, in a thread of its own, over a scripted or a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from edgellm.config import EngineSettings, PlanSettings, ServeSettings, Settings
from edgellm.engine.info import EngineOptions, Script
from edgellm.request import SamplingParams
from edgellm.runtime import ModelSpec, make_runtime
from edgellm.server.core import Limits, Options, Server
from edgellm.server.run import Bind, open_sockets, serve

STARTER = ModelSpec(name="starter", ref="starter", aliases=("SmolLM2-135M-Instruct.Q4_1",))
FAST = EngineOptions(max_waiting=512, script=Script(answer_tokens=0), seed=7)


class Running:
    """A server in a thread. ``url`` is its address; ``server`` what the handlers see."""

    def __init__(
        self,
        *,
        specs: tuple[ModelSpec, ...] = (STARTER,),
        backend: str = "scripted",
        engine: EngineOptions = FAST,
        options: Options | None = None,
        settings: Settings | None = None,
        preload: bool = True,
    ) -> None:
        self._args = (specs, backend, engine)
        self._options = options or Options(log_requests=False)
        self._settings = settings or default_settings()
        self._preload = preload
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""
        self.server: Server
        self.loop: asyncio.AbstractEventLoop

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(120), "the server did not start"
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        if self.server.on_stop is not None and self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.on_stop)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not stop"

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        specs, backend, engine = self._args
        self.loop = asyncio.get_running_loop()
        runtime = make_runtime(specs, self._settings, backend=backend, options=engine)
        self.server = Server(runtime, self._options)
        bind = Bind(port=0, drain_s=10)

        def ready(url: str) -> None:
            self.url = url
            self._ready.set()

        await serve(
            self.server,
            bind,
            sockets=open_sockets(bind),
            on_ready=ready,
            preload=[specs[0].name] if self._preload else [],
        )

    def call(self, make: Callable[[], Any]) -> Any:
        """Run a coroutine on the server's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(60)

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **more)


def default_settings(**serve_settings: Any) -> Settings:
    return Settings(
        plan=PlanSettings(ctx=2048, parallel=8),
        engine=EngineSettings(),
        serve=ServeSettings(**serve_settings),
    )


@pytest.fixture(scope="session")
def scripted() -> Iterator[Running]:
    """The engine without a model: quick, made-up text."""
    with Running() as running:
        yield running


@pytest.fixture
def fresh() -> Iterator[Running]:
    """One that nobody has asked yet: what it keeps depends on what it was asked before."""
    with Running() as running:
        yield running


@pytest.fixture(scope="session")
def starter() -> Iterator[Running]:
    """SmolLM2-135M, answering for real."""
    options = Options(log_requests=False, sampling=SamplingParams(temperature=0.0, seed=1))
    with Running(backend="llama", engine=EngineOptions(), options=options) as running:
        yield running


@pytest.fixture
def http(scripted: Running) -> Iterator[httpx.Client]:
    with scripted.client() as client:
        yield client


@pytest.fixture
def serving() -> Iterator[Callable[..., Running]]:
    """Start a server with the test's own options."""
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(Running(**more))


def limits(**more: Any) -> Options:
    """Options with these limits."""
    return Options(log_requests=False, limits=Limits(**more))
