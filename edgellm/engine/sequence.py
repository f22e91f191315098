"""One continuation of one request: its tokens, what of them is computed, and what it has said."""

from __future__ import annotations

import enum
from array import array
from typing import Any

from edgellm.engine.stream import TextStream
from edgellm.request import Request, TokenLogprob


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """A request's choice number ``index``. Plain attributes: the scheduler and the loop write them.

    ``tokens`` is the prompt and all output; the first ``n_computed`` are in the cache under
    ``slot`` (a seq_id, -1 without one). A sequence needs prefill while more than one token is not
    computed, and decodes when one is.
    """

    __slots__ = (
        "arrival",
        "checkpoint_at",
        "checkpoint_next",
        "constraint",
        "cum_logprob",
        "draft",
        "end_allowed",
        "index",
        "is_begun",
        "level",
        "logprobs",
        "max_output",
        "miss",
        "n_accepted",
        "n_cached",
        "n_computed",
        "n_drafted",
        "n_failures",
        "n_prompt",
        "n_slid",
        "order",
        "plain",
        "prompt_logprobs",
        "request",
        "sampler",
        "scheduled",
        "slot",
        "spec",
        "state",
        "stop_ids",
        "stream",
        "token_times",
        "tokens",
        "turns",
        "waiting_since",
    )

    def __init__(
        self,
        request: Request,
        prompt: array[int],
        *,
        index: int = 0,
        order: int = 0,
        arrival: float = 0.0,
        plain: bool = False,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request = request
        self.index = index
        self.order = order
        self.arrival = arrival
        self.waiting_since = arrival
        self.tokens = array("i", prompt)
        self.n_prompt = len(prompt)
        self.n_computed = 0
        self.n_cached = 0
        self.is_begun = False
        """Whether a step has computed some of it."""
        self.n_slid = 0
        self.n_drafted = 0
        self.n_accepted = 0
        self.n_failures = 0
        """Failed steps since its last token that took its cells with them."""
        self.level = 0.0
        """Its urgency, waiting counted, when it got its slot."""
        self.slot = -1
        self.state = State.WAITING
        self.plain = plain
        self.stop_ids = stop_ids
        self.sampler: Any = None
        self.spec: Any = None
        self.draft: list[int] = []
        self.stream = TextStream(request.sampling.stop)
        self.scheduled: float | None = None
        self.token_times: list[float] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.cum_logprob = 0.0
        self.max_output = 0
        self.end_allowed = request.sampling.min_tokens == 0
        self.checkpoint_at = 0
        """Where the state is saved next; 0: nowhere."""
        self.checkpoint_next = 0
        """And where after that."""
        self.constraint: Any = None
        self.turns: tuple[int, ...] = ()
        self.miss: str | None = None

    @property
    def n_output(self) -> int:
        """Tokens generated so far (those that slid away included)."""
        return len(self.tokens) + self.n_slid - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        """Only the newest token is to be computed."""
        return len(self.tokens) - self.n_computed == 1 and len(self.tokens) + self.n_slid > (
            self.n_prompt
        )

    def __repr__(self) -> str:
        return (
            f"<{self.request.id}#{self.index} {self.state.value} slot {self.slot} "
            f"{self.n_computed}/{len(self.tokens)}>"
        )


def to_drop(n_tokens: int, n_keep: int, turns: tuple[int, ...], need: int) -> int:
    """How many tokens after the first ``n_keep`` a sliding context drops, at least ``need``.

    Whole turns when a turn begins far enough in (``turns``: token offsets, ascending), else just
    what is needed. The newest token always stays.
    """
    most = n_tokens - n_keep - 1
    for turn in turns:
        if need <= turn - n_keep <= most:
            return turn - n_keep
    return max(0, min(need, most))
