"""What steps cost is learned from steps, and one odd step does not change it much."""

from __future__ import annotations

import pytest

from edgellm.engine.costs import Costs


def learned() -> Costs:
    """Decodes: 5 ms for 1-3, 14 ms for 32; prefill: 2 ms and 0.1 ms a token."""
    costs = Costs()
    for _ in range(20):
        costs.observe(2, 0, 0.005)
        costs.observe(32, 0, 0.014)
        for n in (16, 64, 256):
            costs.observe(32, n, 0.014 + 0.002 + n * 0.0001)
    return costs


def test_decodes_are_known_by_how_many_sequences_they_carry() -> None:
    costs = learned()
    assert costs.decode_s(3) == pytest.approx(0.005)
    assert costs.decode_s(32) == pytest.approx(0.014)
    assert costs.decode_s(50) == pytest.approx(0.014)


def test_the_fixed_part_of_a_prefill_is_told_from_the_part_of_a_token() -> None:
    costs = learned()
    assert costs.token_s == pytest.approx(0.0001, rel=0.02)
    assert costs.fixed_s == pytest.approx(0.002, rel=0.05)


def test_equal_chunks_say_nothing_of_a_fixed_part() -> None:
    costs = Costs()
    for _ in range(10):
        costs.observe(0, 50, 0.010)
    assert costs.fixed_s == pytest.approx(0.0, abs=1e-9)
    assert costs.token_s == pytest.approx(0.0002)


def test_an_outlier_counts_as_four_times_what_was_known_at_most() -> None:
    costs = learned()
    costs.observe(32, 0, 3.0)
    assert costs.decode_s(32) <= 0.014 * 1.6 + 1e-9
    costs.observe(32, 64, 3.0)
    assert costs.fixed_s + 64 * costs.token_s < 0.014


def test_nothing_is_known_before_the_first_step() -> None:
    costs = Costs()
    assert (costs.decode_s(4), costs.token_s, costs.fixed_s) == (0.0, 0.0, 0.0)


def test_a_step_has_enough_prefill_when_its_fixed_part_is_a_twentieth_of_it() -> None:
    assert learned().enough == pytest.approx(400, rel=0.1)


def test_what_is_enough_is_unknown_while_all_chunks_are_equal() -> None:
    costs = Costs()
    assert costs.enough == 0
    for _ in range(10):
        costs.observe(0, 50, 0.010)
    assert costs.enough == 0


def test_where_tokens_cost_the_same_in_any_step_one_prompt_is_enough() -> None:
    costs = Costs()
    for n in (16, 64, 256):
        costs.observe(0, n, n * 0.002)
    assert costs.enough == 1


def test_a_state_is_worth_saving_until_a_few_have_taken_long() -> None:
    costs = Costs()
    costs.observe(0, 100, 0.020)
    for _ in range(2):
        costs.observe_save(100, 0.018)
        assert costs.is_worth_saving(100, 100)
    costs.observe_save(100, 0.018)
    assert not costs.is_worth_saving(100, 100)
    for _ in range(20):
        costs.observe_save(100, 0.002)
    assert costs.is_worth_saving(100, 100)
    assert not costs.is_worth_saving(100, 1)
