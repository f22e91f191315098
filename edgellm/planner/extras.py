"""What goes beside the model: a draft model and a vision projector, planned before it is placed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from edgellm.devices import Devices
from edgellm.gguf.reader import read_gguf
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner.estimate import estimate, replace
from edgellm.planner.params import base_params, fixed_params
from edgellm.units import MiB

if TYPE_CHECKING:
    from edgellm.gguf.reader import GGUFFile
    from edgellm.planner.plan import PlanRequest

IMAGE_TOKENS: Final = 4096
"""Patches of the largest image that most projectors take."""


def with_extras(shape: ModelShape, devices: Devices, request: PlanRequest) -> PlanRequest:
    """``request`` with the bytes of its draft model and projector; both go on the first card."""
    if request.draft_model is None and request.mmproj is None:
        return request
    gpu = host = 0
    if request.draft_model is not None:
        on_gpu, on_host = _draft(shape, devices, request)
        gpu, host = gpu + on_gpu, host + on_host
    if request.mmproj is not None:
        needed = projector_bytes(read_gguf(Path(request.mmproj)))
        gpu, host = (gpu + needed, host) if devices.gpus else (gpu, host + needed)
    return msgspec.structs.replace(
        request, extra_gpu=request.extra_gpu + gpu, extra_host=request.extra_host + host
    )


def _draft(shape: ModelShape, devices: Devices, request: PlanRequest) -> tuple[int, int]:
    """The draft model's bytes (card, host), with the context of the model that it drafts for."""
    draft = model_shape(read_gguf(Path(request.draft_model or "")))
    params = fixed_params(request) if request.fixed else base_params(shape, devices, request)
    params = replace(
        params,
        n_gpu_layers=-1 if devices.gpus else 0,
        n_cpu_moe=0,
        tensor_split=(),
        n_outputs_max=params.n_seq_max,
    )
    ledger = estimate(draft, params, devices.gpus[:1], devices.host)
    # the card's own overhead is paid once, for the model
    return sum(d.used - d.overhead for d in ledger.devices), ledger.host.used


def projector_bytes(file: GGUFFile) -> int:
    """Weights, and the scratch memory of one large image (clip.cpp keeps both on one backend)."""
    weights = sum(t.n_bytes for t in file.tensors)
    found = file.metadata.get("clip.vision.embedding_length")
    width = found if isinstance(found, int) else 1152
    # hidden states, queries, keys and values, and a feed-forward four times as wide: f32
    return weights + 4 * IMAGE_TOKENS * width * 9 + 16 * MiB
