"""Run a benchmark: warm up until it is steady, every level, every repeat, and the conditions."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import psutil

from edgellm.bench.client import clock
from edgellm.bench.load import OnProgress, Phase, Progress, closed_phase, open_phase
from edgellm.bench.machine import (
    Moment,
    conditions,
    describe_machine,
    listening_pid,
    moment,
    safety_warnings,
)
from edgellm.bench.results import BenchConfig, BenchRun, Level, TargetRecord
from edgellm.bench.sample import Job, Sample
from edgellm.bench.scenarios import Scenario, make_jobs
from edgellm.bench.stats import (
    drift,
    errors_by_class,
    over_repeats,
    phase_metrics,
    steady_window,
)
from edgellm.bench.target import Target, describe_server
from edgellm.errors import EngineError
from edgellm.metrics import percentile

STEADY: Final = 0.1
"""Two warm-up rounds agree when their rates differ by less than this."""
N_BINS: Final = 60
_HINT: Final = "an address of an OpenAI-compatible API, such as http://127.0.0.1:8080"
_HINTS: Final = {
    "empty": 'a {"prompt"} is continued without a chat template: {"messages"} are answered',
    "connect": "start the server, or mend the address",
    "timeout": "a longer --timeout, or fewer --max-tokens and --concurrency",
    "http_401": "--api-key KEY",
    "http_403": "--api-key KEY",
    "http_404": "name --model, or mend the address",
    "http_400": "mend what the message names: --model, --prompt-words or --max-tokens",
    "http_429": "fewer --concurrency, or the server's own limits",
}
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What is going on, for a progress line."""

    name: str
    """``warm-up`` or a level's label."""
    number: int
    of: int
    progress: Progress | None = None


OnStage = Callable[[Stage], None]


class _Begun(NamedTuple):
    started: str
    at: float
    label: str
    model_path: str | None
    settings: dict[str, Any]


class Runner:
    """One run of one configuration against one target."""

    def __init__(
        self, target: Target, config: BenchConfig, on_stage: OnStage = lambda _: None
    ) -> None:
        self._target = target
        self._config = config
        self._on_stage = on_stage
        self._pids = _server_pids(target)
        self._levels: list[Level] = []
        self._lags: list[float] = []
        self.partial: BenchRun | None = None
        """What an interrupted run had measured, when that is something."""

    async def run(
        self,
        *,
        label: str = "",
        model_path: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> BenchRun:
        """Measure everything. Raises EngineError when not one request of the warm-up succeeds.

        ``model_path`` and ``settings`` are of a model that was served for this run.

        Cancelled, it leaves the repeats that had ended in ``partial``.
        """
        begun = _Begun(_now(), clock(), label, model_path, settings or {})
        warnings = await self._warm_up()
        before = moment(self._pids)
        try:
            for loads in self._loads():
                await self._level(*loads)
        except asyncio.CancelledError:
            if self._levels:
                warnings.append("interrupted: this is what had been measured until then")
                self.partial = self._document(begun, before, warnings, {})
            raise
        # Asked again: a server that loads on first use had no measured memory to tell before.
        about = await describe_server(self._target.endpoint, self._target.model)
        return self._document(begun, before, warnings, about)

    def _document(
        self, begun: _Begun, before: Moment, warnings: list[str], about: dict[str, Any]
    ) -> BenchRun:
        levels = self._levels
        after = moment(self._pids)
        seen = conditions(before, after)
        spread = max((_spread(level) for level in levels), default=0.0)
        warnings += safety_warnings(
            seen, spread=spread, lags=self._lags, knows_server=bool(self._pids)
        )
        return BenchRun(
            label=begun.label,
            started=begun.started,
            took_s=clock() - begun.at,
            config=self._config,
            target=self._record(after, about or self._target.about, begun),
            machine=describe_machine(),
            conditions=seen,
            levels=tuple(levels),
            warnings=tuple(warnings + figure_warnings(levels, self._config)),
        )

    def _loads(self) -> list[tuple[int | None, float | None]]:
        if self._config.rates:
            return [(None, rate) for rate in self._config.rates]
        return [(concurrency, None) for concurrency in self._config.concurrency]

    async def _warm_up(self) -> list[str]:
        """Rounds at the highest concurrency until two in a row agree.

        One round may fail whole (a server that is still loading, a burst of refusals), but a
        server that hangs is waited for once.
        """
        concurrency = 4 if self._config.rates else max(self._config.concurrency)
        before, n_failed = 0.0, 0
        for number in range(self._config.warmup_rounds):
            jobs = self._jobs(f"warm/{number}")
            phase = await closed_phase(
                self._target.endpoint,
                jobs,
                concurrency,
                n=concurrency,
                timeout_s=self._config.timeout_s,
                on_progress=self._watch("warm-up", number, self._config.warmup_rounds),
            )
            if not any(sample.is_ok for sample in phase.samples):
                n_failed += 1
                first = phase.samples[0]
                if n_failed == min(_tries(phase.samples), self._config.warmup_rounds):
                    raise EngineError(
                        f"no request succeeded: {first.error}: {first.message[:300]}",
                        hint=_HINTS.get(first.error or "", _HINT),
                    )
                continue
            n_failed = 0
            rate = phase_metrics(phase)["output_tps"]
            if before and abs(rate / before - 1) < STEADY:
                return []
            before = rate
        return ["the warm-up did not settle"] if self._config.warmup_rounds > 1 else []

    async def _level(self, concurrency: int | None, rate: float | None) -> None:
        label = f"{concurrency} at once" if rate is None else f"{rate:g} req/s"
        phases: list[Phase] = []
        try:
            for number in range(self._config.repeats):
                watch = self._watch(label, number, self._config.repeats)
                phases.append(await self._phase(concurrency, rate, number, watch))
        finally:
            if phases:
                self._levels.append(
                    summarise(phases, self._config, concurrency=concurrency, rate=rate)
                )
                self._lags += [lag for phase in phases for lag in phase.lags]

    async def _phase(
        self, concurrency: int | None, rate: float | None, number: int, watch: OnProgress
    ) -> Phase:
        config = self._config
        jobs = self._jobs(f"{concurrency or rate}/{number}")
        endpoint = self._target.endpoint
        if rate is not None:
            n = config.n_requests or max(20, round(rate * (config.seconds or 20)))
            return await open_phase(
                endpoint,
                jobs,
                rate,
                n=n,
                seed=f"{config.seed}/{number}",
                timeout_s=config.timeout_s,
                on_progress=watch,
            )
        at_once = concurrency or 1
        return await closed_phase(
            endpoint,
            jobs,
            at_once,
            n=config.n_requests or max(8, 2 * at_once),
            seconds=config.seconds,
            timeout_s=config.timeout_s,
            on_progress=watch,
        )

    def _jobs(self, part: str) -> Iterator[Job]:
        # The moment is in the seed: a server that still holds the prompts of an earlier run would
        # otherwise answer this one from its cache.
        seed = f"{self._config.seed}/{_now()}/{part}"
        return make_jobs(self._config.scenario, self._target.model, seed)

    def _watch(self, name: str, number: int, of: int) -> OnProgress:
        def show(progress: Progress) -> None:
            self._on_stage(Stage(name=name, number=number + 1, of=of, progress=progress))

        return show

    def _record(self, after: Moment, about: dict[str, Any], begun: _Begun) -> TargetRecord:
        target, model_path = self._target, begun.model_path
        memory = {f"gpu{g.index}": g.memory_used for g in after.gpus}
        if self._pids:
            memory["resident"] = sum(map(_resident, self._pids))
        return TargetRecord(
            name=target.name,
            url=target.endpoint.url,
            model=target.model,
            command=without_keys(target.command),
            about=about,
            model_path=model_path,
            model_digest=quick_digest(Path(model_path)) if model_path else None,
            settings=begun.settings,
            memory=memory,
        )


def summarise(
    phases: Sequence[Phase],
    config: BenchConfig,
    *,
    concurrency: int | None,
    rate: float | None,
) -> Level:
    """A level's figures from its repeats."""
    objective = config.objective
    samples = [sample for phase in phases for sample in phase.samples]
    repeats = [phase_metrics(p, concurrency=concurrency, objective=objective) for p in phases]
    failed = [s for s in samples if not s.is_ok]
    return Level(
        concurrency=concurrency,
        rate=rate,
        n_requests=len(samples),
        stats=over_repeats(repeats),
        errors=errors_by_class(samples),
        first_error=failed[0].message[:300] if failed else "",
        counted_by=dict(Counter(s.counted_by for s in samples if s.is_ok)),
        drift=_drift(phases[-1], concurrency) if phases else 0.0,
        curves=_curves([s for s in samples if s.is_ok]),
        timeline=_timeline(phases[-1]) if phases else (),
    )


def _tries(failed: Sequence[Sample]) -> int:
    """Warm-up rounds that may fail as this one did before the run ends."""
    errors = {sample.error for sample in failed}
    if errors == {"timeout"}:
        return 1  # a server that hangs was waited for as long as was asked
    if failed[0].error == "empty":
        return sys.maxsize  # a model may end at once with nothing said: it does not refuse
    return 2


def _drift(phase: Phase, concurrency: int | None) -> float:
    good = [s for s in phase.samples if s.is_ok]
    # With a wave or two the window is mostly ramps.
    is_long = concurrency is not None and len(good) >= 3 * concurrency
    window = steady_window(good, concurrency) if concurrency and is_long else None
    return drift(good, window) if window else 0.0


def _curves(good: Sequence[Sample]) -> dict[str, tuple[float, ...]]:
    values = {
        "ttft_s": [s.timings.ttft_s for s in good if s.timings.ttft_s is not None],
        "itl_s": [gap for s in good for gap in s.token_gaps()],
        "e2e_s": [s.timings.e2e_s for s in good],
    }
    ordered = {name: sorted(v) for name, v in values.items() if v}
    return {name: tuple(percentile(v, p) or 0.0 for p in range(101)) for name, v in ordered.items()}


def _timeline(phase: Phase) -> tuple[tuple[float, float], ...]:
    width = (phase.end - phase.begin) / N_BINS
    if width <= 0:
        return ()
    bins = [0] * N_BINS
    for sample in phase.samples:
        for at in sample.token_times:
            bins[min(N_BINS - 1, int((at - phase.begin) / width))] += 1
    return tuple(((i + 0.5) * width, n / width) for i, n in enumerate(bins))


def _spread(level: Level) -> float:
    stat = level.stats.get("output_tps")
    return stat.spread if stat is not None and level.rate is None else 0.0


def figure_warnings(levels: Sequence[Level], config: BenchConfig) -> list[str]:
    """What the figures themselves say against being trusted."""
    out = []
    for level in levels:
        if level.errors:
            listed = ", ".join(f"{n} {name}" for name, n in level.errors.items())
            out.append(f"{level.label}: {listed} of {level.n_requests} ({level.first_error})")
        if "events" in level.counted_by:
            out.append(
                f"{level.label}: the server told no token counts; events were counted instead"
            )
        if abs(level.drift) > 0.15:
            out.append(f"{level.label}: the rate drifted by {level.drift:+.0%} within a repeat")
        if (unequal := _unequal_work(level, config)) is not None:
            out.append(f"{level.label}: {unequal}")
        reused = _reused(level, config.scenario)
        if reused > 0.2 and not config.scenario.shared_words and config.scenario.file is None:
            out.append(f"{level.label}: {reused:.0%} of distinct prompts came from a cache")
    fewest = min((level.n_requests for level in levels), default=100)
    if fewest < 100:
        out.append(f"a p99 of {fewest} requests is close to their maximum: -n asks for more")
    return out


def _reused(level: Level, scenario: Scenario) -> float:
    """Share of the prompts' own words that came from a cache. What a chat template puts before
    them is the same for all, and reused rightly: about the tokens that are not words."""
    n_prompt = level.median("n_prompt_mean") or 0.0
    own = min(n_prompt, scenario.prompt_words) if scenario.is_chat else n_prompt
    n_cached = n_prompt * (level.median("cached_ratio") or 0.0)
    return max(0.0, n_cached - (n_prompt - own)) / own if own else 0.0


def _unequal_work(level: Level, config: BenchConfig) -> str | None:
    """Answers of another length than asked: rates of such runs cannot be compared."""
    scenario, mean = config.scenario, level.median("n_output_mean")
    is_fixed = scenario.ignore_eos and not scenario.spread and scenario.file is None
    if mean is None or not is_fixed or abs(mean / scenario.max_tokens - 1) <= 0.02:
        return None
    return (
        f"answers have {mean:.0f} tokens, not the {scenario.max_tokens} asked for: the server "
        "does not know ignore_eos, or has its own limit; compare TPOT, not requests/s or e2e"
    )


def without_keys(command: Sequence[str]) -> tuple[str, ...]:
    """A command as it may be kept and shown to others: what follows ``--api-key`` is left out."""
    out: list[str] = []
    for word in command:
        name, has_value, _ = word.partition("=")
        if out and out[-1] == "--api-key":
            out.append("...")
        else:
            out.append(f"{name}=..." if name == "--api-key" and has_value else word)
    return tuple(out)


def quick_digest(path: Path) -> str:
    """Which file this is, without reading it whole: SHA-256 of its size, first and last MiB."""
    part = 1 << 20
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(part)
        file.seek(max(0, size - part))
        tail = file.read(part)
    digest = hashlib.sha256(str(size).encode() + head + tail).hexdigest()
    return f"ends-sha256:{digest}"


def _server_pids(target: Target) -> list[int]:
    if target.pid is not None:
        return [target.pid]
    if target.endpoint.host not in _LOCAL:
        return []
    pid = listening_pid(target.endpoint.port)
    return [] if pid is None else [pid]


def _resident(pid: int) -> int:
    try:
        root = psutil.Process(pid)
        return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])
    except psutil.Error:
        return 0


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
