"""Several models behind one door: loaded when first asked for, unloaded when idle or in the way."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from edgellm import devices as devices_
from edgellm.config import Settings
from edgellm.devices import Devices
from edgellm.engine.info import EngineOptions, LoadProgress
from edgellm.errors import (
    ConfigError,
    DoesNotFitError,
    EdgeLLMError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    PlanError,
)
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.runtime.opening import (
    backend_of,
    engine_options,
    local_path,
    plan_request,
    remember_load,
    replanner,
    vram_of,
    with_workers,
)
from edgellm.workers import Pool

if TYPE_CHECKING:  # planning a model, most of what commands do, needs none of the engine
    from edgellm.engine.client import Engine, OnProgress


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a Runtime may load."""

    name: str
    """What clients ask for, and what answers say."""
    ref: str
    """What ``catalog.resolve`` takes."""
    aliases: tuple[str, ...] = ()
    """Other names of it; ``*`` answers to every name that is nobody's."""
    tags: tuple[str, ...] = ()
    is_pinned: bool = False
    """Never unloaded to make room, nor for being idle."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a Runtime as lists show it."""

    name: str
    ref: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    state: str
    """unloaded, loading, loaded, draining, unloading or failed."""
    stage: str = ""
    fraction: float = 0.0
    """How far loading has come."""
    in_use: int = 0
    waiting: int = 0
    idle_s: float | None = None
    n_bytes: int = 0
    """Planned bytes, on all devices and the host."""
    error: str | None = None


class Lease(msgspec.Struct, frozen=True):
    """A loaded model that stays loaded as long as the lease is held."""

    name: str
    engine: Engine


Planner: TypeAlias = Callable[[ModelSpec, Devices, PlanRequest | None], Plan]
"""Asked with what is free and, where not the settings' own, what is wanted."""
Loader: TypeAlias = "Callable[[Plan, OnProgress], Awaitable[Engine]]"

# Measured memory that a driver gives back may fall a little short of the plan.
_RELEASED: Final = 0.8
_RELEASE_TIMEOUT_S: Final = 10.0
_VERDICTS: Final = {"gpu": 3, "partial": 2, "cpu": 1, "does_not_fit": 0}


class _Entry:
    """A model and who uses it. Counts change only between awaits, so they need no lock."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.engine: Engine | None = None
        self.state = "unloaded"
        self.progress = LoadProgress(stage="", fraction=0.0)
        self.users = 0
        self.waiters: deque[asyncio.Future[Engine]] = deque()
        self.loading: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.last_used = time.monotonic()
        self.error: EdgeLLMError | None = None

    @property
    def is_usable(self) -> bool:
        """A new request may start on it now."""
        # An engine whose child died and starts again makes its requests wait by itself.
        return self.engine is not None and self.state == "loaded" and not self.engine.is_dead

    def release(self) -> None:
        self.users -= 1
        self.last_used = time.monotonic()
        if self.users == 0:
            self.idle.set()

    def status(self) -> ModelStatus:
        plan = self.engine.plan if self.engine is not None else None
        is_idle = self.state == "loaded" and self.users == 0
        return ModelStatus(
            name=self.spec.name,
            ref=self.spec.ref,
            aliases=self.spec.aliases,
            tags=self.spec.tags,
            state=self.state,
            stage=self.progress.stage if self.state == "loading" else "",
            fraction=1.0 if self.engine is not None else self.progress.fraction,
            in_use=self.users,
            waiting=sum(not waiter.done() for waiter in self.waiters),
            idle_s=time.monotonic() - self.last_used if is_idle else None,
            n_bytes=0 if plan is None else plan.host.used + sum(d.used for d in plan.devices),
            error=None if self.error is None else self.error.message,
        )


class Runtime:
    """Several models by name: loaded on first use, unloaded when idle or when others need room.

    * Requests for a model that is loading wait for that one load; loads happen one at a time.
    * Room is made by bytes: the planner is asked whether unloading others would give a better
      plan, and the least recently used go first. A model in use is drained: its running requests
      finish, new ones wait and are served after it is loaded again, so none is lost.
    * A load begins only when the memory of what was unloaded has been seen to come back.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        *,
        planner: Planner,
        loader: Loader,
        prober: Callable[[], Devices] = devices_.probe,
        max_loaded: int | None = None,
        ttl_s: float | None = None,
    ) -> None:
        self._entries = {spec.name: _Entry(spec) for spec in specs}
        self._names = _names_of(specs)
        self._planner = planner
        self._loader = loader
        self._prober = prober
        self._max_loaded = max_loaded
        self._ttl_s = ttl_s
        self._load_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.n_loads = 0
        self.n_unloads = 0
        self.warnings: deque[str] = deque(maxlen=20)
        """What went on in spite of something: memory that did not come back in time."""

    def models(self) -> list[ModelStatus]:
        """Every model, in the order given."""
        return [entry.status() for entry in self._entries.values()]

    def loaded(self) -> list[Lease]:
        """The models in memory, without holding them there."""
        return [
            Lease(entry.spec.name, entry.engine)
            for entry in self._entries.values()
            if entry.engine is not None
        ]

    def find(self, name: str | None) -> ModelSpec:
        """The model of that name or alias; the only (or first) one for None. ModelNotFoundError."""
        return self._find(name).spec

    def _find(self, name: str | None, *, is_exact: bool = False) -> _Entry:
        if not self._entries:
            raise ModelNotFoundError(
                "no model is loaded by this server", hint="edgellm serve MODEL"
            )
        if name is None or name == "default":
            return next(iter(self._entries.values()))
        known = self._names
        any_name = None if is_exact else known.get("*")
        found = known.get(name) or known.get(name.lower()) or any_name
        if found is not None:
            return self._entries[found]
        near = difflib.get_close_matches(name, known.keys() - {"*"}, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ModelNotFoundError(
            f"the model {name[:200]!r} does not exist here{meant}", hint="GET /v1/models lists all"
        )

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncIterator[Lease]:
        """The model, loaded if it was not, for as long as the block runs."""
        entry = self._find(name)
        engine = await self._take(entry)
        try:
            yield Lease(entry.spec.name, engine)
        finally:
            entry.release()

    async def _take(self, entry: _Entry) -> Engine:
        """Wait until the model is loaded and count one more user of it."""
        if entry.is_usable and entry.engine is not None:
            entry.users += 1
            entry.idle.clear()
            return entry.engine
        if self._is_closed:
            raise EngineDeadError("the server is shutting down")
        waiter: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self._want(entry)
        try:
            # Whoever sets the result has counted this user already.
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                entry.release()
            raise

    def _want(self, entry: _Entry) -> None:
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry), name=f"load {entry.spec.name}")

    async def _load(self, entry: _Entry) -> None:
        """Load for everyone who waits now; the only place that opens an engine."""
        try:
            async with self._load_lock:
                await self._load_alone(entry)
        except EdgeLLMError as error:
            entry.state, entry.error = "failed", error
            self._fail_waiters(entry, error)
        except BaseException as error:
            # The task was cancelled, or something nobody planned for: nobody may wait forever.
            entry.state = "failed"
            self._fail_waiters(entry, EngineError(f"loading {entry.spec.name} failed: {error!r}"))
            raise
        finally:
            entry.loading = None

    async def _load_alone(self, entry: _Entry) -> None:
        if entry.engine is not None and not entry.is_usable:
            await self._unload(entry)
        if entry.engine is None:
            if not any(not waiter.done() for waiter in entry.waiters):
                entry.waiters.clear()
                return
            entry.state, entry.error = "loading", None
            entry.progress = LoadProgress(stage="planning", fraction=0.0)
            plan = await self._make_room(entry)

            def progress(now: LoadProgress) -> None:
                entry.progress = now

            entry.engine = await self._loader(plan, progress)
            self.n_loads += 1
            entry.state = "loaded"
        self._serve_waiters(entry, entry.engine)

    @staticmethod
    def _serve_waiters(entry: _Entry, engine: Engine) -> None:
        entry.last_used = time.monotonic()
        entry.idle.set()
        while entry.waiters:
            waiter = entry.waiters.popleft()
            if not waiter.done():
                entry.users += 1
                entry.idle.clear()
                waiter.set_result(engine)

    @staticmethod
    def _fail_waiters(entry: _Entry, error: EdgeLLMError) -> None:
        while entry.waiters:
            waiter = entry.waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    async def _make_room(self, entry: _Entry) -> Plan:
        """The plan to load, after unloading what must go for it. Raises DoesNotFitError."""
        while self._max_loaded is not None and len(self._others(entry)) >= self._max_loaded:
            victim = self._victim(entry)
            if victim is None:
                raise DoesNotFitError(
                    f"{len(self._others(entry))} pinned models are loaded, as many as may be",
                    device="host",
                    required=0,
                    available=0,
                    smallest_fix="raise --max-loaded",
                )
            await self._unload(victim)
        while True:
            now, best = await asyncio.to_thread(self._plans, entry.spec, self._held(entry))
            victim = self._victim(entry)
            if isinstance(now, Plan) and (victim is None or not _is_better(best, now)):
                return now
            if victim is None or not isinstance(best, Plan):
                raise now if isinstance(now, EdgeLLMError) else EngineError("no plan")
            await self._unload(victim)

    def _plans(
        self, spec: ModelSpec, held: Sequence[Plan]
    ) -> tuple[Plan | PlanError, Plan | PlanError]:
        """The plan with what is free now, and with what unloading every other would free."""
        devices = self._prober()
        now = self._plan(spec, devices)
        return now, self._plan(spec, give_back(devices, held)) if held else now

    def _plan(self, spec: ModelSpec, devices: Devices) -> Plan | PlanError:
        try:
            return self._planner(spec, devices, None)
        except PlanError as error:
            return error

    def _others(self, entry: _Entry) -> list[_Entry]:
        return [e for e in self._entries.values() if e is not entry and e.engine is not None]

    def _held(self, entry: _Entry) -> list[Plan]:
        others = [e for e in self._others(entry) if not e.spec.is_pinned]
        return [e.engine.plan for e in others if e.engine is not None]

    def _victim(self, entry: _Entry) -> _Entry | None:
        """The idle one used longest ago, else the busy one used longest ago; never a pinned one."""
        able = [e for e in self._others(entry) if not e.spec.is_pinned]
        return min(able, key=lambda e: (e.users > 0, e.last_used), default=None)

    async def _unload(self, entry: _Entry) -> None:
        """Drain, close, and wait until the devices show the memory again."""
        engine = entry.engine
        if engine is None:
            return
        if entry.users and not engine.is_dead:
            entry.state = "draining"
            try:
                await entry.idle.wait()
            except asyncio.CancelledError:
                entry.state = "loaded"
                self._serve_waiters(entry, engine)
                raise
        entry.state = "unloading"
        before = await asyncio.to_thread(self._prober)
        await engine.close()
        entry.engine = None
        entry.state = "unloaded"
        self.n_unloads += 1
        await self._await_release(entry.spec.name, engine.plan, before)

    async def _await_release(self, name: str, plan: Plan, before: Devices) -> None:
        wanted = {
            gpu.id: gpu.free + _RELEASED * used
            for gpu in before.gpus
            for used in [sum(d.used for d in plan.devices if d.id == gpu.id)]
            if used
        }
        deadline = time.monotonic() + _RELEASE_TIMEOUT_S
        while wanted:
            after = await asyncio.to_thread(self._prober)
            short = [g.id for g in after.gpus if g.free < wanted.get(g.id, 0)]
            if not short:
                return
            if time.monotonic() > deadline:
                self.warnings.append(f"{name} was unloaded, but {short} did not show its memory")
                return
            await asyncio.sleep(0.1)

    def plan(self, spec: ModelSpec, request: PlanRequest | None = None) -> Plan:
        """What a request (None: the settings') gives with what is free now. Blocks; nothing is
        loaded."""
        return self._planner(spec, self._prober(), request)

    async def load(self, name: str) -> None:
        """Load a model now, and leave it loaded."""
        async with self.lease(name):
            pass

    async def unload(self, name: str, *, force: bool = False) -> bool:
        """Unload a model after its running requests (``force``: at once); False: it was not loaded.

        Requests that wait for it load it again.
        """
        entry = self._find(name, is_exact=True)
        async with self._load_lock:
            if entry.engine is None:
                return False
            if force:
                await entry.engine.close()
            await self._unload(entry)
        if entry.waiters:
            self._want(entry)
        return True

    async def watch_idle(self) -> None:
        """Until cancelled: unload what has been idle longer than the TTL."""
        while self._ttl_s is not None:
            await asyncio.sleep(min(1.0, self._ttl_s / 4))
            for entry in self._entries.values():
                if self._is_stale(entry):
                    await self._unload_if_stale(entry)

    def _is_stale(self, entry: _Entry) -> bool:
        return (
            self._ttl_s is not None
            and entry.state == "loaded"
            and entry.users == 0
            and not entry.spec.is_pinned
            and time.monotonic() - entry.last_used >= self._ttl_s
        )

    async def _unload_if_stale(self, entry: _Entry) -> None:
        async with self._load_lock:
            if self._is_stale(entry):
                await self._unload(entry)
        if entry.waiters:
            self._want(entry)

    async def close(self) -> None:
        """Unload everything at once. Requests that wait for a model fail."""
        self._is_closed = True
        for entry in self._entries.values():
            if entry.loading is not None:
                entry.loading.cancel()
                await asyncio.wait([entry.loading])
            self._fail_waiters(entry, EngineDeadError("the server is shutting down"))
            if entry.engine is not None:
                await entry.engine.close()
                entry.engine, entry.state = None, "unloaded"


def _names_of(specs: Sequence[ModelSpec]) -> dict[str, str]:
    """Every name and alias -> the model's name. ConfigError when two models claim one."""
    names: dict[str, str] = {}
    for spec in specs:
        if spec.name in names:
            raise ConfigError(f"two models are named {spec.name!r}", hint="--alias NAME=MODEL")
        names[spec.name] = spec.name
    for spec in specs:
        for alias in (*spec.aliases, spec.name.lower()):
            names.setdefault(alias, spec.name)
    return names


def give_back(devices: Devices, plans: Sequence[Plan]) -> Devices:
    """``devices`` as they would be without what ``plans`` hold."""
    freed: dict[str, int] = {}
    for plan in plans:
        for ledger in plan.devices:
            freed[ledger.id] = freed.get(ledger.id, 0) + ledger.used
    host = devices.host
    available = min(host.total, host.available + sum(plan.host.used for plan in plans))
    return msgspec.structs.replace(
        devices,
        host=msgspec.structs.replace(host, available=available),
        gpus=tuple(
            msgspec.structs.replace(gpu, free=min(gpu.total, gpu.free + freed.get(gpu.id, 0)))
            for gpu in devices.gpus
        ),
    )


def _is_better(best: Plan | PlanError, now: Plan) -> bool:
    """Whether unloading others is worth it: more on the GPU, or at least twice the context."""
    if not isinstance(best, Plan):
        return False
    if best.params.n_ctx >= 2 * now.params.n_ctx:
        return True
    rank = (_VERDICTS[best.verdict], best.params.n_gpu_layers)
    return rank > (_VERDICTS[now.verdict], now.params.n_gpu_layers)


def make_runtime(
    specs: Sequence[ModelSpec],
    settings: Settings,
    *,
    backend: str | None = None,
    options: EngineOptions | None = None,
) -> Runtime:
    """A Runtime over models of this machine, planned and run as the settings say."""
    from edgellm.engine.build import require_engine
    from edgellm.engine.client import Engine

    plan = settings.plan
    vram, only = vram_of(plan), backend_of(plan)
    plan_request(settings)  # what is wrong with the settings is said before anything is served
    runs = backend or settings.engine.backend
    how = options if options is not None else engine_options(settings)
    if runs == "llama" and specs:
        require_engine()

    pool = Pool(plan.worker)
    shapes: dict[str, tuple[tuple[str, int, int], ModelShape]] = {}

    def shape_of(ref: str) -> ModelShape:
        # The same object for the same file: the planner remembers its work by shape, and a new
        # one at every load would keep several of them alive.
        path = local_path(ref, settings)
        about = path.stat()
        stamp = (str(path), about.st_size, about.st_mtime_ns)
        known = shapes.get(ref)
        if known is None or known[0] != stamp:
            known = shapes[ref] = (stamp, model_shape(read_gguf(path)))
        return known[1]

    def planner(spec: ModelSpec, devices: Devices, other: PlanRequest | None) -> Plan:
        seen = devices_.imagine(devices, vram=vram, ram=plan.ram, backend=only)
        seen = with_workers(seen, pool)
        return make_plan(shape_of(spec.ref), seen, other or plan_request(settings))

    async def loader(plan: Plan, on_progress: OnProgress) -> Engine:
        again = replanner(pool, plan_request(settings))
        engine = await Engine.load(
            plan, backend=runs, options=how, on_progress=on_progress, replan=again
        )
        await remember_load(plan, engine)
        return engine

    return Runtime(
        specs,
        planner=planner,
        loader=loader,
        max_loaded=settings.serve.max_loaded,
        ttl_s=settings.serve.ttl_s,
    )
