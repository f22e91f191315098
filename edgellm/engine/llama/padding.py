"""A row that nobody reads, where a step is quicker with it.

ggml-cuda multiplies quantised weights with up to eight rows by one kernel (mul_mat_vec_q), whose
time grows with every row, and more by another (mul_mat_q), whose time does not: on an H200 a step
of an 8B model takes 9.3 ms with eight rows and 9.0 with nine. Which is quicker on a card is
measured when a model is loaded.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from edgellm.engine.backend import OK, Limits, Span

MOST_BY_VECTOR: Final = 8
"""MMVQ_MAX_BATCH_SIZE, ggml-cuda/mmvq.cuh."""
ROUNDS: Final = 5
WORTH: Final = 0.985
"""Nine rows must take this part of what eight take, or less."""


def may_pad(limits: Limits) -> bool:
    """Whether eight sequences may run on a device where one more costs no memory."""
    enough = limits.n_running >= MOST_BY_VECTOR
    return enough and limits.is_async and limits.sharing == "cells"


def pad_id(limits: Limits) -> int:
    """The seq_id of the row: the first after those that run. A batch may name none that the
    context was not made for, so the retained ones will not do."""
    return len(limits.slot_ids) + len(limits.plain_ids)


class Padding:
    """Adds the row to steps of eight; off until :meth:`learn` has found that it pays."""

    def __init__(self, seq_id: int) -> None:
        self.is_on = False
        self.seq_id = seq_id
        self._span = Span(seq_id, 0, array("i", [0]), 1)

    def of(self, spans: Sequence[Span]) -> Sequence[Span]:
        """``spans``, or those and one more."""
        if not self.is_on or len(spans) != MOST_BY_VECTOR:
            return spans
        return spans if any(len(span.tokens) > 1 for span in spans) else [*spans, self._span]

    def learn(
        self,
        compute: Callable[[Sequence[Span]], int],
        forget: Callable[[int, int], bool],
        slots: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Time both in turns; the slots are empty before and after."""
        seconds: tuple[list[float], list[float]] = ([], [])
        slots, token = slots[:MOST_BY_VECTOR], array("i", [0])
        at, code = 0, OK
        for _ in range(ROUNDS + 1):
            for times, more in zip(seconds, ([], [self._span]), strict=True):
                spans = [Span(slot, at, token, 1) for slot in slots]
                began = clock()
                code = code or compute([*spans, *more])
                times.append(clock() - began)
                forget(self.seq_id, 0)
                at += 1
        for slot in slots:
            forget(slot, 0)
        eight, nine = (statistics.median(times[1:]) for times in seconds)
        self.is_on = code == OK and nine < WORTH * eight
