"""The plan is the best of an exhaustive search, or within 2 %; benchmarks/ runs all models."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.gguf.shape import ModelShape
from edgellm.planner.plan import PlanRequest

_PATH = Path(__file__).parents[2] / "benchmarks" / "planner_exhaustive.py"
_SPEC = importlib.util.spec_from_file_location("planner_exhaustive", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
exhaustive = importlib.util.module_from_spec(_SPEC)
sys.modules["planner_exhaustive"] = exhaustive
_SPEC.loader.exec_module(exhaustive)


@pytest.mark.parametrize("gib", [4, 6, 12])
@pytest.mark.parametrize("model", ["qwen2.5-7b", "llama-3.1-8b", "gpt-oss-20b"])
def test_the_plan_is_the_best_there_is(
    shape_of: Callable[[str], ModelShape], model: str, gib: int
) -> None:
    chosen, best = exhaustive.compare(shape_of(model), gib, PlanRequest())
    assert chosen >= 0.98 * best.decode_tps
    assert chosen > 0
