"""The straight line: a model's name -> resolved -> header -> shape -> plan -> engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from edgellm import devices as devices_
from edgellm.config import PlanSettings, Settings
from edgellm.devices import Devices
from edgellm.engine.build import require_engine
from edgellm.engine.client import Engine, OnProgress
from edgellm.engine.info import EngineOptions
from edgellm.errors import ConfigError, ModelNotFoundError
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.store import catalog
from edgellm.units import parse_bytes


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
    settings = settings or Settings()
    backend = backend or settings.engine.backend
    if backend == "llama":
        require_engine()
    plan = await asyncio.to_thread(plan_model, model, request, settings=settings)
    return await Engine.load(
        plan, backend=backend, on_progress=on_progress, options=engine_options(settings)
    )


def engine_options(settings: Settings) -> EngineOptions:
    """How engines run by these settings; the engine's own default where a setting is None."""
    chosen = {
        name: value
        for name in settings.engine.__struct_fields__
        if name != "backend" and (value := getattr(settings.engine, name)) is not None
    }
    return EngineOptions(max_waiting=settings.serve.max_waiting, **chosen)


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
        type_k=plan.type_k,
        type_v=plan.type_v,
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
        allow_q4_kv=plan.allow_q4_kv,
        force=plan.force,
    )


def plan_devices(settings: Settings) -> Devices:
    """This machine now, with what --vram, --ram and --backend say in place of what is there."""
    plan = settings.plan
    return devices_.imagine(
        devices_.probe(), vram=_vram(plan), ram=plan.ram, backend=_backend(plan)
    )


def _vram(plan: PlanSettings) -> list[int]:
    try:
        return [parse_bytes(size) for size in plan.vram]
    except ValueError as error:
        raise ConfigError(f"plan.vram: {error}", hint="edgellm plan MODEL --vram 6GiB") from error


def _backend(plan: PlanSettings) -> str | None:
    if plan.backend is None or plan.backend in devices_.BACKENDS:
        return plan.backend
    known = ", ".join(devices_.BACKENDS)
    raise ConfigError(f"plan.backend: {plan.backend!r} is none of {known}", hint="edgellm config")


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
    if min(shares) < 0 or sum(shares) <= 0:
        raise ConfigError(f"plan.tensor_split: {text!r} leaves no card a share")
    return shares
