"""The one thread that owns the context: take what came in, one step, send what came out."""

from __future__ import annotations

import queue
import random
import time
from array import array
from collections.abc import Callable
from typing import Any, Final

import msgspec

from edgellm.engine import scheduler as sched
from edgellm.engine import wire
from edgellm.engine.backend import ABORTED, NO_CELLS, OK, Backend, Span
from edgellm.engine.choose import Chooser, Chosen
from edgellm.engine.embed import EmbedJob, embed
from edgellm.engine.info import EngineOptions
from edgellm.engine.meter import Meter
from edgellm.engine.ops import Copy, Op, Remove, Restore, Shift
from edgellm.engine.output import Group, Output
from edgellm.engine.pins import PinStore
from edgellm.engine.sampling import has_penalties, needs_all_logits
from edgellm.engine.score import ScoreJob, score
from edgellm.engine.sequence import Sequence, State, to_drop
from edgellm.engine.spec import Speculation
from edgellm.errors import (
    ContextOverflowError,
    DecodeError,
    EdgeLLMError,
    EngineError,
    InvalidRequestError,
)
from edgellm.metrics import EngineStats, RunningRequest
from edgellm.request import (
    ErrorInfo,
    FinishReason,
    Overflow,
    Request,
)

IDLE_S: Final = 0.1
"""After this long without a message what a finished sequence left is saved: whoever sends one
request after another does not wait for that (6 ms for 240 tokens of a small model)."""
MAX_FAILURES: Final = 3
"""Steps that a sequence may fail in, together with others, before it gets another token."""


class Arrived(msgspec.Struct, frozen=True):
    """A request with its prompt as token ids, tokenised outside this thread."""

    request: Request
    prompt: array[int]
    arrival: float
    turn_starts: tuple[int, ...] = ()
    """Token offsets of the prompt's turns."""
    constraint: Any = None
    """The compiled grammar."""


class Refused(msgspec.Struct, frozen=True):
    """A request that could not even be tokenised."""

    request_id: str
    error: ErrorInfo


class Withdrawn(msgspec.Struct, frozen=True):
    """A request cancelled, and told so, before it was tokenised: it is counted, no more."""


Message = (
    Arrived
    | Refused
    | Withdrawn
    | EmbedJob
    | ScoreJob
    | wire.Cancel
    | wire.Stats
    | wire.Ping
    | wire.Close
)
Send = Callable[[wire.FromChild], None]


class Loop:
    """Runs until Close comes. ``inbox`` may be fed by any thread; ``send`` must not block.

    What steps took decides about chunks, guesses and saved states; ``clock`` measures it.
    """

    def __init__(
        self,
        backend: Backend,
        options: EngineOptions,
        send: Send,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.scheduler = sched.Scheduler(backend.limits, options)
        self.output = Output(backend, clock)
        self.meter = Meter()
        self.chooser = Chooser(backend)
        self.spec = Speculation(backend, options)
        self._send = send
        self._clock = clock
        self._random = random.Random(options.seed)
        self._began = self._clock()
        self._embeds: list[EmbedJob | ScoreJob] = []
        self._embedding: EmbedJob | ScoreJob | None = None
        self._pins = PinStore(options.pin_dir, backend.info)
        self._load_pins()
        self._closing = False
        self._eog = frozenset(backend.info.eog_ids)
        self._sampled_at = 0.0
        self._saving_s = 0.0
        """What saving states took of the last step."""
        self._delivers_later = False
        self._left: tuple[int, array[int]] | None = None
        """Slot and tokens of the sequence that ended last, while the slot holds them still."""
        self._shape: list[int] = []
        """Tokens of each sequence in the last step."""

    def run(self) -> None:
        """The loop. Whatever goes wrong in a step ends requests, never the loop."""
        while not self._closing:
            if not self._take_in():
                break
            self.turn()
        self._flush()  # what ended with the last step has ended

    def _load_pins(self) -> None:
        for tokens, state in self._pins.load():
            target = self.scheduler.cells.adopt_pin(tokens)
            if target is not None and not self.backend.state_set(target, state):
                self.scheduler.cells.drop_pin(target)
        self._apply(self.scheduler.take_ops())

    def _finish_pinned(self, seq: Sequence) -> None:
        """Keep the system prompt (or the whole prompt) of a request that asked for it."""
        n_keep = seq.request.n_keep
        n = min(n_keep, seq.n_prompt) if n_keep else seq.n_prompt
        slot = seq.slot
        target = self.scheduler.pin(seq, n)
        self._let_go(seq)
        if target is None:
            return
        self._apply(self.scheduler.take_ops())
        # Only what a slot holds can be saved; this one is free now.
        self.backend.seq_cp(target, slot, n)
        self._pins.save(seq.tokens[:n], self.backend.state_get(slot))
        self.backend.seq_rm(slot, 0)

    def turn(self) -> None:
        """One step, or one embedding; what it has to say is sent."""
        self._delivers_later = False
        try:
            self._work()
        except Exception as error:  # noqa: BLE001  (border: the loop must live)
            self._fail_all(error)
            if self._embedding is not None:
                self._send(wire.Failed(self._embedding.call, wire.error_info(_wrapped(error))))
            else:
                self.scheduler.forget_all()
            self._delivers_later = False
        self._embedding = None
        if not self._delivers_later:
            self._flush()

    def _work(self) -> None:
        if self._embeds:
            self._left = None
            self._flush()
            self._embedding = self._embeds.pop(0)
            self._embed(self._embedding)
        elif self.scheduler.has_work:
            self._step()
        else:
            if self._left is not None:
                self._save(*self._left)
            self._apply(self.scheduler.take_ops())

    def _take_in(self) -> bool:
        """Handle what has come, waiting for it when there is nothing to do; False: close."""
        idle = not self.scheduler.has_work and not self._embeds
        patience = IDLE_S if self._left is not None else None
        while idle or not self.inbox.empty():
            try:
                message = self.inbox.get(timeout=patience)
            except queue.Empty:
                return True
            idle = False
            try:
                self._handle(message)
            except Exception as error:  # noqa: BLE001  (border: the loop must live)
                self._refuse(message, _wrapped(error))
        return not self._closing

    def _handle(self, message: Message) -> None:
        if isinstance(message, Arrived):
            self._arrive(message)
        elif isinstance(message, wire.Cancel):
            self._cancel(message.request_id)
        elif isinstance(message, wire.Stats):
            self._send(wire.Reply(message.call, self.stats()))
        elif isinstance(message, wire.Ping):
            self._send(wire.Reply(message.call, None))
        elif isinstance(message, Withdrawn):
            self.meter.cancelled += 1
        elif isinstance(message, Refused):
            self.meter.failed += 1
            self.output.fail(message.request_id, wire.rebuild_error(message.error))
        elif isinstance(message, (EmbedJob, ScoreJob)):
            self._embeds.append(message)
        else:
            self._closing = True

    def _refuse(self, message: Message, error: EdgeLLMError) -> None:
        if isinstance(message, Arrived):
            self._fail(message.request.id, error)  # with what of it is in the queue already
        elif (call := getattr(message, "call", None)) is not None:
            self._send(wire.Failed(call, wire.error_info(error)))
        else:
            self._fail_all(error)

    # -- requests ----------------------------------------------------------------------------

    def _arrive(self, message: Arrived) -> None:
        request = message.request
        if request.id in self.output.groups:
            raise InvalidRequestError(f"request id {request.id} is in use", param="id")
        if self.backend.info.is_encoder:
            raise InvalidRequestError(
                "this model was loaded to embed, not to generate", param="model"
            )
        if not message.prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        sampling = request.sampling
        prompt, n_slid, turns = self._fit(message)
        plain = needs_all_logits(sampling, self.backend.limits.attached_top_k)
        sequences = [
            Sequence(
                request,
                prompt,
                index=i,
                arrival=message.arrival,
                plain=plain,
                stop_ids=frozenset(sampling.stop_token_ids),
            )
            for i in range(max(sampling.n, sampling.best_of or 0))
        ]
        for seq in sequences:
            seq.turns = turns
        self.scheduler.add(sequences)
        warning = f"the oldest {n_slid} tokens were dropped to fit the context" if n_slid else None
        self.output.groups[request.id] = Group(request, sequences, warning, n_slid)
        if message.constraint is not None:
            self._constrain(sequences, message.constraint)
        seed = sampling.seed if sampling.seed is not None else self._random.getrandbits(32)
        for seq in sequences:
            seq.sampler = self.backend.make_sampler(sampling, seed + seq.index, prompt)
        self.meter.prompt_tokens += len(prompt)

    def _constrain(self, sequences: list[Sequence], constraint: Any) -> None:
        for seq in sequences:
            seq.constraint = constraint if seq.index == 0 else constraint.clone()
        for seq in sequences:
            self.chooser.prepare(seq)

    def _fit(self, message: Arrived) -> tuple[array[int], int, tuple[int, ...]]:
        """A prompt that fits, how many tokens it lost for that, and where its turns begin now."""
        request, prompt, turns = message.request, message.prompt, message.turn_starts
        n_ctx = self.backend.limits.n_ctx_seq
        if request.overflow is not Overflow.SLIDE or len(prompt) < n_ctx:
            return prompt, 0, turns
        wanted = request.sampling.max_tokens or n_ctx // 4
        n_keep = min(request.n_keep, n_ctx // 2)
        need = len(prompt) - n_ctx + min(wanted, n_ctx // 4) + 1
        n = to_drop(len(prompt), n_keep, turns, need)
        if turns and n_keep + n not in turns:
            n = _all_but_the_last_turn(len(prompt), n_keep, turns, n_ctx)
        turns = tuple(t - n for t in turns if t >= n_keep + n)
        return prompt[:n_keep] + prompt[n_keep + n :], n, turns

    def _cancel(self, request_id: str) -> None:
        group = self.output.groups.get(request_id)
        if group is None:
            return
        self.meter.cancelled += 1
        now = self._clock()
        for seq in group.sequences:
            if seq.state is not State.FINISHED:
                self._let_go(seq)
                self.output.end(seq, FinishReason.CANCELLED, now)

    def _let_go(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.chooser.forget(seq)
        if seq.sampler is not None:
            self.backend.free_sampler(seq.sampler)
            seq.sampler = None

    def _finish(self, seq: Sequence) -> None:
        if self.scheduler.should_save(seq):
            self._left = seq.slot, seq.tokens[: seq.n_computed]
        if seq.request.pin_prefix and seq.index == 0:
            self._finish_pinned(seq)
        else:
            self._let_go(seq)
        if seq.request.id not in self.output.groups:
            self.meter.finished += 1

    def _fail(self, request_id: str, error: EdgeLLMError) -> None:
        self.meter.failed += 1
        group = self.output.fail(request_id, error)
        for seq in group.sequences if group else ():
            if seq.state is not State.FINISHED:
                self._let_go(seq)

    def _fail_all(self, error: Exception) -> None:
        for request_id in list(self.output.groups):
            self._fail(request_id, _wrapped(error))

    # -- one step ----------------------------------------------------------------------------

    def _step(self) -> None:
        t0 = self._clock()
        self._guess()
        step = self.scheduler.schedule(t0)
        is_good = self._apply(step.ops)
        for seq in step.finished:
            self.output.end(seq, FinishReason.LENGTH, t0)
            self._finish(seq)
        if not is_good or not step.work:
            return
        t1 = self._clock()
        code = self._decode(step.work)
        t2 = self._clock()
        if code != OK:
            self._recover(step, code)
            return
        n_decode = self._update(step.work)
        t3 = self._clock()
        self._measure(step, n_decode, (t0, t1, t2, t3))
        # Where the device computes alone, the next step is on its way before this one is told.
        self._delivers_later = self.backend.limits.is_async and self.scheduler.has_work

    def _measure(
        self, step: sched.Step, n_chosen: int, times: tuple[float, float, float, float]
    ) -> None:
        t0, t1, t2, t3 = times
        sampled = self._sampled_at
        # A saved state is counted by itself: compared with what computing it took, not part of it.
        self.scheduler.costs.observe(
            sum(1 for w in step.work if w.n_out), step.n_prefill, sampled - t1 - self._saving_s
        )
        parts = (t1 - t0, t2 - t1, sampled - t2, t3 - sampled)
        self.meter.step(t3, step.n_prefill, n_chosen, parts)
        if not step.n_prefill:
            n_guesses = sum(len(w.draft) for w in step.work)
            self.spec.observe(len(step.work), n_chosen, n_guesses, t3 - t0)

    def _guess(self) -> None:
        self.spec.propose(self.scheduler.running)
        for seq in self.scheduler.running:
            if seq.constraint is not None and seq.is_decoding and not seq.draft:
                seq.draft = self.chooser.forced(seq) if self.spec.can_rewind else []

    def _apply(self, ops: list[Op]) -> bool:
        """Carry out the scheduler's operations; False: a checkpoint was refused, plan again."""
        self._left = None
        backend = self.backend
        is_good = True
        for op in ops:
            if isinstance(op, Copy):
                backend.seq_cp(op.source, op.target, op.n)
            elif isinstance(op, Remove):
                backend.seq_rm(op.seq_id, op.start)
            elif isinstance(op, Shift):
                backend.seq_shift(op.seq_id, op.start, op.n)
            elif not self._restore(op):
                backend.seq_rm(op.seq_id, 0)
                is_good = not self.scheduler.restore_failed(op) and is_good
        return is_good

    def _restore(self, op: Restore) -> bool:
        saved = self.scheduler.checkpoints.get(op.key)
        if saved is None or not self.backend.state_set(op.seq_id, saved.state):
            return False
        # Where tokens can be taken back, guesses may lie in a state above the tokens it is for.
        exact = op.n == len(saved.tokens) and not self.backend.limits.can_rewind
        return exact or self.backend.seq_rm(op.seq_id, op.n)

    def _decode(self, work: list[sched.Work]) -> int:
        spans = []
        for w in work:
            tokens = w.seq.tokens[w.start : w.start + w.n]
            if w.draft:
                tokens.extend(w.draft)
            spans.append(Span(w.seq.slot, w.start, tokens, w.n_out))
            if not w.seq.is_begun:
                w.seq.is_begun = True
                self.output.started.append(w.seq.request.id)
                self.output.progress(w.seq, w.seq.n_cached)
                self.meter.cached_tokens += w.seq.n_cached if w.seq.index == 0 else 0
        shape, self._shape = self._shape, [len(span.tokens) for span in spans]
        if self.output.started or shape != self._shape:
            # Before the step: should it end the process, the parent must know who was in it; and
            # one of a new shape takes long to hand over (5 ms and more on an H200).
            self._flush()
        return self.backend.decode(spans, self._flush if self.backend.limits.is_async else None)

    def _update(self, work: list[sched.Work]) -> int:
        """Choose tokens for every row, tell the clients, let go of what ended."""
        rows: list[int] = []
        seqs: list[Sequence] = []
        guessed: list[tuple[sched.Work, int]] = []
        at = 0
        self._saving_s = 0.0
        for w in work:
            self.scheduler.computed(w)
            self.output.progress(w.seq, w.seq.n_computed)
            if w.seq.request.sampling.prompt_logprobs and w.seq.n_output == 0:
                self._read_prompt(w, at)
            if w.draft:
                guessed.append((w, at))
            elif w.n_out and w.seq.n_pending == 0:
                rows.append(at + w.n - 1)
                seqs.append(w.seq)
            if w.seq.n_computed == w.seq.checkpoint_at:
                self._pass_checkpoint(w.seq)
            at += w.n + len(w.draft)
        ahead = [(at, w) for w, at in guessed if _chooses_freely(w.seq)]
        ahead_rows = [at + i for at, w in ahead for i in range(w.n_out)]
        ahead_seqs = [w.seq for _, w in ahead for _ in range(w.n_out)]
        tokens = self.chooser.pick_all(rows + ahead_rows, seqs + ahead_seqs)
        self._sampled_at = now = self._clock()
        for row, seq, token in zip(rows, seqs, tokens, strict=False):
            if seq.state is State.RUNNING:
                seq.draft = []  # guesses that found no room began with this token
                self._take(seq, row, token, now)
        picked = dict(zip(ahead_rows, tokens[len(rows) :], strict=True))
        n = len(rows)
        for w, first in guessed:
            if w.seq.state is State.RUNNING:  # another choice of its request may have failed
                n += self._verify(w, first, picked)
        return n

    def _verify(self, w: sched.Work, first: int, picked: dict[int, Chosen]) -> int:
        """Take row by row while the guesses are right; the tokens taken.

        ``picked``: rows whose tokens are chosen already.
        """
        seq, n = w.seq, 0
        seq.draft = []
        for i in range(len(w.draft) + 1):
            token = picked.get(first + i)
            if token is None:
                token = self.chooser.pick(first + i, seq)
            n += 1
            self._take(seq, first + i, token, self._clock())
            if seq.state is not State.RUNNING:
                break
            if i == len(w.draft) or token != w.draft[i]:
                self.scheduler.reject(seq)
                break
            self.scheduler.accepted(seq, array("i", [token]))
        if seq.spec is not None:
            seq.spec.learn(len(w.draft), n - 1)
        seq.n_drafted += len(w.draft)
        seq.n_accepted += n - 1
        self.meter.drafted_tokens += len(w.draft)
        self.meter.accepted_tokens += n - 1
        self._sampled_at = self._clock()
        return n

    def _read_prompt(self, w: sched.Work, at: int) -> None:
        """Log-probabilities of the prompt tokens that these rows predict."""
        seq = w.seq
        if seq.prompt_logprobs is None:
            seq.prompt_logprobs = [None]
        k = seq.request.sampling.logprobs or 0
        for i in range(w.n):
            position = w.start + i + 1
            if len(seq.prompt_logprobs) <= position < seq.n_prompt:
                token = seq.tokens[position]
                seq.prompt_logprobs.append(self.backend.logprobs(at + i, token, k))

    def _pass_checkpoint(self, seq: Sequence) -> None:
        seq.checkpoint_at, seq.checkpoint_next = seq.checkpoint_next, 0
        if self.scheduler.may_pause(seq):
            self._save(seq.slot, seq.tokens[: seq.n_computed])

    def _save(self, slot: int, tokens: array[int]) -> None:
        if len(tokens) > self.scheduler.checkpoints.n_most:
            return
        began = self._clock()
        state = self.backend.state_get(slot)
        took = self._clock() - began
        self._saving_s += took
        self.scheduler.costs.observe_save(len(tokens), took)
        self.scheduler.checkpoints.add(tokens, state)

    def _take(self, seq: Sequence, row: int, token: Chosen, now: float) -> None:
        """One chosen token: constraint, log-probability, text, end, slide."""
        if isinstance(token, EdgeLLMError):
            self._fail(seq.request.id, token)
            return
        seq.n_failures = 0
        sampling = seq.request.sampling
        if seq.constraint is not None and token not in self._eog:
            try:
                seq.constraint.accept(token)
            except EdgeLLMError as error:
                self._fail(seq.request.id, error)
                return
        if sampling.logprobs is not None or sampling.best_of is not None:
            chosen = self.backend.logprobs(row, token, sampling.logprobs or 0)
            seq.logprobs.append(chosen)
            seq.cum_logprob += chosen.logprob
        reason = self.output.token(seq, token, now)
        if reason is not None:
            self._finish(seq)
            return
        if not seq.end_allowed and seq.n_output >= sampling.min_tokens:
            seq.end_allowed = True
            self.backend.allow_end(seq.sampler)
        if seq.constraint is not None:
            self.chooser.prepare(seq)
        if len(seq.tokens) >= self.backend.limits.n_ctx_seq:
            self._slide(seq)

    def _slide(self, seq: Sequence) -> None:
        n_ctx = self.backend.limits.n_ctx_seq
        n_keep = min(seq.request.n_keep, n_ctx // 2)
        n = to_drop(len(seq.tokens), n_keep, seq.turns, max(1, (n_ctx - n_keep) // 4))
        self.scheduler.slide(seq, n_keep, n)
        if seq.spec is not None:
            seq.spec.rewind()

    def _recover(self, step: sched.Step, code: int) -> None:
        """A batch failed: put the cache back where it was, and find out whose fault it is."""
        for w in step.work:
            self._put_back(w)
        if code == NO_CELLS:
            self._make_cells(step)
        elif code != ABORTED:
            self._try_apart(step.work, code)

    def _put_back(self, w: sched.Work) -> None:
        """Forget what the failed step computed of it, or all of it where a part cannot go."""
        if not self.backend.seq_rm(w.seq.slot, w.start):
            self.scheduler.preempt(w.seq, None)

    def _make_cells(self, step: sched.Step) -> None:
        """The cache has no room although the count says so (window caches)."""
        running = self.scheduler.running
        if self.scheduler.give_up_cells() or not running:
            return
        error = DecodeError(
            f"no cells for {step.n_tokens} tokens although the sequence runs alone",
            code=NO_CELLS,
            hint="plan a larger context",
        )
        self._fail(running[0].request.id, error)

    def _try_apart(self, work: list[sched.Work], code: int) -> None:
        """Compute each sequence's part alone: the one that fails is the one to end."""
        for w in work:
            if w.seq.state is State.FINISHED:
                continue
            if w.seq.state is State.PREEMPTED:
                # What it held could not be put back: it begins again, but not for ever.
                w.seq.n_failures += 1
                if len(work) > 1 and w.seq.n_failures < MAX_FAILURES:
                    continue
                alone = code
            else:
                # Who ended while the failure was looked for gives its cells back first.
                self._apply(self.scheduler.take_ops())
                alone = self._decode([w]) if len(work) > 1 else code
            if alone == OK:
                self._update([w])
                continue
            if alone in (NO_CELLS, ABORTED):  # not its fault: with the next step
                self._put_back(w)
                continue
            error = DecodeError(f"llama_decode failed with code {alone}", code=alone)
            self._fail(w.seq.request.id, error)

    # -- embeddings --------------------------------------------------------------------------

    def _embed(self, job: EmbedJob | ScoreJob) -> None:
        try:
            if isinstance(job, ScoreJob):
                self._send(wire.Reply(job.call, self._score(job)))
            else:
                self._send(wire.Reply(job.call, embed(self.backend, job)))
        except EdgeLLMError as error:
            self._send(wire.Failed(job.call, wire.error_info(error)))

    def _score(self, job: ScoreJob) -> int:
        if self.scheduler.has_work:
            raise InvalidRequestError("scoring needs an engine without other requests")
        self.scheduler.cells.drop_retained()
        self._apply(self.scheduler.take_ops())
        return score(self.backend, job)

    # -- what goes out -----------------------------------------------------------------------

    def _flush(self) -> None:
        events, started = self.output.take()
        if events or started:
            self._send(wire.Events(events, started))

    def stats(self) -> EngineStats:
        """Everything the loop knows of itself, now."""
        now = self._clock()
        meter, scheduler = self.meter, self.scheduler
        prefill_tps, decode_tps = meter.rates(now)
        states = [s.state for s in scheduler.waiting]
        return EngineStats(
            uptime_s=now - self._began,
            n_steps=meter.n_steps,
            running=len(scheduler.running),
            waiting=states.count(State.WAITING),
            preempted=states.count(State.PREEMPTED),
            n_cells=self.backend.limits.n_cells,
            cells_used=scheduler.n_cells_used,
            cells_retained=scheduler.n_cells_retained,
            prompt_tokens=meter.prompt_tokens,
            cached_tokens=meter.cached_tokens,
            generated_tokens=meter.generated_tokens,
            drafted_tokens=meter.drafted_tokens,
            accepted_tokens=meter.accepted_tokens,
            requests_finished=meter.finished,
            requests_cancelled=meter.cancelled,
            requests_failed=meter.failed,
            preemptions=scheduler.n_preemptions,
            prefix_hits=scheduler.n_hits,
            prefix_misses=dict(scheduler.misses),
            prefill_tps=prefill_tps,
            decode_tps=decode_tps,
            step=meter.timings(),
            speculation=self.spec.status,
            requests=tuple(_running(s, now) for s in [*scheduler.running, *scheduler.waiting]),
        )


def _wrapped(error: Exception) -> EdgeLLMError:
    return error if isinstance(error, EdgeLLMError) else EngineError(repr(error))


def _chooses_freely(seq: Sequence) -> bool:
    """Whether its choice from a row depends on the row alone: no random numbers, no memory, no
    constraint, no end that is still forbidden."""
    sampling = seq.request.sampling
    is_plain = sampling.temperature == 0.0 and not has_penalties(sampling)
    return is_plain and seq.constraint is None and seq.end_allowed


def _all_but_the_last_turn(n: int, n_keep: int, turns: tuple[int, ...], n_ctx: int) -> int:
    """Tokens dropped when nothing but the first ``n_keep`` and the last turn stays; raises when
    these do not fit: a turn is never cut."""
    n_drop = max(0, turns[-1] - n_keep)
    if n - n_drop >= n_ctx:
        raise ContextOverflowError(
            n - n_drop,
            n_ctx,
            what="the last message, with what must stay before it, has",
            hint="shorten the message, or plan a larger context",
        )
    return n_drop


def _running(seq: Sequence, now: float) -> RunningRequest:
    times = seq.token_times
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    return RunningRequest(
        id=seq.request.id,
        client=seq.request.client,
        state=seq.state.value,
        priority=int(seq.request.priority),
        n_prompt=seq.n_prompt,
        n_computed=seq.n_computed,
        n_output=seq.n_output,
        age_s=now - seq.arrival,
        ttft_s=times[0] - seq.arrival if times else None,
        decode_tps=(len(times) - 1) / span if span > 0 else None,
    )
