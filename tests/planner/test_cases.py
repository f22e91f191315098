"""Published buffer sizes: every row that can be computed is within 5 % or 100 MiB."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "benchmarks" / "planner_cases.py"
_SPEC = importlib.util.spec_from_file_location("planner_cases", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
cases = importlib.util.module_from_spec(_SPEC)
sys.modules["planner_cases"] = cases
_SPEC.loader.exec_module(cases)


@pytest.mark.parametrize("id_", list(cases.CASES))
def test_published_sizes(id_: str) -> None:
    case, planned = cases.CASES[id_], cases.computed(id_)
    wrong = {
        name: (measured, planned[name])
        for name, measured in case.expect.items()
        if not cases.is_close(measured, planned[name])
    }
    assert not wrong or case.differs, wrong
    assert "gpu_kv" not in wrong
    assert "cpu_kv" not in wrong


def test_every_row_is_computed_or_says_why_not() -> None:
    assert set(cases.CASES) | set(cases.INCOMPLETE) == set(cases.ROWS)
    assert not set(cases.CASES) & set(cases.INCOMPLETE)


def test_the_page_is_what_the_script_writes() -> None:
    assert cases.PAGE.read_text(encoding="utf-8") == "\n".join(cases.lines()) + "\n"
