"""The backend that computes: llama.cpp through the raw functions of llama_cpp.llama_cpp."""

from __future__ import annotations

from edgellm.engine.backend import Backend, OnProgress
from edgellm.engine.info import EngineOptions
from edgellm.errors import EngineError
from edgellm.planner.plan import LoadReport, Plan


def load(plan: Plan, options: EngineOptions, on_progress: OnProgress) -> Backend:
    """Load the plan's model."""
    raise EngineError(f"not yet: {plan.model.path} {options} {on_progress}")


def dry_run(plan: Plan, options: EngineOptions) -> LoadReport:
    """The buffers of a plan, measured without allocating them."""
    raise EngineError(f"not yet: {plan.model.path} {options}")
