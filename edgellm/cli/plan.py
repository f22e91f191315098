"""``edgellm plan``: what fits where, to the MiB, before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgellm import config, library, runtime
from edgellm.cli.errors import UsageError
from edgellm.cli.flags import PlanFlags
from edgellm.devices import Devices
from edgellm.gguf.shape import ModelShape, model_shape
from edgellm.planner import observed
from edgellm.planner.alternatives import with_alternatives
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import Plan
from edgellm.planner.vllm import Node, VllmPlan, model_of, plan_vllm
from edgellm.units import parse_bytes


def plan(
    model: str,
    /,
    *,
    fixed: bool = False,
    explain: bool = False,
    dry_run: bool = False,
    json: bool = False,
    engine: Literal["llama", "vllm"] = "llama",
    gpus: str = "1x80GiB",
    gpu_link: Literal["nvlink", "pcie"] = "nvlink",
    fp8: bool = False,
    weights: str | None = None,
    plan_flags: PlanFlags = PlanFlags(),  # noqa: B008 (frozen)
) -> None:
    """What fits where, to the MiB, before loading.

    Examples, one a line:

    * `edgellm plan starter`
    * `edgellm plan llama-3.1-8b --vram 6GiB --ctx 4096`
    * `edgellm plan model.gguf --explain`
    * `edgellm plan hf:owner/repo:Q4_K_M --vram 6GiB --explain`
    * `edgellm plan hf:owner/repo --engine vllm --gpus 8x80GiB --ctx 32768`

    Parameters
    ----------
    model
        A path, a name that edgellm ls or edgellm search prints, hf:owner/repo[:file or quant], or
        a URL of a GGUF.
    fixed
        Take the parameters as given (llama.cpp's defaults otherwise); compute the ledger only.
    explain
        Show the sums behind the numbers too.
    dry_run
        Let llama.cpp itself work out the compute buffers, in a process that allocates none.
    json
        Print the plan as JSON (edgellm.plan/1).
    engine
        vllm writes the `vllm serve` command for a node of equal GPUs.
    gpus
        That node, for vllm: 8x80GiB.
    gpu_link
        How its cards are linked.
    fp8
        Count the weights in FP8, which vllm makes of them while it loads.
    weights
        The repository or folder with the original weights, for the command.
    """
    settings = config.load(plan_flags.settings()).settings
    request = runtime.plan_request(settings, fixed=fixed)
    devices = runtime.plan_devices(settings)
    if settings.plan.worker:
        for note in devices.notes:  # a worker that does not answer is not in the plan
            print(f"warning: {note}", file=sys.stderr)
    shape = model_shape(library.find_header(model, settings, devices))
    if engine == "vllm":
        as_run = model_of(shape, weights or _original(model), fp8=fp8)
        node = node_of(gpus, gpu_link)
        show_vllm(plan_vllm(as_run, node, n_ctx=request.n_ctx, n_seqs=request.n_seq_max), json)
        return
    made = make_plan(shape, devices, request)
    if dry_run:
        made = prove(made, devices)
    show(with_alternatives(shape, devices, request, made), json, shape if explain else None)


def node_of(gpus: str, link: str) -> Node:
    """``8x80GiB`` as a node. Raises UsageError."""
    count, cross, size = gpus.lower().replace("gib", "GiB").partition("x")
    try:
        if not cross or int(count) < 1:
            raise ValueError("it is NUMBERxSIZE")
        return Node(n_gpus=int(count), memory=parse_bytes(size), link=link)
    except ValueError as error:
        raise UsageError(f"--gpus {gpus}: {error}; as in 8x80GiB") from error


def _original(model: str) -> str:
    """The likely repository of the original weights: that of the GGUF without its ending."""
    repo = model.removeprefix("hf:").partition(":")[0]
    return repo.removesuffix("-GGUF").removesuffix("-gguf")


def show_vllm(made: VllmPlan, as_json: bool) -> None:
    """The command with its reasons."""
    if as_json:
        data = {"schema": "edgellm.vllm-plan/1", **msgspec.to_builtins(made)}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n")
        return
    lines = [made.command, "", *(f"  {reason}" for reason in made.reasons)]
    lines += [f"warning: {warning}" for warning in made.warnings]
    lines.append("then: edgellm serve --upstream http://127.0.0.1:8000")
    sys.stdout.write("\n".join(lines) + "\n")


def prove(made: Plan, devices: Devices) -> Plan:
    """``made`` with the compute buffers of a dry run. Raises EngineError, UsageError."""
    import asyncio

    from edgellm.engine.client import dry_run as run

    if any(gpu.hypothetical for gpu in devices.gpus) or not Path(made.model.path).is_file():
        raise UsageError("--dry-run needs the model on this machine, and this machine's cards")
    return observed.with_dry_run(made, asyncio.run(run(made)))


def show(made: Plan, as_json: bool, shape: ModelShape | None = None) -> None:
    """Print a plan for a program or a person; with ``shape`` the sums behind the numbers too."""
    if as_json:
        data: dict[str, Any] = made.to_json()
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n")
        return
    from edgellm.planner.explain import render

    render(made, shape)
