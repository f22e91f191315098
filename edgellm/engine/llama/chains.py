"""Sampler chains called on candidates that are known already: all rows of a step in a few calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from edgellm.engine.candidates import Highest
from edgellm.engine.llama.library import quick
from edgellm.engine.llama.samplers import Sampler
from edgellm.errors import EngineError

CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama_token_data."""
ARRAY: Final = np.dtype(
    [("data", np.uint64), ("size", np.uint64), ("selected", np.int64), ("sorted", np.uint64)]
)
"""llama_token_data_array; its last field is a bool and padding."""


class Chains:
    """Calls llama_sampler_apply on arrays of candidates made here."""

    def __init__(self) -> None:
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        self._apply = quick("llama_sampler_apply", None, pointer, pointer)
        self._accept = quick("llama_sampler_accept", None, pointer, i32)

    def choose(self, found: Highest, samplers: Sequence[Sampler]) -> list[int]:
        """What each sampler's chain chooses of its row's candidates; the chains remember it."""
        chosen = self._choose(found, [sampler.chain for sampler in samplers])
        for sampler, token in zip(samplers, chosen, strict=True):
            if sampler.remembers:
                self._accept(sampler.chain, token)
        return chosen

    def choose_one(self, chain: Any, ids: Any, logits: Any) -> int:
        """What a chain chooses of these candidates; it remembers it."""
        (token,) = self._choose(Highest(ids, logits, np.array([0, len(ids)])), [chain])
        self._accept(chain, token)
        return token

    def _choose(self, found: Highest, chains: Sequence[Any]) -> list[int]:
        starts = found.starts[:-1]
        sizes = found.starts[1:] - starts
        if not sizes.all():
            raise EngineError("nothing to choose from: the model's logits are not numbers")
        candidates = np.empty(len(found.ids), CANDIDATE)
        candidates["id"], candidates["logit"] = found.ids, found.logits
        arrays = np.zeros(len(chains), ARRAY)
        arrays["data"] = candidates.ctypes.data + starts * CANDIDATE.itemsize
        arrays["size"], arrays["selected"] = sizes, -1
        apply, at = self._apply, arrays.ctypes.data
        for chain in chains:
            apply(chain, at)
            at += ARRAY.itemsize
        if arrays["selected"].min() < 0:
            raise EngineError("the chain chose nothing: the model's logits are not numbers")
        # A chain reorders its candidates in place: what it selected is an index after that.
        chosen: list[int] = candidates["id"][starts + arrays["selected"]].tolist()
        return chosen
