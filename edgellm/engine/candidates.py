"""The few highest logits of each row, exactly, in about one pass over the rows.

A sampler chain of llama.cpp given a whole row first copies the vocabulary into candidates of 12
bytes each and sorts them: 0.5 ms for 128k tokens. Here each row is folded into columns, the n-th
highest column maximum is a bound below which no token can be among the n highest, and only
columns that reach it are looked at again.

All rows go through each numpy call together: a call a row would hold the interpreter lock longer
than the reading takes, and threads that share out the rows would wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

FOLD: Final = 64
"""Logits a column holds. With 2,000 columns of 64 the two passes cost about the same."""


class Highest(NamedTuple):
    """The highest logits of several rows, one row after another."""

    ids: Any
    """(m,) token ids; ascending within a row."""
    logits: Any
    """(m,) float32"""
    starts: Any
    """(rows + 1,) where each row's begin, and m."""

    def rows(self) -> Iterator[Any]:
        """Each row's ids."""
        return (self.ids[a:b] for a, b in zip(self.starts, self.starts[1:], strict=False))


def highest(logits: Any, n: int) -> Highest:
    """The ``n`` highest of each row of ``logits`` (rows, n_vocab; float32, contiguous).

    There may be a few more than n, never one of the n missing (ties included). A row with NaN
    gives every id: the caller's chain then sees what it would have seen without this.
    """
    n_rows, n_vocab = logits.shape
    n_columns = n_vocab // FOLD
    if n_columns < 2 * n:
        n = min(n, n_vocab)
        bounds = np.partition(logits, n_vocab - n, axis=1)[:, n_vocab - n]
        return _above(logits, np.where(np.isnan(logits).any(1), np.nan, bounds))
    folded = logits[:, : FOLD * n_columns].reshape(n_rows, FOLD, n_columns)
    tops = folded.max(1)
    bounds = np.partition(tops, n_columns - n, axis=1)[:, n_columns - n]
    row, column = np.nonzero(tops >= bounds[:, None])
    found = folded[row, :, column]
    at, fold = np.nonzero(found >= bounds[row, None])
    keys = row[at] * n_vocab + fold * n_columns + column[at]
    start = FOLD * n_columns
    if start < n_vocab:  # what is left when FOLD does not divide the vocabulary
        rest_row, rest = np.nonzero(logits[:, start:] >= bounds[:, None])
        keys = np.concatenate((keys, rest_row * n_vocab + (start + rest)))
    keys.sort()
    found = _by_row(logits, keys)
    few = np.diff(found.starts) < n
    return _above(logits, np.where(few, np.nan, bounds)) if few.any() else found


def within(logits: Any, depth: float) -> Highest:
    """Each row's ids whose logits are at most ``depth`` below its highest."""
    return _above(logits, logits.max(1) - depth)


def joined(parts: Sequence[Highest]) -> Highest:
    """Some rows' highest logits and then others'."""
    if len(parts) == 1:
        return parts[0]
    begins = np.cumsum([0, *(len(part.ids) for part in parts)])
    starts = [part.starts[:-1] + begin for part, begin in zip(parts, begins, strict=False)]
    return Highest(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.logits for part in parts]),
        np.concatenate([*starts, begins[-1:]]),
    )


def _above(logits: Any, bounds: Any) -> Highest:
    """What reaches each row's bound; everything where the bound is NaN."""
    row, ids = np.nonzero(~(logits < bounds[:, None]))
    return _by_row(logits, row * logits.shape[1] + ids)


def _by_row(logits: Any, keys: Any) -> Highest:
    """From places in the whole of ``logits``, ascending."""
    n_rows, n_vocab = logits.shape
    starts = np.searchsorted(keys, np.arange(n_rows + 1) * n_vocab)
    row = np.repeat(np.arange(n_rows), np.diff(starts))
    return Highest(keys - row * n_vocab, logits.reshape(-1)[keys], starts)
