"""What of a conversation fits into the model's context. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edgellm.request import SamplingParams
from edgellm.tui.sessions import Message

RESERVE: Final = 256
"""Tokens an answer should have room for when nobody set max_tokens."""


class Fit(msgspec.Struct, frozen=True):
    """How full the context is, and how many of the oldest messages would slide out."""

    n_used: int
    n_ctx: int
    n_sliding: int

    @property
    def fraction(self) -> float:
        return self.n_used / self.n_ctx if self.n_ctx else 0.0

    @property
    def text(self) -> str:
        if not self.n_ctx:
            return f"{self.n_used:,} tokens"
        slide = f" · the oldest {self.n_sliding} will slide out" if self.n_sliding else ""
        return f"{self.n_used:,} / {self.n_ctx:,}{slide}"


def fit(counts: Sequence[int], n_ctx: int, reserve: int = RESERVE) -> Fit:
    """``counts`` are the messages' tokens, the system prompt first and never dropped.

    Sliding drops whole turns from the oldest on: a question with its answer.
    """
    total = sum(counts)
    if not n_ctx:
        return Fit(total, 0, 0)
    left, n_sliding = total, 0
    while left + reserve > n_ctx and n_sliding + 2 < len(counts):
        left -= sum(counts[1 + n_sliding : 3 + n_sliding])
        n_sliding += 2
    return Fit(total, n_ctx, n_sliding)


def to_chat(system: str, thread: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as the messages a model is asked with; failed empty answers are left out."""
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    messages.extend(
        {"role": message.role, "content": message.content}
        for message in thread
        if message.content or message.role == "user"
    )
    return messages


def to_sampling(values: dict[str, Any]) -> SamplingParams:
    """A conversation's own settings over the defaults; raises InvalidRequestError."""
    known = {k: v for k, v in values.items() if k in SamplingParams.__struct_fields__}
    return SamplingParams(**known).validate()
