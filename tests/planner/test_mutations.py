"""A wrong formula shows: each change below makes rows that were measured disagree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgellm.devices import Gpu, Host
from edgellm.gguf.shape import ModelShape
from edgellm.planner import backends, compute, estimate, memo, memory, ram, sched
from edgellm.planner.placement import aligned, layer_devices
from edgellm.units import MiB
from tests.planner.conftest import ROWS
from tests.planner.test_measured import EXACT, params_of

Shapes = Callable[[str], ModelShape]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Sizes worked out with another formula must not be remembered."""
    memo._known.clear()
    yield
    memo._known.clear()


@pytest.fixture
def n_wrong(shape_of: Shapes, h200: Gpu, host: Host) -> Callable[[], int]:
    """How many measured rows disagree now."""

    def is_wrong(row: dict[str, Any]) -> bool:
        ledger = estimate.estimate(shape_of(row["model"]), params_of(row), [h200], host)
        mib = row["mib"]
        if any(abs(of(ledger) / MiB - mib.get(name, 0)) > 0.5 for name, of in EXACT.items()):
            return True
        pairs = [
            (ledger.devices[0].compute / MiB, mib["gpu_compute"]),
            (ledger.host.compute / MiB, mib["host_compute"]),
        ]
        return any(abs(a - b) > max(0.03 * b, 4) for a, b in pairs)

    return lambda: sum(is_wrong(row) for row in ROWS)


def test_nothing_is_wrong_unchanged(n_wrong: Callable[[], int]) -> None:
    assert n_wrong() == 0


def f16_rows(_type: str, n: int) -> int:
    return 2 * n


def without_the_output_layer(shape: ModelShape, n: int, shares: Any) -> list[int]:
    return layer_devices(shape, n + 1 if n >= 0 else n, shares)


def every_cell_everywhere(shape: ModelShape, **asked: Any) -> memory.CacheShape:
    return memory.cache_shape(shape, **{**asked, "swa_full": True})


def nothing_in_place(*_: Any) -> bool:
    return False


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "cache types priced as f16": (memory, "row_bytes", f16_rows),
    "contexts not padded": (memory, "pad", lambda n, _: n),
    "the output layer forgotten": (estimate, "layer_devices", without_the_output_layer),
    "sliding windows ignored": (estimate, "cache_shape", every_cell_everywhere),
    "recurrent state ignored": (estimate, "state_bytes", lambda *_: 0),
    "no logits buffer": (estimate, "output_bytes", lambda *_: 0),
    "tensors summed instead of mapped": (ram, "mapped_bytes", aligned),
    "a quantised cache attended to as it is": (backends, "_ALLOC_SIZE", {}),
    "no kernels fused for experts": (backends, "moe_dependencies", lambda _nodes: []),
    "flash attention always on": (estimate, "flash_resolves", lambda *_: True),
    "nothing allocated in place": (sched.Allocator, "_reuse", nothing_in_place),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_formula_shows(
    mutation: str, monkeypatch: pytest.MonkeyPatch, n_wrong: Callable[[], int]
) -> None:
    where, name, wrong = MUTATIONS[mutation]
    monkeypatch.setattr(where, name, wrong)
    assert n_wrong() > 0


def test_weights_left_on_the_host_are_copied_for_a_prompt(
    monkeypatch: pytest.MonkeyPatch, n_wrong: Callable[[], int]
) -> None:
    real = backends.gpu_backend

    def stays(gpu: Gpu) -> sched.Backend:
        return dataclasses.replace(real(gpu), offloads=False)

    monkeypatch.setattr(compute, "gpu_backend", stays)
    assert n_wrong() > 0
