"""Which llama.cpp is installed and what it can offload to, asked in a child process.

The child loads the library, so that a broken build, or a driver that crashes while it lists its
cards, cannot take this process with it. ``python -m edgellm.engine.build`` is that child.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from edgellm.errors import EngineError

ENGINE_PACKAGE: Final = "llama-cpp-python"
ENGINE_VERSION: Final = "0.3.36"
"""The version that plans are checked against; pyproject.toml pins the same."""
GPU_KINDS: Final = ("gpu", "igpu", "accel")


class BuildDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as ggml lists it. Memory in bytes."""

    name: str
    """CUDA0, Vulkan0, Metal, CPU ..."""
    description: str
    kind: str
    """cpu, gpu, igpu or accel."""
    total: int = 0
    free: int = 0


class EngineBuild(msgspec.Struct, frozen=True, kw_only=True):
    """What the installed library says of itself."""

    version: str
    commit: str = ""
    backends: tuple[str, ...] = ()
    """Names of the backends compiled in: CPU, CUDA, Vulkan, Metal, ROCm, RPC."""
    devices: tuple[BuildDevice, ...] = ()
    can_offload: bool = False
    system_info: str = ""
    folder: str = ""

    @property
    def gpus(self) -> tuple[BuildDevice, ...]:
        """The devices that layers can go to. BLAS libraries (accel) hold no layers."""
        return tuple(d for d in self.devices if d.kind in ("gpu", "igpu"))


class BuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """The build, or why there is none."""

    build: EngineBuild | None = None
    problem: str = ""
    """Empty, ``missing``, or ``broken``."""
    detail: str = ""


def is_installed() -> bool:
    """Whether the engine's package is there; nothing is imported."""
    return importlib.util.find_spec("llama_cpp") is not None


def installed_version() -> str | None:
    """The engine's version from its package's metadata, or None."""
    try:
        return importlib.metadata.version(ENGINE_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_engine() -> None:
    """Raise EngineError, with the command that installs it, when there is no engine."""
    if not is_installed():
        raise EngineError(
            f"the engine ({ENGINE_PACKAGE} {ENGINE_VERSION}) is not installed",
            hint="edgellm setup",
        )


def inspect_build(
    *, python: str | None = None, environ: Mapping[str, str] | None = None, timeout_s: float = 120
) -> BuildReport:
    """Ask a child process. Never raises; the first CUDA start of a machine takes seconds."""
    if environ is None and not is_installed():
        return BuildReport(problem="missing")
    command = [python or sys.executable, "-m", "edgellm.engine.build"]
    # Cards in the order devices.probe lists them.
    child_environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **(environ or os.environ)}
    try:
        done = subprocess.run(
            command, capture_output=True, env=child_environ, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return BuildReport(problem="broken", detail=f"no answer within {timeout_s:.0f} s")
    if done.returncode != 0:
        return BuildReport(problem="broken", detail=_last_line(done.stderr, done.returncode))
    try:
        return BuildReport(build=msgspec.json.decode(done.stdout, type=EngineBuild))
    except msgspec.DecodeError as error:
        return BuildReport(problem="broken", detail=f"it did not answer in JSON: {error}")


def _last_line(stderr: bytes, code: int) -> str:
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    if code < 0:
        return f"it was ended by signal {-code}"
    return lines[-1].strip() if lines else f"it exited with code {code}"


def _main() -> None:
    """The child: load the library and print an EngineBuild; only JSON reaches stdout."""
    answer = os.dup(1)
    os.dup2(2, 1)  # the library prints to stdout when it lists cards
    llama = importlib.import_module("edgellm.engine.llama")
    os.write(answer, msgspec.json.encode(llama.describe_build()))


if __name__ == "__main__":
    _main()
