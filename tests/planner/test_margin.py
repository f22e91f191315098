"""The margin is small, grows with what is free, and never eats a card that others nearly fill."""

from __future__ import annotations

import pytest

from edgellm.devices import Gpu
from edgellm.planner.overhead import default_margin
from edgellm.units import GiB, MiB


def card(total: int, free: int) -> Gpu:
    return Gpu(id="CUDA0", name="test", backend="cuda", total=total, free=free)


@pytest.mark.parametrize(
    ("total", "free", "margin"),
    [
        (4 * GiB, 4 * GiB, 160 * MiB),
        (24 * GiB, 24 * GiB, int(24 * GiB * 0.03)),
        (140 * GiB, 8 * GiB, int(8 * GiB * 0.03)),
    ],
)
def test_three_percent_of_what_is_free_is_kept(total: int, free: int, margin: int) -> None:
    assert default_margin(card(total, free)) == margin


def test_more_free_memory_never_leaves_less_to_use() -> None:
    left = [n * GiB - default_margin(card(80 * GiB, n * GiB)) for n in range(1, 81)]
    assert left == sorted(left)
