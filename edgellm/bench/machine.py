"""The machine beside the numbers: what it is, what else it did, what makes a run unsafe."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import psutil

from edgellm import __version__

_QUERY: Final = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "utilization.gpu",
    "clocks_throttle_reasons.active",
)
# nvidia-smi's bits for "the card is slower than asked": power cap, hardware and thermal slowdown.
_SLOWDOWN_BITS: Final = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
MAX_OTHER_CPU: Final = 0.1
MAX_SPREAD: Final = 0.1
MAX_TEMPERATURE_C: Final = 83
MAX_LAG_S: Final = 0.005


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One card at one moment, as the driver says. None where it does not say."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_total: int
    memory_used: int
    temperature_c: float | None = None
    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    power_w: float | None = None
    utilization: float | None = None
    is_slowed: bool = False


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware and versions: what a result belongs to."""

    cpu: str
    n_cores: int
    ram_total: int
    os: str
    python: str
    edgellm: str
    llama_cpp: str
    gpus: tuple[GpuState, ...] = ()


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds so far: everything the machine did, and what belongs to the measurement."""

    at: float
    busy_s: float
    own_s: float
    client_s: float
    gpus: tuple[GpuState, ...] = ()
    load_1m: float = 0.0


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run happened under. CPU shares are of all cores (1.0 = every core busy)."""

    other_cpu: float
    """Used by neither the client nor a server that we could see."""
    server_cpu: float
    client_cpu: float
    """Of one core: at 1.0 the client itself is the bottleneck."""
    gpus_before: tuple[GpuState, ...] = ()
    gpus_after: tuple[GpuState, ...] = ()


def describe_machine() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_cpu_name(),
        n_cores=os.cpu_count() or 1,
        ram_total=psutil.virtual_memory().total,
        os=platform.platform(),
        python=platform.python_version(),
        edgellm=__version__,
        llama_cpp=_version("llama-cpp-python"),
        gpus=gpu_states(),
    )


def moment(server_pids: Iterable[int] = ()) -> Moment:
    """Take the clocks. ``server_pids`` are roots; their children count with them."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    own = sum(_tree_seconds(pid) for pid in server_pids)
    client = sum(psutil.Process().cpu_times()[:2])
    return Moment(
        at=time.monotonic(),
        busy_s=sum(times[:8]) - idle if sys.platform == "linux" else sum(times) - idle,
        own_s=own,
        client_s=client,
        gpus=gpu_states(),
        load_1m=os.getloadavg()[0],
    )


def conditions(before: Moment, after: Moment) -> Conditions:
    """What happened between two moments."""
    wall = max(after.at - before.at, 1e-6)
    cores = os.cpu_count() or 1
    client = after.client_s - before.client_s
    server = max(0.0, after.own_s - before.own_s)
    other = max(0.0, after.busy_s - before.busy_s - client - server)
    return Conditions(
        other_cpu=min(1.0, other / wall / cores),
        server_cpu=server / wall / cores,
        client_cpu=client / wall,
        gpus_before=before.gpus,
        gpus_after=after.gpus,
    )


def listening_pid(port: int) -> int | None:
    """Which local process listens on ``port``, when this user may see it."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return None
    for c in connections:
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port:
            return c.pid
    return None


def safety_warnings(
    seen: Conditions, *, spread: float = 0.0, lags: Sequence[float] = (), knows_server: bool = True
) -> list[str]:
    """Why these numbers should not be trusted as they are; empty when nothing speaks against."""
    out = []
    if spread > MAX_SPREAD:
        out.append(f"repeats differ by {spread:.0%}: run longer, or find what else is running")
    if knows_server and seen.other_cpu > MAX_OTHER_CPU:
        out.append(f"other processes used {seen.other_cpu:.0%} of the CPU")
    late = sorted(lags)[int(len(lags) * 0.99)] if lags else 0.0
    if seen.client_cpu > 0.8 or late > MAX_LAG_S:
        out.append(
            f"the load client used {seen.client_cpu:.0%} of a core and was up to "
            f"{1e3 * late:.0f} ms late: latencies include that"
        )
    return out + _gpu_warnings(seen)


def _gpu_warnings(seen: Conditions) -> list[str]:
    out = []
    for gpu in seen.gpus_after:
        if gpu.is_slowed:
            out.append(f"GPU {gpu.index} lowered its clocks (power or heat) during the run")
        if gpu.temperature_c is not None and gpu.temperature_c >= MAX_TEMPERATURE_C:
            out.append(f"GPU {gpu.index} was at {gpu.temperature_c:.0f} C")
    return out


def gpu_states() -> tuple[GpuState, ...]:
    """Every NVIDIA card through nvidia-smi (no context is created); empty without one."""
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return ()
    command = [binary, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(parse_gpu_states(done.stdout))


def parse_gpu_states(text: str) -> list[GpuState]:
    """nvidia-smi's CSV as states; "[N/A]" and "[Not Supported]" become None."""
    return [
        _gpu_state(row)
        for row in csv.reader(text.splitlines(), skipinitialspace=True)
        if len(row) == len(_QUERY)
    ]


def _gpu_state(row: Sequence[str]) -> GpuState:
    values = dict(zip(_QUERY, row, strict=True))
    number = {key: _number(value) for key, value in values.items()}
    reasons = values["clocks_throttle_reasons.active"]
    mask = int(reasons, 16) if reasons.startswith("0x") else 0
    return GpuState(
        index=int(number["index"] or 0),
        uuid=values["uuid"],
        name=values["name"],
        driver=values["driver_version"],
        memory_total=int((number["memory.total"] or 0) * 2**20),
        memory_used=int((number["memory.used"] or 0) * 2**20),
        temperature_c=number["temperature.gpu"],
        clock_mhz=number["clocks.sm"],
        clock_max_mhz=number["clocks.max.sm"],
        power_w=number["power.draw"],
        utilization=number["utilization.gpu"],
        is_slowed=bool(mask & _SLOWDOWN_BITS),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _tree_seconds(pid: int) -> float:
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0.0
    return sum(_seconds(p) for p in family)


def _seconds(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.Error:
        return 0.0


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
