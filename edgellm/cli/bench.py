"""``edgellm bench``: measure a server or a model, keep the run, compare it with others."""

from __future__ import annotations

import asyncio
import math
import os
import re
import resource
import shlex
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from edgellm import config as config_
from edgellm.bench import report, verdicts
from edgellm.bench.archive import Archive, is_reference
from edgellm.bench.client import Endpoint
from edgellm.bench.html import render
from edgellm.bench.results import BenchConfig, BenchRun, compare_runs, settings_diff
from edgellm.bench.runner import Runner, Stage
from edgellm.bench.scenarios import make_jobs, scenario_from
from edgellm.bench.stats import Objective, parse_seconds
from edgellm.bench.target import RunningServer, Target, edgellm_spec, find_target
from edgellm.bench.tune import Result
from edgellm.cli.errors import DONE, FAILED, INTERRUPTED, UsageError, kept_if_possible
from edgellm.cli.flags import AT_LEAST_0, AT_LEAST_1
from edgellm.cli.tune import steps_table
from edgellm.runtime import local_path

N_SHOWN: Final = 50
DEFAULT_CONCURRENCY: Final = "1,4,8"
app = App(name="bench")


@app.default
def bench(
    target: str,
    *,
    scenario: Annotated[str, Parameter(name=("--scenario", "-s"))] = "chat",
    concurrency: Annotated[str, Parameter(name=("--concurrency", "-c"))] = DEFAULT_CONCURRENCY,
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
    if is_reference(label):
        raise UsageError(
            f"--label {label}: bench show and diff would take it for a number or a place",
            hint="a name, such as baseline",
        )
    if rate is not None and concurrency != DEFAULT_CONCURRENCY:
        raise UsageError("--concurrency and --rate exclude one another: two kinds of load")
    config = BenchConfig(
        scenario=scenario_from(
            scenario, prompt_words=prompt_words, shared_words=shared_words, max_tokens=max_tokens
        ),
        concurrency=_counts(concurrency, "--concurrency"),
        rates=_numbers(rate, "--rate") if rate is not None else (),
        n_requests=requests,
        seconds=parse_seconds(seconds),
        repeats=repeats,
        objective=Objective.parse(objective) if objective is not None else None,
        seed=seed,
        timeout_s=parse_seconds(timeout),
    )
    _check(config, html)
    where = _Where(target, model, api_key, _words(serve_args))
    run, is_whole = _measured(where, config, label)
    number = None
    with kept_if_possible():
        number = Archive().add(run) if save else None
    if json:
        _print_json(run)
    else:
        _show(run, number, plot=plot)
    if html is not None:
        _write(Path(html), render([(number, run)]))
    if not is_whole:
        return INTERRUPTED
    return FAILED if any(sum(x.errors.values()) == x.n_requests for x in run.levels) else DONE


def _check(config: BenchConfig, html: str | None) -> None:
    """What can be known before the minutes of a run is known before them."""
    if config.timeout_s <= 0:
        raise UsageError("--timeout must be above 0")
    if html is not None:
        _check_file("--html", Path(html))
    if config.scenario.file is not None:
        make_jobs(config.scenario, "", config.seed)
    _check_sizes(config)


def _check_sizes(config: BenchConfig) -> None:
    """A slip of the finger must not fill the memory or meet the system's limit minutes later."""
    words = max(config.scenario.prompt_words, config.scenario.shared_words)
    for flag, value, most in (
        ("--requests", config.n_requests or 0, 10_000_000),
        ("--prompt-words, --shared-words", words, 10_000_000),
        ("--max-tokens", config.scenario.max_tokens, 10_000_000),
        ("--concurrency", max(config.concurrency), 10_000),
    ):
        if value > most:
            raise UsageError(f"{flag}: {value} is more than {most}")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64
    if max(config.concurrency) > most >= 0:
        needed = max(config.concurrency) + 64
        raise UsageError(
            f"--concurrency {max(config.concurrency)}: a process may open {most + 64} connections "
            "and files here",
            hint=f"ulimit -n {needed}",
        )


def _check_file(flag: str, path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{flag}: {folder} is not a folder")
    if path.is_dir():
        raise UsageError(f"{flag}: {path} is a folder", hint=f"a file, such as {path}/run.html")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{flag}: {path} cannot be written to")


def _write(path: Path, text: str) -> None:
    """The whole text or, on a full disk, what stood there before."""
    if path.exists() and not path.is_file():  # a pipe
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _words(serve_args: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(serve_args))
    except ValueError as error:
        raise UsageError(f"--serve-args {serve_args!r}: {error}") from error


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
    entries = Archive().entries(kind=kind, limit=None)
    if json:
        _print_json(entries)
        return
    report.show_entries(Console(), entries[:N_SHOWN])
    if n_more := len(entries[N_SHOWN:]):
        print(f"and {n_more} older: edgellm bench ls --json lists them all")


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
    if out is not None:
        _check_file("--out", Path(out))
    archive = Archive()
    chosen = [archive.run(ref) for ref in runs or ("last",)]
    is_html = format == "html" or (format is None and (out or "").endswith((".html", ".htm")))
    text = render(chosen) if is_html else _as_json([run for _, run in chosen])
    if out is None:
        print(text)
        return
    _write(Path(out), text)
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


def _measured(where: _Where, config: BenchConfig, label: str) -> tuple[BenchRun, bool]:
    """(the run, whether it went to its end): after Ctrl-C what had been measured until then."""
    runners: list[Runner] = []
    try:
        return asyncio.run(_measure(where, config, label, runners)), True
    except KeyboardInterrupt:
        for runner in runners:
            if runner.partial is not None:
                return runner.partial, False
        print("\ninterrupted before a repeat had ended: there is nothing to keep", file=sys.stderr)
        raise


async def _measure(
    where: _Where, config: BenchConfig, label: str, runners: list[Runner]
) -> BenchRun:
    async with AsyncExitStack() as stack:
        target, path, settings = await _open(stack, where, config)
        with _progress_bar() as bar:
            task = bar.add_task("warm-up", total=None)

            def on_stage(stage: Stage) -> None:
                bar.update(task, description=_stage_line(stage))

            runners.append(Runner(target, config, on_stage))
            return await runners[0].run(label=label, model_path=path, settings=settings)


async def _open(
    stack: AsyncExitStack, where: _Where, config: BenchConfig
) -> tuple[Target, str | None, dict[str, Any]]:
    """(the server, and of a model that is served for the run its file and engine settings)."""
    if _is_address(where.target):
        endpoint = Endpoint.parse(where.target, where.api_key)
        return await find_target(endpoint, model=where.model), None, {}
    settings = config_.load().settings
    path = local_path(where.target, settings)
    flags = list(where.serve_args)
    if not any(flag.split("=", 1)[0] == "--parallel" for flag in flags):
        n_seq = 8 if config.rates else int(max(config.concurrency))
        flags += ["--parallel", str(n_seq)]
    print(f"serving {where.target} for this run ...", file=sys.stderr)
    server = RunningServer(edgellm_spec(where.target, flags, api_key=where.api_key))
    engine = {k: v for k, v in msgspec.to_builtins(settings.engine).items() if v is not None}
    return await stack.enter_async_context(server), str(path), engine


def _is_address(target: str) -> bool:
    """``http://...``, ``host:port`` or ``host:port/v1``; a model's name or path is neither."""
    host = r"([\w.-]+|\[[0-9a-fA-F:.]+\])"
    return "://" in target or re.fullmatch(host + r":\d+(/.*)?", target) is not None


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
