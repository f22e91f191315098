"""The process that serves: sockets, signals, the drain, and the file that says it runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from edgellm.errors import ConfigError
from edgellm.server import log
from edgellm.server.app import App
from edgellm.server.core import Server
from edgellm.server.http import CLIENT, PUSH, Client
from edgellm.server.statefile import StateFile

T = TypeVar("T")

HEADERS_TIMEOUT_S: Final = 30.0
KEEP_ALIVE_S: Final = 75
BACKLOG: Final = 2048


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to listen."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_s: float = 30.0
    """How long running requests may take after SIGTERM."""


# uvicorn writes header names in lower case. To HTTP they are the same; to scripts that look for
# Content-Type or Access-Control-Allow-Origin they are not.
_NAME: Final = re.compile(rb"\r\n[a-z0-9-]+:")
_TITLES: Final[dict[bytes, bytes]] = {}


def _titled(found: re.Match[bytes]) -> bytes:
    name = found[0]
    title = _TITLES.get(name)
    if title is None:
        title = _TITLES[name] = name.title()
    return title


class Joined:
    """A connection as one answer sees it: its head leaves together with what follows at once, in
    one system call."""

    __slots__ = ("_head", "_is_past_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._is_past_head = False

    def write(self, data: bytes) -> None:
        if self._is_past_head:
            self._transport.write(self._head + data if self._head else data)
            self._head = b""
        elif data.startswith(b"HTTP/1.1 1"):  # 100 Continue
            self._transport.write(data)
        else:
            self._head, self._is_past_head = _NAME.sub(_titled, data), True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def push(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a part of a chunked body at once; False where ASGI's way must be taken: nothing was
    sent yet, the client reads too slowly, or the body is not chunked."""
    if cycle.disconnected or cycle.response_complete:
        return False
    if not cycle.response_started or not cycle.chunked_encoding or cycle.flow.write_paused:
        return False
    if body:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


class Protocol(HttpToolsProtocol):
    """uvicorn's, with a limit for headers that never come, JSON for what is not HTTP, and word to
    the running request when its client goes away."""

    _headers_timer: asyncio.TimerHandle | None = None
    _client: Client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._client = Client()
        self._headers_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self._too_late)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self.scope[CLIENT] = self._client  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.cycle.transport = Joined(self.transport, self.loop)  # type: ignore[assignment]
        self.scope[PUSH] = partial(push, self.cycle)  # type: ignore[typeddict-unknown-key]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._client.leave()

    def eof_received(self) -> None:
        # A client that closed its half before its request was whole will never send the rest.
        cycle = self.cycle
        if cycle is None or (cycle.more_body and not cycle.response_complete):
            self._answer(408, "the connection was closed before the request was whole")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (uvicorn's)
        self._answer(400, "the request is not valid HTTP")

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _too_late(self) -> None:
        self._answer(408, "the request's headers did not arrive in time")

    def _answer(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        error = {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": "bad_http",
        }
        body = msgspec.json.encode({"error": error})
        phrase = {400: "Bad Request", 408: "Request Timeout"}[status]
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: a drained server exits with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_sockets(bind: Bind) -> list[socket.socket]:
    """Listening sockets, one an address, all on one port. ConfigError when it is taken."""
    sockets: list[socket.socket] = []
    port = bind.port
    try:
        for host in bind.hosts:
            sockets.append(_listen(host, port))
            port = sockets[0].getsockname()[1]
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise ConfigError(
            f"cannot listen on {bind.hosts[len(sockets)]} port {port}: {error.strerror or error}",
            hint=f"edgellm serve ... --port {port + 1 if port else 0}",
        ) from error
    return sockets


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, address = found[0]
    opened = socket.socket(family, kind, proto)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
    except OSError:
        opened.close()
        raise
    opened.setblocking(False)
    return opened


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, on uvloop where it exists: half the cost of a socket's event."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.run(main)
    return uvloop.run(main)


async def serve(
    server: Server,
    bind: Bind,
    *,
    sockets: Sequence[socket.socket] | None = None,
    on_ready: Callable[[str], None] | None = None,
    state: StateFile | None = None,
    preload: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM, SIGINT or the stop endpoint; then drain, unload, and return.

    ``preload`` names models to load before ``on_ready`` is called with the address. Meanwhile
    /health says 503, lists show how far it is, and other requests wait; a model that cannot be
    loaded raises here.
    """
    listening = list(sockets) if sockets is not None else open_sockets(bind)
    port = listening[0].getsockname()[1]
    uv = _Uvicorn(_config(server, bind))
    url = _url(bind, port)
    background = await server.run_background()
    background.append(asyncio.create_task(server.runtime.watch_idle(), name="idle-models"))

    def stop() -> None:
        if server.is_draining:
            uv.force_exit = True
        server.is_draining = True
        uv.should_exit = True

    server.on_stop = stop
    with _signals(stop):
        serving = asyncio.create_task(uv.serve(sockets=listening), name="http")
        try:
            if state is not None:
                state.write(url)
            log.write("listening", url=url)
            await _preload(server, preload, serving)
            if on_ready is not None and not serving.done():
                on_ready(url)
            await serving
        finally:
            uv.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            for opened in listening:
                opened.close()
            if state is not None:
                state.remove()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            if server.upstreams is not None:
                server.upstreams.close()
            await server.runtime.close()
            log.write("stopped")


async def _preload(server: Server, names: Sequence[str], serving: asyncio.Task[None]) -> None:
    """Load ``names`` in turn; give up when the server was told to stop."""

    async def load_all() -> None:
        for name in names:
            await server.runtime.load(name)

    server.is_loading = True
    loading = asyncio.create_task(load_all(), name="preload")
    try:
        await asyncio.wait((loading, serving), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
    finally:
        server.is_loading = False
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


def _config(server: Server, bind: Bind) -> uvicorn.Config:
    if (bind.tls_cert is None) != (bind.tls_key is None):
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    config = uvicorn.Config(
        App(server),
        http=Protocol,
        loop="none",
        lifespan="off",
        ws="none",
        interface="asgi3",
        access_log=False,
        log_config=None,
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(bind.drain_s)),
        ssl_certfile=bind.tls_cert,
        ssl_keyfile=bind.tls_key,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the TLS files cannot be used: {error}") from error
    return config


def _url(bind: Bind, port: int) -> str:
    host = bind.hosts[0]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if bind.tls_cert else 'http'}://{shown}:{port}"


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop`` instead of ending the process."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    added: list[Any] = []
    for number in numbers:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop)
            added.append(number)
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)
