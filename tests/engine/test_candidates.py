"""The highest logits of a row are found exactly, whatever the row looks like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.candidates import FOLD, Highest, highest, joined, within


def truly_highest(row: np.ndarray, n: int) -> set[int]:
    """Every id whose logit is at least the n-th highest."""
    return set(np.flatnonzero(row >= np.sort(row)[-n]).tolist())


def check(logits: np.ndarray, found: Highest) -> None:
    """Ids ascend in each row, and their logits are theirs."""
    at = 0
    for row, ids in zip(logits, found.rows(), strict=True):
        assert list(ids) == sorted(set(ids.tolist()))
        assert found.logits[at : at + len(ids)].tolist() == row[ids].tolist()
        at += len(ids)
    assert at == len(found.ids)


@given(
    n_vocab=st.integers(100, 20_000),
    n=st.integers(1, 90),
    n_rows=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from(("smooth", "peaked", "tied", "banned")),
)
@settings(max_examples=150, deadline=None)
def test_none_of_the_n_highest_is_missing(
    n_vocab: int, n: int, n_rows: int, seed: int, spread: str
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (n_rows, n_vocab)).astype(np.float32)
    if spread == "peaked":
        logits[:, rng.integers(0, n_vocab, n)] += 20
    elif spread == "tied":
        logits = np.round(logits)
    elif spread == "banned":
        logits[:, rng.integers(0, n_vocab, n_vocab // 2)] = -np.inf
    found = highest(logits, n)
    check(logits, found)
    for row, ids in zip(logits, found.rows(), strict=True):
        assert truly_highest(row, n) <= set(ids.tolist())


@pytest.mark.parametrize("n_vocab", [FOLD * 512, FOLD * 512 + 17])
def test_few_more_than_asked_come_back(n_vocab: int) -> None:
    logits = np.random.default_rng(1).normal(0, 1, (3, n_vocab)).astype(np.float32)
    assert all(64 <= len(ids) <= 96 for ids in highest(logits, 64).rows())


def test_the_last_logits_count_when_the_fold_does_not_divide_the_vocabulary() -> None:
    logits = np.zeros((1, FOLD * 512 + 5), np.float32)
    logits[0, -1] = 9.0
    (ids,) = highest(logits, 1).rows()
    assert FOLD * 512 + 4 in ids.tolist()


def test_a_row_with_nan_gives_every_id() -> None:
    logits = np.full((1, FOLD * 512), np.nan, np.float32)
    (ids,) = highest(logits, 4).rows()
    assert len(ids) == FOLD * 512


def test_a_row_with_nan_changes_nothing_for_the_others() -> None:
    logits = np.random.default_rng(2).normal(0, 1, (3, FOLD * 512)).astype(np.float32)
    logits[1, 7] = np.nan
    first, second, third = highest(logits, 5).rows()
    assert len(second) == FOLD * 512
    assert set(first.tolist()) >= truly_highest(logits[0], 5)
    assert set(third.tolist()) >= truly_highest(logits[2], 5)


@given(n_rows=st.integers(1, 4), depth=st.floats(0, 5), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_within_a_depth_is_what_the_highest_logit_says(
    n_rows: int, depth: float, seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(0, 1, (n_rows, 500)).astype(np.float32)
    found = within(logits, depth)
    check(logits, found)
    for row, ids in zip(logits, found.rows(), strict=True):
        assert ids.tolist() == np.flatnonzero(row >= row.max() - np.float32(depth)).tolist()


def test_shares_of_the_rows_put_together_are_the_rows() -> None:
    logits = np.random.default_rng(3).normal(0, 1, (5, FOLD * 512)).astype(np.float32)
    whole = highest(logits, 8)
    parts = joined([highest(logits[:2], 8), highest(logits[2:3], 8), highest(logits[3:], 8)])
    for a, b in zip(whole, parts, strict=True):
        assert a.tolist() == b.tolist()
