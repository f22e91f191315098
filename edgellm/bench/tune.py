"""Search for better settings by measuring: one variable at a time, from the plan outwards.

The policy is pure: it asks a ``measure`` function and remembers every answer in a journal, so an
interrupted search that is started again asks only for what it does not know and ends the same.

Noise is met in three ways: nothing counts that is smaller than the baseline's own scatter, a close
call is measured again on both sides alternately, and the winner must beat the plan it began with
in a last direct comparison, or the plan stays.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from edgellm.metrics import percentile

Settings = dict[str, Any]
"""Dotted configuration keys (plan.ubatch) and their values."""

MIN_GAIN: Final = 0.03
"""A change must bring this much: less is not worth a setting that someone must keep."""
MIN_ROUNDS: Final = 2
MAX_ROUNDS: Final = 5
PATIENCE: Final = 2
"""Values of a ladder that may bring nothing before it is left: a curve may dip before its knee. Two
sequences of a small model on two cores are 4 % slower than one, and sixteen twice as fast."""
CLIMBING: Final = 0.8
"""Share of the budget for trying: the rest is for the last comparison with the plan."""
LINEAR: Final = 1.5
"""Gain of one doubling from which the curve still counts as linear."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One measured round of one set of settings. A rejected one says why and has no score."""

    settings: Settings
    round: int
    score: float | None = None
    """Higher is better: the objective's figure."""
    reason: str = ""
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    took_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.score is not None


Measure = Callable[[Settings, int], Awaitable[Trial]]


class Variable(msgspec.Struct, frozen=True, kw_only=True):
    """Something to change. A ladder's values ascend; a choice's have no order."""

    name: str
    options: tuple[Settings, ...]
    is_ladder: bool = True
    about: str = ""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One value that was tried, beside the best known until then."""

    variable: str
    settings: Settings
    """What this step changed."""
    verdict: str
    """linear, better, saturated, over-saturated, or rejected."""
    gain: float | None
    """Score over the best so far, less one."""
    score: float | None
    reason: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found. ``best`` holds only what differs from the plan it began with."""

    best: Settings
    baseline_score: float
    best_score: float
    noise: float
    """Scatter of the baseline's own rounds: smaller differences were not believed."""
    steps: tuple[Step, ...]
    changes: tuple[Step, ...]
    """The steps that were kept: what each change brought."""
    is_complete: bool
    """False when the time budget ended it."""
    spent_s: float

    @property
    def gain(self) -> float:
        """best / baseline, less one."""
        return self.best_score / self.baseline_score - 1


class OutOfTime(Exception):
    """The budget is spent; never leaves this module."""


class BaselineError(Exception):
    """The plan itself could not be measured; ``args[0]`` says why."""


class Journal:
    """Every trial on disk as it ends, one JSON line each."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Trial] = {}
        if path is not None and path.is_file():
            for trial in _read_lines(path):
                self._known[trial_key(trial.settings, trial.round)] = trial
            _end_last_line(path)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, settings: Settings, number: int) -> Trial | None:
        """A trial that was made before."""
        return self._known.get(trial_key(settings, number))

    def add(self, trial: Trial) -> None:
        """Remember a trial; it is on disk when this returns."""
        self._known[trial_key(trial.settings, trial.round)] = trial
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(trial) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """The search is over: the next one starts anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _read_lines(path: Path) -> Iterable[Trial]:
    for line in path.read_bytes().splitlines():
        try:
            trial = msgspec.json.decode(line, type=Trial)
        except msgspec.MsgspecError:
            # A line cut by the interruption: that trial is made again.
            continue
        if (trial.settings or trial.is_ok) and (trial.score is None or trial.score > 0):
            yield trial


def _end_last_line(path: Path) -> None:
    """What is appended must not continue a line that an interruption cut."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def trial_key(settings: Settings, number: int) -> str:
    """One string for one round of one set of settings, whatever the order of its keys."""
    return msgspec.json.encode([sorted(settings.items()), number]).decode()


class Tuner:
    """One search."""

    def __init__(
        self,
        variables: Sequence[Variable],
        measure: Measure,
        *,
        budget_s: float = float("inf"),
        journal: Journal | None = None,
        on_trial: Callable[[Trial], None] = lambda _: None,
        on_step: Callable[[Step], None] = lambda _: None,
    ) -> None:
        self._variables = variables
        self._measure = measure
        self._budget_s = budget_s
        self._limit_s = budget_s
        self._journal = Journal() if journal is None else journal
        self._on_trial = on_trial
        self._on_step = on_step
        self._trials: dict[str, list[Trial]] = {}
        self._steps: list[Step] = []
        self._changes: list[Step] = []
        self._spent_s = 0.0
        self._noise = 0.0

    async def run(self) -> Result:
        """Search to the end, or until the budget is spent."""
        await self._measure_baseline()
        best: Settings = {}
        is_complete = True
        self._limit_s = CLIMBING * self._budget_s
        try:
            for variable in self._variables:
                best = await self._climb(variable, best)
        except OutOfTime:
            is_complete = False
        self._limit_s = self._budget_s
        try:
            best = await self._confirm(best)
        except OutOfTime:
            is_complete = False
            best = self._believed(best)
        return Result(
            best=best,
            baseline_score=self._median({}),
            best_score=self._median(best),
            noise=self._noise,
            steps=tuple(self._steps),
            changes=tuple(self._changes) if best else (),
            is_complete=is_complete,
            spent_s=self._spent_s,
        )

    async def _measure_baseline(self) -> None:
        for _ in range(MIN_ROUNDS + 1):
            trial = await self._round({}, in_budget=False)
            if not trial.is_ok:
                raise BaselineError(trial.reason)
        scores = self._scores({})
        self._noise = (max(scores) - min(scores)) / self._median({})

    async def _climb(self, variable: Variable, best: Settings) -> Settings:
        """Change one variable for as long as it helps."""
        if not variable.is_ladder:
            for option in variable.options:
                best, _ = await self._try(variable, option, best)
            return best
        at = self._place(variable, best)
        start = best
        best = await self._walk(variable, variable.options[at + 1 :], best)
        if best != start:
            return best
        return await self._walk(variable, variable.options[:at][::-1], best)

    async def _walk(
        self, variable: Variable, options: Sequence[Settings], best: Settings
    ) -> Settings:
        """Along a ladder until :data:`PATIENCE` values in a row bring nothing, or one is rejected:
        the next would be too."""
        missed = 0
        for option in options:
            best, helped = await self._try(variable, option, best)
            missed = 0 if helped else missed + 1
            if missed >= PATIENCE or (missed and self._steps[-1].verdict == "rejected"):
                break
        return best

    def _place(self, variable: Variable, best: Settings) -> int:
        """Where the ladder stands now; the empty option is the plan's own place."""
        options = variable.options
        for i, option in enumerate(options):
            if option and {**best, **option} == best:
                return i
        return next((i for i, option in enumerate(options) if not option), 0)

    async def _try(
        self, variable: Variable, option: Settings, best: Settings
    ) -> tuple[Settings, bool]:
        """One value against the best so far: (the better settings, whether it was the new)."""
        settings = {**best, **option}
        if settings == best or not option:
            return best, False
        gain, reason = await self._gain(settings, best)
        step = Step(
            variable=variable.name,
            settings=option,
            verdict=self._verdict(gain),
            gain=gain,
            score=None if gain is None else self._median(settings),
            reason=reason,
        )
        self._steps.append(step)
        self._on_step(step)
        if step.verdict not in ("linear", "better"):
            return best, False
        self._changes.append(step)
        return settings, True

    def _verdict(self, gain: float | None) -> str:
        if gain is None:
            return "rejected"
        if gain >= LINEAR - 1:
            return "linear"
        if gain > self._margin():
            return "better"
        return "over-saturated" if gain < -self._margin() else "saturated"

    async def _gain(self, settings: Settings, best: Settings) -> tuple[float | None, str]:
        """Median score over the best's, less one; more rounds of both while it is a close call.

        (None, why) when the settings were rejected.
        """
        while True:
            while len(self._scores(settings)) < MIN_ROUNDS:
                trial = await self._round(settings)
                if not trial.is_ok:
                    return None, trial.reason
            gain = self._median(settings) / self._median(best) - 1
            if self._is_clear(gain, settings, best) or self._is_exhausted(settings):
                return gain, ""
            for side in (best, settings):
                if not self._is_exhausted(side):
                    trial = await self._round(side)
                    if not trial.is_ok:
                        return None, trial.reason

    def _is_exhausted(self, settings: Settings) -> bool:
        return len(self._scores(settings)) >= MAX_ROUNDS

    def _is_clear(self, gain: float, settings: Settings, best: Settings) -> bool:
        """Every round of one side beats every round of the other, or there is nothing in it."""
        a, b = self._scores(settings), self._scores(best)
        if gain > self._margin():
            return min(a) > max(b)
        if gain < -self._margin():
            return max(a) < min(b)
        return gain < self._margin() / 2

    def _margin(self) -> float:
        return max(MIN_GAIN, self._noise)

    async def _confirm(self, best: Settings) -> Settings:
        """The winner against the plan, as many rounds as there may be: beat it, or the plan."""
        if not best:
            return best
        while not (self._is_exhausted(best) and self._is_exhausted({})):
            for side in ({}, best):
                if self._is_exhausted(side):
                    continue
                trial = await self._round(side)
                if not trial.is_ok:
                    return {}
        return self._believed(best)

    def _believed(self, best: Settings) -> Settings:
        return best if best and self._median(best) > self._median({}) else {}

    async def _round(self, settings: Settings, *, in_budget: bool = True) -> Trial:
        """The next round of some settings, from the journal when it is known."""
        done = self._trials.setdefault(trial_key(settings, -1), [])
        number = len(done)
        trial = self._journal.get(settings, number)
        if trial is None:
            if in_budget and self._spent_s >= self._limit_s:
                raise OutOfTime
            trial = await self._measure(settings, number)
            # A plan that did not run (another program had the memory) is asked again next time.
            if settings or trial.is_ok:
                self._journal.add(trial)
        done.append(trial)
        self._spent_s += trial.took_s
        self._on_trial(trial)
        return trial

    def _scores(self, settings: Settings) -> list[float]:
        trials = self._trials.get(trial_key(settings, -1), [])
        return [t.score for t in trials if t.score is not None]

    def _median(self, settings: Settings) -> float:
        return percentile(sorted(self._scores(settings)), 50) or 0.0


def doublings(key: str, start: int, *, low: int, high: int, **fixed: Any) -> tuple[Settings, ...]:
    """A ladder of ``key`` through its present value ``start`` (an empty option) by factors of 2."""
    down, value = [], start // 2
    while value >= low:
        down.append({key: value, **fixed})
        value //= 2
    up, value = [], start * 2
    while value <= high:
        up.append({key: value, **fixed})
        value *= 2
    return (*reversed(down), {}, *up)
