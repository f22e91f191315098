"""``edgellm batch``: a file of requests in OpenAI's batch format, answered into another file."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from edgellm import config, paths
from edgellm.cli.answer import sampling
from edgellm.cli.errors import FAILED, UsageError
from edgellm.cli.flags import AT_LEAST_1, PlanFlags, SamplingFlags
from edgellm.cli.serve import find_models, with_parallel
from edgellm.config import Settings
from edgellm.request import Overflow, Priority
from edgellm.runtime import make_runtime
from edgellm.server.access import Policy
from edgellm.server.app import App
from edgellm.server.core import Limits, Options, Server
from edgellm.server.inside import Reply, post
from edgellm.store.locks import locked
from edgellm.units import GiB

URLS: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/rerank",
    }
)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _DoneResponse(msgspec.Struct):
    status_code: int


class _Done(msgspec.Struct):
    custom_id: str
    response: _DoneResponse | None = None


class Tally:
    """How far a batch has come."""

    def __init__(self, n_lines: int, n_before: int) -> None:
        self.n_lines = n_lines
        self.n_before = n_before
        self.n_ok = 0
        self.n_failed = 0


def batch(
    requests: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    model: Annotated[str | None, Parameter(name=("--model", "-m"))] = None,
    concurrency: Annotated[int | None, AT_LEAST_1] = None,
    engine: Literal["llama", "scripted"] | None = None,
    overflow: Literal["error", "slide"] | None = None,
    json: bool = False,
    sampling_flags: SamplingFlags = SamplingFlags(),  # noqa: B008 (frozen)
    plan_flags: PlanFlags = PlanFlags(),  # noqa: B008 (frozen)
) -> int | None:
    """Answer a file of requests (OpenAI's batch format), with batch priority.

    Started again after it was stopped, it goes on where it was: lines that are answered in the
    output are not done twice; lines that failed on this side (5xx) are tried again.

    Example: `edgellm batch in.jsonl -o out.jsonl -m starter`

    Parameters
    ----------
    requests
        One JSON object a line: {"custom_id", "method": "POST", "url": "/v1/...", "body"}.
    output
        One line an answer, in the order they finish.
    model
        Answers whatever model the lines name. None: the lines' own names.
    concurrency
        Requests at once; default twice --parallel.
    engine
        scripted runs without a model's weights.
    overflow
        At the end of the context: an error, or slide.
    json
        Print the counts as JSON (edgellm.batch/1).
    """
    flags: dict[str, Any] = {
        **plan_flags.settings(),
        **sampling_flags.settings(),
        "chat.overflow": overflow,
        "engine.backend": engine,
    }
    settings = with_parallel(config.load(flags).settings)
    n_lines = check_input(requests)
    with alone(output):
        check_output(output, requests)
        done = resume(output)
        tally = Tally(n_lines, len(done))
        at_once = concurrency or 2 * (settings.plan.parallel or 1)
        if tally.n_before < n_lines:
            asyncio.run(_run(requests, output, done, tally, _Plan(settings, model, at_once)))
    _report(tally, output, as_json=json)
    return FAILED if tally.n_failed else None


class _Plan:
    """With what a batch is run."""

    def __init__(self, settings: Settings, model: str | None, at_once: int) -> None:
        self.settings = settings
        self.at_once = at_once
        specs = find_models([model] if model else [], settings)
        if model is not None:
            specs = [msgspec.structs.replace(specs[0], aliases=(*specs[0].aliases, "*"))]
        self.specs = specs


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not empty."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def check_input(path: Path) -> int:
    """Count the lines after checking each; UsageError names the first that cannot be used."""
    if not (paths.exists(path) and path.is_file()):
        raise UsageError(f"{path} is not a file", hint="edgellm batch IN.jsonl -o OUT.jsonl")
    seen: dict[str, int] = {}
    for number, data in lines(path):
        line = parse(data, f"{path}:{number}")
        if line.custom_id in seen:
            raise UsageError(
                f"{path}:{number}: custom_id {line.custom_id!r} is that of line "
                f"{seen[line.custom_id]}"
            )
        seen[line.custom_id] = number
    if not seen:
        raise UsageError(f"{path} has no requests")
    return len(seen)


def parse(data: bytes, where: str) -> Line:
    """One line of the input."""
    try:
        line = msgspec.json.decode(data, type=Line)
    except msgspec.DecodeError as error:
        raise UsageError(f"{where}: {error}") from error
    if line.method != "POST" or line.url not in URLS:
        raise UsageError(
            f"{where}: {line.method} {line.url} cannot be batched",
            hint=f"POST to one of {', '.join(sorted(URLS))}",
        )
    return line


@contextlib.contextmanager
def alone(output: Path) -> Iterator[None]:
    """Hold the output as the only batch of this machine that writes it; UsageError when another
    does: both would do every line."""

    def refuse() -> None:
        raise UsageError(
            f"another batch is writing {output}", hint="wait for it, or give -o another file"
        )

    real = os.fsencode(os.path.realpath(output))
    name = f"batch-{hashlib.sha256(real).hexdigest()[:16]}.lock"
    with locked(paths.runtime_dir() / name, on_wait=refuse):
        yield


def check_output(output: Path, requests: Path) -> None:
    """UsageError when the answers would go over something else than answers: :func:`resume` takes
    out of the file what is none."""
    if not os.path.lexists(output):
        return
    if output.is_dir() or output.samefile(requests):
        raise UsageError(f"{str(output)!r} cannot be the output", hint="-o OUT.jsonl")
    if not output.is_file():
        return  # /dev/stdout
    for number, data in lines(output):
        if data.endswith(b"\n") and not _is_answer(data):  # what a kill cut off has no end
            raise UsageError(
                f"{output}:{number} is no answer of a batch, and the file is left alone",
                hint="-o another file",
            )


def _is_answer(data: bytes) -> bool:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return False
    return "custom_id" in fields and "response" in fields


def resume(output: Path) -> set[str]:
    """The custom_ids that are answered already.

    A last line that a kill cut off, and answers that failed on this side, are taken out of the
    file: they will be done again.
    """
    if not output.is_file():
        return set()
    done: set[str] = set()
    kept: list[bytes] = []
    n_lines = 0
    for _, data in lines(output):
        n_lines += 1
        with contextlib.suppress(msgspec.DecodeError):
            answered = msgspec.json.decode(data, type=_Done)
            is_ours = answered.response is None or answered.response.status_code >= 500
            if data.endswith(b"\n") and not is_ours and answered.custom_id not in done:
                done.add(answered.custom_id)
                kept.append(data)
    if len(kept) != n_lines:
        temporary = output.with_name(output.name + ".new")
        temporary.write_bytes(b"".join(kept))
        temporary.replace(output)
    return done


async def _run(requests: Path, output: Path, done: set[str], tally: Tally, how: _Plan) -> None:
    settings = how.settings
    options = Options(
        policy=Policy(hosts=None),
        limits=Limits(max_body=GiB, request_timeout_s=None),
        sampling=sampling(settings.chat),
        priority=Priority.BATCH,
        overflow=Overflow(settings.chat.overflow),
        log_requests=False,
    )
    runtime = make_runtime(how.specs, settings)
    app = App(Server(runtime, options))
    places = asyncio.Semaphore(how.at_once)
    output.parent.mkdir(parents=True, exist_ok=True)
    tasks: set[asyncio.Task[None]] = set()
    try:
        with output.open("ab") as file, _progress(tally) as advance:
            for number, data in lines(requests):
                line = parse(data, f"{requests}:{number}")
                if line.custom_id in done:
                    continue
                await places.acquire()
                task = asyncio.create_task(_one(app, line, file, tally))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: places.release())
                task.add_done_callback(lambda _: advance())
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await runtime.close()


async def _one(app: App, line: Line, file: IO[bytes], tally: Tally) -> None:
    reply = await post(app, line.url, bytes(line.body))
    if reply.status < 400:
        tally.n_ok += 1
    else:
        tally.n_failed += 1
    # One write a line: what a kill leaves is whole lines and at most one cut one.
    file.write(answer_line(line, reply))
    file.flush()


def answer_line(line: Line, reply: Reply) -> bytes:
    """One line of the output, in OpenAI's shape."""
    body = {
        "id": "batch_req_" + secrets.token_hex(12),
        "custom_id": line.custom_id,
        "response": {
            "status_code": reply.status,
            "request_id": reply.request_id,
            "body": msgspec.Raw(reply.body),
        },
        "error": None,
    }
    return msgspec.json.encode(body) + b"\n"


@contextlib.contextmanager
def _progress(tally: Tally) -> Iterator[Any]:
    """A bar on stderr when it is a terminal; the caller advances it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("batch", total=tally.n_lines, completed=tally.n_before)
        yield lambda: progress.advance(task)


def _report(tally: Tally, output: Path, *, as_json: bool) -> None:
    if as_json:
        document = {
            "schema": "edgellm.batch/1",
            "output": os.fspath(output),
            "n_lines": tally.n_lines,
            "n_before": tally.n_before,
            "n_ok": tally.n_ok,
            "n_failed": tally.n_failed,
        }
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return
    before = f", {tally.n_before} were done before" if tally.n_before else ""
    print(f"{tally.n_ok} answered, {tally.n_failed} failed{before}: {output}")
