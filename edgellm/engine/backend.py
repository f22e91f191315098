"""What the loop needs of the library that computes: implemented by llama.py and by scripted.py.

Everything here but ``tokenize``, ``piece`` and ``vocabulary`` is called by the loop's thread alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from edgellm.engine.info import EngineInfo, EngineOptions, LoadProgress
from edgellm.engine.retention import MIN_CELLS
from edgellm.planner.plan import LoadReport, Plan
from edgellm.request import Pooling, SamplingParams, TokenLogprob

OK = 0
NO_CELLS = 1
ABORTED = 2

Allowed: TypeAlias = "tuple[int, ...] | bytes | bool | None"
"""What may be chosen: these ids, the ids whose bits are set (little endian), False for all but end
tokens, None for all."""

State: TypeAlias = "bytes | bytearray"
"""What is held for one sequence, as bytes."""

OnProgress = Callable[[LoadProgress], None]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything there is. The scheduler knows nothing else of the backend."""

    n_cells: int
    """Cells of the cache, shared by all sequences when ``sharing`` is cells."""
    n_ctx_seq: int
    """Tokens one sequence may hold."""
    n_batch: int
    n_ubatch: int
    n_prefill: int = 0
    """Prefill tokens worth one step: an ubatch for each device; 0: n_ubatch."""
    n_running: int
    """Sequences that may run at once."""
    n_outputs_max: int
    slot_ids: tuple[int, ...]
    """seq_ids for running sequences; with attached samplers, those that have one."""
    plain_ids: tuple[int, ...] = ()
    """seq_ids without an attached sampler, for what needs all logits; empty: all slots do."""
    retained_ids: tuple[int, ...] = ()
    """seq_ids that only hold cells of finished sequences."""
    retain_cells: int = MIN_CELLS
    """Cells that retained prefixes may hold to begin with (see retention.py)."""
    sharing: str = "cells"
    is_split: bool = False
    """A step's sequences are computed together only as far as they have equally many tokens
    (llama_batch_allocr::split_equal): each has cells, or a state, of its own."""
    can_shift: bool = True
    can_rewind: bool = True
    """A sequence's last tokens can be taken back; else it goes on from what it has, or from 0."""
    attached_top_k: int = 0
    """Candidates an attached sampler leaves; 0: every slot sees all logits."""
    is_async: bool = False
    """A device computes a step while this process may do something else."""


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a step; the last ``n_out`` of them give logits."""

    seq_id: int
    start: int
    """The first token's position."""
    tokens: array[int]
    n_out: int


class Backend(Protocol):
    """A loaded model and its cache."""

    info: EngineInfo
    limits: Limits
    report: LoadReport
    has_draft: bool

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text. Any thread."""

    def piece(self, token: int) -> bytes:
        """The token's bytes as output shows them. Any thread."""

    def vocabulary(self) -> Sequence[bytes]:
        """Every token's bytes, by id. Any thread; slow the first time."""

    def special_tokens(self) -> frozenset[int]:
        """Control tokens: text never spells them. Any thread; slow the first time."""

    def decode(self, spans: Sequence[Span], meanwhile: Callable[[], None] | None = None) -> int:
        """Compute the spans as one batch: OK, NO_CELLS (nothing changed), ABORTED or negative.

        ``meanwhile`` is called once where the device computes by itself (``Limits.is_async``).
        """

    def make_sampler(self, params: SamplingParams, seed: int, prompt: Sequence[int]) -> Any:
        """How one sequence chooses its tokens; ``prompt`` feeds the penalties."""

    def free_sampler(self, sampler: Any) -> None:
        """Give back what make_sampler took."""

    def allow_end(self, sampler: Any) -> None:
        """min_tokens are there: end tokens may be chosen from now on."""

    def sample(self, rows: Sequence[int], samplers: Sequence[Any]) -> list[int]:
        """One token a row of the last batch (a row is a token's place in the batch)."""

    def sample_allowed(self, row: int, sampler: Any, allowed: Allowed) -> int:
        """One token of a row, out of what is allowed. Needs all logits."""

    def logprobs(self, row: int, token: int, k: int) -> TokenLogprob:
        """The token's log-probability in a row, and the k most likely. Needs all logits."""

    def logits(self, row: int) -> bytes:
        """A row's logits, one float32 (little endian) a token of the vocabulary."""

    def draft(self, asked: Sequence[tuple[int, array[int]]], k: int) -> list[list[int]]:
        """A draft model's k next tokens for each (seq_id, all its tokens); empty without one."""

    def seq_rm(self, seq_id: int, start: int) -> bool:
        """Forget positions from ``start`` on; False when the cache cannot (``can_rewind``)."""

    def seq_cp(self, source: int, target: int, n: int) -> None:
        """Let ``target`` hold the first n cells of ``source`` too."""

    def seq_shift(self, seq_id: int, start: int, n_drop: int) -> None:
        """Forget ``n_drop`` positions from ``start`` on and move the later ones down."""

    def state_get(self, seq_id: int) -> State:
        """All that the cache holds for a slot's sequence, to put back later. What a retained id
        holds cannot be saved: llama_kv_cache::state_write_meta writes no seq_id from n_seq_max on.
        """

    def state_set(self, seq_id: int, state: State) -> bool:
        """Put back a sequence; False when it does not fit."""

    def embed(
        self, spans: Sequence[Span], pooling: Pooling, *, normalize: bool
    ) -> list[tuple[float, ...]]:
        """One vector a span (or, for Pooling.NONE, the token vectors one after another)."""

    def close(self) -> None:
        """Give everything back."""


LoadBackend = Callable[[Plan, EngineOptions, OnProgress], Backend]
