"""The rows of logits that a step left: a token chosen from each, log-probabilities, raw values.

A row is named by its token's place in the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from edgellm.engine.backend import Allowed, Limits
from edgellm.engine.candidates import highest
from edgellm.engine.llama.attached import CANDIDATE, Attached
from edgellm.engine.llama.batch import Batch
from edgellm.engine.llama.library import lib, quick
from edgellm.engine.llama.samplers import Sampler, make_chain
from edgellm.engine.llama.vocab import Vocab
from edgellm.errors import EngineError
from edgellm.request import TokenLogprob, TopLogprob

FEW_ROWS: Final = 12
"""Attached rows that are chosen one by one: 36 us for one and 22 for each further one on an H200's
host, where all at once take 150 us and 9 for each."""
MIN_SHARE: Final = 8
"""Rows given to a thread at least: waking one costs as much as a few rows."""


class Rows:
    """Reads a context's output. ``batch`` is the one that the last step computed."""

    def __init__(
        self, ctx: Any, batch: Batch, vocab: Vocab, limits: Limits, n_threads: int
    ) -> None:
        self._ctx = ctx
        self._batch = batch
        self._vocab = vocab
        self._greedy = make_chain([lib.llama_sampler_init_greedy()])
        top_k = limits.attached_top_k
        self._attached = Attached(ctx, vocab.n, top_k, limits.n_outputs_max) if top_k else None
        pointer = ctypes.c_void_p
        self._sample_now = quick(
            "llama_sampler_sample", ctypes.c_int32, pointer, pointer, ctypes.c_int32
        )
        self._all_logits = quick("llama_get_logits", pointer, pointer)
        self._seen: tuple[tuple[int, tuple[int, int]], Any] = (0, (0, 0)), None
        """Where the last matrix lay and its shape, and the matrix."""
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads, "engine-sample") if n_threads > 1 else None

    def close(self) -> None:
        """Give the threads and the greedy chain back."""
        if self._pool is not None:
            self._pool.shutdown()
        lib.llama_sampler_free(self._greedy)

    # -- choosing ----------------------------------------------------------------------------

    def sample(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> list[int]:
        """One token a row."""
        out = [0] * len(rows)
        attached: list[int] = []
        greedy: list[int] = []
        filtered: list[int] = []
        chained: list[int] = []
        for i, sampler in enumerate(samplers):
            if sampler.attached:
                attached.append(i)
            elif sampler.chain is None:
                greedy.append(i)
            else:
                (filtered if sampler.needed or sampler.depth else chained).append(i)
        if attached:
            chained += self._sample_attached(rows, samplers, attached, out)
        if greedy or filtered:
            self._sample_filtered(rows, samplers, greedy, filtered, out)
        if chained:
            self._sample_chains(rows, samplers, chained, out)
        return out

    def _sample_attached(
        self,
        rows: Sequence[int],
        samplers: Sequence[Sampler],
        which: list[int],
        out: list[int],
    ) -> list[int]:
        """Rows decided by the candidates that the context hands over; those that are not."""
        if self._attached is None or len(which) <= FEW_ROWS:
            return which
        which.sort(key=rows.__getitem__)
        some = [rows[i] for i in which]
        places = self._batch.places
        at = some if places is None else [places[row] for row in some]
        tokens = self._attached.sample(some, at, [samplers[i] for i in which])
        if tokens is None:
            return which
        for i, token in zip(which, tokens, strict=True):
            out[i] = token
        return []

    def _sample_filtered(
        self,
        rows: Sequence[int],
        samplers: Sequence[Sampler],
        greedy: list[int],
        filtered: list[int],
        out: list[int],
    ) -> None:
        """Rows that their highest logits decide: found in parallel, a share of rows a thread."""
        logits = self._matrix()
        places = self._batch.places
        at = rows if places is None else [places[row] for row in rows]

        def argmax(part: list[int]) -> None:
            for i, token in zip(part, _pick(logits, [at[i] for i in part]).argmax(1), strict=True):
                out[i] = int(token)

        def choose(part: list[int]) -> None:
            some = _pick(logits, [at[i] for i in part])
            for i, token in zip(part, _filter([samplers[i] for i in part], some), strict=True):
                out[i] = token

        jobs: list[tuple[Callable[[list[int]], None], list[int]]]
        jobs = [(argmax, part) for part in self._shares(greedy)]
        jobs += [(choose, part) for part in self._shares(filtered)]
        others = [self._pool.submit(f, part) for f, part in jobs[1:]] if self._pool else []
        for f, part in jobs[:1] if self._pool else jobs:
            f(part)
        for other in others:
            other.result()

    def _shares(self, which: list[int]) -> list[list[int]]:
        """Consecutive rows for each thread."""
        n = max(MIN_SHARE, -(-len(which) // self._n_threads))
        return [which[i : i + n] for i in range(0, len(which), n)]

    def _sample_chains(
        self, rows: Sequence[int], samplers: Sequence[Sampler], which: list[int], out: list[int]
    ) -> None:
        ctx, greedy = self._ctx, self._greedy

        def run(part: Sequence[int], call: Any = lib.llama_sampler_sample) -> None:
            for i in part:
                chain = samplers[i].chain
                out[i] = call(greedy if chain is None else chain, ctx, rows[i])

        # K candidates take microseconds; all logits take long enough to share them out.
        run([i for i in which if samplers[i].attached], self._sample_now)
        wide = [i for i in which if not samplers[i].attached]
        if self._pool is None or len(wide) < 2:
            run(wide)
            return
        lib.llama_get_logits(ctx)  # puts the rows in order once, before threads read them
        n = min(self._n_threads, len(wide))
        shares = [wide[k::n] for k in range(n)]
        others = [self._pool.submit(run, share) for share in shares[1:]]
        run(shares[0])
        for other in others:
            other.result()

    def sample_allowed(self, row: int, sampler: Sampler, allowed: Allowed) -> int:
        """One token of a row, out of what is allowed."""
        logits = self._row(row)
        ids = self._allowed_ids(allowed)
        if not len(ids):
            raise EngineError("the grammar allows no token")
        candidates = np.empty(len(ids), CANDIDATE)
        candidates["id"], candidates["logit"] = ids, logits[ids]
        chain = self._greedy if sampler.chain is None else sampler.chain
        return _apply(lib.llama_token_data_array(), chain, candidates.ctypes.data, len(ids))

    def _allowed_ids(self, allowed: Allowed) -> Any:
        if isinstance(allowed, tuple):
            return np.array(allowed, np.int32)
        if isinstance(allowed, bytes):
            bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
            return np.flatnonzero(bits[: self._vocab.n]).astype(np.int32)
        keep = np.ones(self._vocab.n, bool)
        if allowed is False:
            keep[list(self._vocab.eog_ids)] = False
        return np.flatnonzero(keep).astype(np.int32)

    # -- reading -----------------------------------------------------------------------------

    def _matrix(self) -> Any:
        """All rows, in their order."""
        address = self._all_logits(self._ctx)
        if address is None:
            raise EngineError("the last step has no logits")
        shape = self._batch.n_rows, self._vocab.n
        if self._seen[0] != (address, shape):  # making a view takes 15 us
            data: Any = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
            self._seen = (address, shape), np.frombuffer(data, np.float32).reshape(shape)
        return self._seen[1]

    def _row(self, row: int) -> Any:
        pointer = lib.llama_get_logits_ith(self._ctx, row)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if address is None:
            raise EngineError(f"row {row} has no logits")
        data: Any = (ctypes.c_float * self._vocab.n).from_address(address)
        return np.frombuffer(data, np.float32)

    def raw(self, row: int) -> bytes:
        """A row's logits as float32, little endian."""
        return bytes(self._row(row).astype("<f4", copy=False).tobytes())

    def logprobs(self, row: int, token: int, k: int) -> TokenLogprob:
        """The token's log-probability in a row, and the k most likely."""
        logits, piece = self._row(row), self._vocab.piece
        top = float(logits.max())
        total = top + float(np.log(np.exp(logits - top, dtype=np.float64).sum()))
        best: tuple[TopLogprob, ...] = ()
        if k:
            ids = np.argpartition(logits, -k)[-k:]
            ids = ids[np.argsort(-logits[ids], kind="stable")]
            best = tuple(TopLogprob(int(i), piece(int(i)), float(logits[i]) - total) for i in ids)
        return TokenLogprob(token, piece(token), float(logits[token]) - total, best)


def _filter(samplers: Sequence[Sampler], logits: Any) -> list[int]:
    """Chains applied to each row's highest logits alone."""
    needed = max(1, *(sampler.needed for sampler in samplers))
    out = []
    for sampler, row, best in zip(samplers, logits, highest(logits, needed), strict=True):
        deep = bool(sampler.depth)
        ids = np.flatnonzero(row >= row.max() - (sampler.depth + 0.01)) if deep else best
        candidates = np.empty(len(ids), CANDIDATE)
        candidates["id"], candidates["logit"] = ids, row[ids]
        data = lib.llama_token_data_array()
        out.append(_apply(data, sampler.chain, candidates.ctypes.data, len(ids)))
    return out


def _pick(matrix: Any, which: list[int]) -> Any:
    """Rows of a matrix: a view when they follow one another."""
    first, n = which[0], len(which)
    if which == list(range(first, first + n)):
        return matrix[first : first + n]
    return matrix[which]


def _apply(data: Any, chain: Any, address: int, n: int) -> int:
    """What a chain chooses of ``n`` candidates at an address; the chain remembers it."""
    if not n:
        raise EngineError("nothing to choose from: the model's logits are not numbers")
    data.data = ctypes.cast(address, lib.llama_token_data_p)
    data.size, data.selected, data.sorted = n, -1, False
    lib.llama_sampler_apply(chain, ctypes.byref(data))
    token = int(data.data[data.selected].id)
    lib.llama_sampler_accept(chain, token)
    return token
