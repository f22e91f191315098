"""A plan's last step with workers: only those in use are named, and numbered as the engine will."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from edgellm.devices import Devices, Gpu
from edgellm.planner.plan import DeviceLedger, Plan


def settle_workers(plan: Plan, devices: Devices) -> Plan:
    """``plan`` with ``params.rpc`` set to the workers that hold something.

    The engine numbers the devices of the workers it is given from RPC0; those of a worker that is
    left out would shift the numbers, so they leave the plan; a warning of the search says why.
    """
    remote = [gpu for gpu in devices.gpus if gpu.endpoint is not None]
    if not remote:
        return plan
    held = {d.id for d in plan.devices if d.weights or d.kv_cache or d.recurrent_state}
    workers = _endpoints(gpu for gpu in remote if gpu.id in held)
    names = _numbers(remote, workers)
    kept = [d for d in plan.devices if d.id in names or all(d.id != g.id for g in remote)]
    used = plan.params.devices or tuple(d.id for d in plan.devices)
    chosen = tuple(names.get(i, i) for i in used if i in names or all(i != g.id for g in remote))
    params = msgspec.structs.replace(
        plan.params,
        rpc=workers,
        devices=chosen,
        tensor_split=_split(plan, used, names, remote),
    )
    return msgspec.structs.replace(
        plan,
        params=params,
        devices=tuple(_renamed(d, names) for d in kept),
    )


def _endpoints(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(gpu.endpoint for gpu in gpus if gpu.endpoint is not None))


def _numbers(remote: Sequence[Gpu], workers: Sequence[str]) -> dict[str, str]:
    """Each device's id so far -> its id in the engine, for the devices of these workers."""
    ours = [gpu for endpoint in workers for gpu in remote if gpu.endpoint == endpoint]
    return {gpu.id: f"RPC{i}" for i, gpu in enumerate(ours)}


def _split(
    plan: Plan, used: Sequence[str], names: dict[str, str], remote: Sequence[Gpu]
) -> tuple[float, ...]:
    """The shares without those of devices that left."""
    shares = plan.params.tensor_split
    if len(shares) != len(used):
        return shares
    gone = {gpu.id for gpu in remote} - set(names)
    kept = tuple(s for s, i in zip(shares, used, strict=True) if i not in gone)
    return kept if len(kept) > 1 else ()


def _renamed(ledger: DeviceLedger, names: dict[str, str]) -> DeviceLedger:
    return msgspec.structs.replace(ledger, id=names.get(ledger.id, ledger.id))
