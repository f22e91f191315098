"""Where every byte goes: shape + parameters -> a ledger for each GPU and for the host. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from edgellm.devices import Gpu, Host
from edgellm.gguf.shape import ModelShape, Tensor
from edgellm.planner.compute import compute_bytes, flash_resolves
from edgellm.planner.memory import (
    CacheShape,
    cache_shape,
    kv_bytes,
    padded_v_width,
    resolve_ctx,
    state_bytes,
)
from edgellm.planner.overhead import Workspace, workspace
from edgellm.planner.placement import (
    HOST,
    aligned,
    device_tensors,
    layer_devices,
    mapped_bytes,
)
from edgellm.planner.plan import DeviceLedger, HostLedger, PlanParams
from edgellm.planner.ram import host_ledger, host_weights
from edgellm.planner.terms import Terms


@dataclass(frozen=True)
class Ledger:
    """One estimate."""

    params: PlanParams
    devices: tuple[DeviceLedger, ...]
    host: HostLedger
    layer_device: tuple[int, ...]
    flash: bool
    warnings: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        in_ram = max(self.host.used, self.host.load_peak) <= self.host.available
        return in_ram and all(d.headroom >= 0 for d in self.devices)


def estimate(
    shape: ModelShape,
    params: PlanParams,
    gpus: Sequence[Gpu],
    host: Host,
    terms: Sequence[Terms] | None = None,
    *,
    extra_host: int = 0,
    every_block: bool = False,
) -> Ledger:
    """The ledger of ``params`` as given; ``every_block``: as exact as can be, and slower."""
    params = settle(shape, params)
    shares = params.tensor_split or tuple(float(g.free) for g in gpus)
    devices = layer_devices(shape, params.n_gpu_layers, shares[: len(gpus)])
    flash = flash_resolves(shape, params, devices, gpus)
    held = device_tensors(shape, devices, params.n_cpu_moe)
    cache = settled_cache(shape, params)
    kv, state = _caches(shape, params, cache, devices)
    compute = compute_bytes(
        shape,
        params,
        cache,
        devices=devices,
        flash=flash,
        gpus=gpus,
        every_block=every_block,
    )
    each = list(terms) if terms is not None else [Terms()] * len(gpus)
    ledgers = tuple(
        _device_ledger(
            gpu,
            each[i],
            workspace(gpu, shape, params, cache, devices, card=i, flash=flash),
            weights=_weights(gpu, params, held.get(i, ())),
            kv_cache=kv.get(i, 0),
            recurrent_state=state.get(i, 0),
            compute=compute.devices[i],
            extra=each[i].extra,
            n_layers=sum(1 for d in devices if d == i),
        )
        for i, gpu in enumerate(gpus)
    )
    ram = host_ledger(
        shape,
        params,
        host,
        host_weights(shape, params, held[HOST], gpus, host, output_here=devices[-1] == HOST),
        kv_cache=kv.get(HOST, 0),
        recurrent_state=state.get(HOST, 0),
        compute=compute.host,
        output=output_bytes(shape, params),
        extra=extra_host,
    )
    return Ledger(
        params=params,
        devices=ledgers,
        host=ram,
        layer_device=tuple(devices),
        flash=flash,
    )


def _weights(gpu: Gpu, params: PlanParams, tensors: Sequence[Tensor]) -> int:
    """Metal uses the mapped file itself, from its first to its last tensor of the GPU."""
    if gpu.backend == "metal" and params.use_mmap:
        return mapped_bytes(tensors)
    return aligned(tensors)


def settle(shape: ModelShape, params: PlanParams) -> PlanParams:
    """``params`` as llama_context's constructor would make them."""
    n_ctx, n_ctx_seq = resolve_ctx(params.n_ctx, params.n_seq_max, params.kv_unified)
    n_batch = min(params.n_ctx, params.n_batch) if shape.causal else params.n_batch
    n_ubatch = min(n_batch, params.n_ubatch or n_batch)
    changed = {
        "n_ctx": n_ctx,
        "n_ctx_seq": n_ctx_seq,
        "n_batch": n_batch,
        "n_ubatch": n_ubatch,
    }
    return replace(params, **changed)


def replace(params: PlanParams, **changes: object) -> PlanParams:
    """``params`` with ``changes``; msgspec has structs.replace, typed here."""
    return msgspec.structs.replace(params, **changes)


def settled_cache(shape: ModelShape, params: PlanParams) -> CacheShape:
    return cache_shape(
        shape,
        n_ctx_seq=params.n_ctx_seq,
        n_ubatch=params.n_ubatch,
        n_seq_max=params.n_seq_max,
        kv_unified=params.kv_unified,
        swa_full=params.swa_full,
    )


def _caches(
    shape: ModelShape,
    params: PlanParams,
    cache: CacheShape,
    devices: Sequence[int],
) -> tuple[dict[int, int], dict[int, int]]:
    """KV and recurrent bytes by device."""
    kv: dict[int, int] = {}
    state: dict[int, int] = {}
    v_width = padded_v_width(shape, params.flash_attn != "off")
    for il, layer in enumerate(shape.layers):
        where = devices[il] if params.offload_kqv else HOST
        kv[where] = kv.get(where, 0) + kv_bytes(layer, cache, params.type_k, params.type_v, v_width)
        state[where] = state.get(where, 0) + state_bytes(layer, cache)
    return kv, state


def output_bytes(shape: ModelShape, params: PlanParams) -> int:
    """llama_context::output_reserve for one output a sequence: logits, and embeddings if asked."""
    width = shape.n_vocab
    if params.embeddings:
        width = shape.n_vocab + shape.n_embd_out
    return 4 * params.n_seq_max * width


def _device_ledger(
    gpu: Gpu, terms: Terms, work: Workspace, *, n_layers: int, **entries: int
) -> DeviceLedger:
    """A GPU that holds nothing is not initialised for compute, and costs nothing."""
    used = sum(entries.values())
    if terms.overhead is not None or not used:
        work = Workspace()
    overhead = terms.backend(gpu) + work.total if used else 0
    return DeviceLedger(
        id=gpu.id,
        name=gpu.name,
        backend=gpu.backend,
        total=gpu.total,
        free=gpu.free,
        margin=terms.margin,
        overhead=overhead,
        workspace=work.total,
        growth=work.growth,
        used=used + overhead,
        headroom=gpu.free - terms.margin - used - overhead,
        uuid=gpu.uuid,
        n_layers=n_layers,
        **entries,
    )
