"""How the engine is installed on a machine: which backend, which tools, which commands. Pure.

:class:`Machine` says what is there; :func:`recipe` says what to do. `edgellm doctor` prints the
lines, `edgellm setup` runs the steps.
"""

from __future__ import annotations

import shlex
from typing import Final

import msgspec

from edgellm.devices import Gpu
from edgellm.engine.build import ENGINE_PACKAGE, ENGINE_VERSION
from edgellm.units import GiB

# The engine's own index of prebuilt wheels; not every version and Python is there.
WHEEL_INDEX: Final = "https://abetlen.github.io/llama-cpp-python/whl"
# CUDA versions with wheels, newest first (the engine's README, "Pre-built Wheel").
CUDA_WHEELS: Final = ((13, 2), (13, 0), (12, 5), (12, 4), (12, 3), (12, 2), (12, 1), (11, 8))
# CUDA 13 ended support for cards older than Turing (compute capability 7.5).
OLDEST_FOR_CUDA_13: Final = (7, 5)
# The wheels are tagged py3-none (the engine's pyproject.toml, wheel.py-api): any Python takes them.
# Backend -> processors that have one.
WHEEL_ARCHES: Final = {"cpu": ("x86_64", "AMD64", "arm64", "aarch64")}


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A program that a build needs; ``path`` is None where it is not installed."""

    name: str
    path: str | None
    version: str = ""
    in_path: bool = True
    """Whether a build finds it by its name alone."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a recipe."""

    system: str
    """Linux, Darwin or Windows."""
    arch: str
    python: tuple[int, int]
    cores: int
    gpus: tuple[Gpu, ...] = ()
    vendors: tuple[str, ...] = ()
    """Makers of the display adapters: nvidia, amd, intel."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA the NVIDIA driver runs."""
    tools: tuple[Tool, ...] = ()
    disk_free: int = 0
    installer: tuple[str, ...] = ()
    """The command that installs packages here: (python, -m, pip) or (uv, pip); empty: neither."""
    cmake_args: tuple[str, ...] = ()
    """What CMAKE_ARGS holds already; it comes last, so that it wins."""

    def tool(self, name: str) -> Tool:
        found = [t for t in self.tools if t.name == name]
        return found[0] if found else Tool(name=name, path=None)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """One way to install the engine."""

    backend: str
    why: str
    cmake_args: tuple[str, ...]
    minutes: int
    """Expected time of a build on these cores."""
    disk: int
    """Bytes a build needs while it runs."""
    missing: tuple[Tool, ...] = ()
    """Tools that a build needs and that are not here."""
    wheel_index: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def can_build(self) -> bool:
        return not self.missing and not self.problems


# Backend -> (cmake arguments, core-minutes of a build, bytes it needs, tools beside a compiler).
# CPU: 10 minutes on 2 cores; CUDA for one architecture: 4 minutes on 16 cores (both measured).
_BUILDS: Final[dict[str, tuple[tuple[str, ...], int, int, tuple[str, ...]]]] = {
    "cpu": ((), 20, 1 * GiB, ()),
    "cuda": (("-DGGML_CUDA=ON",), 64, 4 * GiB, ("nvcc",)),
    "vulkan": (("-DGGML_VULKAN=ON",), 35, 2 * GiB, ("glslc",)),
    "rocm": (("-DGGML_HIP=ON",), 64, 4 * GiB, ("hipcc",)),
    "metal": (("-DGGML_METAL=ON",), 24, 1 * GiB, ()),
}
# RPC costs seconds and lets machines be pooled.
_PINNED: Final = f"{ENGINE_PACKAGE}=={ENGINE_VERSION}"
_ALWAYS: Final = ("-DGGML_RPC=ON",)

_HOW: Final[dict[str, dict[str, str]]] = {
    "c++": {
        "Linux": "sudo apt install build-essential   (Fedora: sudo dnf install gcc-c++ make)",
        "Darwin": "xcode-select --install",
        "Windows": "winget install Microsoft.VisualStudio.2022.BuildTools",
    },
    "nvcc": {
        "Linux": "install the CUDA toolkit: https://developer.nvidia.com/cuda-downloads",
        "Windows": "winget install Nvidia.CUDA",
    },
    "glslc": {
        "Linux": "sudo apt install glslc libvulkan-dev   (Fedora: sudo dnf install glslc "
        "vulkan-loader-devel)",
        "Windows": "winget install KhronosGroup.VulkanSDK",
    },
    "hipcc": {"Linux": "install ROCm: https://rocm.docs.amd.com/projects/install-on-linux"},
}


# Libraries that a build for the backend needs at run time, and that a bare system may lack.
_LIBRARIES: Final = {
    "libgomp.so": "sudo apt install libgomp1   (Fedora: sudo dnf install libgomp)",
    "libstdc++.so": "sudo apt install libstdc++6   (Fedora: sudo dnf install libstdc++)",
    "libvulkan.so": "sudo apt install libvulkan1   (Fedora: sudo dnf install vulkan-loader)",
    "libcuda.so": "install the NVIDIA driver: https://www.nvidia.com/drivers",
}


def missing_library(detail: str) -> str | None:
    """The command that brings the library which the loader did not find, from its own words."""
    if "cannot open shared object" not in detail:
        return None
    return next((how for name, how in _LIBRARIES.items() if f"{name}." in detail), None)


def best_backend(machine: Machine) -> tuple[str, str]:
    """The backend for this machine's GPU, and why in a few words."""
    if machine.system == "Darwin" and machine.arch == "arm64":
        return "metal", "Apple silicon"
    kinds = {g.backend for g in machine.gpus}
    for backend in ("cuda", "rocm", "vulkan"):
        if backend in kinds:
            names = ", ".join(g.name for g in machine.gpus if g.backend == backend)
            return backend, names
    if "intel" in machine.vendors or "amd" in machine.vendors:
        return "vulkan", f"a GPU of {' and '.join(machine.vendors)}"
    return "cpu", "no GPU was found"


def recipe(machine: Machine, backend: str | None = None) -> Recipe:
    """How to install the engine here for ``backend``, or for the GPU that was found."""
    chosen, why = best_backend(machine) if backend is None else (backend, "asked for")
    _, core_minutes, disk, tools = _BUILDS[chosen]
    needed = [machine.tool(name) for name in ("c++", *tools)]
    return Recipe(
        backend=chosen,
        why=why,
        cmake_args=_cmake_args(machine, chosen),
        minutes=max(1, round(core_minutes / max(1, machine.cores))),
        disk=disk,
        missing=tuple(t for t in needed if t.path is None),
        wheel_index=wheel_index(machine, chosen),
        problems=tuple(_problems(machine, chosen, disk)),
    )


def wheel_index(machine: Machine, backend: str) -> str | None:
    """The index that may hold a prebuilt wheel for this machine, or None when it cannot."""
    if machine.arch not in WHEEL_ARCHES.get(backend, ("x86_64", "AMD64", "arm64")):
        return None
    if backend == "cuda":
        tag = _cuda_tag(machine)
    else:
        tag = {
            ("cpu", "Linux"): "cpu",
            ("cpu", "Windows"): "cpu",
            ("cpu", "Darwin"): "cpu",
            ("metal", "Darwin"): "metal",
            ("vulkan", "Linux"): "vulkan",
            ("vulkan", "Windows"): "vulkan",
            ("rocm", "Linux"): "rocm72",
            ("rocm", "Windows"): "hip-radeon",
        }.get((backend, machine.system))
    return f"{WHEEL_INDEX}/{tag}" if tag else None


def _cuda_tag(machine: Machine) -> str | None:
    """The newest CUDA that both the driver and the oldest card run."""
    if machine.driver_cuda is None:
        return None
    capabilities = [g.compute_capability for g in machine.gpus if g.compute_capability]
    oldest = min(capabilities, default=OLDEST_FOR_CUDA_13)
    for version in CUDA_WHEELS:
        too_new = version > machine.driver_cuda
        if not too_new and not (version[0] >= 13 and oldest < OLDEST_FOR_CUDA_13):
            return f"cu{version[0]}{version[1]}"
    return None


def _cmake_args(machine: Machine, backend: str) -> tuple[str, ...]:
    """What the backend and this machine need, then what the person's CMAKE_ARGS add to it."""
    ours = (
        *_BUILDS[backend][0],
        *_architectures(machine, backend),
        *_compilers(machine, backend),
        *_ALWAYS,
    )
    return (*ours, *(text for text in machine.cmake_args if text not in ours))


def _compilers(machine: Machine, backend: str) -> tuple[str, ...]:
    """The toolkit's installer leaves nvcc outside PATH, where cmake does not look for it."""
    nvcc = machine.tool("nvcc")
    if backend != "cuda" or nvcc.path is None or nvcc.in_path:
        return ()
    return (f"-DCMAKE_CUDA_COMPILER={nvcc.path}",)


def _architectures(machine: Machine, backend: str) -> tuple[str, ...]:
    """Only the cards that are here: a build for every card takes several times longer."""
    if backend != "cuda":
        return ()
    found = {g.compute_capability for g in machine.gpus if g.compute_capability}
    if not found:
        return ("-DCMAKE_CUDA_ARCHITECTURES=native",)
    return ("-DCMAKE_CUDA_ARCHITECTURES=" + ";".join(f"{a}{b}" for a, b in sorted(found)),)


def _problems(machine: Machine, backend: str, disk: int) -> list[str]:
    found: list[str] = []
    if machine.disk_free < disk:
        found.append(
            f"{machine.disk_free / GiB:.1f} GiB of disk are free and a build needs "
            f"{disk / GiB:.0f} GiB"
        )
    if backend == "cuda" and machine.driver_cuda is None:
        found.append("the NVIDIA driver does not answer")
    toolkit = _version(machine.tool("nvcc").version)
    if (
        backend == "cuda"
        and toolkit
        and machine.driver_cuda
        and toolkit[0] > machine.driver_cuda[0]
    ):
        found.append(
            f"the CUDA toolkit is {toolkit[0]}.{toolkit[1]}, newer than the driver runs "
            f"({machine.driver_cuda[0]}.{machine.driver_cuda[1]})"
        )
    return found


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


def how_to_get(tool: str, system: str) -> str:
    """The command or page that installs a tool on this system."""
    return _HOW.get(tool, {}).get(system, f"install {tool}")


def build_command(recipe: Recipe, machine: Machine, *, replaces: bool) -> str:
    """One line that builds and installs the engine, as a person would type it."""
    arguments = shlex.quote(" ".join(recipe.cmake_args))
    options = f"--no-cache-dir --no-binary {ENGINE_PACKAGE}"
    return f"CMAKE_ARGS={arguments} {_install(machine, replaces)} {options} {_PINNED}"


def wheel_command(recipe: Recipe, machine: Machine, *, replaces: bool) -> str:
    """One line that installs a prebuilt wheel and never falls back to a build."""
    options = f"--only-binary {ENGINE_PACKAGE} --extra-index-url {recipe.wheel_index}"
    return f"{_install(machine, replaces)} {options} {_PINNED}"


def _install(machine: Machine, replaces: bool) -> str:
    """The installer's command; an engine that is there is replaced, its dependencies stay."""
    pip = shlex.join(machine.installer or ("python", "-m", "pip"))
    return f"{pip} install" + (" --force-reinstall --no-deps" if replaces else "")
