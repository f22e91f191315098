"""An answer that is being written: what came of it, what of that is shown, what is saved."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

from edgellm.planner.plan import Plan
from edgellm.request import Usage
from edgellm.tui.pacing import Pacer, share_for
from edgellm.tui.ports import HERE, Delta, Endpoint
from edgellm.tui.sessions import Message, Session
from edgellm.tui.transcript import Turn

LONGEST_TOKEN: Final = 16
"""Characters of a token: more on average has no text that a tokenizer was made for."""


@dataclass
class Live:
    """One answer. The lists are its pieces in order; the counts say how far others have read."""

    session: Session
    message: Message
    turn: Turn
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    n_shown: int = 0
    n_reasoned: int = 0
    n_saved: tuple[int, int] = (0, 0)
    n_tokens: int = 0
    last: Delta | None = None

    def take(self, delta: Delta) -> None:
        if delta.text:
            self.text.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        self.n_tokens += delta.n_tokens
        if delta.finish is not None:
            self.last = delta

    def unshown(self) -> tuple[str, str]:
        """Text and reasoning since this was last asked."""
        text = "".join(self.text[self.n_shown :])
        reasoning = "".join(self.reasoning[self.n_reasoned :])
        self.n_shown, self.n_reasoned = len(self.text), len(self.reasoning)
        return text, reasoning

    def unsaved(self) -> tuple[str, str]:
        """Text and reasoning that are not on disk."""
        n_text, n_reasoning = self.n_saved
        return "".join(self.text[n_text:]), "".join(self.reasoning[n_reasoning:])

    def measured(self) -> tuple[Usage, tuple[float | None, float | None]]:
        """Token counts, decode speed and time to first token, as the engine said them."""
        if self.last is None:
            return Usage(n_output=self.n_tokens), (None, None)
        timings = self.last.timings
        speed = (None, None) if timings is None else (timings.decode_tps, timings.ttft_s)
        return self.last.usage or Usage(n_output=self.n_tokens), speed


def share_of(plan: Plan | None) -> float:
    """What drawing may take beside a model that runs here by ``plan``; None: it runs elsewhere."""
    if plan is None:
        return share_for(None, 0, 0)
    return share_for(plan.verdict, plan.params.n_threads, os.cpu_count() or 1)


def pacer_for(endpoint: Endpoint) -> Pacer:
    """Frames as often as eyes want them, unless they would be taken from the model's own cores."""
    return Pacer(share_of(endpoint.plan if endpoint.where == HERE else None))


async def count_tokens(endpoint: Endpoint, text: str) -> tuple[int, bool]:
    """Tokens of a message and whether that is exact: far beyond the context an estimate does."""
    if len(text) > LONGEST_TOKEN * endpoint.n_ctx:
        return len(text) // 4, False
    return await endpoint.count([{"role": "user", "content": text}]), True
