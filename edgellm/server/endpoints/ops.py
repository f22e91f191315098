"""Health, metrics, stats, plans, and the pages that describe the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from edgellm import __version__
from edgellm.errors import EngineError
from edgellm.metrics import EngineStats
from edgellm.planner.plan import PlanRequest
from edgellm.runtime import Lease
from edgellm.server import pages, prom
from edgellm.server.core import Server
from edgellm.server.endpoints.native import settings_body
from edgellm.server.http import Call, decode
from edgellm.server.prom import Gauge
from edgellm.server.wire.native import PlanBody

PLAN: Final = msgspec.json.Decoder(PlanBody)
PING_TIMEOUT_S: Final = 5.0
_HTML: Final = ((b"content-type", b"text/html; charset=utf-8"),)


async def health(server: Server, call: Call) -> None:
    """200 when every loaded engine's loop answered just now; 503 says which did not, or that the
    first load is under way."""
    if server.is_draining:
        await call.json({"status": "draining"}, status=503)
        return
    if server.is_loading:
        error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
        await call.json({"status": "loading", "error": error}, status=503)
        return
    leases = server.runtime.loaded()
    answers = await asyncio.gather(*(_ping(lease) for lease in leases))
    dead = {name: error for name, error in answers if error is not None}
    if server.upstreams is not None:
        # One replica is enough; which ones are down is in the stats and metrics.
        groups = server.upstreams.groups.values()
        dead |= {g.name: "no server for it is up" for g in groups if not g.is_up}
        if not groups and not leases:
            dead["upstream"] = "; ".join(r.error for r in server.upstreams.replicas)
    if dead:
        await call.json({"status": "error", "engines": dead}, status=503)
        return
    await call.json({"status": "ok"})


async def _ping(lease: Lease) -> tuple[str, str | None]:
    try:
        await lease.engine.ping(PING_TIMEOUT_S)
    except EngineError as error:
        return lease.name, error.message
    return lease.name, None


async def all_stats(server: Server) -> list[tuple[Lease, EngineStats]]:
    """What each loaded engine says of itself; one that just went away is left out."""
    leases = server.runtime.loaded()
    answers = await asyncio.gather(*(x.engine.stats() for x in leases), return_exceptions=True)
    return [
        (lease, stats)
        for lease, stats in zip(leases, answers, strict=True)
        if isinstance(stats, EngineStats)
    ]


async def metrics(server: Server, call: Call) -> None:
    """Prometheus text."""
    found = await all_stats(server)
    text = server.metrics.render([*_gauges(server, found), *_llama_gauges(server, found)])
    started = str(int(server.started_at)).encode()
    await call.reply(
        text.encode(),
        headers=((b"content-type", prom.CONTENT_TYPE), (b"process-start-time-unix", started)),
    )


_ENGINE_GAUGES: Final = (
    ("running", "Sequences being computed."),
    ("waiting", "Requests that wait for a place."),
    ("preempted", "Sequences that gave their cells away."),
    ("n_cells", "Cells of the KV cache."),
    ("cells_used", "Cells in use, retained prefixes included."),
    ("cells_retained", "Cells of retained prefixes."),
    ("prefill_tps", "Prompt tokens a second, over the last second."),
    ("decode_tps", "Generated tokens a second, over the last second."),
)
_ENGINE_COUNTERS: Final = (
    ("n_steps", "Steps of the engine loop."),
    ("preemptions", "Times a sequence gave its cells away."),
    ("requests_cancelled", "Requests whose client went away."),
    ("prefix_hits", "Prompts that shared a prefix."),
    ("drafted_tokens", "Tokens that were drafted."),
    ("accepted_tokens", "Drafted tokens that were right."),
)


def _gauges(server: Server, found: list[tuple[Lease, EngineStats]]) -> Iterator[Gauge]:
    def by_model(field: str) -> dict[prom.Labels, float]:
        return {(("model", lease.name),): getattr(stats, field) for lease, stats in found}

    for field, text in _ENGINE_GAUGES:
        yield Gauge(f"edgellm_{field.removeprefix('n_')}", text, by_model(field))
    for field, text in _ENGINE_COUNTERS:
        name = f"edgellm_{field.removeprefix('n_')}_total"
        yield Gauge(name, text, by_model(field), "counter")
    misses: dict[prom.Labels, float] = {
        (("model", lease.name), ("reason", reason)): float(n)
        for lease, stats in found
        for reason, n in stats.prefix_misses.items()
    }
    yield Gauge("edgellm_prefix_misses_total", "Prompts that shared nothing.", misses, "counter")
    yield from _memory(found)
    yield from _upstreams(server)
    runtime = server.runtime
    states: dict[prom.Labels, float] = {
        (("model", m.name), ("state", m.state)): 1.0 for m in runtime.models()
    }
    yield Gauge("edgellm_model_state", "1 for the state each model is in.", states)
    yield Gauge("edgellm_http_requests_in_flight", "Open requests.", {(): server.in_flight})
    yield Gauge("edgellm_model_loads_total", "Model loads.", {(): runtime.n_loads}, "counter")
    yield Gauge("edgellm_model_unloads_total", "Unloads.", {(): runtime.n_unloads}, "counter")
    yield Gauge("edgellm_start_time_seconds", "When it started.", {(): server.started_at})
    yield Gauge("edgellm_build_info", "The version.", {(("version", __version__),): 1})


def _upstreams(server: Server) -> Iterator[Gauge]:
    if server.upstreams is None:
        return
    replicas = server.upstreams.replicas

    def by_url(name: str) -> dict[prom.Labels, float]:
        return {(("upstream", r.origin.url),): float(getattr(r, name)) for r in replicas}

    yield Gauge("edgellm_upstream_up", "1 when it answers.", by_url("is_up"))
    yield Gauge("edgellm_upstream_in_flight", "Open requests there.", by_url("in_flight"))
    text = "Requests given to it."
    yield Gauge("edgellm_upstream_given_total", text, by_url("n_requests"), "counter")
    failed = by_url("n_failed")
    yield Gauge("edgellm_upstream_failures_total", "Times it broke off.", failed, "counter")
    waiting: dict[prom.Labels, float] = {
        (("model", g.name),): float(g.n_waiting) for g in server.upstreams.groups.values()
    }
    yield Gauge("edgellm_upstream_waiting", "Requests that wait for room.", waiting)
    n_retries: dict[prom.Labels, float] = {(): float(server.upstreams.n_retries)}
    yield Gauge("edgellm_upstream_retries_total", "Asked another.", n_retries, "counter")


def _memory(found: list[tuple[Lease, EngineStats]]) -> Iterator[Gauge]:
    planned: dict[prom.Labels, float] = {}
    measured: dict[prom.Labels, float] = {}
    for lease, _ in found:
        model = ("model", lease.name)
        for ledger in lease.engine.plan.devices:
            planned[(model, ("device", ledger.id))] = ledger.used
        planned[(model, ("device", "host"))] = lease.engine.plan.host.used
        for device in lease.engine.report.measured:
            measured[(model, ("device", device.id))] = (
                device.weights + device.kv_cache + device.recurrent_state + device.compute
            )
    yield Gauge("edgellm_memory_planned_bytes", "What the plan gives a device.", planned)
    yield Gauge("edgellm_memory_measured_bytes", "What llama.cpp allocated there.", measured)


def _llama_gauges(server: Server, found: list[tuple[Lease, EngineStats]]) -> Iterator[Gauge]:
    """The names that dashboards made for llama-server read (server-context.cpp, metrics)."""
    m = server.metrics
    prompt, cached = m.total("edgellm_prompt_tokens_total"), m.total("edgellm_cached_tokens_total")
    generated = m.total("edgellm_generated_tokens_total")
    ttft = m.sum("edgellm_ttft_seconds") - m.sum("edgellm_queue_seconds")
    decode = m.sum("edgellm_e2e_seconds") - m.sum("edgellm_ttft_seconds")
    stats = [s for _, s in found]
    counters = {
        "prompt_tokens_total": ("Prompt tokens processed.", prompt - cached),
        "prompt_tokens_cached_total": ("Prompt tokens reused.", cached),
        "prompt_seconds_total": ("Prompt processing time.", max(ttft, 0.0)),
        "tokens_predicted_total": ("Generated tokens.", generated),
        "tokens_predicted_seconds_total": ("Generation time.", max(decode, 0.0)),
        "n_decode_total": ("Calls of llama_decode.", sum(s.n_steps for s in stats)),
        "n_tokens_max": ("Most cells seen.", max((s.cells_used for s in stats), default=0)),
        "spec_decode_num_draft_tokens_total": ("Drafted.", sum(s.drafted_tokens for s in stats)),
        "spec_decode_num_accepted_tokens_total": ("Right.", sum(s.accepted_tokens for s in stats)),
        "spec_decode_num_drafts_total": ("Drafts.", sum(s.drafted_tokens > 0 for s in stats)),
    }
    gauges = {
        "prompt_tokens_seconds": ("Prompt throughput.", sum(s.prefill_tps for s in stats)),
        "predicted_tokens_seconds": ("Decode throughput.", sum(s.decode_tps for s in stats)),
        "requests_processing": ("Running.", sum(s.running for s in stats)),
        "requests_deferred": ("Waiting.", sum(s.waiting for s in stats)),
        "n_busy_slots_per_decode": ("Running a step.", sum(s.running for s in stats)),
    }
    for name, (text, value) in counters.items():
        yield Gauge(f"llamacpp:{name}", text, {(): value}, "counter")
    for name, (text, value) in gauges.items():
        yield Gauge(f"llamacpp:{name}", text, {(): value})


async def stats(server: Server, call: Call) -> None:
    """Models, their engines and requests, as ``edgellm ps`` and the terminal interface show."""
    engines = {
        lease.name: {
            **msgspec.to_builtins(found),
            "pid": lease.engine.pid,
            "n_seq_max": lease.engine.info.n_seq_max,
            "n_ctx_seq": lease.engine.info.n_ctx_seq,
        }
        for lease, found in await all_stats(server)
    }
    await call.json(
        {
            "version": __version__,
            "started_at": server.started_at,
            "in_flight": server.in_flight,
            "is_draining": server.is_draining,
            "models": [msgspec.to_builtins(m) for m in server.runtime.models()],
            "engines": engines,
            "warnings": list(server.runtime.warnings),
            "upstreams": _upstream_stats(server),
        }
    )


def _upstream_stats(server: Server) -> list[dict[str, Any]]:
    if server.upstreams is None:
        return []
    return [
        {
            "url": r.origin.url,
            "is_up": r.is_up,
            "error": r.error or None,
            "models": list(r.models),
            "in_flight": r.in_flight,
            "limit": r.limit,
            "n_requests": r.n_requests,
            "n_failed": r.n_failed,
        }
        for r in server.upstreams.replicas
    ]


async def plans(server: Server, call: Call) -> None:
    """The plan of ``?model=`` (or the first): as loaded, with what was measured, else as of now."""
    wanted = call.query("model")
    loaded = {lease.name: lease.engine for lease in server.runtime.loaded()}
    spec = server.runtime.find(wanted or next(iter(loaded), None))
    engine = loaded.get(spec.name)
    if engine is None:
        made = await asyncio.to_thread(server.runtime.plan, spec)
        await call.json({**made.to_json(), "report": None})
        return
    await call.json({**engine.plan.to_json(), "report": msgspec.to_builtins(engine.report)})


async def plan(server: Server, call: Call) -> None:
    """The plan of a model that is served here, with other parameters; nothing is loaded."""
    body = decode(PLAN, await server.body(call))
    spec = server.runtime.find(body.model)
    request = PlanRequest(
        n_ctx=body.ctx,
        n_seq_max=body.parallel,
        n_gpu_layers=body.ngl,
        n_batch=body.batch,
        n_ubatch=body.ubatch,
        type_k=body.type_k,
        type_v=body.type_v,
        flash_attn=body.flash_attn,
        n_cpu_moe=body.n_cpu_moe,
        margin=body.margin,
        objective=body.objective,
    )
    made = await asyncio.to_thread(server.runtime.plan, spec, request)
    await call.json(made.to_json())


async def props(server: Server, call: Call) -> None:
    """llama-server's /props, of the first loaded model (or the one ``?model=`` names)."""
    async with server.lease(call, call.query("model")) as view:
        info, plan_ = view.info, view.engine.plan
        templates = info.chat_templates
        await call.json(
            {
                "default_generation_settings": {
                    "id": 0,
                    "n_ctx": info.n_ctx_seq,
                    "is_processing": False,
                    "params": settings_body(view, server.options.sampling),
                },
                "total_slots": info.n_seq_max,
                "model_alias": view.name,
                "model_path": plan_.model.path,
                "modalities": {"vision": False, "audio": False, "video": False},
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": True,
                "chat_template": templates.get("default", ""),
                **(
                    {"chat_template_tool_use": templates["tool_use"]}
                    if "tool_use" in templates
                    else {}
                ),
                "bos_token": info.bos_text,
                "eos_token": info.eos_text,
                "build_info": info.build,
                "is_sleeping": False,
            }
        )


async def slots(server: Server, call: Call) -> None:
    """llama-server's /slots: one entry a sequence that the first loaded model can run."""
    found = await all_stats(server)
    wanted = call.query("model")
    name = server.runtime.find(wanted).name if wanted else None
    for lease, engine_stats in found:
        if name in (None, lease.name):
            await call.json(_slots(lease, engine_stats))
            return
    await call.json([])


def _slots(lease: Lease, engine_stats: EngineStats) -> list[dict[str, Any]]:
    running = [r for r in engine_stats.requests if r.state == "running"]
    info = lease.engine.info
    shown = []
    for i in range(max(info.n_seq_max, len(running))):
        request = running[i] if i < len(running) else None
        slot: dict[str, Any] = {
            "id": i,
            "n_ctx": info.n_ctx_seq,
            "speculative": engine_stats.speculation != "off",
            "is_processing": request is not None,
        }
        if request is not None:
            slot["id_task"] = request.id
            slot["n_prompt_tokens"] = request.n_prompt
            slot["next_token"] = {"has_next_token": True, "n_decoded": request.n_output}
        shown.append(slot)
    return shown


async def version(_: Server, call: Call) -> None:
    """``{"version": ...}``, as vLLM says it."""
    await call.json({"version": __version__})


async def docs(_: Server, call: Call) -> None:
    """The document as a page."""
    await call.reply(pages.DOCS, headers=_HTML)


async def home(server: Server, call: Call) -> None:
    """What runs here."""
    if not server.options.ui:
        await call.json({"name": "edgellm", "version": __version__}, status=404)
        return
    await call.reply(pages.HOME, headers=_HTML)
