"""Embeddings and scores, as a context made for them leaves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from edgellm.engine.backend import Span
from edgellm.engine.llama.library import lib
from edgellm.request import Pooling


class Vectors:
    """Reads the vectors of the last batch."""

    def __init__(self, model: Any, ctx: Any) -> None:
        self._ctx = ctx
        self._n_embd = lib.llama_model_n_embd_out(model)

    def read(
        self, spans: Sequence[Span], pooling: Pooling, *, normalize: bool
    ) -> Iterator[tuple[float, ...]]:
        """One vector a span; for Pooling.NONE its tokens' vectors one after another."""
        at = 0
        for span in spans:
            if pooling is Pooling.NONE:
                yield self._of_tokens(at, len(span.tokens), normalize)
            else:
                yield self._of_sequence(span.seq_id, pooling, normalize)
            at += len(span.tokens)

    def _of_tokens(self, at: int, n: int, normalize: bool) -> tuple[float, ...]:
        rows = (self._floats(lib.llama_get_embeddings_ith(self._ctx, at + i)) for i in range(n))
        return tuple(float(x) for row in rows for x in _scaled(row, normalize))

    def _of_sequence(self, seq_id: int, pooling: Pooling, normalize: bool) -> tuple[float, ...]:
        pointer = lib.llama_get_embeddings_seq(self._ctx, seq_id)
        if pooling is Pooling.RANK:
            return (float(pointer[0]),)
        return tuple(_scaled(self._floats(pointer), normalize).tolist())

    def _floats(self, pointer: Any) -> Any:
        return np.ctypeslib.as_array(pointer, (self._n_embd,)).copy()


def _scaled(vector: Any, normalize: bool) -> Any:
    norm = float(np.linalg.norm(vector))
    return vector / norm if normalize and norm > 0 else vector
