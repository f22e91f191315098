"""The plan bar: proportions that add up, and numbers that are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.planner.plan import DeviceLedger, HostLedger
from edgellm.tui.ledger import allocate, device_bar, host_bar, mib
from edgellm.units import GiB, MiB


@given(st.lists(st.integers(1, 80 * GiB), min_size=1, max_size=8), st.integers(10, 200))
def test_cells_add_up_to_the_width_and_nothing_vanishes(sizes: list[int], width: int) -> None:
    cells = allocate(sizes, width)
    assert sum(cells) == width
    assert all(n >= 1 for n in cells)


def test_cells_follow_the_sizes() -> None:
    assert allocate([50, 30, 20], 10) == [5, 3, 2]
    assert allocate([99, 1], 10) == [9, 1]
    assert allocate([], 10) == []
    assert allocate([1, 1, 1], 2) == [1, 1, 0]


def card(**changes: int) -> DeviceLedger:
    values = {
        "total": 6144, "free": 5900, "margin": 200, "weights": 4403, "kv_cache": 512,
        "compute": 112, "overhead": 450, "used": 5477, "headroom": 223,
    } | changes  # fmt: skip
    return DeviceLedger(
        id="CUDA0", name="a card", backend="cuda", **{k: v * MiB for k, v in values.items()}
    )


def test_a_card_s_bar_adds_up_to_its_memory() -> None:
    bar = device_bar(card())
    assert sum(share.n_bytes for share in bar.shares) == 6144 * MiB
    assert [share.field for share in bar.shares] == [
        "taken", "weights", "kv_cache", "compute", "overhead", "margin", "free",
    ]  # fmt: skip
    assert bar.used == (244 + 5477) * MiB


def test_a_card_that_is_too_small_says_by_how_much() -> None:
    bar = device_bar(card(weights=5000, used=6074, headroom=-374))
    assert bar.headroom == -374 * MiB
    assert "free" not in {share.field for share in bar.shares}


def test_the_host_s_bar_counts_what_others_hold() -> None:
    bar = host_bar(HostLedger(total=16 * GiB, available=10 * GiB, weights=GiB, used=GiB))
    assert [(s.field, s.n_bytes // GiB) for s in bar.shares] == [
        ("taken", 6), ("weights", 1), ("free", 9),
    ]  # fmt: skip


@pytest.mark.parametrize(("n", "text"), [(0, "0 MiB"), (4403 * MiB, "4,403 MiB"), (-MiB, "-1 MiB")])
def test_bytes_are_written_to_the_mib(n: int, text: str) -> None:
    assert mib(n) == text
