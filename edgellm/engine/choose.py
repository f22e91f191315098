"""After a step: which token each row gives, where a constraint narrows the choice too."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

from edgellm.engine.backend import Allowed, Backend
from edgellm.engine.sequence import Sequence
from edgellm.errors import EdgeLLMError

Chosen: TypeAlias = "int | EdgeLLMError"
"""A token, or why there is none (the sequence's constraint lets none through, its logits are not
numbers): that ends its request alone."""


class Narrowed(NamedTuple):
    """What a constraint lets through next, and the tokens that must come."""

    allowed: Allowed
    forced: list[int]


def narrow(constraint: Any) -> Narrowed:
    """Ask a constraint. It belongs to one thread at a time: to this call until it returns."""
    if not constraint.needs_mask:
        return Narrowed(None if constraint.can_stop else False, [])
    ids = constraint.allowed()
    if ids is None:
        return Narrowed(constraint.mask(), [])
    return Narrowed(tuple(ids), constraint.forced_tokens() if len(ids) == 1 else [])


class Chooser:
    """Picks tokens. Masks are computed on another thread while the next step decodes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pool: ThreadPoolExecutor | None = None
        self._masks: dict[int, Future[Narrowed]] = {}

    def prepare(self, seq: Sequence) -> None:
        """Begin to compute what the sequence's constraint allows next."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "engine-mask")
        self._masks[id(seq)] = self._pool.submit(narrow, seq.constraint)

    def forced(self, seq: Sequence) -> list[int]:
        """Tokens that must come next, when that is known by now."""
        mask = self._masks.get(id(seq))
        known = mask is not None and mask.done() and mask.exception() is None
        return mask.result().forced if mask is not None and known else []

    def forget(self, seq: Sequence) -> None:
        """The sequence ended."""
        self._masks.pop(id(seq), None)

    def pick_all(self, rows: Rows[int], seqs: Rows[Sequence]) -> list[Chosen]:
        """A token for each row; rows without a constraint go together, first."""
        free = [i for i, seq in enumerate(seqs) if seq.constraint is None]
        if len(free) == len(seqs):
            return self._pick_free(rows, seqs)
        out: list[Chosen] = [0] * len(rows)
        picked = self._pick_free([rows[i] for i in free], [seqs[i] for i in free])
        for i, token in zip(free, picked, strict=True):
            out[i] = token
        for i, seq in enumerate(seqs):
            if seq.constraint is not None:
                out[i] = self.pick(rows[i], seq)
        return out

    def _pick_free(self, rows: Rows[int], seqs: Rows[Sequence]) -> list[Chosen]:
        try:
            return [*self._backend.sample(rows, [seq.sampler for seq in seqs])]
        except EdgeLLMError:
            # One by one, to end only whose row it is. Who had chosen draws another number.
            return [self.pick(row, seq) for row, seq in zip(rows, seqs, strict=True)]

    def pick(self, row: int, seq: Sequence) -> Chosen:
        """One row's token."""
        try:
            if seq.constraint is None:
                return self._backend.sample([row], [seq.sampler])[0]
            return self._pick_allowed(row, seq)
        except EdgeLLMError as error:
            return error

    def _pick_allowed(self, row: int, seq: Sequence) -> int:
        mask = self._masks.pop(id(seq), None)
        allowed = (mask.result() if mask is not None else narrow(seq.constraint)).allowed
        if allowed is None:
            return self._backend.sample([row], [seq.sampler])[0]
        return self._backend.sample_allowed(row, seq.sampler, allowed)
