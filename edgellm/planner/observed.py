"""What earlier loads showed, kept beside the plans they correct: pure functions and one small file.

A load gives :func:`observe` what llama.cpp allocated and what the driver saw; the next plan for the
same card, backend and architecture starts from that instead of the table, with a margin that
shrinks as loads agree with their plans.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from edgellm import paths
from edgellm.devices import Gpu
from edgellm.planner.plan import (
    DeviceLedger,
    HostLedger,
    LoadReport,
    MeasuredDevice,
    Observation,
    Plan,
)
from edgellm.units import GiB, MiB

MOST: Final = 200
"""Observations kept, the newest."""
TRUSTED: Final = 3
"""Loads after which the margin is learned."""
LEAST_MARGIN: Final = 64 * MiB
_PLAUSIBLE: Final = 4 * GiB
"""More than this beside the buffers is another program's."""


# --- from a load to observations ---------------------------------------------------------------


def observe(plan: Plan, report: LoadReport, at: float = 0.0) -> tuple[Observation, ...]:
    """What a load showed about each card that it used; nothing where it fell back from the plan."""
    if report.fallbacks:
        return ()
    measured = {m.id: m for m in report.measured}
    found = []
    for ledger in plan.devices:
        seen = measured.get(ledger.id)
        if seen is None or seen.used_before is None or seen.used_after is None:
            continue
        taken = seen.used_after - seen.used_before
        overhead = taken - (ledger.used - ledger.overhead) - (ledger.workspace - ledger.growth)
        if ledger.used and 0 <= overhead <= _PLAUSIBLE:
            found.append(
                Observation(
                    device=ledger.uuid or ledger.name,
                    backend=ledger.backend,
                    build=report.build,
                    arch=plan.model.arch,
                    n_loads=1,
                    overhead=overhead,
                    error=abs(taken - (ledger.used - ledger.growth)),
                    at=at,
                )
            )
    return tuple(found)


def observe_speed(plan: Plan, decode_tps: float, at: float = 0.0) -> tuple[Observation, ...]:
    """What a measured decode speed says about the devices of a plan."""
    if decode_tps <= 0 or plan.speed.decode_tps <= 0:
        return ()
    ratio = decode_tps / plan.speed.decode_tps * plan.speed.correction
    used = [(d.uuid or d.name, d.backend) for d in plan.devices if d.used] or [("host", "")]
    return tuple(
        Observation(device=name, backend=backend, arch=plan.model.arch, decode_ratio=ratio, at=at)
        for name, backend in used
    )


def merged(old: Sequence[Observation], new: Sequence[Observation]) -> tuple[Observation, ...]:
    """``old`` with ``new`` in their places; the newest are kept."""
    held = {_key(x): x for x in old}
    for x in new:
        before = held.get(_key(x))
        held[_key(x)] = x if before is None else _joined(before, x)
    return tuple(sorted(held.values(), key=lambda x: (x.at, _key(x)))[-MOST:])


def _key(x: Observation) -> tuple[str, str, str, str]:
    return x.device, x.backend, x.build, x.arch


def _joined(old: Observation, new: Observation) -> Observation:
    """The newest overhead; of the errors the largest since the first was corrected for."""
    error = new.error if old.n_loads <= 1 else max(new.error, old.error)
    return Observation(
        device=new.device,
        backend=new.backend,
        build=new.build,
        arch=new.arch,
        n_loads=old.n_loads + new.n_loads,
        overhead=old.overhead if new.overhead is None else new.overhead,
        error=error if new.n_loads else old.error,
        decode_ratio=old.decode_ratio if new.decode_ratio is None else new.decode_ratio,
        bandwidth=old.bandwidth if new.bandwidth is None else new.bandwidth,
        at=max(old.at, new.at),
    )


# --- from observations to terms of the next plan -----------------------------------------------


def of_card(observed: Sequence[Observation], gpu: Gpu) -> list[Observation]:
    """Observations of ``gpu``, the newest last."""
    names = (gpu.uuid,) if gpu.uuid else (gpu.name,)
    found = [x for x in observed if x.device in names and x.backend == gpu.backend]
    return sorted(found, key=lambda x: x.at)


def overhead(observed: Sequence[Observation], gpu: Gpu, arch: str) -> int | None:
    """The card's overhead, workspaces of the settings taken off, as last seen with ``arch``, else
    the largest with any; None: never."""
    seen = [x for x in of_card(observed, gpu) if x.overhead is not None]
    own = [x for x in seen if x.arch == arch]
    if own:
        return own[-1].overhead
    return max((x.overhead or 0 for x in seen), default=None)


def margin(observed: Sequence[Observation], gpu: Gpu, arch: str, default: int) -> int:
    """``default`` until a few loads agreed with their plans; then twice what they were off by."""
    own = [x for x in of_card(observed, gpu) if x.arch == arch and x.n_loads]
    if sum(x.n_loads for x in own) < TRUSTED:
        return default
    worst = max(x.error for x in own)
    return max(min(default, max(LEAST_MARGIN, 2 * worst)), min(worst, _PLAUSIBLE))


def decode_ratio(observed: Sequence[Observation], names: Sequence[str], arch: str) -> float | None:
    """How much faster than predicted these devices were with ``arch``; None: not all were seen."""
    ratios = []
    for name in names:
        seen = [x for x in observed if x.device == name and x.arch == arch and x.decode_ratio]
        if not seen:
            return None
        ratios.append(max(seen, key=lambda x: x.at).decode_ratio or 1.0)
    return min(ratios, default=None)


def host_bandwidth(observed: Sequence[Observation]) -> float | None:
    """The host's memory bandwidth as last measured."""
    seen = [x for x in observed if x.device == "host" and x.bandwidth]
    return max(seen, key=lambda x: x.at).bandwidth if seen else None


# --- plans with measured numbers ---------------------------------------------------------------


def with_dry_run(plan: Plan, report: LoadReport) -> Plan:
    """``plan`` with the compute buffers that llama.cpp itself worked out.

    On several cards a dry run knows a little less than a load (it assigns the graph anew), so
    there the larger number counts.
    """
    measured = {m.id: m for m in report.measured}
    at_least = sum(1 for d in plan.devices if d.used) > 1
    devices = tuple(
        d
        if d.id not in measured
        else _with_compute(d, max(measured[d.id].compute, d.compute if at_least else 0))
        for d in plan.devices
    )
    host = plan.host
    if "host" in measured:
        compute = max(measured["host"].compute, host.compute if at_least else 0)
        used = host.used - host.compute + compute
        host = msgspec.structs.replace(host, compute=compute, used=used)
    return msgspec.structs.replace(
        plan, devices=devices, host=host, proof="dry_run", verdict=_verdict(plan, devices, host)
    )


def with_measured(plan: Plan, report: LoadReport) -> Plan:
    """``plan`` with every number that the load reported in place of the computed one."""
    measured = {m.id: m for m in report.measured}
    devices = tuple(
        _measured_device(d, measured[d.id]) if d.id in measured else d for d in plan.devices
    )
    return msgspec.structs.replace(plan, devices=devices, proof="measured")


def _with_compute(ledger: DeviceLedger, compute: int) -> DeviceLedger:
    more = compute - ledger.compute
    return msgspec.structs.replace(
        ledger,
        compute=compute,
        used=ledger.used + more,
        headroom=ledger.headroom - more,
    )


def _measured_device(ledger: DeviceLedger, seen: MeasuredDevice) -> DeviceLedger:
    buffers = seen.weights + seen.kv_cache + seen.recurrent_state + seen.compute + seen.output
    if seen.used_before is None or seen.used_after is None:
        overhead = ledger.overhead
    else:
        overhead = max(seen.used_after - seen.used_before - buffers, 0)
    used = buffers + overhead
    return msgspec.structs.replace(
        ledger,
        weights=seen.weights,
        kv_cache=seen.kv_cache,
        recurrent_state=seen.recurrent_state,
        compute=seen.compute + seen.output,
        overhead=overhead,
        used=used,
        headroom=ledger.free - ledger.margin - used,
    )


def _verdict(plan: Plan, devices: Sequence[DeviceLedger], host: HostLedger) -> str:
    fits = all(d.headroom >= 0 for d in devices) and host.used <= host.available
    if not fits:
        return "does_not_fit"
    return plan.verdict


# --- the file ----------------------------------------------------------------------------------


def file() -> Path:
    return paths.cache_dir() / "observed.json"


def load(path: Path | None = None) -> tuple[Observation, ...]:
    """What is remembered; nothing when the file is missing or is not ours."""
    try:
        return msgspec.json.decode((path or file()).read_bytes(), type=tuple[Observation, ...])
    except (OSError, msgspec.MsgspecError):
        return ()


def save(observed: Sequence[Observation], path: Path | None = None) -> None:
    """Write all of it at once, so that no reader sees half a file."""
    where = path or file()
    where.parent.mkdir(parents=True, exist_ok=True)
    temporary = where.with_name(f"{where.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(tuple(observed)))
    temporary.replace(where)


def remember(new: Sequence[Observation], path: Path | None = None) -> None:
    """Add ``new`` to the file; a file that cannot be written is no reason to fail."""
    if not new:
        return
    now = time.time()
    stamped = [x if x.at else msgspec.structs.replace(x, at=now) for x in new]
    try:
        save(merged(load(path), stamped), path)
    except OSError:
        return
