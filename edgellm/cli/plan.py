"""``edgellm plan``: what fits where, to the MiB, before anything is loaded."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from edgellm.cli.errors import UsageError
from edgellm.devices import imagine, probe
from edgellm.errors import ModelNotFoundError
from edgellm.gguf.reader import GGUFFile, read_gguf
from edgellm.gguf.shape import model_shape
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan, PlanRequest
from edgellm.planner.types import KV_BLOCK
from edgellm.units import parse_bytes

OnOff = Literal["on", "off"]


def plan(
    model: str,
    *,
    ctx: int | None = None,
    parallel: int | None = None,
    ngl: str = "auto",
    batch: int | None = None,
    ubatch: int | None = None,
    outputs: int | None = None,
    kv: str | None = None,
    type_k: str | None = None,
    type_v: str | None = None,
    flash_attn: Literal["on", "off", "auto"] | None = None,
    n_cpu_moe: int | None = None,
    swa_full: Annotated[bool | None, Parameter(negative=())] = None,
    kv_unified: OnOff | None = None,
    vram: list[str] | None = None,
    ram: str | None = None,
    backend: Literal["cuda", "vulkan", "metal", "rocm", "cpu", "rpc"] | None = None,
    margin: str | None = None,
    overhead: str | None = None,
    objective: Literal["speed", "context"] = "speed",
    fixed: Annotated[bool, Parameter(negative=())] = False,
    force: Annotated[bool, Parameter(negative=())] = False,
    explain: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """What fits where, to the MiB, before loading.

    Example: edgellm plan model.gguf --vram 6GiB --ctx 8192

    Parameters
    ----------
    model
        A path, hf:owner/repo[:file or quant], a URL of a GGUF, or a name in the store.
    ctx
        Cells for all sequences (n_ctx).
    parallel
        Sequences at once.
    ngl
        Layers on the GPU, the output layer counted as one more: a number, auto or all.
    batch
        Tokens a batch (n_batch).
    ubatch
        Tokens a step (n_ubatch).
    outputs
        Positions a step that give logits (n_outputs_max); 0: every one.
    kv
        Type of the KV cache, K and V alike: f16, q8_0, q4_0 ...
    type_k
        Type of K alone.
    type_v
        Type of V alone.
    flash_attn
        Flash attention.
    n_cpu_moe
        Layers, from the first, whose experts stay on the host.
    swa_full
        Keep every cell of sliding-window layers.
    kv_unified
        One cache for all sequences, or one each.
    vram
        Free memory of a card that need not exist; repeat it for several cards.
    ram
        Free memory of the host.
    backend
        The backend to plan for.
    margin
        Memory to keep free on each card; 0 means 0.
    overhead
        What the backend takes on each card outside llama.cpp's buffers.
    objective
        The fastest plan with the context asked for, or also the largest context at that speed.
    fixed
        Take the parameters as given (llama.cpp's defaults otherwise); compute the ledger only.
    force
        Give the nearest plan even when it does not fit.
    explain
        Why each parameter has its value, and what else could be done.
    json
        Print the plan as JSON (edgellm.plan/1).
    """
    request = PlanRequest(
        n_ctx=_positive("--ctx", ctx),
        n_seq_max=_positive("--parallel", parallel),
        n_gpu_layers=_layers(ngl),
        n_batch=_positive("--batch", batch),
        n_ubatch=_positive("--ubatch", ubatch),
        n_outputs_max=outputs,
        type_k=_kv_type(type_k or kv),
        type_v=_kv_type(type_v or kv),
        flash_attn=flash_attn,
        n_cpu_moe=n_cpu_moe,
        swa_full=swa_full,
        kv_unified=None if kv_unified is None else kv_unified == "on",
        margin=_size("--margin", margin),
        overhead=_size("--overhead", overhead),
        objective=objective,
        fixed=fixed,
        force=force,
        allow_q4_kv=(kv or type_k or type_v or "").startswith("q4"),
    )
    devices = imagine(
        probe(),
        vram=[parse_size("--vram", text) for text in vram or ()],
        ram=_size("--ram", ram),
        backend=backend,
    )
    show(make_plan(model_shape(open_header(model)), devices, request), json, explain)


def open_header(model: str) -> GGUFFile:
    """The header of what ``model`` names, wherever it is."""
    if os.path.exists(model):
        return read_gguf(model)
    raise ModelNotFoundError(f"no model {model!r}", hint="edgellm ls")


def show(plan: Plan, as_json: bool, explain: bool) -> None:
    """Print ``plan`` for a program or a person."""
    if as_json:
        data: dict[str, Any] = plan.to_json()
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n")
        return
    from edgellm.planner.explain import render

    render(plan, explain=explain)


def _layers(text: str) -> int | None:
    if text == "auto":
        return None
    if text == "all":
        return -1
    if text.isdecimal() or text == "-1":
        return int(text)
    raise UsageError(f"--ngl takes a number, auto or all, not {text!r}")


def _positive(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise UsageError(f"{flag} must be 1 or more, not {value}")
    return value


def _kv_type(text: str | None) -> str | None:
    if text is not None and text not in KV_BLOCK:
        raise UsageError(f"{text!r} is no KV cache type; one of {', '.join(KV_BLOCK)}")
    return text


def parse_size(flag: str, text: str) -> int:
    """A size as people write it; a UsageError that names the flag otherwise."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from error


def _size(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_size(flag, text)
