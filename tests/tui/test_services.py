"""The seam over this machine: the planner, the store and the engine behind what screens ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgellm import config
from edgellm.config import PlanSettings, Settings
from edgellm.errors import ConfigError
from edgellm.planner import observed
from edgellm.planner.plan import Observation, PlanRequest
from edgellm.tui.app import EdgeApp
from edgellm.tui.downloads import Download
from edgellm.tui.ports import ModelRow
from edgellm.tui.services import LocalServices
from tests.gguf.build import STR, gguf, pair, tensor
from tests.hub_server import HubServer, hub_server
from tests.tui.driving import settle

CARD = Settings(plan=PlanSettings(vram=("1GiB",), backend="cuda"))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    size = 128 * 1024
    tensors = [tensor("a.weight", (8, size), 0, 0)]
    with hub_server() as hub:
        data = gguf([pair("general.architecture", STR, "llama")], tensors, data=8 * size * 4)
        hub.files["ann/tiny-GGUF"] = {"tiny-Q4_1.gguf": data}
        hub.trouble.chunk = 1 << 18
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_alternatives_of_a_real_model_can_be_asked_for_as_they_stand() -> None:
    services = LocalServices(CARD)
    plan = services.plan("starter", PlanRequest())
    assert plan.alternatives == ()
    richer = services.alternatives("starter", PlanRequest(), plan)
    assert msgspec.structs.replace(richer, alternatives=()) == plan
    assert richer.alternatives
    for choice in richer.alternatives:
        other = services.plan("starter", PlanRequest(**choice.change))
        assert other.speed.decode_tps == choice.decode_tps


def test_a_saved_profile_is_what_the_next_start_plans_with() -> None:
    services = LocalServices(CARD)
    asked = PlanRequest(n_ctx=2048, n_gpu_layers=7, type_k="q8_0")
    where = services.save_profile("laptop", services.plan("starter", asked), asked)
    loaded = config.load({"profile": "laptop"}, environ={}).settings.plan
    assert (loaded.ctx, loaded.ngl, loaded.type_k, loaded.ubatch) == (2048, "7", "q8_0", None)
    profile = config.read_profile("laptop")
    assert str(profile.path) == where
    assert set(profile.reasons.values()) == {"chosen by hand"}


def test_a_profile_of_an_untouched_plan_holds_the_planner_s_values_and_reasons() -> None:
    services = LocalServices(CARD)
    plan = services.plan("starter", PlanRequest())
    services.save_profile("found", plan, PlanRequest())
    profile = config.read_profile("found")
    assert profile.values["plan.ctx"] == plan.params.n_ctx
    why = {reason.param: reason.why for reason in plan.reasons}
    assert profile.reasons["plan.ctx"] == why["n_ctx"]


def test_a_profile_s_name_cannot_leave_its_folder() -> None:
    services = LocalServices(CARD)
    plan = services.plan("starter", PlanRequest())
    for name in ("../x", ".x", "", "a b"):
        with pytest.raises(ConfigError):
            services.save_profile(name, plan, PlanRequest())


async def test_what_a_load_showed_is_remembered_for_the_next_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Observation(device="card", backend="cuda", arch="llama", n_loads=1, overhead=7)
    monkeypatch.setattr(observed, "observe", lambda plan, report: (seen,))
    settings = msgspec.structs.replace(
        Settings(), engine=msgspec.structs.replace(Settings().engine, backend="scripted")
    )
    services = LocalServices(settings)
    plan = await asyncio.to_thread(services.plan, "starter", PlanRequest())
    endpoint = await services.load(plan, lambda progress: None)
    await endpoint.close()
    assert [x.overhead for x in observed.load()] == [7]


async def start(pilot: Any, app: EdgeApp) -> Download:
    """A download that has begun to arrive."""
    row = ModelRow(ref="hf:ann/tiny-GGUF", name="tiny", source="hub")
    app.downloads.start(row)
    await settle(pilot, lambda: app.downloads.items[row.ref].progress.n_done > 0)
    return app.downloads.items[row.ref]


async def test_a_download_is_paused_goes_on_where_it_stopped_and_is_listed(hub: HubServer) -> None:
    app = EdgeApp(LocalServices(Settings()))
    size = len(hub.files["ann/tiny-GGUF"]["tiny-Q4_1.gguf"])
    hub.trouble.chunk_delay_s = 0.5
    async with app.run_test(size=(80, 24)) as pilot:
        download = await start(pilot, app)
        app.downloads.pause(download.row.ref)
        await settle(pilot, lambda: not running(app))
        paused_at = download.progress.n_done
        assert 0 < paused_at < size
        hub.trouble.chunk_delay_s = 0.0
        download = await start(pilot, app)
        await settle(pilot, lambda: download.state == "done")
        assert download.progress.n_done == download.progress.n_total == size
        assert download.progress.phase == "checking"
        assert Path(download.path).stat().st_size == size
        assert hub.data_requests()[-1].range is not None
        assert "tiny" in {row.name for row in app.services.local_models()}


async def test_a_cancelled_download_stops_and_lists_nothing(hub: HubServer) -> None:
    app = EdgeApp(LocalServices(Settings()))
    hub.trouble.chunk_delay_s = 0.5
    async with app.run_test(size=(80, 24)) as pilot:
        download = await start(pilot, app)
        app.downloads.cancel(download.row.ref)
        await settle(pilot, lambda: not running(app))
        assert download.state == "cancelled"
        assert "tiny" not in {row.name for row in app.services.local_models()}


def running(app: EdgeApp) -> list[Any]:
    return [worker for worker in app.workers if worker.group == "downloads" and worker.is_running]
