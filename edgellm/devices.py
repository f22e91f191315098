"""What this machine has: CPU cores, RAM and GPUs, with their free memory now.

:func:`probe` never raises: what could not be asked is a note. It creates no GPU context; NVIDIA
cards are read through NVML, AMD cards from the kernel's sysfs, Apple's from the system. Cards are
listed in the order llama.cpp numbers them: CUDA_VISIBLE_DEVICES applied to PCI order, which the
engine's child process pins with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

BACKENDS: Final = ("cuda", "vulkan", "metal", "rocm", "cpu", "rpc")

_SYS: Final = Path("/sys")
_PROC: Final = Path("/proc")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU (or a card given by --vram that need not exist). Memory in bytes."""

    id: str
    """llama.cpp's device name, such as CUDA0."""
    name: str
    backend: str
    """cuda, vulkan, metal, rocm, or rpc."""
    total: int
    free: int
    uuid: str | None = None
    compute_capability: tuple[int, int] | None = None
    integrated: bool = False
    driver: str | None = None
    hypothetical: bool = False
    bandwidth: float | None = None
    """Bytes a second from its memory, where that was measured."""
    endpoint: str | None = None
    """HOST:PORT of the worker that has it; None: this machine."""
    link_latency_s: float = 0.0
    """To its worker and back."""
    link_bandwidth: float | None = None
    """Bytes a second to its worker."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU and its memory (bytes)."""

    cpu: str
    n_physical: int
    n_logical: int
    total: int
    available: int
    os: str = ""
    unified: bool = False
    """The GPU shares this memory (Apple silicon, most integrated GPUs)."""
    features: tuple[str, ...] = ()
    """What its kernels may use: avx2, avx512, dotprod, i8mm."""


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a plan can use."""

    host: Host
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be asked, and why (no driver, a library missing)."""


def probe() -> Devices:
    """The machine as it is now. Never raises; a few milliseconds, more with an NVIDIA driver."""
    host = _host()
    if _is_apple():
        return Devices(host=host, gpus=(_apple_gpu(host),))
    nvidia, notes = _nvidia()
    gpus = (*nvidia, *_amd(_SYS))
    return Devices(host=host, gpus=gpus, notes=tuple(notes))


def vendors() -> tuple[str, ...]:
    """Makers of the display adapters on the PCI bus: nvidia, amd, intel. Linux only."""
    known = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
    return tuple(name for number, name in known.items() if _has_pci_vendor(_SYS, number))


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """What one NVIDIA card does now; None where the driver does not say."""

    uuid: str
    percent: float | None = None
    celsius: float | None = None
    watts: float | None = None


def activity() -> tuple[Activity, ...]:
    """Every NVIDIA card's load, temperature and power, in NVML's order. Never raises."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return tuple(_activity(pynvml, handle) for handle in handles)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _activity(pynvml: Any, handle: Any) -> Activity:
    def ask(call: Any, *arguments: Any) -> Any:
        try:
            return call(handle, *arguments)
        except pynvml.NVMLError:
            return None

    load = ask(pynvml.nvmlDeviceGetUtilizationRates)
    heat = ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
    power = ask(pynvml.nvmlDeviceGetPowerUsage)
    return Activity(
        uuid=_text(ask(pynvml.nvmlDeviceGetUUID) or ""),
        percent=None if load is None else float(load.gpu),
        celsius=None if heat is None else float(heat),
        watts=None if power is None else power / 1000,
    )


def cuda_driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver runs, or None without one."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        version = int(pynvml.nvmlSystemGetCudaDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return version // 1000, version % 1000 // 10


def hypothetical(sizes: Sequence[int], backend: str = "cuda") -> tuple[Gpu, ...]:
    """Cards with this much free memory (bytes) that need not exist: GPU0, GPU1, ..."""
    return tuple(
        Gpu(
            id=f"GPU{i}",
            name=f"{size / 2**30:.4g} GiB card",
            backend=backend,
            total=size,
            free=size,
            hypothetical=True,
        )
        for i, size in enumerate(sizes)
    )


def imagine(
    devices: Devices,
    *,
    vram: Sequence[int] = (),
    ram: int | None = None,
    backend: str | None = None,
) -> Devices:
    """``devices`` with what --vram, --ram and --backend say in place of what is there."""
    gpus = devices.gpus
    if vram:
        # Without a backend the cards that exist decide; a machine with none imagines CUDA.
        gpus = hypothetical(vram, backend or (gpus[0].backend if gpus else "cuda"))
    elif backend is not None and backend != "cpu":
        gpus = tuple(g for g in gpus if g.backend == backend)
    if backend == "cpu":
        gpus = ()
    host = devices.host
    if ram is not None:
        host = msgspec.structs.replace(host, total=max(host.total, ram), available=ram)
    return msgspec.structs.replace(devices, host=host, gpus=gpus)


def _host() -> Host:
    import psutil  # 10 ms that `edgellm --help` does without

    memory = psutil.virtual_memory()
    total, available = _within_cgroup(memory.total, memory.available, _SYS / "fs/cgroup")
    n_logical = _usable_cpus()
    n_physical = min(psutil.cpu_count(logical=False) or n_logical, n_logical)
    return Host(
        cpu=_cpu_name(),
        n_physical=n_physical,
        n_logical=n_logical,
        total=total,
        available=available,
        os=f"{platform.system()} {platform.release()}",
        unified=_is_apple(),
        features=_cpu_features(),
    )


_FEATURES: Final = {"avx2": "avx2", "avx512f": "avx512", "asimddp": "dotprod", "i8mm": "i8mm"}
"""The kernel's names, and llama.cpp's."""


def _cpu_features() -> tuple[str, ...]:
    """From /proc/cpuinfo; elsewhere what every such machine of the last ten years has."""
    for line in _read(_PROC / "cpuinfo").splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            there = set(words.split())
            return tuple(ours for theirs, ours in _FEATURES.items() if theirs in there)
    return ("dotprod",) if platform.machine().lower() in ("arm64", "aarch64") else ("avx2",)


def _usable_cpus() -> int:
    """Logical CPUs this process may use: its affinity, and a container's quota."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cpu_quota(_SYS / "fs/cgroup")
    return count if quota is None else max(1, min(count, round(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs that cgroup v2 allows (``cpu.max``: quota and period in microseconds), or None."""
    words = _read(cgroup / "cpu.max").split()
    if len(words) != 2 or not words[0].isdigit():
        return None
    return int(words[0]) / int(words[1])


def _within_cgroup(total: int, available: int, cgroup: Path) -> tuple[int, int]:
    """Total and available bytes under a container's limit (cgroup v2 ``memory.max``)."""
    limit = _read(cgroup / "memory.max")
    if not limit.isdigit() or int(limit) >= total:
        return total, available
    used = int(_read(cgroup / "memory.current") or 0)
    # Clean page cache counts as used there, but the kernel gives it back when asked.
    stat = dict(line.split() for line in _read(cgroup / "memory.stat").splitlines())
    used -= int(stat.get("inactive_file", 0))
    return int(limit), max(0, min(available, int(limit) - used))


def _cpu_name() -> str:
    for line in _read(_PROC / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()
    return platform.processor() or platform.machine()


def _is_apple() -> bool:
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def _apple_gpu(host: Host) -> Gpu:
    """Metal's working set: iogpu.wired_limit_mb when set, else its default share of the RAM."""
    limit = _output(["sysctl", "-n", "iogpu.wired_limit_mb"])
    megabytes = int(limit) if limit.isdigit() else 0
    # recommendedMaxWorkingSetSize: two thirds up to 36 GiB of RAM, three quarters above.
    share = 2 / 3 if host.total <= 36 * 2**30 else 3 / 4
    total = megabytes * 2**20 if megabytes else int(host.total * share)
    return Gpu(
        id="Metal",
        name=host.cpu,
        backend="metal",
        total=total,
        free=min(total, host.available),
        integrated=True,
    )


def _nvidia() -> tuple[list[Gpu], list[str]]:
    """NVIDIA cards in llama.cpp's order, and a note when the driver could not be asked."""
    try:
        import pynvml
    except ImportError:
        return [], ["NVIDIA cards were not looked for: nvidia-ml-py is not installed"]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], _driver_note(pynvml, error)
    try:
        cards, notes = _nvml_cards(pynvml)
    except pynvml.NVMLError as error:
        return [], [f"the NVIDIA driver failed: {error}"]
    finally:
        pynvml.nvmlShutdown()
    visible = _visible(cards, os.environ)
    if len(visible) < len(cards):
        notes.append(f"CUDA_VISIBLE_DEVICES leaves {len(visible)} of {len(cards)} NVIDIA cards")
    numbered = [msgspec.structs.replace(g, id=f"CUDA{i}") for i, g in enumerate(visible)]
    return numbered, notes


def _driver_note(pynvml: Any, error: Exception) -> list[str]:
    """Nothing to say where there is no driver and no card; a note where a card has no driver."""
    if not _has_pci_vendor(_SYS, "0x10de"):
        return []
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        return ["an NVIDIA card is here, but its driver is not installed"]
    return [f"an NVIDIA card is here, but its driver does not answer: {error}"]


def _nvml_cards(pynvml: Any) -> tuple[list[Gpu], list[str]]:
    """Every card NVML can open, in PCI order; one that fails becomes a note."""
    found: list[tuple[str, Gpu]] = []
    notes: list[str] = []
    driver = _text(pynvml.nvmlSystemGetDriverVersion())
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            bus = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
            found.append((bus, _nvml_card(pynvml, handle, driver)))
        except pynvml.NVMLError as error:
            notes.append(f"NVIDIA card {index} could not be read: {error}")
    return [card for _, card in sorted(found, key=lambda pair: pair[0])], notes


def _nvml_card(pynvml: Any, handle: Any, driver: str) -> Gpu:
    instance = _mig_instance(pynvml, handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle if instance is None else instance)
    name = _text(pynvml.nvmlDeviceGetName(handle))
    return Gpu(
        id="CUDA",
        name=name if instance is None else f"{name} (MIG)",
        backend="cuda",
        total=int(memory.total),
        free=int(memory.free),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle if instance is None else instance)),
        compute_capability=_capability(pynvml, handle),
        driver=driver,
    )


def _capability(pynvml: Any, handle: Any) -> tuple[int, int] | None:
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    return int(major), int(minor)


def _mig_instance(pynvml: Any, handle: Any) -> Any | None:
    """The first instance of a partitioned card, the one CUDA shows; None for a whole card."""
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
        if not mode:
            return None
        return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    except pynvml.NVMLError:
        return None


def _visible(cards: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """``cards`` (in PCI order) through CUDA_VISIBLE_DEVICES.

    Indices and unique prefixes of UUIDs; the list ends at the first entry that names no card, as
    CUDA's does (CUDA C++ Programming Guide, environment variables).
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(cards)
    chosen: list[Gpu] = []
    for word in (part.strip() for part in wanted.split(",")):
        card = _card_named(cards, word)
        if card is None or card in chosen:
            break
        chosen.append(card)
    return chosen


def _card_named(cards: Sequence[Gpu], word: str) -> Gpu | None:
    if word.isdigit():
        return cards[int(word)] if int(word) < len(cards) else None
    matches = [c for c in cards if word and (c.uuid or "").startswith(word)]
    return matches[0] if len(matches) == 1 else None


def _amd(sys: Path) -> list[Gpu]:
    """AMD cards from the amdgpu driver's sysfs files, in PCI order.

    llama.cpp reaches them through Vulkan or ROCm, whichever the build has.
    """
    cards = sorted(_drm_devices(sys, "0x1002"), key=lambda path: path.resolve().name)
    readable = [path for path in cards if _read(path / "mem_info_vram_total").isdigit()]
    return [_amd_card(path, index) for index, path in enumerate(readable)]


def _amd_card(path: Path, index: int) -> Gpu:
    total = int(_read(path / "mem_info_vram_total"))
    used = int(_read(path / "mem_info_vram_used") or 0)
    has_rocm = Path("/dev/kfd").exists() and Path("/opt/rocm").exists()
    return Gpu(
        id=f"ROCm{index}" if has_rocm else f"Vulkan{index}",
        name=_read(path / "product_name") or f"AMD {_read(path / 'device')}",
        backend="rocm" if has_rocm else "vulkan",
        total=total,
        free=max(0, total - used),
        uuid=path.resolve().name,
    )


def _drm_devices(sys: Path, vendor: str) -> Iterator[Path]:
    for path in sorted((sys / "class/drm").glob("card[0-9]*/device")):
        if "-" not in path.parent.name and _read(path / "vendor") == vendor:
            yield path


def _has_pci_vendor(sys: Path, vendor: str) -> bool:
    devices = (sys / "bus/pci/devices").glob("*/vendor")
    # 0x03....: display controllers; a network card of the same maker is not a GPU.
    return any(
        _read(path) == vendor and _read(path.with_name("class")).startswith("0x03")
        for path in devices
    )


def _read(path: Path) -> str:
    """A small file's text without its last line break; empty when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _text(value: str | bytes) -> str:
    """pynvml gives bytes or str, by its version."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
