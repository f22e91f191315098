"""LlamaBackend: one model and one context, put together from the rooms of this package."""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from edgellm.engine.backend import OK, Allowed, OnProgress, Span, State
from edgellm.engine.info import EngineOptions, LoadProgress
from edgellm.engine.llama.batch import Batch
from edgellm.engine.llama.describe import describe
from edgellm.engine.llama.draft import load_drafter
from edgellm.engine.llama.library import lib
from edgellm.engine.llama.limits import (
    is_on_gpu,
    n_outputs,
    planned_limits,
    true_limits,
)
from edgellm.engine.llama.log import LoadLog, devices_named, load_error, read_report
from edgellm.engine.llama.memory import Memory
from edgellm.engine.llama.params import context_params, model_params
from edgellm.engine.llama.rows import Rows
from edgellm.engine.llama.samplers import SamplerFactory, make_chain
from edgellm.engine.llama.topk import TopK
from edgellm.engine.llama.vectors import Vectors
from edgellm.engine.llama.vocab import Vocab
from edgellm.engine.rpc import end_process, register, watch
from edgellm.errors import EngineError
from edgellm.planner.plan import LoadReport, Plan
from edgellm.request import Pooling, SamplingParams, TokenLogprob

CPU_WARMUP: Final = 16
"""Tokens: a CPU has nothing to load but the weights' pages."""
MAX_SMALL_WARMUP_S: Final = 1.0
MAX_SAMPLE_THREADS: Final = 8


class LlamaBackend:
    """Implements Backend."""

    def __init__(self, plan: Plan, options: EngineOptions, on_progress: OnProgress) -> None:
        self._log = LoadLog()
        self._keep: list[Any] = []
        self._plan = plan
        self._options = options
        self._on_progress = on_progress
        lib.llama_backend_init()
        aliases = register(plan.params.rpc)
        if plan.params.rpc:
            watch(plan.params.rpc, end_process)
        self._model = self._load_model()
        self._vocab = Vocab(self._model, self._log.lines)
        self.limits = planned_limits(plan, options, self._model)
        self._ctx = self._make_context()
        self._memory = Memory(self._ctx)
        self.limits = true_limits(self.limits, self._ctx, self._memory.can_shift)
        self._batch = Batch(self.limits.n_batch)
        n_threads = _sample_threads(plan, options)
        self._rows = Rows(self._ctx, self._batch, self._vocab, self.limits, n_threads)
        self._samplers = SamplerFactory(self._vocab, self.limits)
        self._vectors = Vectors(self._model, self._ctx)
        info = describe(plan, self._model, self._ctx, self._vocab, self.limits)
        self.info = msgspec.structs.replace(info, devices=devices_named(self._log.lines))
        self._drafter = load_drafter(plan, self._vocab.n, self.limits, self._log.lines, self._keep)
        self.has_draft = self._drafter is not None
        warmup_s = self._warm_up() if options.warmup else 0.0
        self._log.is_loading = False
        report = read_report(self._log.lines, aliases)
        self.report = msgspec.structs.replace(report, warmup_s=warmup_s)

    # -- loading -----------------------------------------------------------------------------

    def _load_model(self) -> Any:
        params = model_params(self._plan, self._keep)
        last = 0.0

        def report(fraction: float, _: object) -> bool:
            nonlocal last
            if fraction - last >= 0.01 or fraction >= 1.0:
                last = fraction
                self._on_progress(LoadProgress(stage="weights", fraction=fraction))
            return True

        params.progress_callback = lib.llama_progress_callback(report)
        model = lib.llama_model_load_from_file(self._plan.model.path.encode(), params)
        if not model:
            raise load_error(self._plan, self._log.lines, "the model")
        return model

    def _make_context(self) -> Any:
        self._on_progress(LoadProgress(stage="context", fraction=0.0))
        p, options = self._plan.params, self._options
        n_seq = len(self.limits.slot_ids) + len(self.limits.plain_ids)
        p = msgspec.structs.replace(
            p, n_seq_max=n_seq, n_outputs_max=n_outputs(self._plan, options, n_seq)
        )
        params = context_params(p, options.spec_max + 1 if options.spec != "off" else 1)
        if self.limits.attached_top_k:
            self._attach_samplers(params)
        else:
            params.n_outputs_max_per_seq = 0
        ctx = lib.llama_init_from_model(self._model, params)
        if not ctx:
            raise load_error(self._plan, self._log.lines, "the context")
        return ctx

    def _attach_samplers(self, params: Any) -> None:
        """A top-k for every slot: the device hands over its candidates instead of all logits."""
        slots, k = self.limits.slot_ids, self.limits.attached_top_k
        top_k = TopK(self._vocab.n, k)
        chains = [make_chain([top_k.sampler()]) for _ in slots]
        table = (lib.llama_sampler_seq_config * len(chains))()
        for i, (slot, chain) in enumerate(zip(slots, chains, strict=True)):
            table[i].seq_id = slot
            table[i].sampler = ctypes.cast(chain, ctypes.c_void_p)
        self._keep += [table, chains, top_k]
        params.samplers = table
        params.n_samplers = len(chains)

    def _warm_up(self) -> float:
        """Fill one ubatch and, on a GPU, some depth and small batches: kernels and workspaces are
        loaded when first used."""
        began = time.monotonic()
        if self.info.is_encoder:
            return 0.0
        self._on_progress(LoadProgress(stage="warmup", fraction=0.0))
        on_gpu = is_on_gpu(self._plan)
        n_ubatch = self.limits.n_ubatch if on_gpu else min(CPU_WARMUP, self.limits.n_ubatch)
        depth = min(self.limits.n_ctx_seq - 2, n_ubatch * (4 if on_gpu else 1))
        for slot in (*self.limits.slot_ids[:1], *self.limits.plain_ids[:1]):
            for start in range(0, depth, n_ubatch):
                self._warm_span(slot, start, min(n_ubatch, depth - start))
            self._warm_span(slot, depth, 1)
            self.seq_rm(slot, 0)
        if on_gpu:
            self._warm_small_batches(min(depth, n_ubatch))
        return time.monotonic() - began

    def _warm_small_batches(self, most: int) -> None:
        """Each width of ggml-cuda's kernels for a few rows (mul_mat_vec_q up to 8, mul_mat_q in
        tiles of 8 up to 128) is loaded when it is first used: in the middle of somebody's stream
        otherwise."""
        began = time.monotonic()
        for n in (*range(2, 9), *range(16, 129, 8)):
            if n > most or time.monotonic() - began > MAX_SMALL_WARMUP_S:
                return
            self._warm_span(0, 0, n)
            self.seq_rm(0, 0)

    def _warm_span(self, slot: int, start: int, n: int) -> None:
        tokens = array("i", [max(self.info.bos_id, 0)]) * n
        code = self.decode([Span(slot, start, tokens, 1)])
        if code != OK:
            raise EngineError(f"the warm-up failed: llama_decode returned {code}")

    def close(self) -> None:
        """Free everything; the backend is of no use afterwards."""
        self._rows.close()
        if self._drafter is not None:
            self._drafter.close()
        lib.llama_free(self._ctx)
        lib.llama_model_free(self._model)

    # -- text --------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return self._vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    def piece(self, token: int) -> bytes:
        return self._vocab.piece(token)

    def vocabulary(self) -> Sequence[bytes]:
        return self._vocab.pieces()

    def special_tokens(self) -> frozenset[int]:
        return self._vocab.special()

    # -- steps -------------------------------------------------------------------------------

    def decode(self, spans: Sequence[Span], meanwhile: Callable[[], None] | None = None) -> int:
        batch = self._batch
        batch.fill(spans)
        code: int = lib.llama_decode(self._ctx, batch.struct)
        if meanwhile is not None:
            meanwhile()
        if code == OK:
            lib.llama_synchronize(self._ctx)
        return code

    def make_sampler(self, params: SamplingParams, seed: int, prompt: Sequence[int]) -> Any:
        return self._samplers.make(params, seed, prompt)

    def free_sampler(self, sampler: Any) -> None:
        self._samplers.free(sampler)

    def allow_end(self, sampler: Any) -> None:
        self._samplers.allow_end(sampler)

    def sample(self, rows: Sequence[int], samplers: Sequence[Any]) -> list[int]:
        return self._rows.sample(rows, samplers)

    def sample_allowed(self, row: int, sampler: Any, allowed: Allowed) -> int:
        return self._rows.sample_allowed(row, sampler, allowed)

    def logits(self, row: int) -> bytes:
        return self._rows.raw(row)

    def logprobs(self, row: int, token: int, k: int) -> TokenLogprob:
        return self._rows.logprobs(row, token, k)

    def draft(self, asked: Sequence[tuple[int, array[int]]], k: int) -> list[list[int]]:
        return self._drafter.propose(asked, k) if self._drafter is not None else []

    # -- the cache ---------------------------------------------------------------------------

    def seq_rm(self, seq_id: int, start: int) -> bool:
        return self._memory.remove(seq_id, start)

    def seq_cp(self, source: int, target: int, n: int) -> None:
        self._memory.copy(source, target, n)

    def seq_shift(self, seq_id: int, start: int, n_drop: int) -> None:
        self._memory.shift(seq_id, start, n_drop)

    def state_get(self, seq_id: int) -> State:
        return self._memory.state(seq_id)

    def state_set(self, seq_id: int, state: State) -> bool:
        return self._memory.restore(seq_id, state)

    # -- embeddings --------------------------------------------------------------------------

    def embed(
        self, spans: Sequence[Span], pooling: Pooling, *, normalize: bool
    ) -> list[tuple[float, ...]]:
        code = self.decode(spans)
        if code != OK:
            raise EngineError(f"embedding failed: llama_decode returned {code}")
        out = list(self._vectors.read(spans, pooling, normalize=normalize))
        self._memory.clear()
        return out


def load(plan: Plan, options: EngineOptions, on_progress: OnProgress) -> LlamaBackend:
    """Load the plan's model."""
    return LlamaBackend(plan, options, on_progress)


def dry_run(plan: Plan, options: EngineOptions) -> LoadReport:
    """The buffers of a plan, measured without allocating them (weights and KV print as 0)."""
    log = LoadLog()
    keep: list[Any] = []
    lib.llama_backend_init()
    aliases = register(plan.params.rpc)
    params = model_params(plan, keep)
    params.no_alloc = True
    params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    model = lib.llama_model_load_from_file(plan.model.path.encode(), params)
    if not model:
        raise load_error(plan, log.lines, "the model")
    context = context_params(plan.params, options.spec_max + 1 if options.spec != "off" else 1)
    ctx = lib.llama_init_from_model(model, context)
    if not ctx:
        raise load_error(plan, log.lines, "the context")
    report = read_report(log.lines, aliases)
    lib.llama_free(ctx)
    lib.llama_model_free(model)
    return report


def _sample_threads(plan: Plan, options: EngineOptions) -> int:
    """Threads that read logits."""
    return options.sample_threads or min(MAX_SAMPLE_THREADS, max(1, plan.params.n_threads))
