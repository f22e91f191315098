"""A plan straight from parameters: nothing is estimated, nothing is known of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm.planner.plan import HostLedger, ModelFacts, Plan, PlanParams, Speed


def bare_plan(path: str, **params: Any) -> Plan:
    """A plan with these PlanParams for the file at ``path``."""
    facts = ModelFacts(
        name=Path(path).stem,
        path=path,
        arch="",
        quant="",
        file_bytes=0,
        n_params=0,
        n_layer=0,
        n_ctx_train=0,
    )
    planned = PlanParams(**params)
    return Plan(
        model=facts,
        params=planned,
        devices=(),
        host=HostLedger(total=0, available=0),
        verdict="gpu" if planned.n_gpu_layers else "cpu",
        speed=Speed(prefill_tps=0, decode_tps=0, basis="none"),
    )
