"""Which tokens of which sequences the next step computes. Pure: it moves numbers, nothing else.

There are no phases. Every sequence has tokens, some of them computed; a step takes sequences in
the order of urgency and computes what it can of the rest, within a budget of tokens. A sequence
with one token missing decodes; decodes go first, and prompts get what is left, in chunks that keep
the running streams' gaps short.

What must be done to the cache before the step (cells shared, forgotten) is a list of operations
that the loop carries out in order.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from edgellm.engine.backend import Limits
from edgellm.engine.cells import Cells
from edgellm.engine.checkpoints import Checkpoints
from edgellm.engine.costs import Costs
from edgellm.engine.info import EngineOptions
from edgellm.engine.ops import Op, Remove, Restore
from edgellm.engine.prefix import common_prefix
from edgellm.engine.sequence import Sequence, State
from edgellm.errors import ContextOverflowError, QueueFullError
from edgellm.request import Overflow, Priority

MIN_CHUNK: Final = 16
"""Smaller prefill chunks cost a step nearly as much and take longer overall."""
LEAST_CHUNK: Final = 4
STALL_S: Final = 0.05
"""But where even that many take longer, chunks are smaller: 8,000 tokens into a prompt each of
them takes two CPU cores 16 ms."""
FIRST_SHARE: Final = 16
"""The chunk while costs are unknown: this part of an ubatch."""
CROWD: Final = 8.0
"""How much longer a step may be for each further prompt that waits, over the streams it delays."""


class Work(NamedTuple):
    """One sequence's part of a step: ``n`` tokens from ``start`` on, then its draft."""

    seq: Sequence
    start: int
    n: int
    n_out: int
    """Rows of logits: the last tokens of the span (0 when the prompt goes on)."""
    draft: tuple[int, ...] = ()


class Step(NamedTuple):
    """What to do next: operations on the cache first, then one batch."""

    ops: list[Op]
    work: list[Work]
    n_tokens: int
    n_prefill: int
    finished: list[Sequence]
    """Sequences that cannot go on: no cells are left even when they run alone."""


class Scheduler:
    """Queue, slots, steps. ``add``, ``schedule``, ``computed``, ``finish``."""

    def __init__(self, limits: Limits, options: EngineOptions) -> None:
        self.limits = limits
        self.options = options
        self.costs = Costs()
        self._ops: list[Op] = []
        self.cells = Cells(limits, options, self._ops)
        self.checkpoints = Checkpoints(options, self._ops, self.costs, can_rewind=limits.can_rewind)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        stores: dict[str, Cells | Checkpoints] = {
            "cells": self.cells,
            "checkpoint": self.checkpoints,
        }
        self._prefixes = stores.get(limits.sharing)
        """Where a prompt may find its beginning; None: nowhere."""
        self.misses: Counter[str] = Counter()
        self.n_hits = 0
        self.n_preemptions = 0
        self._free_slots = list(reversed(limits.slot_ids))
        self._free_plain = list(reversed(limits.plain_ids))
        self._order = 0
        # A step has a token and a row for each, or the same ones would have none in every step.
        self._most_running = min(limits.n_running, limits.n_batch, limits.n_outputs_max)
        budget = limits.n_batch if options.step_budget is None else options.step_budget
        self._budget = min(max(budget, limits.n_running), limits.n_batch)
        self._free = 0
        """Cells that the step being planned has not given out yet."""
        self._seen_preemptions = 0
        self._last_chunk = 0
        self._prompts_turn = False
        """Split caches: whether this step is the prompts' rather than the running streams'."""
        self._is_full = False
        """The cache had no room although the count says so: who was put out waits until somebody
        else has left, or would be let in at once, and put out again, for ever."""
        self._awaited: dict[Sequence, Sequence] = {}
        """Running sequences that others wait for in this step, and the most urgent of these."""

    # -- the queue ---------------------------------------------------------------------------

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Take in a request's sequences; raises when the prompt is too long or too many wait."""
        new = list(sequences)
        if len(self.waiting) + len(new) > self.options.max_waiting + self._n_free_running():
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already, as many as may",
                hint="try again later, or raise max_waiting",
            )
        for seq in new:
            self._check_length(seq)
        for seq in new:
            seq.order = self._order
            self._order += 1
            self.waiting.append(seq)

    def _check_length(self, seq: Sequence) -> None:
        n_ctx = min(self.limits.n_ctx_seq, self._all_cells())
        if seq.n_prompt >= n_ctx:
            raise ContextOverflowError(seq.n_prompt, n_ctx)
        room = n_ctx - seq.n_prompt
        if seq.request.overflow is Overflow.SLIDE:
            room = 1 << 30
        wanted = seq.request.sampling.max_tokens
        seq.max_output = room if wanted is None else min(room, wanted)

    def _all_cells(self) -> int:
        return self.limits.n_cells if self.cells.are_shared else self.limits.n_ctx_seq

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def n_cells_used(self) -> int:
        if self.cells.are_shared:
            return self.cells.tree.n_cells
        return sum(seq.n_computed for seq in self.running)

    @property
    def n_cells_retained(self) -> int:
        """Cells that only retained prefixes hold, shared among themselves or not."""
        return self.cells.n_retained

    def _n_free_running(self) -> int:
        return max(0, self._most_running - len(self.running))

    def _urgency(self, seq: Sequence, now: float) -> tuple[float, int]:
        waited = now - seq.waiting_since
        return (seq.request.priority - waited / self.options.aging_s, seq.order)

    def _urgency_for_others(self, seq: Sequence, now: float) -> tuple[float, int]:
        """A running sequence is as urgent as the most urgent one that waits for its prefix."""
        return min(self._urgency(seq, now), self._urgency(self._awaited.get(seq, seq), now))

    # -- one step ----------------------------------------------------------------------------

    def schedule(self, now: float) -> Step:
        """Decide the next step. What it holds counts as computed once ``computed`` is called."""
        self._admit(now)
        finished: list[Sequence] = []
        work, n_decode = self._fill(now, finished)
        self.cells.n_guessed = sum(len(w.draft) for w in work)
        n_tokens = sum(w.n for w in work) + self.cells.n_guessed
        return Step(self.take_ops(), work, n_tokens, n_tokens - n_decode, finished)

    def _fill(self, now: float, finished: list[Sequence]) -> tuple[list[Work], int]:
        """The step's work, decodes first, and how many tokens of it are decodes and guesses."""
        work: list[Work] = []
        budget, outputs = self._budget, self.limits.n_outputs_max
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self.running:
            (decoding if seq.is_decoding else prefilling).append(seq)
        # Sequences are computed together when their ids follow one another in the batch
        # (llama_batch_allocr::split_equal, sequential): out of order each is computed alone.
        if self.limits.is_split:
            decoding.sort(key=lambda s: s.slot)
        self._free = self.limits.n_cells - self.n_cells_used
        # What is not of one length is computed one after the other, and each sequence looks at as
        # many cells as the longest beside it has: a step for each kind costs no more, and streams
        # are not slowed to a long prompt's depth.
        takes_turns = self.limits.is_split and bool(decoding) and bool(prefilling)
        self._prompts_turn = takes_turns and not self._prompts_turn
        beside = decoding
        if self._prompts_turn:
            decoding = []
        elif takes_turns:
            prefilling = []
        for n_before, seq in enumerate(decoding):
            if seq.state is not State.RUNNING or budget <= 0 or outputs <= 0:
                continue
            if self._free < 1 and not self._make_room(1, seq, work, finished):
                continue
            draft: tuple[int, ...] = ()
            if seq.draft:
                # A token and a row for everyone first; guesses share what is left.
                n_left = len(decoding) - n_before
                spare = min(budget, outputs) - len(prefilling) - n_left
                draft = self._draft(seq, -(-spare // n_left))
            n_out = 1 + len(draft)
            work.append(Work(seq, seq.n_computed, 1, n_out, draft))
            self._free -= n_out
            budget -= n_out
            outputs -= n_out
        n_first = len(work)
        if prefilling:
            prefilling.sort(key=lambda s: self._urgency_for_others(s, now))
            if not self._prompts_turn:
                beside = [w.seq for w in work]
            budget = min(budget, self._chunk(prefilling, beside))
            self._fill_prefill(prefilling, work, budget, outputs, finished)
        if self.n_preemptions != self._seen_preemptions:
            self._seen_preemptions = self.n_preemptions
            n_first = sum(w.seq.state is State.RUNNING for w in work[:n_first])
            work = [w for w in work if w.seq.state is State.RUNNING]
        return work, sum(w.n_out for w in work[:n_first])

    def _draft(self, seq: Sequence, room: int) -> tuple[int, ...]:
        """As many of the sequence's guesses as rows, its length and the free cells allow."""
        wanted = seq.max_output - seq.n_output - 1
        n = min(len(seq.draft), room, wanted, self.limits.n_ctx_seq - len(seq.tokens) - 1)
        free = self._free // max(1, len(self.running)) - 1
        return tuple(seq.draft[: max(0, min(n, free))])

    def _fill_prefill(
        self,
        prefilling: list[Sequence],
        work: list[Work],
        budget: int,
        outputs: int,
        finished: list[Sequence],
    ) -> None:
        enough, n_prefill = self.costs.enough, 0
        for seq in prefilling:
            if 0 < enough <= n_prefill:
                break  # the next prompt costs as much in the next step: this one speaks now
            if budget <= 0 or seq.state is not State.RUNNING:
                continue
            n = min(seq.n_pending, budget)
            n = self._until_checkpoint(seq, n)
            is_last = n == seq.n_pending
            n_out = self._outputs_of(seq, n, is_last=is_last)
            if n_out > outputs:
                n, n_out = self._shrink_outputs(seq, n, outputs)
            if n <= 0 or (self._free < n and not self._make_room(n, seq, work, finished)):
                continue
            work.append(Work(seq, seq.n_computed, n, n_out))
            self._free -= n
            n_prefill += n
            budget -= n
            outputs -= n_out

    def _outputs_of(self, seq: Sequence, n: int, *, is_last: bool) -> int:
        if seq.request.sampling.prompt_logprobs and seq.n_output == 0:
            return n
        return 1 if is_last else 0

    def _shrink_outputs(self, seq: Sequence, n: int, outputs: int) -> tuple[int, int]:
        if seq.request.sampling.prompt_logprobs and seq.n_output == 0:
            return outputs, outputs
        # Leave the last token for a step that has a row for it.
        return n - 1, 0

    def _until_checkpoint(self, seq: Sequence, n: int) -> int:
        at = seq.checkpoint_at
        if seq.n_computed < at < seq.n_computed + n:
            return at - seq.n_computed
        return n

    def _chunk(self, prefilling: list[Sequence], beside: list[Sequence]) -> int:
        """Prefill tokens that this step may carry; the streams ``beside`` wait for its end.

        Never more than the backend computes in one go: a longer step is no quicker, and whoever
        arrives in it waits for its end.
        """
        costs, most = self.costs, self.limits.n_prefill or self.limits.n_ubatch
        first = prefilling[0]
        urgent = min(first.request.priority, self._awaited.get(first, first).request.priority)
        if all(seq.request.priority > urgent for seq in beside):
            return most
        calm = costs.decode_s(len(beside))
        if not calm or not costs.token_s:
            return max(MIN_CHUNK, most // FIRST_SHARE)
        crowd = max(1.0, CROWD * (len(prefilling) - 1) / len(beside))
        extra = self._spare_s(calm, crowd)
        least = min(MIN_CHUNK, max(LEAST_CHUNK, int(STALL_S / costs.token_s)))
        n = min(most, max(least, int((extra - costs.fixed_s) / costs.token_s)))
        # A step of the shape of the one before it is captured as a CUDA graph (ggml-cuda.cu): 6 ms
        # on an H200, for a shape that a few steps later is another one as the cache grows.
        n -= n == self._last_chunk and n > 1
        self._last_chunk = n
        return n

    def _spare_s(self, calm: float, crowd: float = 1.0) -> float:
        """How much longer a step that carries streams may be than theirs alone (``calm``)."""
        spare = (self.options.itl_factor - 1) * calm * crowd
        target = self.options.itl_target_s
        return spare if target is None else max(spare, target - calm)

    # -- admission ---------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        self._awaited.clear()
        if not self.waiting:
            return
        self.waiting.sort(key=lambda s: self._urgency(s, now))
        held = []
        queue, self.waiting = self.waiting, []
        while queue:
            seq = queue[0]
            other = self._waits_for(seq)
            if other is not None:
                self._awaited.setdefault(other, seq)
                held.append(queue.pop(0))
                continue
            if not self._has_slot(seq, now) or not self._has_cells_for(seq, now):
                break
            queue.pop(0)
            self._start(seq, now)
        self.waiting = held + queue + self.waiting

    def _has_slot(self, seq: Sequence, now: float) -> bool:
        pool = self._pool(seq)
        if pool and len(self.running) < self._most_running:
            return True
        able = self._displaceable(seq, now)
        victims = [s for s in able if pool or s.slot in self._ids(seq)]
        if not victims or not self._fits(seq, able):
            return False  # nobody is put out in vain
        self.preempt(victims[0], now)
        return bool(self._pool(seq))

    def _displaceable(self, seq: Sequence, now: float) -> list[Sequence]:
        """Running sequences that give way to ``seq``, the least urgent and newest first."""
        level = self._urgency(seq, now)[0]
        found = [s for s in self.running if self._may_displace(seq, level, s)]
        return sorted(found, key=lambda s: (s.request.priority, s.order), reverse=True)

    @staticmethod
    def _may_displace(seq: Sequence, level: float, other: Sequence) -> bool:
        """Whether ``other`` gives its slot, or its cells, to ``seq``.

        An interactive request takes a less urgent one's; else a slot that was got by waiting is
        kept, or those who waited longest would be put out first.
        """
        if seq.request.priority >= other.request.priority:
            return False
        return seq.request.priority == Priority.INTERACTIVE or level < other.level

    def _ids(self, seq: Sequence) -> tuple[int, ...]:
        limits = self.limits
        return limits.plain_ids if seq.plain and limits.plain_ids else limits.slot_ids

    def _pool(self, seq: Sequence) -> list[int]:
        return self._free_plain if seq.plain and self.limits.plain_ids else self._free_slots

    def _has_cells_for(self, seq: Sequence, now: float) -> bool:
        """Whether the prompt fits beside what runs; less urgent sequences make room for it."""
        if self._fits(seq):
            return True
        victims = self._displaceable(seq, now)
        if not self._fits(seq, victims):
            return False
        for victim in victims:
            self.preempt(victim, now)
            if self._fits(seq):
                return True
        return False

    def _fits(self, seq: Sequence, gone: Collection[Sequence] = ()) -> bool:
        """Whether there are cells for the prompt, once those in ``gone`` have given way."""
        running = [s for s in self.running if s not in gone]
        if not running or self._is_full:
            return not running
        needed = len(seq.tokens)
        if self._may_share(seq):
            needed -= self.cells.cached(seq.tokens, len(seq.tokens) - 1)
        promised = sum(s.n_pending for s in running) + len(running)
        free = self.limits.n_cells - self.n_cells_used + self.n_cells_retained
        own = self.cells.tree.exclusive
        free += sum(own(s.slot) if self.cells.are_shared else s.n_computed for s in gone)
        return needed + promised + 1 <= free

    @staticmethod
    def _may_share(seq: Sequence) -> bool:
        return seq.request.cache_prompt and not seq.request.sampling.prompt_logprobs

    def _waits_for(self, seq: Sequence) -> Sequence | None:
        """A running sequence that computes a prefix which this one could share: let it finish."""
        prefixes = self._prefixes
        if prefixes is None or not self._may_share(seq):
            return None
        limit = len(seq.tokens) - 1
        cached: int | None = None
        for other in self.running:
            coming = prefixes.coming(other, seq.tokens, limit)
            if coming and cached is None:
                cached = prefixes.cached(seq.tokens, limit)
            if coming > (cached or 0):
                return other
        return None

    def _start(self, seq: Sequence, now: float) -> None:
        seq.slot = self._pool(seq).pop()
        seq.state = State.RUNNING
        seq.level = self._urgency(seq, now)[0]
        if seq.scheduled is None:
            seq.scheduled = now
        self.running.append(seq)
        n = self._share_prefix(seq)
        seq.n_computed = n
        if seq.n_output == 0:
            # What it computed itself before it was preempted was not cached for it.
            seq.n_cached = min(n, seq.n_cached) if seq.is_begun else n

    def _share_prefix(self, seq: Sequence) -> int:
        """Begin with what is there of the prompt already: how many tokens."""
        n, why_none = self._look_up(seq, len(seq.tokens) - 1)
        if n:
            self.n_hits += 1
        else:
            self._miss(seq, why_none)
        return n

    def _look_up(self, seq: Sequence, limit: int) -> tuple[int, str]:
        if not self._may_share(seq):
            return 0, "asked_not_to"
        if self._prefixes is None:
            return 0, "split_cache"
        return self._prefixes.share(seq, limit)

    def may_pause(self, seq: Sequence) -> bool:
        """Whether a state may be saved now: nobody is kept long by it, or somebody waits for it."""
        others = [s for s in self.running if s is not seq and s.is_decoding]
        if not others or seq in self._awaited:
            return True
        spare = self._spare_s(self.costs.decode_s(len(others)))
        return self.costs.save_s(seq.n_computed) <= max(STALL_S, spare)

    def should_save(self, seq: Sequence) -> bool:
        """Whether what a sequence leaves should be saved, its answer too: for the conversation's
        next turn, while nobody else is there to wait for it."""
        if self._prefixes is not self.checkpoints or not self.limits.can_rewind or seq.n_slid:
            return False
        is_alone = self.running == [seq] and not self.waiting
        return is_alone and self._may_share(seq) and self.checkpoints.lacks(seq)

    def restore_failed(self, op: Restore) -> bool:
        """A checkpoint could not be put back: its sequence computes its prompt after all. False
        when it has lost its slot again since, and the step is as good as it was."""
        if op.seq.slot != op.seq_id:
            return False
        self._miss(op.seq, "checkpoint_refused")
        op.seq.n_computed = 0
        if op.seq.n_output == 0:
            op.seq.n_cached = 0  # what was cached when it first spoke stays true
        return True

    def slide(self, seq: Sequence, n_keep: int, n_drop: int) -> None:
        """Drop ``n_drop`` tokens after the first ``n_keep``; the rest moves down.

        Cells that others share must not move, and some caches cannot move any: then what follows
        is computed again.
        """
        del seq.tokens[n_keep : n_keep + n_drop]
        seq.n_slid += n_drop
        seq.turns = tuple(t - n_drop for t in seq.turns if t >= n_keep + n_drop)
        n_moved = seq.n_computed - n_keep - n_drop
        shared = self.cells.are_shared
        own = shared and self.cells.tree.exclusive(seq.slot) >= seq.n_computed - n_keep
        if n_moved > 0 and own and self.limits.can_shift:
            self.cells.shift(seq.slot, n_keep, n_drop)
            seq.n_computed -= n_drop
            return
        seq.n_computed = min(n_keep, seq.n_computed) if self.limits.can_rewind else 0
        self.cells.shorten(seq.slot, seq.n_computed)

    def _miss(self, seq: Sequence, reason: str) -> None:
        seq.miss = reason
        self.misses[reason] += 1

    # -- cells -------------------------------------------------------------------------------

    def _make_room(self, n: int, seq: Sequence, work: list[Work], finished: list[Sequence]) -> bool:
        """Free cells for n tokens of ``seq``: retained prefixes first, then less urgent streams."""
        while self._free < n:
            if not self.cells.evict():
                victim = self._victim()
                if victim is not None and (victim is not seq or len(self.running) > 1):
                    self.preempt(victim, None)
                elif not self.cells.evict(pinned=True):
                    finished.append(seq)
                    return False
            taken = sum(w.n + len(w.draft) for w in work if w.seq.state is State.RUNNING)
            # Whoever comes next in this step counts on it, also where this one gave way itself.
            self._free = self.limits.n_cells - self.n_cells_used - taken
            if seq.state is not State.RUNNING:
                return False
        return True

    def give_up_cells(self) -> bool:
        """A step found no room in the cache: somebody gives way. False when nobody is left who
        could."""
        if self.cells.evict():
            return True
        victim = self._victim()
        if victim is None or len(self.running) == 1:
            return self.cells.evict(pinned=True)
        self.preempt(victim, None)
        self._is_full = True
        return True

    def _victim(self) -> Sequence | None:
        running = [s for s in self.running if s.state is State.RUNNING]
        return max(running, key=lambda s: (s.request.priority, s.order), default=None)

    def preempt(self, seq: Sequence, now: float | None) -> None:
        """Take a running sequence's slot and cells; it waits again and goes on where it was.

        With ``now`` (its slot is wanted, not its cells) its cells stay behind as long as they can.
        """
        self.n_preemptions += 1
        self.running.remove(seq)
        self._leave(seq, keep=now is not None)
        seq.state = State.PREEMPTED
        seq.draft = []
        seq.n_computed = 0
        self.waiting.append(seq)

    def _leave(self, seq: Sequence, *, keep: bool) -> None:
        """Give the slot back; its cells stay as a retained prefix when they are worth it."""
        slot = seq.slot
        seq.slot = -1
        self._is_full = False
        if seq.n_slid:
            # Cells that moved cannot be shared: only what came before them is worth keeping.
            self.cells.cut(slot, common_prefix(self.cells.tree.tokens(slot), seq.tokens))
        if keep:
            self.cells.retain(slot)
        self.cells.release(slot)
        free = self._free_plain if slot in self.limits.plain_ids else self._free_slots
        free.append(slot)
        if self.limits.is_split:
            free.sort(reverse=True)  # the lowest is taken first: running ones stay together

    # -- what became of a step ---------------------------------------------------------------

    def computed(self, work: Work, n: int | None = None) -> None:
        """The first ``n`` (all) of the work's own tokens are in the cache now."""
        n = work.n if n is None else n
        seq = work.seq
        self.cells.grow(seq.slot, seq.tokens[work.start : work.start + n])
        seq.n_computed = work.start + n

    def accepted(self, seq: Sequence, tokens: array[int]) -> None:
        """Draft tokens that were right are in the cache now (and already in ``tokens``)."""
        self.cells.grow(seq.slot, tokens)
        seq.n_computed += len(tokens)

    def reject(self, seq: Sequence) -> None:
        """What the last step computed beyond ``n_computed`` was guessed wrong."""
        self._ops.append(Remove(seq.slot, seq.n_computed))

    def finish(self, seq: Sequence) -> None:
        """A sequence ended or was cancelled, in whatever state it was."""
        if seq.state is State.FINISHED:
            return
        if seq.slot >= 0:
            self.running.remove(seq)
            self._leave(seq, keep=seq.request.cache_prompt)
        else:
            self.waiting.remove(seq)
        seq.state = State.FINISHED

    def pin(self, seq: Sequence, n: int) -> int | None:
        """Keep a running sequence's first ``n`` tokens for good: the seq_id that holds them now.

        None when they are pinned already, when no seq_id is left, or when pins would take more
        than half of the cells.
        """
        if seq.n_slid or n > seq.n_computed:
            return None
        return self.cells.pin(seq.slot, seq.tokens[:n])

    def forget_all(self) -> None:
        """Empty the cache: a step broke off, and what it did of its operations is not known. The
        sequences are finished already."""
        self.cells.drop_retained()
        limits = self.limits
        everything = (*limits.slot_ids, *limits.plain_ids, *limits.retained_ids)
        self._ops[:] = [Remove(seq_id, 0) for seq_id in everything]

    def take_ops(self) -> list[Op]:
        """Operations that nobody has carried out yet."""
        ops = self._ops.copy()
        self._ops.clear()
        return ops

    def check(self) -> None:
        """Raise ValueError when slots, cells or states contradict one another."""
        slots = [s.slot for s in self.running]
        free = [*self._free_slots, *self._free_plain]
        everything = sorted([*slots, *free])
        if everything != sorted([*self.limits.slot_ids, *self.limits.plain_ids]):
            raise ValueError(f"slots {slots} and free {free} are not all slots")
        self.cells.check(slots)
        for seq in self.running:
            n = self.cells.tree.length(seq.slot)
            if self.cells.are_shared and n != seq.n_computed:
                raise ValueError(f"{seq!r} holds {n} cells")
