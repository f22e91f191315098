"""A trial: load an engine with some settings, drive it, and look at what it really took."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from edgellm import config
from edgellm.bench.load import Phase
from edgellm.bench.sample import Sample
from edgellm.bench.scenarios import words
from edgellm.bench.stats import phase_metrics
from edgellm.bench.tune import Settings, Trial, Variable, doublings
from edgellm.devices import Devices
from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions
from edgellm.errors import EdgeLLMError, GGUFError, ModelNotFoundError
from edgellm.metrics import request_timings
from edgellm.planner import observed
from edgellm.planner.plan import LoadReport, Observation, Plan
from edgellm.request import Request, SamplingParams
from edgellm.runtime import engine_options, plan_model
from edgellm.units import MiB, format_bytes

OBJECTIVES: Final = {
    "latency": "the time of one answer alone",
    "throughput": "output tok/s of all sequences together",
    "context": "cells of context, as long as decode keeps 90 % of its rate",
}
SPILL: Final = 256 * MiB
"""Bytes a card's own count may lack against what was allocated on it: rounding and sharing."""
SWAP: Final = 64 * MiB
N_PROMPT_WORDS: Final = 256
N_OUTPUT: Final = 64
KEPT_DECODE: Final = 0.9


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What each round of a trial asks of the engine."""

    objective: str = "throughput"
    prompt_words: int = N_PROMPT_WORDS
    max_tokens: int = N_OUTPUT


class EngineTrials:
    """Measures settings with real engines (or the scripted one): the tuner's ``measure``."""

    def __init__(
        self,
        model: str,
        workload: Workload,
        *,
        flags: Settings | None = None,
        devices: Devices | None = None,
        baseline_decode: float | None = None,
    ) -> None:
        """``flags``: what the person fixed; trials change other keys only.

        ``baseline_decode`` is the plan's own decode rate where an earlier part of the search
        measured it: context may not be bought with more than a tenth of it.
        """
        self._model = model
        self._workload = workload
        self._flags = flags or {}
        self._devices = devices
        self._baseline_decode = baseline_decode
        self.seen: list[Observation] = []
        """What the loads showed. Remembered only after a search: plans must not change within."""

    async def __call__(self, settings: Settings, number: int) -> Trial:
        """One round; every failure of the engine is a rejected trial, never an exception.

        Raises ModelNotFoundError and GGUFError: a file that went away rejects no setting.
        """
        begin = time.monotonic()
        swapped = psutil.swap_memory().sout
        try:
            figures, reason = await self._measure(settings, number)
        except (ModelNotFoundError, GGUFError):
            raise
        except EdgeLLMError as error:
            figures, reason = {}, f"{type(error).__name__}: {error.message.splitlines()[0]}"
        grown = psutil.swap_memory().sout - swapped
        if not reason and grown > SWAP:
            reason = f"{format_bytes(grown)} went to swap"
        score = None if reason else self._score(figures)
        if not reason and score is None:
            reason = f"decode fell below {KEPT_DECODE:.0%} of the plan's"
        return Trial(
            settings=settings,
            round=number,
            score=score,
            reason=reason,
            figures=figures,
            took_s=time.monotonic() - begin,
        )

    def options(self, resolved: config.Settings) -> EngineOptions:
        """How the engine of a trial runs."""
        return engine_options(resolved)

    async def _measure(self, settings: Settings, number: int) -> tuple[dict[str, float], str]:
        resolved = config.load({**self._flags, **settings}).settings
        plan = await asyncio.to_thread(
            plan_model, self._model, None, self._devices, settings=resolved
        )
        engine = await Engine.load(
            plan, backend=resolved.engine.backend, options=self.options(resolved)
        )
        try:
            reason = spilled(engine.plan, engine.report)
            if reason:
                return {}, reason
            self.seen += observed.observe(engine.plan, engine.report)
            return await self._drive(engine, number), ""
        finally:
            await engine.close()

    async def _drive(self, engine: Engine, number: int) -> dict[str, float]:
        n = 1 if self._workload.objective == "latency" else engine.plan.params.n_seq_max
        await drive(engine, self._requests(engine, n, f"warm/{number}"))
        count = 3 if n == 1 else n
        waves = [[r] for r in self._requests(engine, count, f"{number}")] if n == 1 else [
            self._requests(engine, n, f"{number}")
        ]  # fmt: skip
        phases = [await drive(engine, wave) for wave in waves]
        samples = [s for phase in phases for s in phase.samples]
        wall = sum(phase.end - phase.begin for phase in phases)
        figures = phase_metrics(Phase(samples=samples, begin=0.0, end=wall), concurrency=None)
        return {**figures, "n_ctx": float(engine.plan.params.n_ctx)}

    def _requests(self, engine: Engine, n: int, seed: str) -> list[Request]:
        rng = random.Random(seed)
        room = engine.info.n_ctx_seq - self._workload.max_tokens
        n_words = max(1, min(self._workload.prompt_words, int(room * 0.7)))
        sampling = SamplingParams(
            max_tokens=self._workload.max_tokens, ignore_eos=True, seed=1, temperature=0.8
        )
        return [
            Request(
                id=f"tune-{seed}-{i}",
                prompt=words(rng, n_words),
                sampling=sampling,
                cache_prompt=False,
            )
            for i in range(n)
        ]

    def _score(self, figures: dict[str, float]) -> float | None:
        if self._workload.objective == "latency":
            e2e = figures.get("e2e_p50_s")
            return 1 / e2e if e2e else None
        if self._workload.objective == "throughput":
            return figures.get("output_tps")
        decode = figures.get("decode_tps_p50", 0.0)
        if self._baseline_decode is None:
            self._baseline_decode = decode
        return figures["n_ctx"] if decode >= KEPT_DECODE * self._baseline_decode else None


async def drive(engine: Engine, requests: Sequence[Request]) -> Phase:
    """Send requests to an engine at once; samples like those of a load run. Raises its errors."""
    begin = time.monotonic()
    tasks = [asyncio.create_task(_one(engine, request)) for request in requests]
    try:
        samples = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return Phase(samples=list(samples), begin=begin, end=time.monotonic())


async def _one(engine: Engine, request: Request) -> Sample:
    begin = time.monotonic()
    times: list[float] = []
    usage = None
    async for event in engine.generate(request):
        times += [time.monotonic()] * len(event.token_ids)
        usage = event.usage or usage
    end = time.monotonic()
    n_prompt = usage.n_prompt if usage else 0
    n_cached = usage.n_cached if usage else 0
    timings = request_timings(
        arrival=begin,
        scheduled=begin,
        token_times=times,
        end=end,
        n_computed=n_prompt - n_cached,
    )
    return Sample(
        group="main",
        intended=begin,
        sent=begin,
        end=end,
        token_times=times,
        arrival_times=times,
        n_prompt=n_prompt,
        n_cached=n_cached,
        n_output=len(times),
        error=None if times else "empty",
        timings=timings,
    )


def spilled(plan: Plan, report: LoadReport) -> str:
    """Why this load is not what was planned: memory that is not where it should be; "" when it is.

    A driver that runs out of VRAM may put an allocation into host memory and say nothing: then
    the card's own count grew by less than what llama.cpp allocated on it.
    """
    if report.fallbacks:
        return f"loaded only after: {'; '.join(report.fallbacks)}"
    on_cards = {device.id for device in plan.devices}
    for device in report.measured:
        if device.id not in on_cards or device.used_before is None or device.used_after is None:
            continue
        allocated = (
            device.weights + device.kv_cache + device.recurrent_state
            + device.compute + device.output
        )  # fmt: skip
        missing = allocated - (device.used_after - device.used_before)
        if missing > SPILL:
            return f"{format_bytes(missing)} spilled from {device.id} into host memory"
    return ""


def variables_for(plan: Plan, devices: Devices, objective: str, fixed: Settings) -> list[Variable]:
    """What is worth changing on this machine for this model; never what the person fixed."""
    found = [
        *_thread_variables(plan, devices),
        *_batch_variables(plan),
        *_sequence_variables(plan, objective),
        *_placement_variables(plan),
        *_cache_variables(plan, objective),
        *_context_variables(plan, objective),
        *_draft_variables(plan),
    ]
    return [v for v in found if v.options and not any(k in fixed for o in v.options for k in o)]


def _batch_variables(plan: Plan) -> list[Variable]:
    p = plan.params
    ubatch = doublings("plan.ubatch", p.n_ubatch, low=32, high=min(4096, max(p.n_batch, 2048)))
    # A ubatch larger than the batch has no effect: the batch grows with it.
    options = tuple(
        {**o, "plan.batch": o["plan.ubatch"]} if o and o["plan.ubatch"] > p.n_batch else o
        for o in ubatch
    )
    return [
        Variable(name="n_ubatch", options=options, about="prompt tokens computed at once"),
        Variable(
            name="n_batch",
            options=doublings("plan.batch", p.n_batch, low=max(p.n_ubatch, 128), high=8192),
            about="tokens a decode call takes",
        ),
    ]


def _thread_variables(plan: Plan, devices: Devices) -> list[Variable]:
    p = plan.params
    if plan.verdict == "gpu":
        return []
    options = doublings("plan.threads", p.n_threads, low=1, high=devices.host.n_logical)
    named = {o["plan.threads"] for o in options if o} | {p.n_threads}
    others = {devices.host.n_physical, devices.host.n_logical} - named
    ladder = sorted(
        [*(o for o in options if o), *({"plan.threads": n} for n in others)],
        key=lambda o: o["plan.threads"],
    )
    place = sum(1 for o in ladder if o["plan.threads"] < p.n_threads)
    return [
        Variable(
            name="n_threads",
            options=(*ladder[:place], {}, *ladder[place:]),
            about="CPU threads for decoding",
        )
    ]


def _sequence_variables(plan: Plan, objective: str) -> list[Variable]:
    if objective != "throughput":
        return []
    options = doublings("plan.parallel", plan.params.n_seq_max, low=1, high=64)
    return [Variable(name="n_seq_max", options=options, about="sequences at once")]


def _placement_variables(plan: Plan) -> list[Variable]:
    p, out = plan.params, []
    if not plan.devices:
        return []
    if plan.model.n_expert and p.n_cpu_moe:
        lower = tuple(
            {"plan.n_cpu_moe": n}
            for n in sorted({p.n_cpu_moe * i // 4 for i in (1, 2, 3)} - {p.n_cpu_moe})
        )
        out.append(
            Variable(
                name="n_cpu_moe", options=(*lower, {}), about="layers with experts on the host"
            )
        )
    if plan.verdict == "partial" and p.n_gpu_layers > 0:
        top = plan.model.n_layer + 1
        higher = tuple(
            {"plan.ngl": str(n)}
            for n in range(p.n_gpu_layers + 1, min(top, p.n_gpu_layers + 4) + 1)
        )
        out.append(Variable(name="n_gpu_layers", options=({}, *higher), about="layers on the GPU"))
    return out


def _cache_variables(plan: Plan, objective: str) -> list[Variable]:
    p = plan.params
    flash = tuple({"plan.flash_attn": x} for x in ("on", "off") if x != p.flash_attn)
    out = [Variable(name="flash_attn", options=flash, is_ladder=False, about="flash attention")]
    if objective != "latency" and p.type_k == "f16":
        kv = ({"plan.type_k": "q8_0", "plan.type_v": "q8_0", "plan.flash_attn": "on"},)
        out.append(Variable(name="kv", options=kv, is_ladder=False, about="type of the KV cache"))
    return out


def _context_variables(plan: Plan, objective: str) -> list[Variable]:
    if objective != "context":
        return []
    high = plan.model.n_ctx_train * plan.params.n_seq_max
    options = doublings("plan.ctx", plan.params.n_ctx, low=plan.params.n_ctx, high=high)
    return [Variable(name="n_ctx", options=options, about="cells of context")]


def _draft_variables(plan: Plan) -> list[Variable]:
    if plan.params.draft_model is None:
        return []
    options = doublings("engine.spec_max", 8, low=2, high=32)
    return [Variable(name="draft length", options=options, about="tokens drafted a step at most")]


def session_name(
    plan: Plan, devices: Devices, workload: Workload, fixed: Settings, digest: str
) -> str:
    """One name for one search: the same model, cards, objective and fixed settings resume it."""
    cards = [gpu.uuid or gpu.name for gpu in devices.gpus] or [devices.host.cpu]
    parts: list[Any] = [digest, cards, msgspec.to_builtins(workload), sorted(fixed.items())]
    text = msgspec.json.encode(parts)
    return f"{Path(plan.model.path).stem}-{hashlib.sha256(text).hexdigest()[:12]}"
