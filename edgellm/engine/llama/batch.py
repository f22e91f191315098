"""The batch of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from edgellm.engine.backend import Span
from edgellm.engine.llama.library import lib


class Batch:
    """A llama_batch over arrays that are filled in place and never reallocated."""

    def __init__(self, n: int) -> None:
        zeros = bytes(4 * n)
        self.token = array("i", zeros)
        self.pos = array("i", zeros)
        self.seq = array("i", zeros)
        self.out = bytearray(n)
        self.n_rows = 0
        self.places: dict[int, int] | None = None
        """Batch index -> row of logits; None: the same."""
        self._n_seq = array("i", [1]) * n
        seq_at = self.seq.buffer_info()[0]
        self._seq_ptrs = array("Q", [seq_at + 4 * i for i in range(n)])
        self._no_out = bytes(n)
        self.struct = lib.llama_batch()
        batch = self.struct
        i32 = ctypes.POINTER(ctypes.c_int32)
        batch.token = ctypes.cast(self.token.buffer_info()[0], i32)
        batch.pos = ctypes.cast(self.pos.buffer_info()[0], i32)
        batch.n_seq_id = ctypes.cast(self._n_seq.buffer_info()[0], i32)
        batch.seq_id = ctypes.cast(self._seq_ptrs.buffer_info()[0], ctypes.POINTER(i32))
        out = (ctypes.c_int8 * n).from_buffer(self.out)
        # An array with a view does not grow: one token too many is an error here, not a write into
        # memory that llama.cpp still points to.
        self._keep = (out, *(memoryview(a) for a in (self.token, self.pos, self.seq)))
        batch.logits = ctypes.cast(out, ctypes.POINTER(ctypes.c_int8))

    def fill(self, spans: Sequence[Span]) -> None:
        """Write the spans one after another."""
        token, pos, seq, out = self.token, self.pos, self.seq, self.out
        at = n_rows = 0
        places = {}
        for seq_id, start, tokens, n_out in spans:
            n = len(tokens)
            if n == 1:
                token[at] = tokens[0]
                pos[at] = start
                seq[at] = seq_id
                out[at] = n_out
            else:
                end = at + n
                token[at:end] = tokens
                pos[at:end] = array("i", range(start, start + n))
                seq[at:end] = array("i", [seq_id]) * n
                out[at:end] = self._no_out[: n - n_out] + b"\1" * n_out
            at += n
            for i in range(at - n_out, at):
                places[i] = n_rows
                n_rows += 1
        self.places = None if n_rows == at else places
        self.n_rows = n_rows
        self.struct.n_tokens = at
