"""What this machine has: CPU cores, RAM and GPUs, with their free memory now."""

from __future__ import annotations

import msgspec


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


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a plan can use."""

    host: Host
    gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be asked, and why (no driver, a library missing)."""
