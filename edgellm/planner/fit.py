"""The search for the fastest plan that fits. Pure: the same input gives the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from edgellm.devices import Devices, Gpu
from edgellm.errors import DoesNotFitError
from edgellm.gguf.shape import ModelShape
from edgellm.planner.estimate import Ledger, Terms, estimate, replace
from edgellm.planner.plan import ModelFacts, Plan, PlanParams, PlanRequest, Reason, Speed
from edgellm.planner.speed import card, host_card, predict
from edgellm.units import MiB, format_bytes

DEFAULT_CTX: Final = 8192
UBATCHES: Final = (512, 256, 128, 64)
MARGIN_SHARE: Final = 0.03
MARGIN_LEAST: Final = 160 * MiB


def default_margin(gpu: Gpu) -> int:
    """What is kept free on a card nobody measured: 3 % or 160 MiB, whichever is larger."""
    return max(int(gpu.total * MARGIN_SHARE), MARGIN_LEAST)


def make_plan(shape: ModelShape, devices: Devices, request: PlanRequest) -> Plan:
    """The plan for ``request``; raises DoesNotFitError when nothing fits and force is off."""
    if request.fixed:
        return _finish(shape, devices, _estimate(shape, devices, request, fixed_params(request)))
    best: tuple[float, Ledger, Speed] | None = None
    tightest: Ledger | None = None
    for params in _candidates(shape, devices, request):
        ledger = _estimate(shape, devices, request, params)
        if not ledger.fits:
            tightest = _closer(tightest, ledger)
            continue
        speed = _speed(shape, devices, ledger)
        if best is None or speed.decode_tps > best[0] * 1.02:
            best = (speed.decode_tps, ledger, speed)
    if best is not None:
        return _finish(shape, devices, best[1])
    assert_tight = tightest or _estimate(shape, devices, request, fixed_params(request))
    if request.force:
        return _finish(shape, devices, assert_tight)
    raise _does_not_fit(shape, assert_tight)


def fixed_params(request: PlanRequest) -> PlanParams:
    """``request`` as given, llama.cpp's defaults where it says nothing."""
    return PlanParams(
        n_gpu_layers=-1 if request.n_gpu_layers is None else request.n_gpu_layers,
        n_ctx=request.n_ctx or 512,
        n_ctx_seq=0,
        n_batch=request.n_batch or 2048,
        n_ubatch=request.n_ubatch or 512,
        n_seq_max=request.n_seq_max or 1,
        n_outputs_max=request.n_outputs_max or 0,
        type_k=request.type_k or "f16",
        type_v=request.type_v or "f16",
        flash_attn=request.flash_attn or "auto",
        offload_kqv=request.offload_kqv is not False,
        kv_unified=bool(request.kv_unified),
        swa_full=bool(request.swa_full),
        n_cpu_moe=request.n_cpu_moe or 0,
        tensor_split=request.tensor_split or (),
        main_gpu=request.main_gpu or 0,
        split_mode=request.split_mode or "layer",
        n_threads=request.n_threads or 4,
        n_threads_batch=request.n_threads_batch or 4,
        use_mmap=request.use_mmap is not False,
        use_mlock=bool(request.use_mlock),
        embeddings=bool(request.embeddings),
        pooling=request.pooling or "none",
        draft_model=request.draft_model,
        mmproj=request.mmproj,
    )


def _base_params(shape: ModelShape, devices: Devices, request: PlanRequest) -> PlanParams:
    """``request`` with edgellm's own defaults."""
    n_seq = request.n_seq_max or 1
    n_ctx = request.n_ctx or min(DEFAULT_CTX, shape.n_ctx_train or DEFAULT_CTX)
    threads = max(devices.host.n_physical, 1)
    return replace(
        fixed_params(request),
        n_ctx=n_ctx,
        n_outputs_max=request.n_outputs_max or n_seq,
        kv_unified=request.kv_unified is not False,
        n_threads=request.n_threads or threads,
        n_threads_batch=request.n_threads_batch or threads,
        embeddings=shape.is_encoder if request.embeddings is None else request.embeddings,
    )


def _candidates(shape: ModelShape, devices: Devices, request: PlanRequest) -> Iterator[PlanParams]:
    base = _base_params(shape, devices, request)
    kinds = [(base.type_k, base.type_v)]
    if request.type_k is None and request.type_v is None:
        kinds.append(("q8_0", "q8_0"))
    ubatches = (request.n_ubatch,) if request.n_ubatch else UBATCHES
    for type_k, type_v in kinds:
        for n_ubatch in ubatches:
            params = replace(
                base,
                type_k=type_k,
                type_v=type_v,
                n_ubatch=n_ubatch,
                n_batch=request.n_batch or max(n_ubatch, 512),
            )
            yield from _layers(shape, devices, request, params)


def _layers(
    shape: ModelShape, devices: Devices, request: PlanRequest, params: PlanParams
) -> Iterator[PlanParams]:
    """The most layers that fit, experts kept on the host first, then fewer layers."""
    if not devices.gpus:
        yield replace(params, n_gpu_layers=0)
        return
    if request.n_gpu_layers is not None:
        yield params
        return
    everything = shape.n_offloadable
    tries = [replace(params, n_gpu_layers=everything)]
    if shape.has_experts and request.n_cpu_moe is None:
        tries = [
            replace(params, n_gpu_layers=everything, n_cpu_moe=n) for n in range(shape.n_layer + 1)
        ]
    yield from _first_fit(shape, devices, request, tries)
    fewer = [replace(params, n_gpu_layers=n) for n in range(everything - 1, -1, -1)]
    yield from _first_fit(shape, devices, request, fewer)


def _first_fit(
    shape: ModelShape, devices: Devices, request: PlanRequest, tries: Sequence[PlanParams]
) -> Iterator[PlanParams]:
    """The first of ``tries``, each smaller than the one before, that fits; else the last."""
    low, high = 0, len(tries) - 1
    while low < high:
        middle = (low + high) // 2
        if _estimate(shape, devices, request, tries[middle]).fits:
            high = middle
        else:
            low = middle + 1
    yield tries[low]


def _estimate(
    shape: ModelShape, devices: Devices, request: PlanRequest, params: PlanParams
) -> Ledger:
    terms = [
        Terms(
            margin=default_margin(g) if request.margin is None else request.margin,
            overhead=request.overhead,
        )
        for g in devices.gpus
    ]
    return estimate(shape, params, devices.gpus, devices.host, terms)


def _speed(shape: ModelShape, devices: Devices, ledger: Ledger) -> Speed:
    cards = [card(g) for g in devices.gpus]
    return predict(shape, ledger.params, ledger.layer_device, cards, host_card(devices.host))


def _closer(one: Ledger | None, other: Ledger) -> Ledger:
    if one is None or _missing(other) < _missing(one):
        return other
    return one


def _missing(ledger: Ledger) -> int:
    gpu = sum(max(-d.headroom, 0) for d in ledger.devices)
    return gpu + max(ledger.host.used - ledger.host.available, 0)


def _does_not_fit(shape: ModelShape, ledger: Ledger) -> DoesNotFitError:
    worst = min(ledger.devices, key=lambda d: d.headroom, default=None)
    if worst is not None and worst.headroom < 0:
        device, required, available = worst.id, worst.used, worst.free - worst.margin
    else:
        device, required, available = "host", ledger.host.used, ledger.host.available
    return DoesNotFitError(
        f"{shape.name} needs {format_bytes(required)} on {device}, "
        f"{format_bytes(available)} may be used",
        device=device,
        required=required,
        available=available,
        smallest_fix="a smaller quantisation of the same model, or --force to try anyway",
    )


def model_facts(shape: ModelShape) -> ModelFacts:
    return ModelFacts(
        name=shape.name,
        path=shape.path,
        arch=shape.arch,
        quant=shape.quant,
        file_bytes=shape.file_bytes,
        n_params=shape.n_params,
        n_layer=shape.n_layer,
        n_ctx_train=shape.n_ctx_train,
        n_embd=shape.n_embd,
        n_vocab=shape.n_vocab,
        n_expert=shape.n_expert,
        is_embedding=shape.is_encoder,
    )


def verdict(ledger: Ledger, shape: ModelShape) -> str:
    """gpu, partial, cpu or does_not_fit."""
    if not ledger.fits:
        return "does_not_fit"
    on_gpu = sum(1 for d in ledger.layer_device if d >= 0)
    if on_gpu == 0:
        return "cpu"
    whole = on_gpu == len(ledger.layer_device) and not (
        ledger.params.n_cpu_moe and shape.has_experts
    )
    return "gpu" if whole else "partial"


def _finish(shape: ModelShape, devices: Devices, ledger: Ledger) -> Plan:
    params = ledger.params
    return Plan(
        model=model_facts(shape),
        params=params,
        devices=ledger.devices,
        host=ledger.host,
        verdict=verdict(ledger, shape),
        speed=_speed(shape, devices, ledger),
        reasons=(Reason(param="n_ctx", value=str(params.n_ctx), why="asked for, or the default"),),
        warnings=(*shape.warnings, *ledger.warnings),
    )
