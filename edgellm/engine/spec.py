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
"""Steps without guesses that set the measure, for each size of batch."""
TRIAL_STEPS: Final = 32
HOPELESS_STEPS: Final = 8
HOPELESS: Final = -0.2
"""A trial that loses so much ends early: a step with guesses may take four times one without."""
PAUSE_STEPS: Final = 400
MAX_PAUSE: Final = 16 * PAUSE_STEPS
FIRST_GUESSES: Final = 2


class NgramIndex:
    """Where each three tokens stood last in a sequence: what followed may follow again."""

    __slots__ = ("_after", "_n", "n_guesses")

    def __init__(self) -> None:
        self._after: dict[tuple[int, int, int], int] = {}
        self._n = 3
        self.n_guesses = FIRST_GUESSES
        """How many tokens are worth guessing at once: more while guesses are right."""

    def propose(self, tokens: array[int], most: int) -> list[int]:
        """At most ``most`` tokens that followed the last three tokens before."""
        after = self._after
        for i in range(self._n, len(tokens)):
            after[(tokens[i - 3], tokens[i - 2], tokens[i - 1])] = i
        self._n = max(self._n, len(tokens))
        if len(tokens) < 4:
            return []
        at = after.get((tokens[-3], tokens[-2], tokens[-1]))
        return [] if at is None else list(tokens[at : at + min(most, self.n_guesses)])

    def learn(self, n_guessed: int, n_right: int) -> None:
        """Of so many guesses so many were right."""
        self.n_guesses = 2 * n_guessed if n_right == n_guessed else n_right + 1

    def rewind(self) -> None:
        """The tokens changed (a context slid): begin again."""
        self._after.clear()
        self._n = 3


class _Mean:
    """A mean that follows its newest values."""

    __slots__ = ("n", "value")

    def __init__(self) -> None:
        self.n = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.n += 1
        self.value += (value - self.value) / min(self.n, TRIAL_STEPS)


class Speculation:
    """Whether to guess now: measured against steps of as many sequences without guesses."""

    def __init__(self, backend: Backend, options: EngineOptions) -> None:
        self.can_rewind = backend.limits.can_rewind
        self.mode = options.spec if self.can_rewind else "off"
        self._backend = backend
        self._drafts = options.spec in ("draft", "auto") and backend.has_draft
        self._most = options.spec_max
        self._min_gain = options.spec_min_gain
        self._plain: dict[int, _Mean] = {}
        self._gain = _Mean()
        self._pause = 0
        self._next_pause = PAUSE_STEPS
        self._n_guesses = 0
        self._n_right = 0
        self._why = "" if self.can_rewind else "the cache cannot take tokens back"

    @property
    def status(self) -> str:
        """off, on or paused, with the reason, the gain and how many guesses were right."""
        if self.mode == "off":
            return f"off: {self._why}" if self._why else "off"
        parts = [f"paused: {self._why}" if self._pause else "on"]
        if self._gain.n:
            parts.append(f"{self._gain.value:+.0%} measured")
        if self._n_guesses:
            parts.append(f"{self._n_right / self._n_guesses:.0%} of guesses right")
        return ", ".join(parts)

    def propose(self, running: list[Sequence]) -> None:
        """Give decoding sequences their guesses for the next step."""
        if self.mode == "off" or self._pause:
            return
        decoding = [s for s in running if s.is_decoding]
        plain = self._plain.get(len(decoding).bit_length())
        if plain is None or plain.n < PLAIN_STEPS:
            return
        ready = [s for s in decoding if not s.draft]
        for seq in ready:
            if seq.spec is None:
                seq.spec = NgramIndex()
            seq.draft = seq.spec.propose(seq.tokens, self._most)
        if self._drafts:
            # What stood in the text before costs nothing to guess: the model does the rest.
            rest = [s for s in ready if not s.draft]
            if not rest:
                return
            drafts = self._backend.draft([(s.slot, s.tokens) for s in rest], self._most)
            for seq, draft in zip(rest, drafts, strict=True):
                seq.draft = draft

    def observe(self, n_seqs: int, n_chosen: int, n_guesses: int, seconds: float) -> None:
        """A step without prefill chose ``n_chosen`` tokens for ``n_seqs`` sequences."""
        if self.mode == "off" or not n_seqs or seconds <= 0:
            return
        plain = self._plain.setdefault(n_seqs.bit_length(), _Mean())
        if not n_guesses:
            plain.add(seconds)
            self._pause = max(0, self._pause - 1)
            return
        self._n_guesses += n_guesses
        self._n_right += n_chosen - n_seqs
        if plain.n:
            self._gain.add(n_chosen / n_seqs * plain.value / seconds - 1)
            self._judge()

    def _judge(self) -> None:
        gain, n = self._gain.value, self._gain.n
        if n < TRIAL_STEPS and not (n >= HOPELESS_STEPS and gain < HOPELESS):
            return
        if gain >= self._min_gain:
            self._next_pause = PAUSE_STEPS
            return
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
        self._why = f"{gain:+.0%} measured, {self._min_gain:.0%} wanted"
        self._gain = _Mean()
