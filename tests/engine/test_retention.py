"""What finished sequences leave behind stays small until somebody asks for it again."""

from __future__ import annotations

from array import array

from edgellm.engine.retention import (
    LOOKUPS,
    MIN_CELLS,
    Retention,
    first_budget,
)
from edgellm.units import GiB, KiB


def prompt(seed: int, n: int = 300) -> array[int]:
    return array("i", range(seed * 1000, seed * 1000 + n))


def test_the_first_budget_is_a_twentieth_of_the_weights_bytes() -> None:
    assert first_budget(40 * GiB, 128 * KiB) == 2 * GiB // (128 * KiB)


def test_the_first_budget_holds_a_prompt_even_beside_a_tiny_model() -> None:
    assert first_budget(100 * KiB, 128 * KiB) == MIN_CELLS
    assert first_budget(0, 0) == MIN_CELLS


def test_prompts_that_share_nothing_shrink_the_budget_to_its_least() -> None:
    retention = Retention(4096, 65536)
    for i in range(LOOKUPS * 10):
        retention.looked_up(prompt(i), 0, retained=False)
    assert retention.cells == MIN_CELLS


def test_sharing_with_running_sequences_says_nothing_for_keeping_finished_ones() -> None:
    retention = Retention(4096, 65536)
    for i in range(LOOKUPS):
        retention.looked_up(prompt(i), 200, retained=False)
    assert retention.cells == 2048


def test_hits_keep_the_budget() -> None:
    retention = Retention(4096, 65536)
    for i in range(LOOKUPS * 10):
        retention.looked_up(prompt(i), 200 if i % 8 == 0 else 0, retained=i % 8 == 0)
    assert retention.cells == 4096


def test_what_was_let_go_and_is_asked_for_again_doubles_the_budget() -> None:
    retention = Retention(1024, 65536)
    retention.let_go(prompt(7))
    retention.looked_up(prompt(7), 0, retained=False)
    assert retention.cells == 2048


def test_a_shorter_share_of_what_was_let_go_still_counts() -> None:
    retention = Retention(1024, 65536)
    retention.let_go(prompt(7))
    retention.looked_up(prompt(7), 100, retained=True)
    assert retention.cells == 2048


def test_a_system_prompt_that_is_still_cached_is_no_ghost() -> None:
    retention = Retention(1024, 65536)
    retention.let_go(prompt(7)[:100] + prompt(8))
    retention.looked_up(prompt(7)[:100] + prompt(9), 100, retained=True)
    assert retention.cells == 1024


def test_the_budget_never_exceeds_the_cells() -> None:
    retention = Retention(1024, 1500)
    for _ in range(3):
        retention.let_go(prompt(7))
        retention.looked_up(prompt(7), 0, retained=False)
    assert retention.cells == 1500
