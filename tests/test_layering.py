"""Imports go down the levels: a file uses its own level's package or a lower one, never upwards.

The one sideways edge is engine -> planner/plan.py. Heavy or foreign libraries have one home each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "edgellm"

LEVELS = {
    "errors": 0,
    "units": 0,
    "request": 0,
    "metrics": 0,
    "web": 0,
    "paths": 1,
    "config": 1,
    "devices": 1,
    "workers": 1,
    "gguf": 1,
    "store": 1,
    "planner": 2,
    "engine": 2,
    "chat": 2,
    "library": 3,
    "runtime": 3,
    "server": 4,
    "bench": 4,
    "tui": 4,
    "cli": 5,
}
# Files of level 1 that the rest of the level may use.
SHARED_IN_LEVEL_1 = {"paths", "config", "devices"}
SIDEWAYS = {("engine", "edgellm.planner.plan")}
HOMES = {
    "llama_cpp": {"engine/llama/"},
    "huggingface_hub": {"store/hub.py"},
    "pynvml": {"devices.py"},
    "textual": {"tui/"},
    "textual_plotext": {"tui/"},
}

FILES = sorted(path for path in ROOT.rglob("*.py"))


def room(module: str) -> str:
    """The name under ``edgellm`` that a module belongs to: ``edgellm.gguf.reader`` -> ``gguf``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, those inside functions too; ``from a import b`` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_room(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def is_allowed(source: str, module: str) -> bool:
    target = room(module)
    if target in (source, "__init__", "__version__") or target not in LEVELS:
        return True
    if any(source == a and module.startswith(b) for a, b in SIDEWAYS):
        return True
    if LEVELS[target] == LEVELS[source]:
        return LEVELS[source] == 0 or target in SHARED_IN_LEVEL_1
    return LEVELS[target] < LEVELS[source]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_the_levels(path: Path) -> None:
    source = own_room(path)
    if source in ("__init__", "__main__"):
        return
    assert source in LEVELS, f"{source} has no level: add it to the design and to this test"
    wrong = [m for m in imports(path) if m.startswith("edgellm") and not is_allowed(source, m)]
    assert not wrong, f"{path.relative_to(ROOT)} (level {LEVELS[source]}) imports {wrong}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_foreign_libraries_have_one_home(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    for module in imports(path):
        homes = HOMES.get(module.split(".")[0])
        if homes is not None:
            assert any(relative.startswith(home) for home in homes), f"{relative} imports {module}"
