"""A plan as a profile of one's own: the values that were chosen, each with its reason."""

from __future__ import annotations

from edgellm import config
from edgellm.planner.plan import Plan, PlanRequest

# PlanRequest's fields and the settings of the same meaning.
SETTINGS = {
    "n_ctx": "plan.ctx", "n_seq_max": "plan.parallel", "n_gpu_layers": "plan.ngl",
    "n_ubatch": "plan.ubatch", "type_k": "plan.type_k", "type_v": "plan.type_v",
    "n_cpu_moe": "plan.n_cpu_moe",
}  # fmt: skip


def save_profile(name: str, plan: Plan, request: PlanRequest) -> str:
    """Write what was asked for, where something was, else what the planner chose; the place."""
    asked = [field for field in SETTINGS if getattr(request, field) is not None]
    chosen = {reason.param: reason.why for reason in plan.reasons}
    values, why = {}, {}
    for field in asked or SETTINGS:
        key, value = SETTINGS[field], getattr(plan.params, field)
        values[key] = str(value) if field == "n_gpu_layers" else value
        why[key] = "chosen by hand" if asked else chosen.get(field, "chosen by the planner")
    what_for = f"{plan.model.name} {plan.model.quant}"
    return str(config.write_profile(name, config.profile_text(name, what_for, values, why)))
