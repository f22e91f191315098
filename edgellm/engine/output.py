"""From chosen tokens to the events a client sees: text, stops, choices, usage, timings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from edgellm.engine.backend import Backend
from edgellm.engine.sequence import Sequence
from edgellm.engine.wire import error_info
from edgellm.errors import EdgeLLMError
from edgellm.metrics import RequestTimings, request_timings
from edgellm.request import FinishReason, Progress, Request, TokenEvent, TokenLogprob, Usage


class Joined:
    """What a choice has said since its last event."""

    __slots__ = ("since", "text", "tokens")

    def __init__(self, since: float) -> None:
        self.since = since
        self.text = ""
        self.tokens: list[int] = []


class Group:
    """One request and its choices; knows when the last of them has ended."""

    __slots__ = ("best", "held", "joined", "n_slid", "open", "request", "sequences", "warning")

    def __init__(
        self,
        request: Request,
        sequences: list[Sequence],
        warning: str | None = None,
        n_slid: int = 0,
    ) -> None:
        self.n_slid = n_slid
        self.request = request
        self.sequences = sequences
        self.open = len(sequences)
        sampling = request.sampling
        self.best = sampling.best_of is not None and sampling.best_of > sampling.n
        self.held: dict[int, list[TokenEvent]] = {}
        self.joined: dict[int, Joined] = {}
        self.warning = warning

    def take_joined(self, index: int) -> tuple[str, tuple[int, ...]]:
        """Text and tokens of a choice that no event has carried yet."""
        joined = self.joined.pop(index, None)
        return (joined.text, tuple(joined.tokens)) if joined is not None else ("", ())

    def usage(self) -> Usage:
        """Counts over all choices; the shared prompt counts once."""
        first = self.sequences[0]
        return Usage(
            n_prompt=first.n_prompt,
            n_output=sum(s.n_output for s in self.sequences),
            n_cached=first.n_cached,
            n_drafted=sum(s.n_drafted for s in self.sequences),
            n_accepted=sum(s.n_accepted for s in self.sequences),
            n_slid=self.n_slid + max(s.n_slid for s in self.sequences),
        )

    def timings(self, now: float) -> RequestTimings:
        """Timings of the choice that spoke first."""
        first = min(
            self.sequences, key=lambda s: s.token_times[0] if s.token_times else float("inf")
        )
        return request_timings(
            arrival=first.arrival,
            scheduled=first.scheduled,
            token_times=first.token_times,
            end=now,
            n_computed=first.n_prompt - first.n_cached,
        )


class Output:
    """Collects the events of a step."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._piece = backend.piece
        self._pieces: dict[int, bytes] = {}
        self._eog = frozenset(backend.info.eog_ids)
        self.groups: dict[str, Group] = {}
        self.events: list[TokenEvent] = []
        self.started: list[str] = []

    def text_of(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece

    def progress(self, seq: Sequence, n_computed: int) -> None:
        """Tell a client that wants it how far its prompt was read."""
        if not seq.request.wants_progress or seq.token_times or seq.index:
            return
        seconds = self._clock() - (seq.scheduled or seq.arrival)
        read = Progress(seq.n_prompt, seq.n_cached, n_computed, seconds)
        self.events.append(TokenEvent(request_id=seq.request.id, progress=read))

    def token(self, seq: Sequence, token: int, now: float) -> FinishReason | None:
        """Append a chosen token, tell the client, and say whether the sequence ends with it."""
        seq.tokens.append(token)
        seq.token_times.append(now)
        reason: FinishReason | None = None
        if token in self._eog or token in seq.stop_ids:
            ends = token in seq.stop_ids or not seq.request.sampling.ignore_eos
            reason = FinishReason.STOP if ends and seq.end_allowed else None
            text = ""
        else:
            text = seq.stream.push(self.text_of(token), may_stop=seq.end_allowed)
            if seq.stream.matched is not None:
                reason = FinishReason.STOP
        if reason is None and seq.n_output >= seq.max_output:
            reason = FinishReason.LENGTH
        if reason is None and self._is_finished_grammar(seq):
            reason = FinishReason.STOP
        if reason is None:
            self._emit(seq, text, token, now)
        else:
            self._end(seq, text, (token,), reason, now)
        return reason

    @staticmethod
    def _is_finished_grammar(seq: Sequence) -> bool:
        return seq.constraint is not None and bool(seq.constraint.is_finished)

    def _emit(self, seq: Sequence, text: str, token: int, now: float) -> None:
        group = self.groups[seq.request.id]
        if seq.logprobs or seq.prompt_logprobs is not None or group.best or group.warning:
            self._push(group, self._rich(seq, group, text, (token,), None))
            return
        tokens: tuple[int, ...] = (token,)
        if seq.request.event_interval_s > 0:
            if not self._is_due(group, seq, text, token, now):
                return
            text, tokens = group.take_joined(seq.index)
            group.joined[seq.index] = Joined(now)
        self._say(group, seq.index, text, tokens)

    def _say(self, group: Group, index: int, text: str, tokens: tuple[int, ...]) -> None:
        """An event with nothing but text and its tokens."""
        self.events.append(
            TokenEvent(request_id=group.request.id, index=index, text=text, token_ids=tokens)
        )

    @staticmethod
    def _is_due(group: Group, seq: Sequence, text: str, token: int, now: float) -> bool:
        """Add to what waits for the next event, and say whether that goes now."""
        joined = group.joined.setdefault(seq.index, Joined(0.0))
        joined.text += text
        joined.tokens.append(token)
        return now - joined.since >= seq.request.event_interval_s

    def _rich(
        self,
        seq: Sequence,
        group: Group,
        text: str,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
    ) -> TokenEvent:
        logprobs: tuple[TokenLogprob, ...] | None = tuple(seq.logprobs) or None
        if seq.request.sampling.logprobs is None:
            logprobs = None
        seq.logprobs = []
        prompt, seq.prompt_logprobs = seq.prompt_logprobs, None
        warning, group.warning = group.warning, None
        stop = seq.stream.matched if reason is FinishReason.STOP else None
        return TokenEvent(
            request_id=seq.request.id,
            index=seq.index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=None if prompt is None else tuple(prompt),
            prompt_token_ids=None if prompt is None else tuple(seq.tokens[: seq.n_prompt]),
            finish_reason=reason,
            stop=stop,
            warning=warning,
        )

    def _push(self, group: Group, event: TokenEvent) -> None:
        if group.best:
            group.held.setdefault(event.index, []).append(event)
        else:
            self.events.append(event)

    def end(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """A sequence ends without another token."""
        self._end(seq, "", (), reason, now)

    def _end(
        self, seq: Sequence, text: str, tokens: tuple[int, ...], reason: FinishReason, now: float
    ) -> None:
        group = self.groups[seq.request.id]
        waiting, before = group.take_joined(seq.index)
        text, tokens = waiting + text + seq.stream.finish(), before + tokens
        if seq.stream.matched is not None and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP
        self._push(group, self._rich(seq, group, text, tokens, reason))
        self._close_one(group, now)

    def _close_one(self, group: Group, now: float) -> None:
        group.open -= 1
        if group.open:
            return
        del self.groups[group.request.id]
        if group.best:
            self._release_best(group)
        last = self.events.pop()
        totals = {"usage": group.usage(), "timings": group.timings(now)}
        self.events.append(msgspec.structs.replace(last, is_last=True, **totals))

    def _release_best(self, group: Group) -> None:
        ranked = sorted(group.sequences, key=_mean_logprob, reverse=True)
        for place, seq in enumerate(ranked[: group.request.sampling.n]):
            for event in group.held[seq.index]:
                self.events.append(msgspec.structs.replace(event, index=place))

    def fail(self, request_id: str, error: EdgeLLMError) -> Group | None:
        """End a request with an error; its group, so that its sequences can be let go."""
        group = self.groups.pop(request_id, None)
        if group is not None:
            self._flush_joined(group)
        self.events.append(
            TokenEvent(
                request_id=request_id,
                finish_reason=FinishReason.ERROR,
                is_last=True,
                error=error_info(error),
            )
        )
        return group

    def _flush_joined(self, group: Group) -> None:
        for index in list(group.joined):
            text, tokens = group.take_joined(index)
            if tokens:
                self._say(group, index, text, tokens)

    def take(self) -> tuple[list[TokenEvent], list[str]]:
        """The step's events and the requests that began with it."""
        taken = (self.events, self.started)
        self.events, self.started = [], []
        return taken


def _mean_logprob(seq: Sequence) -> float:
    # One that ended before it said anything is nobody's best.
    return seq.cum_logprob / seq.n_output if seq.n_output else -math.inf
