"""The straight line: a model's name -> resolved -> header -> shape -> plan -> engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgellm import devices as devices_
from edgellm.config import PlanSettings, Settings
from edgellm.devices import Devices
from edgellm.engine.info import EngineOptions
from edgellm.errors import (
    ConfigError,
    ModelNotFoundError,
)
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner import observed
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.planner.types import KV_BLOCK
from edgellm.store import catalog
from edgellm.units import MiB, parse_bytes
from edgellm.workers import Pool, as_gpus

if TYPE_CHECKING:  # planning a model, most of what commands do, needs none of the engine
    from edgellm.engine.client import Engine, OnProgress, Replan


def plan_model(
    model: str,
    request: PlanRequest | None = None,
    devices: Devices | None = None,
    *,
    settings: Settings | None = None,
) -> Plan:
    """The plan for a model that is on this machine; ``request`` and ``devices`` from the settings
    when they are not given. No engine is imported. Raises ModelNotFoundError, GGUFError,
    DoesNotFitError."""
    settings = settings or Settings()
    return make_plan(
        local_shape(model, settings),
        devices if devices is not None else plan_devices(settings),
        request if request is not None else plan_request(settings),
    )


async def open_engine(
    model: str,
    request: PlanRequest | None = None,
    *,
    settings: Settings | None = None,
    backend: str | None = None,
    on_progress: OnProgress | None = None,
) -> Engine:
    """Resolve, read, plan and load one model: the whole straight line.

    Raises what its parts raise: ModelNotFoundError, GGUFError, DoesNotFitError, EngineError.
    """
    import asyncio  # 20 ms that planning has no use for

    from edgellm.engine.build import require_engine
    from edgellm.engine.client import Engine

    settings = settings or Settings()
    backend = backend or settings.engine.backend
    if backend == "llama":
        require_engine()
    plan = await asyncio.to_thread(plan_model, model, request, settings=settings)
    engine = await Engine.load(
        plan,
        backend=backend,
        on_progress=on_progress,
        options=engine_options(settings),
        replan=replanner(Pool(settings.plan.worker), request or plan_request(settings)),
    )
    await remember_load(plan, engine)
    return engine


async def remember_load(plan: Plan, engine: Engine) -> None:
    """Keep for later plans what this load showed and, once it is closed, how fast it was."""
    import asyncio

    def keep_speed() -> None:
        observed.remember(observed.observe_speed(plan, engine.alone_tps))

    await asyncio.to_thread(observed.remember, observed.observe(plan, engine.report))
    if engine.info.backend == "llama" and not engine.report.fallbacks:
        engine.on_closed = keep_speed


def engine_options(settings: Settings) -> EngineOptions:
    """How engines run by these settings; the engine's own default where a setting is None."""
    chosen = {
        name: value
        for name in settings.engine.__struct_fields__
        if name != "backend" and (value := getattr(settings.engine, name)) is not None
    }
    waiting = settings.serve.max_waiting
    return EngineOptions(max_waiting=waiting, min_ctx=settings.plan.min_ctx, **chosen)


def local_path(model: str, settings: Settings) -> Path:
    """The file of a model on this machine, or a ModelNotFoundError that says how to fetch it."""
    resolved = catalog.resolve(model, settings.store)
    if resolved.path is None:
        raise ModelNotFoundError(
            f"{resolved.name} is not on this machine", hint=f"edgellm pull {model}"
        )
    return resolved.path


def local_shape(model: str, settings: Settings) -> ModelShape:
    """The shape of a model on this machine, from its header."""
    return model_shape(read_gguf(local_path(model, settings)))


def plan_request(settings: Settings, *, fixed: bool = False) -> PlanRequest:
    """The planner's question as the settings put it. Raises ConfigError on values it cannot be."""
    plan = settings.plan
    return PlanRequest(
        n_ctx=plan.ctx,
        n_seq_max=plan.parallel,
        n_gpu_layers=_n_gpu_layers(plan.ngl),
        n_batch=plan.batch,
        n_ubatch=plan.ubatch,
        n_outputs_max=plan.outputs,
        type_k=_kv_type("type_k", plan.type_k),
        type_v=_kv_type("type_v", plan.type_v),
        flash_attn=plan.flash_attn,
        n_cpu_moe=plan.n_cpu_moe,
        swa_full=plan.swa_full,
        kv_unified=None if plan.kv_unified is None else plan.kv_unified == "on",
        tensor_split=_tensor_split(plan.tensor_split),
        split_mode=plan.split_mode,
        main_gpu=plan.main_gpu,
        n_threads=plan.threads,
        n_threads_batch=plan.threads_batch,
        use_mmap=plan.mmap,
        use_mlock=plan.mlock,
        margin=plan.margin,
        overhead=plan.overhead,
        objective=plan.objective,
        fixed=fixed,
        draft_model=plan.draft_model,
        mmproj=plan.mmproj,
        min_ctx=plan.min_ctx,
        # Asked for by name, q4 is no surprise.
        allow_q4_kv=plan.allow_q4_kv or "q4" in f"{plan.type_k} {plan.type_v}",
        force=plan.force,
        observed=observed.load(),
        embeddings=plan.embeddings,
        pooling=plan.pooling,
    )


def plan_devices(settings: Settings) -> Devices:
    """This machine now, with what --vram, --ram and --backend say in place of what is there."""
    plan = settings.plan
    here = devices_.imagine(
        devices_.probe(), vram=vram_of(plan), ram=plan.ram, backend=backend_of(plan)
    )
    return with_workers(here, Pool(plan.worker))


def with_workers(devices: Devices, pool: Pool, without: Sequence[str] = ()) -> Devices:
    """``devices`` and those of the workers that answer, before this machine's: the output layer
    goes to the last device, and its logits should not cross the network."""
    found, notes = pool.look(without)
    return msgspec.structs.replace(
        devices, gpus=(*as_gpus(found), *devices.gpus), notes=(*devices.notes, *notes)
    )


def replanner(pool: Pool, request: PlanRequest) -> Replan:
    """What gives an engine another plan when workers are lost: without them, as long as it fits."""

    def replan(plan: Plan, gone: tuple[str, ...]) -> Plan:
        devices = with_workers(devices_.probe(), pool, gone)
        return make_plan(model_shape(read_gguf(plan.model.path)), devices, request)

    return replan


def vram_of(plan: PlanSettings) -> list[int]:
    try:
        sizes = [parse_bytes(size) for size in plan.vram]
    except ValueError as error:
        raise ConfigError(f"plan.vram: {error}", hint="edgellm plan MODEL --vram 6GiB") from error
    for size in sizes:
        if 0 < size < MiB:
            raise ConfigError(f"plan.vram: a card of {size} bytes", hint=f"--vram {size}GiB")
    return sizes


def backend_of(plan: PlanSettings) -> str | None:
    if plan.backend is None or plan.backend in devices_.BACKENDS:
        return plan.backend
    known = ", ".join(devices_.BACKENDS)
    raise ConfigError(f"plan.backend: {plan.backend!r} is none of {known}", hint="edgellm config")


def _kv_type(key: str, text: str | None) -> str | None:
    if text is not None and text not in KV_BLOCK:
        known = ", ".join(KV_BLOCK)
        raise ConfigError(f"plan.{key}: {text!r} is no cache type; one of {known}")
    return text


def _n_gpu_layers(text: str | None) -> int | None:
    if text is None or text == "auto":
        return None
    if text == "all":
        return -1
    if text == "-1" or text.isdecimal():
        return int(text)
    raise ConfigError(f"plan.ngl: {text!r} is not a number, auto or all", hint="--ngl auto")


def _tensor_split(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"plan.tensor_split: {text!r} is not a list of numbers", hint="--tensor-split 3,1"
        ) from error
    if not all(0 <= share < math.inf for share in shares) or sum(shares) <= 0:
        raise ConfigError(f"plan.tensor_split: {text!r} leaves no card a share")
    return shares
