"""What a backend takes outside llama.cpp's buffers: contexts, kernels, library workspaces.

Measured on the cards named beside each number; replaced by what was measured on this machine.
"""

from __future__ import annotations

from typing import Final

from edgellm.devices import Gpu
from edgellm.units import MiB

_CUDA_BY_GENERATION: Final = (
    ((12, 0), 705),  # RTX PRO 6000 Blackwell: 703-712
    ((9, 0), 609),  # H200: 525 context + 80 cuBLAS
    ((8, 9), 300),  # RTX 4090 and the laptops below it
    ((8, 0), 300),  # RTX 3080: up to 559 with 20 GB cards
    ((7, 0), 200),  # Turing, Volta
    ((0, 0), 180),
)
_BY_BACKEND: Final = {"cuda": 300, "rocm": 250, "vulkan": 250, "metal": 8, "rpc": 8}
MOE_EXTRA: Final = 100 * MiB
"""Expert kernels and, without flash attention, batched matrix products: more cuBLAS workspace."""


MARGIN_SHARE: Final = 0.03
MARGIN_LEAST: Final = 160 * MiB


def default_margin(gpu: Gpu) -> int:
    """What is kept free on a card nobody measured: 3 % of what is free, 160 MiB at least.

    Of what is free, not of the card: 3 % of a large card that others nearly fill is most of what
    they leave.
    """
    return max(int(gpu.free * MARGIN_SHARE), MARGIN_LEAST)


def default_overhead(gpu: Gpu, *, experts: bool = False, flash: bool = True) -> int:
    """The table's bytes for ``gpu``."""
    base = _BY_BACKEND.get(gpu.backend, 300)
    if gpu.backend == "cuda" and gpu.compute_capability is not None:
        base = next(mib for since, mib in _CUDA_BY_GENERATION if gpu.compute_capability >= since)
    extra = MOE_EXTRA if gpu.backend == "cuda" and (experts or not flash) else 0
    return base * MiB + extra
