"""Choosing from the candidates that attached samplers left: all rows of a step in a few calls.

llama_sampler_sample asks the context four times a row, and waits for the device each time: 20 us a
row on an H200. Here the context is asked once a step, since the candidates of all rows lie a
vocabulary apart (llama_context::get_sampled_logits_ith), and a chain is called once a row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from edgellm.engine.llama.library import quick
from edgellm.engine.llama.samplers import Sampler

CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data."""
ARRAY: Final = np.dtype(
    [("data", np.uint64), ("size", np.uint64), ("selected", np.int64), ("sorted", np.uint64)]
)
"""llama_token_data_array; its last field is a bool and padding."""


class Attached:
    """Reads the candidates of a context whose slots have a top-k of ``k`` attached."""

    def __init__(self, ctx: Any, n_vocab: int, k: int, n_max: int) -> None:
        self._ctx = ctx
        self._n_vocab = n_vocab
        self._k = k
        self._candidates = np.zeros((n_max, k), CANDIDATE)
        self._arrays = np.zeros(n_max, ARRAY)
        self._at = self._candidates.ctypes.data + np.arange(n_max, dtype=np.uint64) * (12 * k)
        self._first = self._arrays.ctypes.data
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        self._apply = quick("llama_sampler_apply", None, pointer, pointer)
        self._accept = quick("llama_sampler_accept", None, pointer, i32)
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
            chosen = self._choose(ids, logits, [samplers[i] for i in which])
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

    def _choose(self, ids: Any, logits: Any, samplers: Sequence[Sampler]) -> list[int]:
        """What each sampler's chain chooses of its candidates."""
        n = len(samplers)
        candidates, arrays = self._candidates[:n], self._arrays[:n]
        candidates["id"], candidates["logit"] = ids, logits
        arrays["data"], arrays["size"], arrays["selected"] = self._at[:n], self._k, -1
        arrays["sorted"] = 0
        apply, at = self._apply, self._first
        for sampler in samplers:
            apply(sampler.chain, at)
            at += ARRAY.itemsize
        # A chain reorders its candidates in place: what it selected is an index after that.
        out: list[int] = candidates["id"][np.arange(n), arrays["selected"]].tolist()
        for sampler, token in zip(samplers, out, strict=True):
            if sampler.remembers:
                self._accept(sampler.chain, token)
        return out
