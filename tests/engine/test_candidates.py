"""The highest logits of a row are found exactly, whatever the row looks like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.candidates import FOLD, highest


def truly_highest(row: np.ndarray, n: int) -> set[int]:
    """Every id whose logit is at least the n-th highest."""
    return set(np.flatnonzero(row >= np.sort(row)[-n]).tolist())


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
    for row, ids in zip(logits, highest(logits, n), strict=True):
        assert truly_highest(row, n) <= set(ids.tolist())
        assert list(ids) == sorted(set(ids.tolist()))


@pytest.mark.parametrize("n_vocab", [FOLD * 512, FOLD * 512 + 17])
def test_few_more_than_asked_come_back(n_vocab: int) -> None:
    logits = np.random.default_rng(1).normal(0, 1, (3, n_vocab)).astype(np.float32)
    assert all(64 <= len(ids) <= 96 for ids in highest(logits, 64))


def test_the_last_logits_count_when_the_fold_does_not_divide_the_vocabulary() -> None:
    logits = np.zeros((1, FOLD * 512 + 5), np.float32)
    logits[0, -1] = 9.0
    (ids,) = highest(logits, 1)
    assert FOLD * 512 + 4 in ids.tolist()


def test_a_row_with_nan_gives_every_id() -> None:
    logits = np.full((1, FOLD * 512), np.nan, np.float32)
    (ids,) = highest(logits, 4)
    assert len(ids) == FOLD * 512
