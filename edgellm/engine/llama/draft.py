"""The draft model: a small one that guesses what the large one will say."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from edgellm.engine.backend import OK, Limits, Span
from edgellm.engine.llama.batch import Batch
from edgellm.engine.llama.library import lib
from edgellm.engine.llama.log import load_error
from edgellm.engine.llama.memory import Memory
from edgellm.engine.llama.params import context_params, model_params
from edgellm.engine.prefix import common_prefix
from edgellm.errors import ConfigError
from edgellm.planner.plan import Plan


def load_drafter(
    plan: Plan, n_vocab: int, limits: Limits, log: Sequence[str], keep: list[Any]
) -> Drafter | None:
    """The plan's draft model in a context like the model's own, or None without one."""
    p = plan.params
    if p.draft_model is None:
        return None
    facts = msgspec.structs.replace(plan.model, path=p.draft_model)
    small = msgspec.structs.replace(
        p,
        n_gpu_layers=p.draft_n_gpu_layers,
        n_seq_max=len(limits.slot_ids) + len(limits.plain_ids),
        n_outputs_max=p.n_seq_max,
        draft_model=None,
    )
    plan = msgspec.structs.replace(plan, model=facts, params=small)
    model = lib.llama_model_load_from_file(p.draft_model.encode(), model_params(plan, keep))
    if not model:
        raise load_error(plan, log, "the model")
    n_draft = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    if n_draft != n_vocab:
        raise ConfigError(
            f"the draft model has {n_draft} tokens, the model {n_vocab}",
            hint="choose a draft model of the same family",
        )
    ctx = lib.llama_init_from_model(model, context_params(small, 1))
    if not ctx:
        raise load_error(plan, log, "the context")
    return Drafter(model, ctx, n_vocab, limits.n_batch)


class Drafter:
    """Guesses greedily, with a cache of its own under the same seq_ids."""

    def __init__(self, model: Any, ctx: Any, n_vocab: int, n_batch: int) -> None:
        self._model = model
        self._ctx = ctx
        self._memory = Memory(ctx)
        self._n_vocab = n_vocab
        self._n_batch = min(n_batch, lib.llama_n_batch(ctx))
        self._batch = Batch(self._n_batch)
        self._cached: dict[int, array[int]] = {}

    def propose(self, asked: Sequence[tuple[int, array[int]]], k: int) -> list[list[int]]:
        """k tokens for each sequence; all sequences advance in one batch a token."""
        if not self._catch_up(asked):
            self._memory.clear()
            self._cached.clear()
            return [[] for _ in asked]
        out: list[list[int]] = [[] for _ in asked]
        spans = [Span(slot, len(tokens) - 1, array("i", [tokens[-1]]), 1) for slot, tokens in asked]
        for _ in range(k):
            if not self._decode(spans):
                break
            for i, span in enumerate(spans):
                self._cached[span.seq_id].extend(span.tokens)
                out[i].append(self._argmax(i))
                spans[i] = Span(span.seq_id, span.start + 1, array("i", out[i][-1:]), 1)
        return out

    def _catch_up(self, asked: Sequence[tuple[int, array[int]]]) -> bool:
        """Compute all but each sequence's newest token; False when there is no room."""
        for slot, tokens in asked:
            held = self._cached.setdefault(slot, array("i"))
            same = common_prefix(held, tokens[:-1])
            if same < len(held):
                self._memory.remove(slot, same)
                del held[same:]
            while len(held) < len(tokens) - 1:
                part = tokens[len(held) : min(len(tokens) - 1, len(held) + self._n_batch)]
                if not self._decode([Span(slot, len(held), part, 0)]):
                    return False
                held.extend(part)
        return True

    def _decode(self, spans: Sequence[Span]) -> bool:
        self._batch.fill(spans)
        return bool(lib.llama_decode(self._ctx, self._batch.struct) == OK)

    def _argmax(self, row: int) -> int:
        pointer = lib.llama_get_logits_ith(self._ctx, row)
        return int(np.ctypeslib.as_array(pointer, (self._n_vocab,)).argmax())

    def close(self) -> None:
        """Free the model and its context."""
        lib.llama_free(self._ctx)
        lib.llama_model_free(self._model)
