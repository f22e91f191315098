"""Whole distributions of a text's tokens, written to a file: what quality is measured with."""

from __future__ import annotations

from array import array

import msgspec

from edgellm.engine.backend import OK, Backend, Span
from edgellm.errors import DecodeError, InvalidRequestError


class ScoreJob(msgspec.Struct, frozen=True):
    """Write the logits of positions ``first`` to the end of ``tokens`` to the file ``out``."""

    call: int
    tokens: array[int]
    first: int
    out: str


def score(backend: Backend, job: ScoreJob) -> int:
    """Decode the tokens as one fresh sequence; rows of float32, little endian, row after row.

    Returns the number of rows. The sequence's cells are free again afterwards. The cache must
    hold nothing else that matters: the caller sees to that.
    """
    limits = backend.limits
    if not 0 <= job.first < len(job.tokens) <= limits.n_ctx_seq:
        raise InvalidRequestError(
            f"{len(job.tokens)} tokens from {job.first} do not fit a context of {limits.n_ctx_seq}",
            param="tokens",
        )
    seq_id = (*limits.plain_ids, *limits.slot_ids)[0]
    try:
        with open(job.out, "wb") as file:
            for start, n, n_out in _pieces(job, limits.n_batch, max(1, limits.n_outputs_max)):
                code = backend.decode([Span(seq_id, start, job.tokens[start : start + n], n_out)])
                if code != OK:
                    raise DecodeError(f"scoring failed: llama_decode returned {code}", code=code)
                for row in range(n - n_out, n):
                    file.write(backend.logits(row))
    finally:
        backend.seq_rm(seq_id, 0)
    return len(job.tokens) - job.first


def _pieces(job: ScoreJob, n_batch: int, n_outputs: int) -> list[tuple[int, int, int]]:
    """(start, tokens, rows) of each decode: whole batches before ``first``, then as many rows as
    a batch may give."""
    before = [(start, min(n_batch, job.first - start), 0) for start in range(0, job.first, n_batch)]
    size = min(n_batch, n_outputs)
    starts = range(job.first, len(job.tokens), size)
    scored = [(start, n := min(size, len(job.tokens) - start), n) for start in starts]
    return before + scored
