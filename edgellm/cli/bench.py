"""``edgellm bench``: measure a server or a model, keep the run, compare it with others."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from edgellm import config as config_
from edgellm.bench import report, verdicts
from edgellm.bench.archive import Archive
from edgellm.bench.client import Endpoint
from edgellm.bench.html import render
from edgellm.bench.results import BenchConfig, BenchRun, compare_runs, settings_diff
from edgellm.bench.runner import Runner, Stage
from edgellm.bench.scenarios import scenario_from
from edgellm.bench.stats import Objective, parse_seconds
from edgellm.bench.target import RunningServer, Target, edgellm_spec, find_target
from edgellm.bench.tune import Result
from edgellm.cli.errors import UsageError, kept_if_possible
from edgellm.cli.flags import AT_LEAST_0, AT_LEAST_1
from edgellm.cli.tune import steps_table
from edgellm.runtime import local_path

app = App(name="bench")


@app.default
def bench(
    target: str,
    *,
    scenario: Annotated[str, Parameter(name=("--scenario", "-s"))] = "chat",
    concurrency: Annotated[str, Parameter(name=("--concurrency", "-c"))] = "1,4,8",
    rate: str | None = None,
    requests: Annotated[int | None, Parameter(name=("--requests", "-n")), AT_LEAST_1] = None,
    seconds: str = "0",
    repeats: Annotated[int, AT_LEAST_1] = 3,
    prompt_words: Annotated[int | None, AT_LEAST_0] = None,
    shared_words: Annotated[int | None, AT_LEAST_0] = None,
    max_tokens: Annotated[int | None, AT_LEAST_1] = None,
    objective: str | None = None,
    model: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="OPENAI_API_KEY")] = None,
    serve_args: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    label: str = "",
    seed: str = "1",
    timeout: str = "600s",
    plot: bool = False,
    html: str | None = None,
    save: Annotated[bool, Parameter(negative="--no-save")] = True,
    json: bool = False,
) -> int:
    """Measure speed: time to first token, gaps between tokens, rates, errors, with the conditions.

    Examples, one a line:

    * `edgellm bench starter -c 1,4,8`
    * `edgellm bench http://127.0.0.1:8080 --rate 2 --objective ttft=1s,tpot=50ms`

    Parameters
    ----------
    target
        A server's address, or a model that is then served for the length of the run.
    scenario
        chat, long, shared, batch, mixed, or a .jsonl of real prompts ({"prompt"} or {"messages"}).
    concurrency
        Requests at once, one level after another (closed loop).
    rate
        Requests a second at random (Poisson) times, one level after another (open loop); latency
        counts from when a request was due.
    requests
        Requests a level and repeat.
    seconds
        A level goes on at least this long (closed loop), or so long (open loop).
    repeats
        Each level is measured so often; the medians are shown.
    prompt_words
        Words of a prompt's own part.
    shared_words
        Words that all prompts begin with.
    max_tokens
        Tokens of an answer.
    objective
        What counts as good, such as ttft=1s,tpot=50ms,e2e=20s: goodput is reported.
    model
        The model's name on the server, when it has several.
    api_key
        Sent as a bearer token.
    serve_args
        Further flags for `edgellm serve` when the target is a model: "--kv q8_0 --ctx 16384".
    label
        A name for the run in the archive.
    seed
        Another seed draws other prompts and arrival times.
    timeout
        A request that takes longer is an error.
    plot
        Draw plots in the terminal.
    html
        Also write the run as an HTML page to this file.
    save
        Keep the run in the archive (edgellm bench ls).
    json
        Print the whole run as JSON.
    """
    config = BenchConfig(
        scenario=scenario_from(
            scenario, prompt_words=prompt_words, shared_words=shared_words, max_tokens=max_tokens
        ),
        concurrency=_counts(concurrency, "--concurrency"),
        rates=_numbers(rate, "--rate") if rate else (),
        n_requests=requests,
        seconds=parse_seconds(seconds),
        repeats=repeats,
        objective=Objective.parse(objective) if objective else None,
        seed=seed,
        timeout_s=parse_seconds(timeout),
    )
    if html and not Path(html).absolute().parent.is_dir():
        # Known before the minutes of a run, not after.
        raise UsageError(f"--html: {Path(html).absolute().parent} is not a folder")
    run = asyncio.run(
        _measure(_Where(target, model, api_key, tuple(serve_args.split())), config, label)
    )
    number = None
    with kept_if_possible():
        number = Archive().add(run) if save else None
    if html:
        Path(html).write_text(render([(number, run)]), encoding="utf-8")
    if json:
        _print_json(run)
    else:
        _show(run, number, plot=plot)
    return 1 if all(level.median("output_tps") is None for level in run.levels) else 0


@app.command
def ls(*, kind: Literal["bench", "tune", "eval"] | None = None, json: bool = False) -> None:
    """List the runs in the archive, the newest first.

    Example: `edgellm bench ls`

    Parameters
    ----------
    kind
        Only runs of this kind.
    json
        Print JSON.
    """
    entries = Archive().entries(kind=kind)
    if json:
        _print_json(entries)
    else:
        report.show_entries(Console(), entries)


@app.command
def show(run: str = "last", *, plot: bool = False, json: bool = False) -> None:
    """Show one run again.

    Example: `edgellm bench show 12 --plot`

    Parameters
    ----------
    run
        A number from `edgellm bench ls`, a label, last, or last-1.
    plot
        Draw plots in the terminal.
    json
        Print the whole run as JSON: configuration, plan, machine, figures.
    """
    number, kind, document = Archive().document(run)
    if json:
        print(msgspec.json.format(document, indent=2).decode())
        return
    if kind == "eval":
        verdicts.show_evaluation(Console(), document)
        return
    if kind == "tune":
        _show_tuning(document)
        return
    _show(msgspec.json.decode(document, type=BenchRun), number, plot=plot)


@app.command
def diff(before: str = "last-1", after: str = "last", *, json: bool = False) -> None:
    """Compare two runs: what was set differently, and what came of it.

    A difference within what the repeats themselves differ by is called neither better nor worse.

    Example: `edgellm bench diff 11 12`

    Parameters
    ----------
    before
        A number from `edgellm bench ls`, a label, last, or last-1.
    after
        The other one.
    json
        Print JSON.
    """
    archive = Archive()
    (_, a), (_, b) = archive.run(before), archive.run(after)
    if json:
        settings = settings_diff(a, b)
        changes = compare_runs(a, b, report.DIFF_METRICS)
        _print_json({"settings": settings, "figures": changes})
        return
    report.show_diff(Console(), a, b)


@app.command
def export(
    *runs: str,
    out: Annotated[str | None, Parameter(name=("--out", "-o"))] = None,
    format: Literal["json", "html"] | None = None,
) -> None:
    """Write runs to a file: JSON, or an HTML page that opens anywhere (several: side by side).

    Example: `edgellm bench export 11 12 -o comparison.html`

    Parameters
    ----------
    runs
        Numbers from `edgellm bench ls` or labels; the last run when none is given.
    out
        The file; its ending gives the format. Without it JSON goes to the terminal.
    format
        json or html, when the file's ending does not say.
    """
    archive = Archive()
    chosen = [archive.run(ref) for ref in runs or ("last",)]
    is_html = format == "html" or (format is None and (out or "").endswith((".html", ".htm")))
    text = render(chosen) if is_html else _as_json([run for _, run in chosen])
    if out is None:
        print(text)
        return
    Path(out).write_text(text, encoding="utf-8")
    print(f"wrote {out}", file=sys.stderr)


def _numbers(text: str, flag: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{flag} takes numbers such as 1,4,8, not {text!r}") from error
    if not all(0 < value < math.inf for value in values):
        raise UsageError(f"{flag} must be above 0, not {text!r}")
    return values


def _counts(text: str, flag: str) -> tuple[int, ...]:
    values = _numbers(text, flag)
    if any(value != int(value) for value in values):
        raise UsageError(f"{flag} takes whole numbers such as 1,4,8, not {text!r}")
    return tuple(int(value) for value in values)


class _Where(NamedTuple):
    """What to measure: an address, or a model and how to serve it."""

    target: str
    model: str | None
    api_key: str | None
    serve_args: tuple[str, ...]


async def _measure(where: _Where, config: BenchConfig, label: str) -> BenchRun:
    async with AsyncExitStack() as stack:
        target, path = await _open(stack, where, config)
        with _progress_bar() as bar:
            task = bar.add_task("warm-up", total=None)

            def on_stage(stage: Stage) -> None:
                bar.update(task, description=_stage_line(stage))

            return await Runner(target, config, on_stage).run(label=label, model_path=path)


async def _open(
    stack: AsyncExitStack, where: _Where, config: BenchConfig
) -> tuple[Target, str | None]:
    if _is_address(where.target):
        endpoint = Endpoint.parse(where.target, where.api_key)
        return await find_target(endpoint, model=where.model), None
    path = local_path(where.target, config_.load().settings)
    flags = list(where.serve_args)
    if "--parallel" not in flags:
        n_seq = 8 if config.rates else int(max(config.concurrency))
        flags += ["--parallel", str(n_seq)]
    print(f"serving {where.target} for this run ...", file=sys.stderr)
    server = RunningServer(edgellm_spec(where.target, flags))
    return await stack.enter_async_context(server), str(path)


def _is_address(target: str) -> bool:
    """``http://...`` or ``host:port``; a model's name or path is neither."""
    return "://" in target or re.fullmatch(r"[\w.-]+:\d+", target) is not None


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20, pulse_style="cyan"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=4,
    )


def _stage_line(stage: Stage) -> str:
    done = stage.progress
    if done is None:
        return f"{stage.name} {stage.number}/{stage.of}"
    rate = done.n_events / done.elapsed_s if done.elapsed_s > 0 else 0.0
    return (
        f"{stage.name}, {stage.number} of {stage.of}: {done.n_done} requests, "
        f"{done.elapsed_s:.0f} s, {rate:.0f} events/s"
    )


def _show(run: BenchRun, number: int | None, *, plot: bool) -> None:
    console = Console()
    report.show_run(console, run, number)
    if plot:
        report.show_plots(console, run)


class _Tuning(msgspec.Struct):
    """The part of a tuning run's document that is shown."""

    result: Result
    profile: str | None = None


def _show_tuning(document: bytes) -> None:
    tuning = msgspec.json.decode(document, type=_Tuning)
    console = Console()
    console.print(steps_table(tuning.result))
    kept = f"profile {tuning.profile}" if tuning.profile else "the plan stayed"
    noise = f"noise {tuning.result.noise:.1%}"
    console.print(f"{tuning.result.gain:+.1%} over the plan ({noise}); {kept}")


def _as_json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _print_json(value: object) -> None:
    print(_as_json(value))
