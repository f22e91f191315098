"""``edgellm setup``: install the engine built for this machine's GPU, and prove it.

The engine is built and tried in a folder of its own; only an engine that was proven replaces the
one that is there, and what was there is put back when even that goes wrong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from edgellm.cli import checks, install
from edgellm.cli.errors import UsageError
from edgellm.cli.install import Job, Route, Step
from edgellm.cli.recipes import Recipe, how_to_get, recipe
from edgellm.engine.build import ENGINE_PACKAGE, ENGINE_VERSION
from edgellm.errors import EngineError
from edgellm.units import format_bytes

SCHEMA = "edgellm.setup/1"


def setup(
    *,
    backend: Literal["cpu", "cuda", "vulkan", "rocm", "metal"] | None = None,
    prebuilt: bool = False,
    build: bool = False,
    source: Path | None = None,
    starter: Annotated[bool, Parameter(negative="--no-starter")] = True,
    dry_run: bool = False,
    yes: Annotated[bool, Parameter(name=("--yes", "-y"))] = False,
    json: bool = False,
) -> None:
    """Install the engine (llama.cpp) for this machine's GPU, and prove that it works.

    Builds it from source with the right options, or takes a prebuilt wheel where you choose one.
    The engine that is installed now stays until the new one has loaded a model.

    Examples, one a line:

    * `edgellm setup --dry-run`
    * `edgellm setup --yes`
    * `edgellm setup --backend vulkan`

    Parameters
    ----------
    backend
        Build for this backend instead of the one for the GPU that was found.
    prebuilt
        Take a prebuilt wheel from the engine's own index; nothing is compiled.
    build
        Compile it here, without asking.
    source
        A wheel or source archive of the engine on this disk, in place of the package index's.
    starter
        Also install the starter model (94 MiB), which proves the engine.
    dry_run
        Print the steps and leave.
    yes
        Do not ask; compiles unless --prebuilt is given.
    json
        Print the steps or the result as JSON (edgellm.setup/1).
    """
    if prebuilt and build:
        raise UsageError("--prebuilt and --build exclude each other")
    if source is not None and not source.is_file():
        raise UsageError(f"no file {source}")
    facts = checks.examine()
    chosen = recipe(facts.machine, backend)
    job = Job(
        recipe=chosen,
        machine=facts.machine,
        route=_route(chosen, prebuilt=prebuilt, build=build or bool(source), yes=yes or dry_run),
        source=source,
        replaces=facts.engine_version is not None,
        installs_starter=starter and not facts.has_starter,
        proves_with_starter=starter or facts.has_starter,
        stage=Path(tempfile.gettempdir()) / "edgellm-setup",
    )
    if dry_run or not json:
        _show_plan(job, as_json=json)
    if not dry_run:
        _install(job, as_json=json)


def _install(job: Job, *, as_json: bool) -> None:
    _check(job)
    with tempfile.TemporaryDirectory(prefix="edgellm-setup-") as stage:
        result = install.run(msgspec.structs.replace(job, stage=Path(stage)))
    _show_result(result, as_json=as_json)


def _route(chosen: Recipe, *, prebuilt: bool, build: bool, yes: bool) -> Route:
    """Wheel or build: as the flags say, else as the person at the terminal says."""
    if prebuilt:
        if chosen.wheel_index is None:
            raise UsageError(
                f"no prebuilt engine for {chosen.backend} on this system",
                hint="edgellm setup --build",
            )
        return "wheel"
    if build or yes or chosen.wheel_index is None:
        return "build"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("setup changes this environment", hint="edgellm setup --yes")
    return _ask(chosen)


def _ask(chosen: Recipe) -> Route:
    print(f"The engine for {chosen.backend} ({chosen.why}):")
    print(f"  1  compile it here: about {chosen.minutes} minutes")
    print(f"  2  take a prebuilt wheel from {chosen.wheel_index} (when it has this version)")
    answer = input("1 or 2? [1] ").strip() or "1"
    if answer not in ("1", "2"):
        raise UsageError(f"{answer!r} is neither 1 nor 2")
    return "wheel" if answer == "2" else "build"


def _check(job: Job) -> None:
    """Refuse what cannot end well before anything is changed."""
    if not job.machine.installer:
        raise EngineError(
            "neither pip nor uv can install into this environment",
            hint=f"{sys.executable} -m ensurepip",
        )
    if not job.compiles:
        return
    if job.recipe.problems:
        raise EngineError("; ".join(job.recipe.problems), hint="edgellm doctor")
    if job.recipe.missing:
        tool = job.recipe.missing[0]
        hint = how_to_get(tool.name, job.machine.system)
        if job.recipe.wheel_index:
            hint += "; or, without compiling: edgellm setup --prebuilt"
        raise EngineError(f"a build for {job.recipe.backend} needs {tool.name}", hint=hint)


def _show_plan(job: Job, *, as_json: bool) -> None:
    steps = install.steps(job)
    if as_json:
        print(msgspec.json.encode(_plan_json(job, steps)).decode())
        return
    chosen = job.recipe
    print(f"{ENGINE_PACKAGE} {ENGINE_VERSION} for {chosen.backend} ({chosen.why})")
    if job.compiles:
        print(f"about {chosen.minutes} minutes and {format_bytes(chosen.disk)} while it compiles")
    for problem in chosen.problems:
        print(f"  ! {problem}")
    for tool in chosen.missing if job.compiles else ():
        print(f"  ! {tool.name} is missing: {how_to_get(tool.name, job.machine.system)}")
    for number, step in enumerate(steps, start=1):
        print(f"{number}. {step.title}")
        print(f"     {step.spoken}")


def _plan_json(job: Job, steps: tuple[Step, ...]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "backend": job.recipe.backend,
        "why": job.recipe.why,
        "route": job.route,
        "minutes": job.recipe.minutes,
        "missing": [tool.name for tool in job.recipe.missing],
        "problems": list(job.recipe.problems),
        "steps": [{"title": step.title, "command": step.spoken} for step in steps],
    }


def _show_result(result: install.Result, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode({"schema": SCHEMA, **msgspec.to_builtins(result)}).decode())
        return
    devices = ", ".join(f"{d.name} ({d.description})" for d in result.build.devices)
    print(f"the engine is installed; it lists {devices}")
    if result.offloaded:
        print(f"the starter answered; layers on the GPU: {result.offloaded}")
    if result.overhead is not None:
        taken = format_bytes(result.overhead)
        print(
            f"beside llama.cpp's buffers it took {taken} of the card; later plans start from that"
        )
    print("next:  edgellm chat starter")
