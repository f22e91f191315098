"""What the terminal interface needs from the rest, as types: the seam and nothing behind it.

``services.py`` implements :class:`Services` with the store, the planner, the runtime and the
server; ``demo.py`` is the same seam without a machine behind it, for tests and screenshots.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from edgellm.devices import Devices
from edgellm.errors import EngineError
from edgellm.metrics import EngineStats, RequestTimings
from edgellm.planner.plan import LoadReport, Plan, PlanRequest
from edgellm.request import SamplingParams, Usage

Json = dict[str, Any]
HERE: Final = "this machine"
"""Where an endpoint is that belongs to this program."""


class ServerLostError(EngineError):
    """The server could not be reached, or went away in the middle of an answer."""


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model in the table: on this machine, in the catalog, or found on the hub."""

    ref: str
    """What the planner and the runtime take: a path, a name, hf:owner/repo:quant."""
    name: str
    source: str
    """here, catalog or hub."""
    owner: str = ""
    """Which program's folder holds the file, or who publishes it."""
    path: str | None = None
    n_bytes: int = 0
    quant: str = ""
    about: str = ""
    verdict: str = ""
    """A verdict from its size alone, where no header was read; a plan is the truth."""
    licence: str = ""

    @property
    def is_here(self) -> bool:
        return self.path is not None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a download or a load is; ``n_total`` 0 when nobody knows."""

    phase: str
    n_done: int = 0
    n_total: int = 0
    rate: float = 0.0
    """Bytes a second."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an answer. The last one has ``finish``; after an error it is "error"."""

    text: str = ""
    reasoning: str = ""
    n_tokens: int = 0
    finish: str | None = None
    usage: Usage | None = None
    timings: RequestTimings | None = None
    warning: str | None = None


class Preferences(msgspec.Struct, frozen=True, kw_only=True):
    """The person's configuration, as far as this interface follows it."""

    theme: str | None = None
    animations: bool = True
    keys: dict[str, str] = msgspec.field(default_factory=dict)
    """Binding id -> keys."""
    system: str = ""
    sampling: Json = msgspec.field(default_factory=dict)
    """What every conversation begins with, by SamplingParams' names."""


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the machine; None where there is nobody to ask."""

    cpu_percent: float | None = None
    ram_used: int | None = None
    ram_total: int | None = None
    gpu_percent: float | None = None
    gpu_used: int | None = None
    gpu_total: int | None = None
    gpu_celsius: float | None = None
    gpu_watts: float | None = None


class Endpoint(Protocol):
    """A model that answers: an engine of this program, or a server somewhere."""

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str:
        """ "this machine" or the server's address."""
        ...

    @property
    def n_ctx(self) -> int:
        """Tokens one conversation may hold; 0 when unknown."""
        ...

    @property
    def plan(self) -> Plan | None: ...
    @property
    def report(self) -> LoadReport | None: ...
    @property
    def is_alive(self) -> bool: ...

    def chat(
        self, messages: Sequence[Json], sampling: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        """Stream an answer. Raises EdgeLLMError; closing the generator cancels the request."""
        ...

    async def count(self, messages: Sequence[Json]) -> int:
        """Tokens of a rendered conversation; an estimate where the server cannot say."""
        ...

    async def stats(self) -> EngineStats: ...
    async def cancel(self, request_id: str) -> None: ...
    async def close(self) -> None: ...


class ServerHandle(Protocol):
    """A server this program started, in a process of its own."""

    @property
    def url(self) -> str: ...
    @property
    def is_alive(self) -> bool: ...
    def tail(self, n: int) -> list[str]:
        """The last lines it logged."""
        ...

    async def stop(self) -> None: ...


class Services(Protocol):
    """Everything the screens ask for. Methods that are not ``async`` may block (use a thread)."""

    def clock(self) -> float:
        """Seconds of the wall clock."""
        ...

    def state_file(self, name: str) -> str: ...
    def preferences(self) -> Preferences:
        """What the person configured."""
        ...

    def devices(self) -> Devices: ...
    def gauge(self) -> Gauge: ...
    def local_models(self) -> list[ModelRow]: ...
    def catalog(self) -> list[ModelRow]: ...
    def search(self, query: str) -> list[ModelRow]: ...
    def details(self, row: ModelRow) -> list[tuple[str, str]]:
        """Metadata worth reading, as (name, value); the chat template last."""
        ...

    def plan(self, ref: str, request: PlanRequest) -> Plan: ...
    def alternatives(self, ref: str, request: PlanRequest, plan: Plan) -> Plan:
        """The plan with its alternatives, which take longer to find than the plan itself."""
        ...

    def save_profile(self, name: str, plan: Plan, request: PlanRequest) -> str:
        """Write a profile; return where."""
        ...

    def pull(
        self, ref: str, on_progress: Callable[[Progress], None], stopped: Callable[[], bool]
    ) -> str:
        """Download; return the path. What has arrived is kept when ``stopped`` turns true."""
        ...

    async def load(self, plan: Plan, on_progress: Callable[[Progress], None]) -> Endpoint: ...
    async def attach(self, url: str, api_key: str | None = None) -> Endpoint: ...
    async def serve(self, ref: str, host: str, port: int, api_key: str | None) -> ServerHandle: ...
    def bench_runs(self) -> list[Json]:
        """Finished benchmark runs, newest first."""
        ...
