"""What is asked of each card beside the model: bytes kept free, bytes the backend takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.devices import Gpu
from edgellm.gguf.shape import ModelShape
from edgellm.planner import observed
from edgellm.planner.overhead import default_margin, default_overhead
from edgellm.planner.plan import PlanRequest


@dataclass(frozen=True)
class Terms:
    """One card's."""

    margin: int = 0
    overhead: int | None = None
    """As asked for, whatever the settings; None: what follows."""
    base: int | None = None
    """The backend's own part as seen here, to which the settings' is added; None: the table's."""
    extra: int = 0
    """Bytes beside the model: a draft model, a projector."""

    def backend(self, gpu: Gpu) -> int:
        """What the backend takes on ``gpu`` whatever the settings."""
        if self.overhead is not None:
            return self.overhead
        return default_overhead(gpu) if self.base is None else self.base


def terms_of(shape: ModelShape, gpus: Sequence[Gpu], request: PlanRequest) -> list[Terms]:
    """Margin and overhead of each card: as asked, else as seen here, else the defaults."""
    seen, arch = request.observed, shape.arch
    return [
        Terms(
            margin=observed.margin(seen, gpu, arch, default_margin(gpu))
            if request.margin is None
            else request.margin,
            overhead=request.overhead,
            base=observed.overhead(seen, gpu, arch),
            extra=0 if i else request.extra_gpu,
        )
        for i, gpu in enumerate(gpus)
    ]
