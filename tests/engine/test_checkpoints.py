"""Saved states: which of them a prompt begins with, and which of them stay."""

from __future__ import annotations

from array import array

from edgellm.engine.checkpoints import Checkpoints
from edgellm.engine.costs import Costs
from edgellm.engine.info import EngineOptions


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def states(*, can_rewind: bool = False, n_bytes: int = 250, prefix_min: int = 2) -> Checkpoints:
    options = EngineOptions(checkpoint_bytes=n_bytes, prefix_min=prefix_min)
    return Checkpoints(options, [], Costs(), can_rewind=can_rewind)


def match(saved: Checkpoints, tokens: array[int], limit: int) -> tuple[bytes, int] | None:
    found = saved.match(tokens, limit)
    return None if found is None else (bytes(found[0].state[:1]), found[1])


def test_a_prompt_begins_with_the_longest_whole_state_and_the_oldest_is_forgotten() -> None:
    saved = states()
    saved.add(ids(1, 2), b"x" * 100)
    saved.add(ids(1, 2, 3), b"y" * 100)
    assert match(saved, ids(1, 2, 3, 4), 3) == (b"y", 3)
    assert match(saved, ids(1, 2, 9), 2) == (b"x", 2)  # used: the other one is older now
    saved.add(ids(7), b"z" * 100)
    assert match(saved, ids(1, 2, 3, 4), 4) == (b"x", 2)
    assert saved.n_bytes == 200


def test_where_the_cache_can_rewind_a_prompt_begins_with_a_part_of_a_state() -> None:
    saved = states(can_rewind=True)
    saved.add(ids(1, 2, 3, 4, 5), b"x" * 100)
    assert match(saved, ids(1, 2, 3, 9), 3) == (b"x", 3)
    assert match(saved, ids(1, 2, 3, 4), 3) == (b"x", 3)
    assert match(saved, ids(1, 9), 1) is None  # shorter than prefix_min


def test_of_states_that_serve_alike_the_smallest_is_put_back() -> None:
    saved = states(can_rewind=True)
    saved.add(ids(1, 2, *range(10, 30)), b"x" * 100)
    saved.add(ids(1, 2, 3), b"y" * 30)
    assert match(saved, ids(1, 2, 9), 2) == (b"y", 2)


def test_a_state_is_left_where_computing_its_part_is_quicker() -> None:
    saved = states(can_rewind=True)
    saved._costs.observe(0, 100, 0.1)
    for _ in range(3):
        saved._costs.observe_save(100, 0.01)
    saved.add(ids(*range(100)), b"x" * 100)
    assert match(saved, ids(*range(20), 7), 20) == (b"x", 20)  # 20 ms, or a state in 10
    assert match(saved, ids(*range(19), 7), 19) is None


def test_a_longer_state_stands_in_for_its_beginning_unless_that_is_much_quicker() -> None:
    saved = states(can_rewind=True)
    saved.add(ids(1, 2), b"x" * 20)
    saved.add(ids(1, 2, 3, 4), b"y" * 40)
    saved.add(ids(1, 2, 3, 4, 5), b"z" * 50)
    assert len(saved) == 2
    assert saved.n_bytes == 70
