"""The rows of logits that a step left: a token chosen from each, log-probabilities, raw values.

A row is named by its token's place in the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from edgellm.engine.backend import Allowed, Limits
from edgellm.engine.candidates import Highest, highest, joined, within
from edgellm.engine.llama.attached import Attached
from edgellm.engine.llama.batch import Batch
from edgellm.engine.llama.chains import Chains
from edgellm.engine.llama.library import lib
from edgellm.engine.llama.samplers import Sampler, make_chain
from edgellm.engine.llama.vocab import Vocab
from edgellm.engine.team import Team
from edgellm.errors import EngineError
from edgellm.request import TokenLogprob, TopLogprob

SHARE_BYTES: Final = 1 << 20
"""Logits a thread reads at least: waking one costs as much as half of them."""


class Rows:
    """Reads a context's output. ``batch`` is the one that the last step computed."""

    def __init__(
        self, ctx: Any, batch: Batch, vocab: Vocab, limits: Limits, n_threads: int
    ) -> None:
        self._ctx = ctx
        self._batch = batch
        self._vocab = vocab
        self._greedy = make_chain([lib.llama_sampler_init_greedy()])
        self._chains = Chains()
        top_k = limits.attached_top_k
        self._attached = Attached(ctx, vocab.n, top_k, self._chains) if top_k else None
        self._team = Team(n_threads, "engine-sample")
        self._least = max(1, SHARE_BYTES // (4 * vocab.n))

    def close(self) -> None:
        """Give the threads and the chains back."""
        self._team.close()
        lib.llama_sampler_free(self._greedy)

    # -- choosing ----------------------------------------------------------------------------

    def sample(self, rows: Sequence[int], samplers: Sequence[Sampler]) -> list[int]:
        """One token a row."""
        out = [0] * len(rows)
        groups = _grouped(samplers)
        if groups.attached:
            groups.chained.extend(self._sample_attached(rows, samplers, groups.attached, out))
        if groups.greedy or groups.filtered or groups.deep:
            self._sample_filtered(rows, samplers, groups, out)
        if groups.chained:
            self._sample_chains(rows, samplers, groups.chained, out)
        return out

    def _sample_attached(
        self,
        rows: Sequence[int],
        samplers: Sequence[Sampler],
        which: list[int],
        out: list[int],
    ) -> list[int]:
        """Rows decided by the candidates that the context hands over; those that are not."""
        if self._attached is None:
            return which
        which.sort(key=rows.__getitem__)
        some = [rows[i] for i in which]
        tokens = self._attached.sample(some, self._places(some), [samplers[i] for i in which])
        if tokens is None:
            return which
        for i, token in zip(which, tokens, strict=True):
            out[i] = token
        return []

    def _places(self, rows: Sequence[int]) -> Sequence[int]:
        """The rows' places among the step's outputs."""
        places = self._batch.places
        return rows if places is None else [places[row] for row in rows]

    def _sample_filtered(
        self, rows: Sequence[int], samplers: Sequence[Sampler], groups: _Groups, out: list[int]
    ) -> None:
        """Rows that their highest logits decide: these are read by all threads, a share of rows
        each; the chains, of a few microseconds, are called here."""
        logits, at = self._matrix(), self._places(rows)

        def argmax(part: list[int]) -> Any:
            return _pick(logits, [at[i] for i in part]).argmax(1)

        def best(part: list[int]) -> Highest:
            needed = max(samplers[i].needed for i in part)
            return highest(_pick(logits, [at[i] for i in part]), needed)

        def deep(part: list[int]) -> Highest:
            depth = max(samplers[i].depth for i in part)
            return within(_pick(logits, [at[i] for i in part]), depth + 0.01)

        wanted = ((argmax, groups.greedy), (best, groups.filtered), (deep, groups.deep))
        jobs = [(read, part) for read, group in wanted for part in self._shares(group)]
        found = self._at_once(jobs)
        n_greedy = sum(read is argmax for read, _ in jobs)
        which = [i for _, part in jobs for i in part]
        tokens = [token for some in found[:n_greedy] for token in some.tolist()]
        if n_greedy < len(jobs):
            rest = [samplers[i] for i in which[len(tokens) :]]
            tokens += self._chains.choose(joined(found[n_greedy:]), rest)
        for i, token in zip(which, tokens, strict=True):
            out[i] = token

    def _shares(self, which: list[int]) -> list[list[int]]:
        """Consecutive rows for each thread."""
        n = max(self._least, -(-len(which) // self._team.size))
        return [which[i : i + n] for i in range(0, len(which), n)]

    def _at_once(self, jobs: Sequence[tuple[Callable[[list[int]], Any], list[int]]]) -> list[Any]:
        """Each job's result; as many at a time as there are threads."""
        calls = [partial(read, part) for read, part in jobs]
        out: list[Any] = []
        for i in range(0, len(calls), self._team.size):
            out += self._team.run(calls[i : i + self._team.size])
        return out

    def _sample_chains(
        self, rows: Sequence[int], samplers: Sequence[Sampler], which: list[int], out: list[int]
    ) -> None:
        """Rows that only the whole chain over all logits decides."""
        ctx, call, greedy = self._ctx, lib.llama_sampler_sample, self._greedy

        def run(part: Sequence[int]) -> None:
            for i in part:
                chain = samplers[i].chain
                out[i] = call(greedy if chain is None else chain, ctx, rows[i])

        # K candidates take microseconds; all logits take long enough to share them out.
        wide = [i for i in which if not samplers[i].attached]
        run([i for i in which if samplers[i].attached])
        if wide:
            lib.llama_get_logits(ctx)  # puts the rows in order once, before threads read them
            n = min(self._team.size, len(wide))
            self._team.run([partial(run, wide[k::n]) for k in range(n)])

    def sample_allowed(self, row: int, sampler: Sampler, allowed: Allowed) -> int:
        """One token of a row, out of what is allowed."""
        logits = self._row(row)
        ids = self._allowed_ids(allowed)
        if not len(ids):
            raise EngineError("the grammar allows no token")
        chain = self._greedy if sampler.chain is None else sampler.chain
        return self._chains.choose_one(chain, ids, logits[ids])

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
        address = ctypes.cast(lib.llama_get_logits(self._ctx), ctypes.c_void_p).value
        if address is None:
            raise EngineError("the last step has no logits")
        n = self._batch.n_rows * self._vocab.n
        data: Any = (ctypes.c_float * n).from_address(address)
        return np.frombuffer(data, np.float32).reshape(self._batch.n_rows, self._vocab.n)

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


class _Groups(NamedTuple):
    """Places among the rows, by what decides them."""

    attached: list[int]
    greedy: list[int]
    filtered: list[int]
    deep: list[int]
    chained: list[int]


def _grouped(samplers: Sequence[Sampler]) -> _Groups:
    groups = _Groups([], [], [], [], [])
    for i, sampler in enumerate(samplers):
        if sampler.attached:
            groups.attached.append(i)
        elif sampler.chain is None:
            groups.greedy.append(i)
        elif sampler.depth:
            groups.deep.append(i)
        elif sampler.needed:
            groups.filtered.append(i)
        else:
            groups.chained.append(i)
    return groups


def _pick(matrix: Any, which: list[int]) -> Any:
    """Rows of a matrix: a view when they follow one another."""
    first, n = which[0], len(which)
    if which == list(range(first, first + n)):
        return matrix[first : first + n]
    return matrix[which]
