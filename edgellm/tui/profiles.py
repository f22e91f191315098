"""A plan as a profile of one's own: the values that were chosen, each with its reason."""

from __future__ import annotations

import json
import re

from edgellm import paths
from edgellm.errors import ConfigError
from edgellm.planner.plan import Plan, PlanRequest

# PlanRequest's fields and the settings of the same meaning.
SETTINGS = {
    "n_ctx": "ctx", "n_seq_max": "parallel", "n_gpu_layers": "ngl", "n_ubatch": "ubatch",
    "type_k": "type_k", "type_v": "type_v", "n_cpu_moe": "n_cpu_moe",
}  # fmt: skip


def profile_text(name: str, plan: Plan, request: PlanRequest) -> str:
    """TOML: what was asked for where something was, else what the planner chose."""
    asked = {field for field in SETTINGS if getattr(request, field) is not None}
    why = {reason.param: reason.why for reason in plan.reasons}
    lines = [
        "[profile]", f"title = {json.dumps(name)}",
        f"for = {json.dumps(f'{plan.model.name} {plan.model.quant}')}", "", "[plan]",
    ]  # fmt: skip
    for field in [f for f in SETTINGS if f in asked] or list(SETTINGS):
        value = getattr(plan.params, field)
        if field == "n_gpu_layers":
            value = str(value)
        reason = "chosen by hand" if field in asked else why.get(field, "chosen by the planner")
        lines.append(
            f"{SETTINGS[field]} = {{ value = {json.dumps(value)}, why = {json.dumps(reason)} }}"
        )
    return "\n".join(lines) + "\n"


def save_profile(name: str, plan: Plan, request: PlanRequest) -> str:
    """Write the profile into the person's folder; return its path."""
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ConfigError(f"{name!r} is no name for a profile", hint="letters, digits, - and _")
    folder = paths.config_dir() / "profiles"
    path = folder / f"{name}.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(profile_text(name, plan, request), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    return str(path)
