"""What every command and the server start from: one model opened, or several behind one door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm.runtime.opening import (
    engine_options,
    local_path,
    local_shape,
    open_engine,
    plan_devices,
    plan_model,
    plan_request,
    remember_load,
    replanner,
    with_workers,
)

if TYPE_CHECKING:
    from edgellm.runtime.models import Lease, ModelSpec, ModelStatus, Runtime, make_runtime

__all__ = [
    "Lease",
    "ModelSpec",
    "ModelStatus",
    "Runtime",
    "engine_options",
    "local_path",
    "local_shape",
    "make_runtime",
    "open_engine",
    "plan_devices",
    "plan_model",
    "plan_request",
    "remember_load",
    "replanner",
    "with_workers",
]


def __getattr__(name: str) -> Any:
    """Several models need asyncio (20 ms), which ``edgellm plan`` has no use for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edgellm.runtime import models

    return getattr(models, name)
