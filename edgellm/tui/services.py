"""The seam to the store, the planner, the runtime and the server: it only translates.

Everything heavy is imported when it is first asked for: the first paint waits for none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgellm import config, paths
from edgellm.config import Settings
from edgellm.devices import Devices, probe
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.tui.ports import (
    Endpoint,
    Gauge,
    Json,
    ModelRow,
    Preferences,
    Progress,
    ServerHandle,
)

if TYPE_CHECKING:
    from edgellm.gguf.shape import ModelShape

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty",
    "frequency_penalty", "seed", "max_tokens",
)  # fmt: skip
HUB_LIMIT = 30
DEVICES_FOR_S = 2.0
"""Free memory is asked again after this long: replanning while somebody steps stays quick."""


class LocalServices:
    """Implements :class:`edgellm.tui.ports.Services` on this machine."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings if settings is not None else config.load().settings
        self._shapes: dict[str, ModelShape] = {}
        self._devices: tuple[float, Devices] | None = None

    def clock(self) -> float:
        return time.time()

    def state_file(self, name: str) -> str:
        return str(paths.state_dir() / name)

    def preferences(self) -> Preferences:
        tui, chat = self.settings.tui, self.settings.chat
        pairs = (pair.partition("=") for pair in tui.keys)
        return Preferences(
            theme=tui.theme, animations=tui.animations, system=chat.system or "",
            keys={name.strip(): keys.strip() for name, _, keys in pairs},
            sampling={k: v for k in SAMPLING if (v := getattr(chat, k)) is not None},
        )  # fmt: skip

    # -- the machine -----------------------------------------------------------------------------

    def devices(self) -> Devices:
        return probe()

    def gauge(self) -> Gauge:
        from edgellm.tui.gauge import read_gauge

        return read_gauge(self._recent_devices())

    def _recent_devices(self) -> Devices:
        """The devices plans are made for, not older than DEVICES_FOR_S."""
        from edgellm.runtime import plan_devices

        now = time.monotonic()
        if self._devices is None or now - self._devices[0] > DEVICES_FOR_S:
            self._devices = (now, plan_devices(self.settings))
        return self._devices[1]

    # -- models ----------------------------------------------------------------------------------

    def local_models(self) -> list[ModelRow]:
        from edgellm.store.local import list_models
        from edgellm.store.names import quant_of
        from edgellm.tui.details import shown_name

        return [
            ModelRow(
                ref=model.name, name=shown_name(str(model.path)), source="here", owner=model.owner,
                path=str(model.path), n_bytes=model.n_bytes, quant=quant_of(model.path.name) or "",
            )
            for model in list_models(self.settings.store)
        ]  # fmt: skip

    def catalog(self) -> list[ModelRow]:
        from edgellm.store.catalog import entries
        from edgellm.tui.offers import entry_row

        devices = self._recent_devices()
        return [entry_row(entry, devices) for entry in entries()]

    def search(self, query: str) -> list[ModelRow]:
        from edgellm.store import hub
        from edgellm.tui.offers import hit_row

        hits = hub.search(query, limit=HUB_LIMIT, settings=self.settings.store)
        return [hit_row(hit.repo, hit.downloads, hit.license) for hit in hits]

    def details(self, row: ModelRow) -> list[tuple[str, str]]:
        from edgellm.gguf.reader import read_gguf
        from edgellm.tui.details import facts

        return facts(read_gguf(row.path)) if row.path is not None else []

    # -- plans -----------------------------------------------------------------------------------

    def plan(self, ref: str, request: PlanRequest) -> Plan:
        from edgellm.planner.fit import make_plan

        shape, devices = self._shape(ref), self._recent_devices()
        return make_plan(shape, devices, self._over_settings(request))

    def alternatives(self, ref: str, request: PlanRequest, plan: Plan) -> Plan:
        from edgellm.planner.alternatives import with_alternatives

        shape, devices = self._shape(ref), self._recent_devices()
        return with_alternatives(shape, devices, self._over_settings(request), plan)

    def _shape(self, ref: str) -> ModelShape:
        """A model's shape, its header read once."""
        shape = self._shapes.get(ref)
        if shape is None:
            from edgellm.gguf.shape import model_shape
            from edgellm.library import find_header

            header = find_header(ref, self.settings, self._recent_devices())
            shape = self._shapes[ref] = model_shape(header)
        return shape

    def _over_settings(self, request: PlanRequest) -> PlanRequest:
        """What was asked for here, over what is configured."""
        import msgspec

        from edgellm.runtime import plan_request

        base = plan_request(self.settings)
        default = PlanRequest()
        given = {
            name: value
            for name in request.__struct_fields__
            if (value := getattr(request, name)) != getattr(default, name)
        }
        return msgspec.structs.replace(base, **given)

    def save_profile(self, name: str, plan: Plan, request: PlanRequest) -> str:
        from edgellm.tui.profiles import save_profile

        return save_profile(name, plan, request)

    def pull(
        self, ref: str, on_progress: Callable[[Progress], None], stopped: Callable[[], bool]
    ) -> str:
        from edgellm.tui.pulling import pull_model

        return pull_model(ref, self.settings, self._recent_devices(), on_progress, stopped)

    # -- models that answer ----------------------------------------------------------------------

    async def load(self, plan: Plan, on_progress: Callable[[Progress], None]) -> Endpoint:
        from edgellm.engine.build import require_engine
        from edgellm.engine.client import Engine
        from edgellm.engine.info import LoadProgress, load_words
        from edgellm.runtime import engine_options, plan_request, remember_load, replanner
        from edgellm.tui.local import LocalEndpoint
        from edgellm.workers import Pool

        def forward(progress: LoadProgress) -> None:
            on_progress(Progress(phase=load_words(progress.stage, progress.fraction)))

        if self.settings.engine.backend == "llama":
            require_engine()
        engine = await Engine.load(
            plan, backend=self.settings.engine.backend, on_progress=forward,
            options=engine_options(self.settings),
            replan=replanner(Pool(self.settings.plan.worker), plan_request(self.settings)),
        )  # fmt: skip
        await remember_load(plan, engine)
        return LocalEndpoint(engine)

    async def attach(self, url: str, api_key: str | None = None) -> Endpoint:
        from edgellm.tui.remote import RemoteEndpoint

        return await RemoteEndpoint.attach(url, api_key)

    async def serve(self, ref: str, host: str, port: int, api_key: str | None) -> ServerHandle:
        from edgellm.tui.serving import start

        return await start(ref, host, port, api_key)

    def bench_runs(self) -> list[Json]:
        from edgellm.tui.runs import read_runs

        return read_runs(paths.state_dir() / "bench.sqlite3")


def make_services(overrides: dict[str, Any] | None = None) -> LocalServices:
    """Services by the settings, flags of the command line over them."""
    return LocalServices(config.load(overrides or {}).settings)
