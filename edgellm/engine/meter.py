"""The loop's own numbers: what a step's time goes to, and the rates of the last second."""

from __future__ import annotations

from collections import deque

from edgellm.metrics import StepTimings

WINDOW_S = 1.0
N_STEPS = 64


class Meter:
    """Fed once a step; read when somebody asks."""

    def __init__(self) -> None:
        self.n_steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.finished = 0
        self.cancelled = 0
        self.failed = 0
        self.last: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
        """Seconds of the last step's schedule, decode, sample and deliver."""
        self._parts: deque[tuple[float, float, float, float]] = deque(maxlen=N_STEPS)
        self._recent: deque[tuple[float, int, int]] = deque()

    def step(
        self,
        now: float,
        n_prefill: int,
        n_decode: int,
        parts: tuple[float, float, float, float],
    ) -> None:
        """One step: tokens computed of prompts and chosen, seconds of its four parts."""
        self.n_steps += 1
        self.generated_tokens += n_decode
        self.last = parts
        self._parts.append(parts)
        self._recent.append((now, n_prefill, n_decode))
        while self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()

    def timings(self) -> StepTimings:
        n = max(1, len(self._parts))
        schedule, decode, sample, deliver = (
            (sum(column) / n for column in zip(*self._parts, strict=True))
            if self._parts
            else (0.0, 0.0, 0.0, 0.0)
        )
        return StepTimings(schedule_s=schedule, decode_s=decode, sample_s=sample, deliver_s=deliver)

    def rates(self, now: float) -> tuple[float, float]:
        """Prompt tokens and chosen tokens a second, over the last second."""
        recent = [r for r in self._recent if r[0] >= now - WINDOW_S]
        return sum(r[1] for r in recent) / WINDOW_S, sum(r[2] for r in recent) / WINDOW_S
