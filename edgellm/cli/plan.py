"""``edgellm plan``: what fits where, to the MiB, before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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


def plan(
    model: str,
    /,
    *,
    fixed: bool = False,
    explain: bool = False,
    dry_run: bool = False,
    json: bool = False,
    plan_flags: PlanFlags = PlanFlags(),  # noqa: B008 (frozen)
) -> None:
    """What fits where, to the MiB, before loading.

    Examples: `edgellm plan starter`, `edgellm plan model.gguf --vram 6GiB --ctx 8192`,
    `edgellm plan hf:owner/repo:Q4_K_M --vram 6GiB --explain`

    Parameters
    ----------
    model
        A path, hf:owner/repo[:file or quant], a URL of a GGUF, or a name in the store.
    fixed
        Take the parameters as given (llama.cpp's defaults otherwise); compute the ledger only.
    explain
        Show the sums behind the numbers too.
    dry_run
        Let llama.cpp itself work out the compute buffers, in a process that allocates none.
    json
        Print the plan as JSON (edgellm.plan/1).
    """
    settings = config.load(plan_flags.settings()).settings
    request = runtime.plan_request(settings, fixed=fixed)
    devices = runtime.plan_devices(settings)
    shape = model_shape(library.find_header(model, settings, devices))
    made = make_plan(shape, devices, request)
    if dry_run:
        made = prove(made, devices)
    show(with_alternatives(shape, devices, request, made), json, shape if explain else None)


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
