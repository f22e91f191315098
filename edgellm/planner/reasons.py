"""From a ledger to a plan: verdict, reasons, the constraint that binds, errors with a way out."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.devices import Devices, Gpu
from edgellm.errors import DoesNotFitError
from edgellm.gguf.shape import ModelShape
from edgellm.planner.compute import ROUGH
from edgellm.planner.estimate import Ledger
from edgellm.planner.params import DEFAULT_CTX
from edgellm.planner.plan import ModelFacts, Plan, PlanRequest, Reason, Speed
from edgellm.units import MiB, format_bytes


def model_facts(shape: ModelShape) -> ModelFacts:
    """The model as a plan names it."""
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
    experts_away = ledger.params.n_cpu_moe > 0 and shape.has_experts
    return "gpu" if on_gpu == len(ledger.layer_device) and not experts_away else "partial"


def finish(
    shape: ModelShape,
    devices: Devices,
    request: PlanRequest,
    ledger: Ledger,
    speed: Speed,
    *,
    notes: Sequence[str] = (),
) -> Plan:
    """The plan of a ledger."""
    warnings = (*shape.warnings, *ledger.warnings, *notes, *_warnings(shape, ledger))
    return Plan(
        model=model_facts(shape),
        params=ledger.params,
        devices=ledger.devices,
        host=ledger.host,
        verdict=verdict(ledger, shape),
        speed=speed,
        reasons=reasons(shape, devices, request, ledger),
        warnings=warnings,
        binding=binding(ledger, shape),
    )


def _warnings(shape: ModelShape, ledger: Ledger) -> list[str]:
    params, found = ledger.params, []
    if shape.arch in ROUGH:
        found.append(
            f"the compute buffers of {shape.arch} are estimated roughly: --dry-run is exact"
        )
    if params.n_ctx_seq > shape.n_ctx_train > 0:
        found.append(
            f"a context of {params.n_ctx_seq} is past the {shape.n_ctx_train} of its training"
        )
    if shape.is_mla and params.type_k != params.type_v:
        found.append(
            f"{shape.arch} takes one type for K and V, not {params.type_k} and {params.type_v}: "
            "load fails"
        )
    if not ledger.flash and params.type_v not in ("f16", "f32", "bf16"):
        found.append(f"V as {params.type_v} needs flash attention, which is off here: load fails")
    return found


def left_out(gpus: Sequence[Gpu], used: Sequence[Gpu]) -> tuple[str, ...]:
    """Why cards stay empty."""
    ids = {gpu.id for gpu in used}
    return tuple(
        f"{gpu.id} ({gpu.name}) is not used: the plan without it is as fast"
        for gpu in gpus
        if gpu.id not in ids
    )


def binding(ledger: Ledger, shape: ModelShape) -> str:
    """What stopped the search: the fullest device and its largest entry, or none."""
    if verdict(ledger, shape) == "gpu" or not ledger.devices:
        return "none" if ledger.devices else "no GPU"
    used = [d for d in ledger.devices if d.used] or list(ledger.devices)
    if _left_alone(ledger, shape):
        return "none"
    tightest = min(used, key=lambda d: d.headroom)
    return (
        f"memory of {tightest.id}: {format_bytes(max(tightest.headroom, 0))} left of "
        f"{format_bytes(tightest.free - tightest.margin)}"
    )


def _left_alone(ledger: Ledger, shape: ModelShape) -> bool:
    """Nothing is on any card though there is room for layers: they would only slow it."""
    largest = max((layer.n_bytes for layer in shape.layers), default=0)
    room = max((d.headroom for d in ledger.devices), default=0)
    return all(not d.used for d in ledger.devices) and room > 2 * largest + MiB * 256


def reasons(
    shape: ModelShape, devices: Devices, request: PlanRequest, ledger: Ledger
) -> tuple[Reason, ...]:
    """Why each parameter has its value."""
    p = ledger.params
    asked = "as asked"
    n_all = shape.n_layer_all + 1
    on_gpu = sum(1 for d in ledger.layer_device if d >= 0)
    if request.n_gpu_layers is not None:
        layers = asked
    elif on_gpu == n_all:
        layers = "every layer and the output layer fit"
    elif not devices.gpus:
        layers = "no GPU"
    elif on_gpu == 0 and _left_alone(ledger, shape):
        layers = "no device there is makes it faster"
    else:
        layers = f"the most that fit: {binding(ledger, shape)}"
    ctx = f"the default of {DEFAULT_CTX}, or what the model was trained for"
    kv = "exact" if p.type_k == "f16" else "half the cache for next to no loss"
    ubatch = "full prefill speed" if p.n_ubatch >= 512 else "smaller scratch buffers leave room"
    if p.n_ubatch > 512:
        ubatch = "host weights cross the bus once for so many prompt tokens"
    outputs = f"only {p.n_seq_max} position{'s' * (p.n_seq_max > 1)} a step need logits"
    found = [
        Reason(param="n_gpu_layers", value=f"{on_gpu} of {n_all}", why=layers),
        Reason(param="n_ctx", value=str(p.n_ctx), why=asked if request.n_ctx else ctx),
        Reason(
            param="type_k, type_v",
            value=f"{p.type_k}, {p.type_v}",
            why=asked if request.type_k or request.type_v else kv,
        ),
        Reason(param="n_ubatch", value=str(p.n_ubatch), why=asked if request.n_ubatch else ubatch),
        Reason(
            param="n_outputs_max",
            value=str(p.n_outputs_max),
            why=asked if request.n_outputs_max is not None else outputs,
        ),
        Reason(
            param="flash_attn",
            value="on" if ledger.flash else "off",
            why=asked
            if request.flash_attn
            else "every attention runs where its layer is"
            if ledger.flash
            else "one attention would run on another device than its layer",
        ),
    ]
    found += _of_placement(shape, request, ledger)
    found.append(Reason(param="n_threads", value=str(p.n_threads), why="one a physical core"))
    return tuple(found)


def _of_placement(shape: ModelShape, request: PlanRequest, ledger: Ledger) -> list[Reason]:
    """Of the parameters that only some models and machines have."""
    p, asked, found = ledger.params, "as asked", list[Reason]()
    if shape.has_experts:
        why = asked if request.n_cpu_moe is not None else "experts go to the host before layers do"
        value = f"{p.n_cpu_moe} of {shape.n_layer}"
        found.append(Reason(param="n_cpu_moe", value=value, why=why if p.n_cpu_moe else "all fit"))
    if len(ledger.devices) > 1:
        split = ", ".join(f"{d.id} {d.n_layers}" for d in ledger.devices)
        found.append(
            Reason(param="tensor_split", value=split, why="the fastest cards filled first")
        )
    if not p.use_mmap:
        why = "prompts copy host weights to the card, five times as fast from pinned memory"
        found.append(
            Reason(param="use_mmap", value="off", why=why if request.use_mmap is None else asked)
        )
    if p.draft_model:
        where = "on the first card, where it is fast" if p.draft_n_gpu_layers else "no GPU"
        found.append(Reason(param="draft_model", value=p.draft_model, why=where))
    return found


def does_not_fit(shape: ModelShape, ledger: Ledger, fix: str | None) -> DoesNotFitError:
    """The error, with the numbers of the tightest place and the smallest way out."""
    worst = min(ledger.devices, key=lambda d: d.headroom, default=None)
    if worst is not None and worst.headroom < 0:
        device, required, available = worst.id, worst.used, worst.free - worst.margin
    else:
        device, required, available = "host", ledger.host.used, ledger.host.available
    smaller = "a smaller quantisation of the same model, or --force to try anyway"
    return DoesNotFitError(
        f"{shape.name} needs {format_bytes(required)} on {device}, "
        f"{format_bytes(max(available, 0))} may be used",
        device=device,
        required=required,
        available=available,
        smallest_fix=fix or smaller,
    )
