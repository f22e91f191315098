"""Servers to measure: started and stopped here, or found at an address."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import quote

import msgspec

from edgellm.bench.client import Endpoint, clock, exchange, get_json
from edgellm.errors import EdgeLLMError, EngineError

_STOP_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1
# Loaded before the fork: the child does nothing there but the one call.
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a server; an empty command means that it runs already."""

    name: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    url: str = ""
    api_key: str | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answers: where, which model, and what it says of itself."""

    name: str
    endpoint: Endpoint
    model: str
    pid: int | None = None
    command: tuple[str, ...] = ()
    about: dict[str, Any] = msgspec.field(default_factory=dict)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def edgellm_spec(
    model: str, flags: Sequence[str] = (), *, name: str = "edgellm", api_key: str | None = None
) -> ServerSpec:
    """``edgellm serve`` of this very installation on a free port."""
    port = str(free_port())
    command = (sys.executable, "-m", "edgellm", "serve", model, "--port", port, *flags)
    return ServerSpec(name=name, command=command, url=f"http://127.0.0.1:{port}", api_key=api_key)


def llama_server_spec(
    binary: str, path: str, flags: Sequence[str] = (), *, name: str = "llama-server"
) -> ServerSpec:
    """llama.cpp's own server, its libraries looked for beside the binary."""
    port = str(free_port())
    folder = str(Path(binary).resolve().parent)
    libraries = os.pathsep.join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
    command = (binary, "-m", path, "--host", "127.0.0.1", "--port", port, "--no-webui", *flags)
    return ServerSpec(
        name=name,
        command=command,
        environment={"LD_LIBRARY_PATH": libraries},
        url=f"http://127.0.0.1:{port}",
    )


def llama_cpp_python_spec(path: str, flags: Sequence[str] = ()) -> ServerSpec:
    """The server inside llama-cpp-python (needs its ``server`` extra)."""
    port = str(free_port())
    base = (sys.executable, "-m", "llama_cpp.server", "--model", path, "--port", port)
    return ServerSpec(
        name="llama_cpp.server", command=(*base, *flags), url=f"http://127.0.0.1:{port}"
    )


class RunningServer:
    """Starts a spec on entering, waits until it answers, and ends it on leaving."""

    def __init__(self, spec: ServerSpec, *, ready_s: float = 600.0) -> None:
        self._spec = spec
        self._ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 - lives as long as the server
            prefix=f"{spec.name}-", suffix=".log"
        )

    async def __aenter__(self) -> Target:
        spec = self._spec
        endpoint = Endpoint.parse(spec.url, spec.api_key)
        if spec.command:
            self._start()
        try:
            await self._wait(endpoint)
            return await find_target(
                endpoint,
                name=spec.name,
                pid=self._process.pid if self._process else None,
                command=spec.command,
            )
        except BaseException:
            await self._stop()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    def log_tail(self, n: int = 15) -> str:
        """The last lines the server printed."""
        text = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-n:])

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._spec.command,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._spec.environment},
                start_new_session=True,
                # Safe: servers are started before anything here starts a thread.
                preexec_fn=_end_with_parent if _LIBC is not None else None,  # noqa: PLW1509
            )
        except OSError as error:
            raise EdgeLLMError(f"cannot start {self._spec.name}: {error}") from error

    async def _wait(self, endpoint: Endpoint) -> None:
        deadline = clock() + self._ready_s
        while clock() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise EngineError(
                    f"{self._spec.name} ended with {self._process.returncode} before it was "
                    f"ready:\n{self.log_tail()}"
                )
            if await _answers(endpoint):
                return
            await asyncio.sleep(0.1)
        raise EngineError(f"{self._spec.name} was not ready after {self._ready_s:g} s")

    async def _stop(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            deadline = clock() + _STOP_S
            while process.poll() is None and clock() < deadline:
                await asyncio.sleep(0.05)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._log.close()


def _end_with_parent() -> None:
    """In the child: SIGTERM when whoever measures is killed, so that no server stays behind."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _answers(endpoint: Endpoint) -> bool:
    for path in ("/health", "/v1/models"):
        reply = await exchange(endpoint, path, None, timeout_s=5.0)
        if reply.status == 200:
            return True
        if reply.status not in (404, 405):
            return False
    return False


async def find_target(
    endpoint: Endpoint,
    *,
    name: str = "",
    model: str | None = None,
    pid: int | None = None,
    command: tuple[str, ...] = (),
) -> Target:
    """Ask a server for its model and configuration; raises EngineError when nobody answers."""
    named = model or _first_model(await _listing(endpoint))
    about = await describe_server(endpoint, named)
    return Target(
        name=name or _kind(about),
        endpoint=endpoint,
        model=named,
        pid=pid,
        command=command,
        about=about,
    )


async def _listing(endpoint: Endpoint) -> Any:
    reply = await exchange(endpoint, "/v1/models", None, timeout_s=30.0)
    what, hint = f"{endpoint.url} does not answer /v1/models", "start it, or name --model"
    if reply.error in ("http_401", "http_403"):
        raise EngineError(f"{what} without a key ({reply.error})", hint="--api-key KEY")
    if reply.error is not None:
        raise EngineError(f"{what}: {reply.error} {reply.message[:200]}".rstrip(), hint=hint)
    try:
        return msgspec.json.decode(reply.body)
    except msgspec.DecodeError as error:
        raise EngineError(f"{what} with JSON", hint="check the address, or name --model") from error


async def describe_server(endpoint: Endpoint, model: str) -> dict[str, Any]:
    """What the server tells of its plan and build, for the record."""
    about: dict[str, Any] = {}
    plan = await get_json(endpoint, f"/v1/edgellm/plan?model={quote(model)}", timeout_s=30.0)
    if isinstance(plan, dict):
        return {"kind": "edgellm", "plan": plan}
    props = await get_json(endpoint, "/props")
    if isinstance(props, dict):
        kept = ("build_info", "total_slots", "model_path", "model_alias", "n_ctx")
        about = {"kind": "llama-server", **{k: props[k] for k in kept if k in props}}
    return about


async def engine_stats(endpoint: Endpoint) -> Any:
    """edgellm's own counters (step times, prefix hits), or None from another server."""
    return await get_json(endpoint, "/v1/edgellm/stats")


def _kind(about: Mapping[str, Any]) -> str:
    return str(about.get("kind", "server"))


def _first_model(listing: Any) -> str:
    models = listing.get("data") if isinstance(listing, dict) else None
    if isinstance(models, list) and models and isinstance(models[0], dict):
        return str(models[0].get("id", ""))
    return ""
