"""What every command and the server start from: one model opened, or several behind one door."""

from edgellm.runtime.models import Lease, ModelSpec, ModelStatus, Runtime, make_runtime
from edgellm.runtime.opening import (
    engine_options,
    local_path,
    local_shape,
    open_engine,
    plan_devices,
    plan_model,
    plan_request,
    replanner,
    with_workers,
)

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
    "replanner",
    "with_workers",
]
