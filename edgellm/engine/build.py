"""Which llama.cpp is installed and what it can offload to, asked in a child process.

The child loads the libraries, so that a broken build, or a driver that crashes while it lists its
cards, cannot take this process with it. ``python -m edgellm.engine.build`` is that child; it opens
the libraries themselves, without the Python package around them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from edgellm.errors import EngineError

ENGINE_PACKAGE: Final = "llama-cpp-python"
ENGINE_VERSION: Final = "0.3.36"
"""The version that plans are checked against; pyproject.toml pins the same."""
ENGINE_COMMIT: Final = "0c1e57098"
"""Of llama.cpp, as the package's sources of that version hold it."""


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
    """Of the Python package."""
    commit: str = ""
    """Of llama.cpp, as far as it is known; empty where it is not."""
    ggml: str = ""
    """ggml's own version."""
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


# ggml-backend.h, enum ggml_backend_dev_type.
_KINDS: Final = ("cpu", "gpu", "igpu", "accel", "meta")


def describe_build() -> EngineBuild:
    """Load the libraries and ask them. In the child only: drivers start here."""
    folder = library_folder()
    ggml, llama = open_library(folder, "ggml"), open_library(folder, "llama")
    version = installed_version() or ""
    package = "" if os.environ.get("LLAMA_CPP_LIB_PATH") else version
    return EngineBuild(
        version=version,
        commit=_commit(_text(ggml, "ggml_commit"), package),
        ggml=_text(ggml, "ggml_version"),
        backends=tuple(_backends(ggml)),
        devices=tuple(list_devices(ggml)),
        can_offload=bool(_call(llama, "llama_supports_gpu_offload", ctypes.c_bool)),
        system_info=_text(llama, "llama_print_system_info"),
        folder=str(folder),
    )


def _commit(told: str, package: str) -> str:
    """What was compiled: the sources in a package are no git repository, and ggml says "unknown"
    then (ggml/CMakeLists.txt). ``package``: the version whose libraries these are."""
    if told not in ("", "unknown"):
        return told
    return ENGINE_COMMIT if package == ENGINE_VERSION else ""


def library_folder() -> Path:
    """Where the libraries are: LLAMA_CPP_LIB_PATH, or beside the package (its own rule)."""
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    if override:
        return Path(override)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise EngineError("no engine is installed", hint="edgellm setup")
    return Path(spec.origin).parent / "lib"


def open_library(folder: Path, name: str) -> ctypes.CDLL:
    """One of the engine's libraries; the one already loaded when it comes from this folder."""
    if sys.platform == "win32":
        os.add_dll_directory(str(folder))
        return ctypes.CDLL(str(folder / f"{name}.dll"), winmode=0)
    ending = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(folder / f"lib{name}.{ending}"))


def _call(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    """Call a C function; every argument here is a pointer or a size."""
    function = getattr(library, name)
    function.restype = result
    return function(*(ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments))


def _text(library: ctypes.CDLL, name: str, *arguments: Any) -> str:
    raw = _call(library, name, ctypes.c_char_p, *arguments)
    return (raw or b"").decode(errors="replace").strip()


def _backends(ggml: ctypes.CDLL) -> Iterator[str]:
    for index in range(_call(ggml, "ggml_backend_reg_count", ctypes.c_size_t)):
        backend = _call(ggml, "ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t(index))
        yield _text(ggml, "ggml_backend_reg_name", backend)


def list_devices(ggml: ctypes.CDLL) -> Iterator[BuildDevice]:
    """Every device, as ggml numbers them."""
    for index in range(_call(ggml, "ggml_backend_dev_count", ctypes.c_size_t)):
        device = _call(ggml, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t(index))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _call(
            ggml, "ggml_backend_dev_memory", None, device, ctypes.byref(free), ctypes.byref(total)
        )
        kind = _call(ggml, "ggml_backend_dev_type", ctypes.c_int, device)
        yield BuildDevice(
            name=_text(ggml, "ggml_backend_dev_name", device),
            description=_text(ggml, "ggml_backend_dev_description", device),
            kind=_KINDS[kind] if 0 <= kind < len(_KINDS) else "gpu",
            total=total.value,
            free=free.value,
        )


def _main() -> None:
    """The child: print an EngineBuild; only its JSON reaches stdout."""
    answer = os.dup(1)
    os.dup2(2, 1)  # the libraries print to stdout while they list cards
    os.write(answer, msgspec.json.encode(describe_build()))


if __name__ == "__main__":
    _main()
