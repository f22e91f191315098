"""Plan: every llama.cpp parameter, where every byte goes, and why. Frozen; the engine obeys it.

The JSON form is the outside contract ``edgellm.plan/1``: :func:`Plan.to_json`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

SCHEMA: Final = "edgellm.plan/1"
VERDICTS: Final = ("gpu", "partial", "cpu", "does_not_fit")
PROOFS: Final = ("analytic", "dry_run", "measured")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the plan names it."""

    name: str
    path: str
    """The first (or only) file; for a remote model, its URL or hf: reference."""
    arch: str
    quant: str
    file_bytes: int
    n_params: int
    n_layer: int
    n_ctx_train: int
    n_embd: int = 0
    n_vocab: int = 0
    n_expert: int = 0
    is_embedding: bool = False
    digest: str | None = None


class PlanParams(msgspec.Struct, frozen=True, kw_only=True):
    """llama.cpp's parameters by llama.h's names; what Engine.load passes on unchanged."""

    n_gpu_layers: int
    n_ctx: int
    """All cells, for all sequences."""
    n_ctx_seq: int
    """What one sequence may use."""
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_outputs_max: int
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    """on, off or auto."""
    offload_kqv: bool = True
    kv_unified: bool = True
    swa_full: bool = False
    n_cpu_moe: int = 0
    """The first n layers keep their expert tensors on the host."""
    devices: tuple[str, ...] = ()
    """The devices to use, by llama.cpp's names; empty: every one of the plan. A card that is left
    out must not be initialised either: it would cost its context."""
    rpc: tuple[str, ...] = ()
    """HOST:PORT of the workers in use. The engine registers each, in order, before it loads; their
    devices are then RPC0, RPC1, ... and listed before this machine's."""
    tensor_split: tuple[float, ...] = ()
    """Layers' share a used device, in the devices' order; empty for one device."""
    main_gpu: int = 0
    split_mode: str = "layer"
    n_threads: int = 1
    n_threads_batch: int = 1
    use_mmap: bool = True
    use_mlock: bool = False
    embeddings: bool = False
    pooling: str = "none"
    draft_model: str | None = None
    draft_n_gpu_layers: int = 0
    mmproj: str | None = None


class DeviceLedger(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one GPU. ``used`` = weights + kv_cache + recurrent_state + compute + extra +
    overhead."""

    id: str
    """llama.cpp's device name (CUDA0) or, for a card given by --vram, GPU0."""
    name: str
    backend: str
    total: int
    free: int
    margin: int
    weights: int = 0
    kv_cache: int = 0
    recurrent_state: int = 0
    compute: int = 0
    extra: int = 0
    """The draft model and the projector: weights, caches and scratch memory."""
    overhead: int = 0
    workspace: int = 0
    """Of ``overhead``, what these settings take: library workspaces, graphs of copied layers."""
    growth: int = 0
    """Of ``workspace``, what is only taken as the context fills, after the warm-up."""
    used: int = 0
    headroom: int = 0
    """free - margin - used; negative when it does not fit."""
    uuid: str | None = None
    n_layers: int = 0


class HostLedger(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of RAM. ``used``, what must stay there, is weights - idle + repacked + kv_cache +
    recurrent_state + compute + output + extra + process."""

    total: int
    available: int
    weights: int = 0
    """As llama.cpp reports them: mapped from the first to the last of them, or read."""
    repacked: int = 0
    """Copies in the layout of the CPU's kernels."""
    idle: int = 0
    """Of ``weights``, mapped pages between them that nobody reads: given back when needed."""
    kv_cache: int = 0
    recurrent_state: int = 0
    compute: int = 0
    output: int = 0
    extra: int = 0
    """The draft model and the projector."""
    process: int = 0
    """The engine itself and the vocabulary."""
    used: int = 0
    prompt_cache: int = 0
    """Beside ``used``: copies of caches that the engine may keep for prompts it saw before."""
    page_cache: int = 0
    """Beside ``used``: the file, read once; the system gives it back when asked."""
    load_peak: int = 0
    """What must be there while it loads."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted tokens a second for one stream, what the prediction rests on, what limits it."""

    prefill_tps: float
    decode_tps: float
    basis: str
    """table, measured, or unknown device."""
    bottleneck: str = ""
    correction: float = 1.0
    """What ``decode_tps`` was multiplied by: measured over predicted, of earlier loads here."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why one parameter has its value."""

    param: str
    value: str
    why: str


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan, one change away, and what it trades."""

    title: str
    change: dict[str, Any]
    """The plan arguments that make it: {"type_k": "q8_0", ...}."""
    gain: str
    cost: str
    decode_tps: float | None = None
    n_ctx: int | None = None
    used: int | None = None


class MeasuredDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What llama.cpp allocated on a device and what the driver said, in bytes."""

    id: str
    weights: int = 0
    kv_cache: int = 0
    recurrent_state: int = 0
    compute: int = 0
    output: int = 0
    used_before: int | None = None
    used_after: int | None = None


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Plan beside measured, after a real load and its warm-up."""

    measured: tuple[MeasuredDevice, ...] = ()
    """The host is the entry with id ``host``."""
    offloaded: str = ""
    """As llama.cpp says it: ``33/33``."""
    load_s: float = 0.0
    warmup_s: float = 0.0
    fallbacks: tuple[str, ...] = ()
    """Each step down the out-of-memory ladder that was taken, in words."""
    build: str = ""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What loads on one card (or the host, id ``host``) showed, for one architecture."""

    device: str
    """The card's UUID, else its name; ``host``."""
    backend: str = ""
    build: str = ""
    arch: str = ""
    n_loads: int = 0
    overhead: int | None = None
    """Bytes the card lost beyond what was planned for the buffers on it and for the settings'
    workspaces, the last time."""
    error: int = 0
    """The largest difference of planned and measured use since, in bytes."""
    decode_ratio: float | None = None
    """Measured tokens a second over predicted."""
    bandwidth: float | None = None
    """Measured bytes a second; of the host's memory."""
    at: float = 0.0
    """Seconds since the epoch."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run one model on these devices."""

    model: ModelFacts
    params: PlanParams
    devices: tuple[DeviceLedger, ...]
    host: HostLedger
    verdict: str
    speed: Speed
    proof: str = "analytic"
    reasons: tuple[Reason, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = ()
    binding: str = ""
    """The constraint that stopped the search: device and ledger entry, or "none"."""

    def to_json(self) -> dict[str, Any]:
        """The plan as ``edgellm.plan/1``: plain JSON values, bytes as ints."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return {"schema": SCHEMA, **built}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`; raises ValueError on another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a {SCHEMA} document: schema is {data.get('schema')!r}")
        return msgspec.convert({k: v for k, v in data.items() if k != "schema"}, cls)


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asks of the planner; None everywhere means "you choose".

    ``n_ctx`` counts all cells, as llama.h and ``llama-server -c`` do: with a unified cache every
    sequence may use all of them, without one each has ``n_ctx / n_seq_max``.
    """

    n_ctx: int | None = None
    n_seq_max: int | None = None
    n_gpu_layers: int | None = None
    """None: the planner chooses; -1: all."""
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_outputs_max: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    flash_attn: str | None = None
    n_cpu_moe: int | None = None
    swa_full: bool | None = None
    kv_unified: bool | None = None
    offload_kqv: bool | None = None
    tensor_split: tuple[float, ...] | None = None
    split_mode: str | None = None
    main_gpu: int | None = None
    n_threads: int | None = None
    n_threads_batch: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    margin: int | None = None
    """Bytes kept free a device; None: the learned or default margin; 0 means 0."""
    overhead: int | None = None
    """Bytes a device takes outside llama.cpp's buffers; None: measured here, else the table."""
    objective: str = "speed"
    """speed or context."""
    fixed: bool = False
    """Take the parameters as given (llama.cpp defaults where None); only compute the ledger."""
    embeddings: bool | None = None
    pooling: str | None = None
    draft_model: str | None = None
    mmproj: str | None = None
    min_ctx: int | None = None
    """The smallest context the planner may fall to; None: it may not shrink what was asked."""
    allow_q4_kv: bool = False
    force: bool = False
    """Plan and load even where the estimate says it does not fit."""
    observed: tuple[Observation, ...] = ()
    """What earlier loads on this machine showed."""
    extra_gpu: int = 0
    """Bytes on the first card beside the model; the planner fills in a draft's and projector's."""
    extra_host: int = 0
