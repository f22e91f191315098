"""What `edgellm doctor` looks at and `edgellm setup` builds on: facts, then judgements on them.

:func:`examine` asks the machine; :func:`judge` is pure, so that every complaint can be tested on a
machine that does not have the trouble.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from edgellm import __version__, config, devices, paths
from edgellm.cli.recipes import (
    Machine,
    Recipe,
    Tool,
    build_command,
    how_to_get,
    missing_library,
    recipe,
)
from edgellm.devices import Devices
from edgellm.engine.build import (
    ENGINE_PACKAGE,
    ENGINE_VERSION,
    BuildReport,
    inspect_build,
    installed_version,
)
from edgellm.errors import ConfigError
from edgellm.store import local, records
from edgellm.units import GiB, format_bytes

PYTHONS: Final = ((3, 10), (3, 13))
LOW_RAM: Final = 2 * GiB
LOW_DISK: Final = 5 * GiB


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement: ``ok``, ``warning`` or ``problem``, and the command that mends it."""

    name: str
    status: str
    detail: str
    fix: str | None = None


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of models. Bytes."""

    folder: str
    n_models: int
    used: int
    free: int
    is_writable: bool


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the judgements rest on."""

    version: str
    python: str
    executable: str
    devices: Devices
    machine: Machine
    report: BuildReport
    engine_version: str | None
    store: Store
    config_error: str | None = None
    config_file: str = ""
    has_starter: bool = False

    @property
    def recipe(self) -> Recipe:
        return recipe(self.machine)


def examine() -> Facts:
    """Ask the machine, the engine (in a child process), the store and the settings."""
    found = devices.probe()
    return Facts(
        version=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        devices=found,
        machine=machine(found),
        report=inspect_build(),
        engine_version=installed_version(),
        store=_store(),
        config_error=_config_error(),
        config_file=str(paths.config_file()),
        has_starter=local.starter_path() is not None,
    )


def machine(found: Devices) -> Machine:
    """What decides how the engine is installed here."""
    return Machine(
        system=platform.system(),
        arch=platform.machine(),
        python=sys.version_info[:2],
        cores=found.host.n_physical,
        gpus=found.gpus,
        vendors=devices.vendors(),
        driver_cuda=devices.cuda_driver_version(),
        tools=tuple(_tools()),
        disk_free=shutil.disk_usage(_existing(Path(sys.prefix))).free,
        installer=installer(),
        cmake_args=tuple(os.environ.get("CMAKE_ARGS", "").split()),
    )


def installer() -> tuple[str, ...]:
    """How packages get into this environment: pip inside it, else uv from outside."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    uv = shutil.which("uv")
    return (uv, "pip", "--python", sys.executable) if uv else ()


def _tools() -> Iterator[Tool]:
    """The programs a build may need. cmake and ninja are not here: a build brings its own."""
    compilers = ("cl",) if os.name == "nt" else ("c++", "g++", "clang++")
    yield Tool(name="c++", path=_which(*compilers))
    nvcc = _which("nvcc", *(f"{root}/bin/nvcc" for root in _cuda_roots()))
    in_path = shutil.which("nvcc") is not None or bool(os.environ.get("CUDACXX"))
    yield Tool(name="nvcc", path=nvcc, version=_nvcc_version(nvcc), in_path=in_path)
    yield Tool(name="glslc", path=_which("glslc"))
    yield Tool(name="hipcc", path=_which("hipcc", "/opt/rocm/bin/hipcc"))


def _which(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def _cuda_roots() -> tuple[str, ...]:
    return tuple(x for x in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if x)


def _nvcc_version(path: str | None) -> str:
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return match[1] if match else ""


def _store() -> Store:
    folder = records.store_folder()
    models = [m for m in local.list_models() if m.owner == "edgellm"]
    nearest = _existing(folder)
    return Store(
        folder=str(folder),
        n_models=len(models),
        used=sum(m.n_bytes for m in models),
        free=shutil.disk_usage(nearest).free,
        is_writable=os.access(nearest, os.W_OK),
    )


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def _config_error() -> str | None:
    try:
        config.load()
    except ConfigError as error:
        return error.message
    return None


def judge(facts: Facts) -> list[Check]:
    """Every judgement, in the order a person should read them."""
    return [
        _judge_python(facts),
        *_judge_engine(facts),
        *_judge_gpus(facts),
        _judge_ram(facts),
        *_judge_store(facts),
        *_judge_settings(facts),
    ]


def _judge_python(facts: Facts) -> Check:
    (low, high), here = PYTHONS, facts.machine.python
    if low <= here <= high:
        return Check(name="python", status="ok", detail=facts.python)
    span = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return Check(
        name="python",
        status="problem" if here < low else "warning",
        detail=f"Python {facts.python} is here; edgellm is tested on {span}",
        fix="pipx reinstall edgellm --python python3.12",
    )


def _judge_engine(facts: Facts) -> Iterator[Check]:
    if facts.report.problem == "missing":
        yield Check(
            name="engine",
            status="problem",
            detail=f"the engine ({ENGINE_PACKAGE} {ENGINE_VERSION}) is not installed; "
            "plan, ls, pull and search work without it",
            fix="edgellm setup",
        )
    elif facts.report.problem:
        yield Check(
            name="engine",
            status="problem",
            detail=f"the engine does not load: {facts.report.detail}",
            fix=missing_library(facts.report.detail) or _rebuild(facts),
        )
    elif facts.engine_version not in (ENGINE_VERSION, None):
        yield Check(
            name="engine",
            status="warning",
            detail=f"{ENGINE_PACKAGE} {facts.engine_version} is installed; "
            f"plans are checked against {ENGINE_VERSION}",
            fix=_rebuild(facts),
        )
    else:
        yield Check(name="engine", status="ok", detail=f"{ENGINE_PACKAGE} {ENGINE_VERSION} loads")


def _judge_gpus(facts: Facts) -> Iterator[Check]:
    for note in facts.devices.notes:
        is_driver = "driver" in note
        yield Check(
            name="gpu",
            status="problem" if is_driver else "warning",
            detail=note,
            fix=_driver_fix(facts) if is_driver else None,
        )
    build, wanted = facts.report.build, facts.recipe
    if build is None or wanted.backend == "cpu":
        return
    if build.gpus:
        names = ", ".join(d.name for d in build.gpus)
        yield Check(name="offload", status="ok", detail=f"layers can go to {names}")
        return
    yield from _no_offload(facts, wanted)


def _no_offload(facts: Facts, wanted: Recipe) -> Iterator[Check]:
    """A GPU is here and the engine lists none: a build for the CPU, or one without its driver."""
    build = facts.report.build
    compiled = {b.lower() for b in build.backends} if build else set()
    if wanted.backend in compiled:
        yield Check(
            name="offload",
            status="problem",
            detail=f"{wanted.why} is here and the engine has {wanted.backend}, but lists no card",
            fix=_driver_fix(facts),
        )
        return
    yield Check(
        name="offload",
        status="problem",
        detail=f"{wanted.why} is unused: the engine was built for {_spoken(compiled)}",
        fix=_rebuild(facts),
    )
    for tool in wanted.missing:
        yield Check(
            name="build",
            status="warning",
            detail=f"a build for {wanted.backend} needs {tool.name}, which is not here",
            fix=how_to_get(tool.name, facts.machine.system),
        )


def _spoken(backends: set[str]) -> str:
    others = sorted(backends - {"cpu", "rpc"})
    return "the CPU only" if not others else ", ".join(others)


def _judge_ram(facts: Facts) -> Check:
    host = facts.devices.host
    detail = f"{format_bytes(host.available)} of {format_bytes(host.total)} are free"
    if host.available >= LOW_RAM:
        return Check(name="ram", status="ok", detail=detail)
    return Check(
        name="ram", status="warning", detail=f"{detail}: close programs, or use a smaller model",
        fix="edgellm pull starter",
    )  # fmt: skip


def _judge_store(facts: Facts) -> Iterator[Check]:
    store = facts.store
    if not store.is_writable:
        yield Check(
            name="store",
            status="problem",
            detail=f"{store.folder} cannot be written",
            fix=f"sudo chown -R {os.environ.get('USER', '$USER')} {store.folder}",
        )
    if store.free < LOW_DISK:
        yield Check(
            name="disk",
            status="warning",
            detail=f"{format_bytes(store.free)} are free beside the store in {store.folder}",
            fix="edgellm ls && edgellm rm MODEL",
        )
    else:
        yield Check(name="disk", status="ok", detail=f"{format_bytes(store.free)} are free")


def _judge_settings(facts: Facts) -> Iterator[Check]:
    if facts.config_error is not None:
        yield Check(
            name="config", status="problem", detail=facts.config_error, fix="edgellm config path"
        )


def _rebuild(facts: Facts) -> str:
    return build_command(facts.recipe, facts.machine, replaces=facts.engine_version is not None)


def _driver_fix(facts: Facts) -> str:
    if facts.machine.system == "Linux" and "nvidia" in facts.machine.vendors:
        return "sudo ubuntu-drivers install   (other systems: https://www.nvidia.com/drivers)"
    return "install the newest driver of the GPU's maker, then run edgellm doctor"
