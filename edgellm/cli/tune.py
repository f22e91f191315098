"""``edgellm tune``: better settings for one model on this machine, found by measuring."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgellm import config as config_
from edgellm.bench.archive import Archive
from edgellm.bench.machine import describe_machine
from edgellm.bench.profiles import profile_name, profile_text, write_profile
from edgellm.bench.runner import quick_digest
from edgellm.bench.stats import parse_seconds
from edgellm.bench.trial import (
    OBJECTIVES,
    EngineTrials,
    Workload,
    session_name,
    variables_for,
)
from edgellm.bench.tune import BaselineError, Journal, Result, Step, Trial, Tuner, Variable
from edgellm.cli.errors import UsageError, kept_if_possible
from edgellm.cli.flags import AT_LEAST_1, PlanFlags
from edgellm.errors import EngineError
from edgellm.paths import state_dir
from edgellm.planner import observed
from edgellm.planner.plan import Plan
from edgellm.runtime import local_path, plan_devices, plan_model
from edgellm.store.locks import locked
from edgellm.store.names import is_plain

_NO_FLAGS = PlanFlags()
MAX_NOISE: Final = 0.1
_STYLE = {"linear": "green", "better": "green", "rejected": "red", "over-saturated": "red"}


def tune(
    model: str,
    /,
    *,
    for_: Annotated[
        Literal["latency", "throughput", "context"], Parameter(name="--for")
    ] = "latency",
    budget: str = "20m",
    prompt_words: Annotated[int, AT_LEAST_1] = 256,
    max_tokens: Annotated[int, AT_LEAST_1] = 64,
    fresh: bool = False,
    dry_run: bool = False,
    name: str | None = None,
    save: Annotated[bool, Parameter(negative="--no-save")] = True,
    json: bool = False,
    plan: PlanFlags = _NO_FLAGS,
) -> int:
    """Search for better settings by measuring, one variable at a time, from the plan outwards.

    Each value is tried with a fresh engine, several rounds, against the best so far; a doubling
    goes on until it brings nothing more. A trial that crashes, does not fit or spills into host
    memory is rejected. What wins must beat the plan in a last direct comparison; else the plan
    stays. Interrupted, the same command goes on where it was.

    Example: `edgellm tune starter --for throughput --parallel 4 --budget 10m`

    Parameters
    ----------
    model
        A name, a path or a reference, as for `edgellm plan`.
    for_
        latency: the time of one answer alone. throughput: tok/s of all sequences. context: cells,
        as long as decode keeps 90 % of its rate.
    budget
        No trial begins after this long, earlier parts of the same search included; what was found
        until then counts, and a larger budget goes on from there.
    prompt_words
        Length of the prompts.
    max_tokens
        Length of the answers.
    fresh
        Forget an interrupted search instead of going on with it.
    dry_run
        Only print what would be tried.
    name
        The profile's name; it is made from the model and the card otherwise.
    save
        Write the profile, and keep the search in the archive.
    json
        Print the result as JSON.
    """
    return _Search(
        model=model,
        workload=Workload(objective=for_, prompt_words=prompt_words, max_tokens=max_tokens),
        flags={k: v for k, v in plan.settings().items() if v not in (None, [])},
        budget_s=parse_seconds(budget),
        name=name,
        as_json=json,
    ).run(fresh=fresh, dry_run=dry_run, save=save)


class _Search:
    """One command line, resolved."""

    def __init__(
        self,
        *,
        model: str,
        workload: Workload,
        flags: dict[str, Any],
        budget_s: float,
        name: str | None,
        as_json: bool,
    ) -> None:
        settings = config_.load(flags).settings
        self._model = model
        self._workload = workload
        self._flags = flags
        self._budget_s = budget_s
        self._as_json = as_json
        self._err = Console(stderr=True)
        self._devices = plan_devices(settings)
        self._plan: Plan = plan_model(model, None, self._devices, settings=settings)
        self._path = local_path(model, settings)
        self._digest = quick_digest(self._path)
        gpus = self._devices.gpus
        if name is not None and not is_plain(name):
            raise UsageError(f"{name!r} cannot be the name of a profile")
        self._name = name or profile_name(self._path.name, gpus[0].uuid if gpus else None)

    def run(self, *, fresh: bool, dry_run: bool, save: bool) -> int:
        variables = variables_for(self._plan, self._devices, self._workload.objective, self._flags)
        if dry_run:
            _print_variables(variables, self._plan, as_json=self._as_json)
            return 0
        path = self._journal_path()
        # Two searches at once would measure each other; the second goes on with the first's trials.
        with locked(path.with_suffix(".lock"), self._say_waiting):
            return self._run(variables, self._journal(path, fresh=fresh), save=save)

    def _run(self, variables: list[Variable], journal: Journal, *, save: bool) -> int:
        result = self._search(variables, journal)
        path, is_kept = None, not save
        with kept_if_possible():
            path = self._save(result) if save else None
            is_kept = True
        if result.is_complete and is_kept:
            journal.close()
        if self._as_json:
            print(_json(result))
        else:
            self._report(result, path)
        return 0

    def _journal_path(self) -> Path:
        session = session_name(self._plan, self._devices, self._workload, self._flags, self._digest)
        return state_dir() / "tune" / f"{session}.jsonl"

    def _say_waiting(self) -> None:
        self._say("another search for this model is running: waiting for its end")

    def _journal(self, path: Path, *, fresh: bool) -> Journal:
        if fresh:
            path.unlink(missing_ok=True)
        journal = Journal(path)
        if len(journal):
            self._say(f"going on after {len(journal)} trials (--fresh forgets them)")
        return journal

    def _search(self, variables: list[Variable], journal: Journal) -> Result:
        first = journal.get({}, 0)
        trials = EngineTrials(
            self._model,
            self._workload,
            flags=self._flags,
            devices=self._devices,
            baseline_decode=first.figures.get("decode_tps_p50") if first else None,
        )
        tuner = Tuner(
            variables,
            trials,
            budget_s=self._budget_s,
            journal=journal,
            on_trial=self._show_trial,
            on_step=self._show_step,
        )
        self._say(f"measuring the plan for {self._workload.objective} ...")
        try:
            result = asyncio.run(tuner.run())
        except BaselineError as error:
            raise EngineError(
                f"the plan itself could not be measured: {error}",
                hint=f"edgellm plan {self._model}",
            ) from error
        if result.is_complete:
            observed.remember(trials.seen)
        return result

    def _save(self, result: Result) -> Path | None:
        archive = Archive()
        document = {
            "schema": "edgellm.tune/1",
            "workload": self._workload,
            "fixed": self._flags,
            "plan": self._plan.to_json(),
            "machine": describe_machine(),
            "profile": self._name if result.best else None,
            "result": result,
        }
        archive.add_document(
            kind="tune",
            started=_now(),
            label=self._name,
            target="engine",
            model=self._plan.model.name,
            digest=self._digest,
            scenario=self._workload.objective,
            headline=f"{result.gain:+.1%} with {len(result.best)} settings",
            document=msgspec.json.encode(document),
        )
        if not result.best:
            return None
        return write_profile(archive, self._name, self._profile(result))

    def _profile(self, result: Result) -> str:
        reasons = {
            key: f"{step.variable}: {step.gain or 0:+.1%} {self._workload.objective}"
            for step in result.changes
            for key in step.settings
        }
        card = self._devices.gpus[0] if self._devices.gpus else None
        where = f"{card.name} {card.uuid}" if card else self._devices.host.cpu
        values = {**self._flags, **result.best}
        values.pop("profile", None)
        title = f"{self._plan.model.name} tuned for {self._workload.objective}"
        why = dict.fromkeys(self._flags, "given when it was tuned") | reasons
        return profile_text(title, f"{where}; model {self._digest}", values, why)

    def _report(self, result: Result, path: Path | None) -> None:
        console = Console()
        console.print(steps_table(result))
        end = "" if result.is_complete else " The budget ended it: a larger --budget goes on."
        noise = f"noise {result.noise:.1%}"
        if result.noise > MAX_NOISE:
            console.print(
                f"! the plan's own rounds differ by {result.noise:.0%}: what brings less is not "
                "seen; repeat it in quiet (--fresh)"
            )
        if not result.best:
            beaten = "nothing beat it beyond" if result.steps else "nothing else was tried;"
            console.print(f"The plan stays: {beaten} {noise}.{end}")
            return
        console.print(f"{result.gain:+.1%} over the plan ({noise}).{end}")
        if path is not None:
            console.print(f"profile {self._name}: {path}", soft_wrap=True)
            console.print(f"  use it:  edgellm serve {self._model} --profile {self._name}")
            console.print(f"  undo it: edgellm profile rollback {self._name}")

    def _show_trial(self, trial: Trial) -> None:
        what = _words(trial.settings) or "the plan"
        score = f"{trial.score:.4g}" if trial.score is not None else f"rejected: {trial.reason}"
        self._say(f"  {what}, round {trial.round + 1}: {score} ({trial.took_s:.1f} s)")

    def _show_step(self, step: Step) -> None:
        gain = "" if step.gain is None else f" {step.gain:+.1%}"
        self._say(f"{step.variable} {_words(step.settings)}: {step.verdict}{gain} {step.reason}")

    def _say(self, line: str) -> None:
        self._err.print(Text(line), soft_wrap=True)


def _print_variables(variables: list[Variable], plan: Plan, *, as_json: bool) -> None:
    if as_json:
        print(_json(variables))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("variable", "values (* the plan's)", "what it is"):
        table.add_column(title, overflow="fold")
    for variable in variables:
        shown = [_words(o) or "*" for o in variable.options]
        table.add_row(variable.name, ", ".join(shown), variable.about)
    console = Console()
    console.print(f"{plan.model.name}: objectives are {', '.join(OBJECTIVES)}")
    console.print(table)


def steps_table(result: Result) -> Table:
    """What was tried, what it brought, and the verdict."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("variable", "tried", "over the best so far", "verdict"):
        table.add_column(title, overflow="fold")
    for step in result.steps:
        verdict = Text(step.verdict, style=_STYLE.get(step.verdict, "dim"))
        if step.reason:
            verdict.append(f": {step.reason}")
        gain = "-" if step.gain is None else f"{step.gain:+.1%}"
        table.add_row(step.variable, _words(step.settings), gain, verdict)
    return table


def _words(settings: dict[str, Any]) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
