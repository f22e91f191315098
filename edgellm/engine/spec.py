"""Guessing the next tokens, so that one step may confirm several: and knowing when not to.

A guess costs a row each and is checked by choosing tokens as ever: a row's token is taken when the
guesses before it were right. So the text is what it would have been, whatever was guessed.
"""

from __future__ import annotations

from array import array
from typing import Final

from edgellm.engine.backend import Backend
from edgellm.engine.info import EngineOptions
from edgellm.engine.sequence import Sequence

PLAIN_STEPS: Final = 8
"""Steps without guesses that set the measure."""
TRIAL_STEPS: Final = 32
PAUSE_STEPS: Final = 400


class NgramIndex:
    """Where each three tokens stood last in a sequence: what followed may follow again."""

    __slots__ = ("_after", "_n")

    def __init__(self) -> None:
        self._after: dict[tuple[int, int, int], int] = {}
        self._n = 3

    def propose(self, tokens: array[int], k: int) -> list[int]:
        """At most k tokens that followed the last three tokens before."""
        after = self._after
        for i in range(self._n, len(tokens)):
            after[(tokens[i - 3], tokens[i - 2], tokens[i - 1])] = i
        self._n = max(self._n, len(tokens))
        if len(tokens) < 4:
            return []
        at = after.get((tokens[-3], tokens[-2], tokens[-1]))
        return [] if at is None else list(tokens[at : at + k])

    def rewind(self) -> None:
        """The tokens changed (a context slid): begin again."""
        self._after.clear()
        self._n = 3


class Speculation:
    """Whether to guess now: measured against steps without guesses."""

    def __init__(self, backend: Backend, options: EngineOptions) -> None:
        can_rewind = backend.limits.sharing != "checkpoint"
        self.can_rewind = can_rewind
        self._backend = backend
        self._drafts = options.spec in ("draft", "auto") and backend.has_draft
        self.mode = options.spec if can_rewind else "off"
        self._max = options.spec_max
        self._min_gain = options.spec_min_gain
        self._plain = 0.0
        self._guessed = 0.0
        self._n_plain = 0
        self._n_guessed = 0
        self._pause = 0
        self._why = "" if can_rewind else "the cache cannot take tokens back"

    @property
    def status(self) -> str:
        """off, on, or paused with the reason."""
        if self.mode == "off":
            return f"off: {self._why}" if self._why else "off"
        return f"paused: {self._why}" if self._pause else "on"

    def propose(self, running: list[Sequence]) -> None:
        """Give decoding sequences their guesses for the next step."""
        if self.mode == "off" or self._pause or self._n_plain < PLAIN_STEPS:
            return
        ready = [s for s in running if s.is_decoding and not s.draft]
        for seq in ready:
            if seq.spec is None:
                seq.spec = NgramIndex()
            seq.draft = seq.spec.propose(seq.tokens, self._max)
        if self._drafts:
            # What stood in the text before costs nothing to guess: the model does the rest.
            rest = [s for s in ready if not s.draft]
            drafts = self._backend.draft([(s.slot, s.tokens) for s in rest], self._max)
            for seq, draft in zip(rest, drafts, strict=True):
                seq.draft = draft

    def observe(self, n_seqs: int, n_chosen: int, n_guesses: int, seconds: float) -> None:
        """A step without prefill chose ``n_chosen`` tokens for ``n_seqs`` sequences."""
        if self.mode == "off" or not n_seqs or seconds <= 0:
            return
        rate = n_chosen / n_seqs / seconds
        if n_guesses:
            self._n_guessed += 1
            self._guessed += (rate - self._guessed) / min(self._n_guessed, TRIAL_STEPS)
            self._judge()
        else:
            self._n_plain += 1
            self._plain += (rate - self._plain) / min(self._n_plain, TRIAL_STEPS)
            self._pause = max(0, self._pause - 1)

    def _judge(self) -> None:
        if self._n_guessed < TRIAL_STEPS:
            return
        gain = self._guessed / self._plain - 1 if self._plain else 0.0
        if gain < self._min_gain:
            self._pause = PAUSE_STEPS
            self._why = f"{gain:+.0%} measured, {self._min_gain:.0%} wanted"
            self._n_guessed, self._guessed = 0, 0.0
