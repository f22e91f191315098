from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest

from edgellm import devices
from edgellm.devices import Gpu

GiB = 2**30


def card(uuid: str, name: str = "card") -> Gpu:
    return Gpu(id="CUDA", name=name, backend="cuda", total=8 * GiB, free=7 * GiB, uuid=uuid)


CARDS = [card("GPU-aaaa-1"), card("GPU-aaaa-2"), card("GPU-bbbb-3")]


class FakeNvml:
    """An NVML with cards given as (bus id, name, uuid, total, free), one of them may be broken."""

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound

    def __init__(self, cards: list[tuple[str, str, str, int, int]], broken: int | None = None):
        self.cards = cards
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        if name not in ("nvmlInit", "nvmlShutdown"):
            raise AttributeError(name)
        return lambda: None

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index == self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return type("Pci", (), {"busId": self.cards[handle][0]})

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return self.cards[handle][1]

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return self.cards[handle][2]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return type("M", (), {"total": self.cards[handle][3], "free": self.cards[handle][4]})

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 8, 9

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:  # noqa: N802
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def nvml(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]


def test_this_machine_is_probed_without_raising() -> None:
    found = devices.probe()
    assert 1 <= found.host.n_physical <= found.host.n_logical
    assert 0 < found.host.available <= found.host.total
    assert found.host.cpu


def test_cards_are_numbered_in_pci_order_with_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    late = ("00000000:41:00.0", "RTX 4090", "GPU-b", 24 * GiB, 23 * GiB)
    early = ("00000000:01:00.0", "RTX 3060", "GPU-a", 12 * GiB, 11 * GiB)
    nvml(monkeypatch, FakeNvml([late, early]))
    gpus, notes = devices._nvidia()
    assert [(g.id, g.name, g.free) for g in gpus] == [
        ("CUDA0", "RTX 3060", 11 * GiB),
        ("CUDA1", "RTX 4090", 23 * GiB),
    ]
    assert gpus[0].driver == "580.1"
    assert gpus[0].compute_capability == (8, 9)
    assert notes == []


def test_a_card_that_cannot_be_read_is_a_note_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    good = ("00000000:01:00.0", "RTX 3060", "GPU-a", 12 * GiB, 11 * GiB)
    nvml(monkeypatch, FakeNvml([good, good], broken=1))
    gpus, notes = devices._nvidia()
    assert [g.name for g in gpus] == ["RTX 3060"]
    assert "card 1 could not be read" in notes[0]


def test_visible_devices_reorder_and_renumber_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    one = ("00000000:01:00.0", "one", "GPU-a", GiB, GiB)
    two = ("00000000:02:00.0", "two", "GPU-b", GiB, GiB)
    nvml(monkeypatch, FakeNvml([one, two]))
    gpus, _ = devices._nvidia()
    assert [(g.id, g.name) for g in gpus] == [("CUDA0", "two"), ("CUDA1", "one")]


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, ["GPU-aaaa-1", "GPU-aaaa-2", "GPU-bbbb-3"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-bbbb-3", "GPU-aaaa-1"]),
        ("GPU-bbbb", ["GPU-bbbb-3"]),
        ("GPU-aaaa", []),
        ("0,9,1", ["GPU-aaaa-1"]),
        ("0,0", ["GPU-aaaa-1"]),
        (" 1 , 2 ", ["GPU-aaaa-2", "GPU-bbbb-3"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str | None, uuids: list[str]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [g.uuid for g in devices._visible(CARDS, environ)] == uuids


def test_hidden_cards_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    nvml(monkeypatch, FakeNvml([("1", "one", "GPU-a", GiB, GiB)]))
    gpus, notes = devices._nvidia()
    assert gpus == []
    assert notes == ["CUDA_VISIBLE_DEVICES leaves 0 of 1 NVIDIA cards"]


def pci(sys: Path, vendor: str, pci_class: str) -> None:
    device = sys / "bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor)
    (device / "class").write_text(pci_class)


def test_a_card_without_its_driver_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci(tmp_path, "0x10de\n", "0x030000\n")
    monkeypatch.setattr(devices, "_SYS", tmp_path)
    missing = pynvml.NVMLError_LibraryNotFound()
    assert "driver is not installed" in devices._driver_note(pynvml, missing)[0]


def test_no_card_and_no_driver_is_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pci(tmp_path, "0x10de\n", "0x020000\n")  # a network card of the same maker
    monkeypatch.setattr(devices, "_SYS", tmp_path)
    assert devices._driver_note(pynvml, pynvml.NVMLError_LibraryNotFound()) == []


def amd(sys: Path, index: int, total: int, used: int) -> None:
    device = sys / f"class/drm/card{index}/device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1002\n")
    (device / "mem_info_vram_total").write_text(f"{total}\n")
    (device / "mem_info_vram_used").write_text(f"{used}\n")
    (device / "product_name").write_text("Radeon RX 7600\n")


def test_amd_cards_are_read_from_the_kernel(tmp_path: Path) -> None:
    amd(tmp_path, 0, 8 * GiB, GiB)
    (tmp_path / "class/drm/card0-HDMI-A-1/device").mkdir(parents=True)
    (gpu,) = devices._amd(tmp_path)
    assert (gpu.name, gpu.total, gpu.free) == ("Radeon RX 7600", 8 * GiB, 7 * GiB)
    assert gpu.backend in ("vulkan", "rocm")


def test_a_container_limit_bounds_ram(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{4 * GiB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GiB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GiB}\ninactive_file {2 * GiB}\n")
    assert devices._within_cgroup(64 * GiB, 60 * GiB, tmp_path) == (4 * GiB, 3 * GiB)


@pytest.mark.parametrize("limit", ["max", "", str(128 * GiB)])
def test_no_container_limit_leaves_ram_alone(tmp_path: Path, limit: str) -> None:
    (tmp_path / "memory.max").write_text(limit)
    assert devices._within_cgroup(64 * GiB, 60 * GiB, tmp_path) == (64 * GiB, 60 * GiB)


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("200000 100000", 2.0), ("", None)]
)
def test_a_container_cpu_quota_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert devices._cpu_quota(tmp_path) == quota


def test_hypothetical_cards_have_the_given_memory_free() -> None:
    gpus = devices.hypothetical([6 * GiB, 4 * GiB], "vulkan")
    assert [(g.id, g.free, g.backend) for g in gpus] == [
        ("GPU0", 6 * GiB, "vulkan"),
        ("GPU1", 4 * GiB, "vulkan"),
    ]
    assert all(g.hypothetical for g in gpus)


HOST = devices.Host(cpu="x", n_physical=4, n_logical=8, total=16 * GiB, available=12 * GiB)
REAL = devices.Devices(host=HOST, gpus=(card("GPU-1"),))


def test_vram_replaces_the_cards_that_exist() -> None:
    (gpu,) = devices.imagine(REAL, vram=[6 * GiB]).gpus
    assert (gpu.hypothetical, gpu.free, gpu.backend) == (True, 6 * GiB, "cuda")


def test_backend_cpu_leaves_every_card_out() -> None:
    assert devices.imagine(REAL, backend="cpu").gpus == ()
    assert devices.imagine(REAL, backend="vulkan").gpus == ()
    assert devices.imagine(REAL, backend="cuda").gpus == REAL.gpus


def test_ram_replaces_what_is_available() -> None:
    host = devices.imagine(REAL, ram=32 * GiB).host
    assert (host.total, host.available) == (32 * GiB, 32 * GiB)
    host = devices.imagine(REAL, ram=2 * GiB).host
    assert (host.total, host.available) == (16 * GiB, 2 * GiB)


def test_without_nvidia_ml_py_the_driver_has_no_version_and_nothing_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert devices.cuda_driver_version() is None
