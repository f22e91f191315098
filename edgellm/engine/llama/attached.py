"""Choosing from the candidates that attached samplers left: all rows of a step in a few calls.

llama_sampler_sample asks the context four times a row, and waits for the device each time: 20 us a
row on an H200. Here the context is asked once a step, since the candidates of all rows lie a
vocabulary apart (llama_context::get_sampled_logits_ith), and a chain is called once a row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm.engine.candidates import Highest
from edgellm.engine.llama.chains import Chains
from edgellm.engine.llama.library import quick
from edgellm.engine.llama.samplers import Sampler


class Attached:
    """Reads the candidates of a context whose slots have a top-k of ``k`` attached."""

    def __init__(self, ctx: Any, n_vocab: int, k: int, chains: Chains) -> None:
        self._ctx = ctx
        self._n_vocab = n_vocab
        self._k = k
        self._chains = chains
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        self._count = quick("llama_get_sampled_logits_count_ith", ctypes.c_uint32, pointer, i32)
        self._ids = quick("llama_get_sampled_candidates_ith", pointer, pointer, i32)
        self._logits = quick("llama_get_sampled_logits_ith", pointer, pointer, i32)

    def sample(
        self, rows: Sequence[int], places: Sequence[int], samplers: Sequence[Sampler]
    ) -> list[int] | None:
        """One token a row; None when the candidates are not where they are expected.

        ``places`` are the rows' places among the step's outputs, ascending.
        """
        if self._count(self._ctx, rows[0]) != self._k:
            return None
        ids = self._read(self._ids, np.int32, rows, places)
        logits = self._read(self._logits, np.float32, rows, places)
        if ids is None or logits is None:
            return None
        out: list[int] = ids[np.arange(len(rows)), logits.argmax(1)].tolist()
        which = [i for i, sampler in enumerate(samplers) if sampler.chain is not None]
        if which:
            if len(which) < len(rows):
                ids, logits = ids[which], logits[which]
            starts = np.arange(len(which) + 1) * self._k
            found = Highest(ids.reshape(-1), logits.reshape(-1), starts)
            chosen = self._chains.choose(found, [samplers[i] for i in which])
            for i, token in zip(which, chosen, strict=True):
                out[i] = token
        return out

    def _read(self, source: Any, kind: Any, rows: Sequence[int], places: Sequence[int]) -> Any:
        """The k values of each row that a function of the context points to."""
        first, last = source(self._ctx, rows[0]) or 0, source(self._ctx, rows[-1]) or 0
        pitch, n = 4 * self._n_vocab, places[-1] - places[0] + 1
        if not first or last - first != pitch * (n - 1):
            return None
        data: Any = (ctypes.c_char * (pitch * (n - 1) + 4 * self._k)).from_address(first)
        values = np.ndarray((n, self._k), kind, data, 0, (pitch, 4))
        return values if n == len(rows) else values[[place - places[0] for place in places]]
