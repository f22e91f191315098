from __future__ import annotations

import msgspec
import pytest

from edgellm.cli.recipes import (
    WHEEL_INDEX,
    Machine,
    Tool,
    best_backend,
    build_command,
    recipe,
    wheel_command,
    wheel_index,
)
from edgellm.units import GiB
from tests.cli.machines import EVERY_TOOL, RADEON, RTX_4060, linux, with_nvidia


@pytest.mark.parametrize(
    ("machine", "backend"),
    [
        (linux(), "cpu"),
        (with_nvidia(), "cuda"),
        (linux(gpus=(RADEON,), vendors=("amd",)), "vulkan"),
        (linux(gpus=(msgspec.structs.replace(RADEON, backend="rocm"),)), "rocm"),
        (linux(vendors=("intel",)), "vulkan"),
        (linux(gpus=(RADEON, RTX_4060)), "cuda"),
        (linux(system="Darwin", arch="arm64"), "metal"),
        (linux(system="Darwin"), "cpu"),
    ],
)
def test_the_gpu_decides_the_backend(machine: Machine, backend: str) -> None:
    assert best_backend(machine)[0] == backend
    assert recipe(machine).backend == backend


def test_a_cuda_build_is_for_the_cards_that_are_here_alone() -> None:
    assert "-DCMAKE_CUDA_ARCHITECTURES=89" in recipe(with_nvidia()).cmake_args
    old = msgspec.structs.replace(RTX_4060, compute_capability=(6, 1))
    two = msgspec.structs.replace(with_nvidia(), gpus=(RTX_4060, old, RTX_4060))
    assert "-DCMAKE_CUDA_ARCHITECTURES=61;89" in recipe(two).cmake_args


def test_more_cores_build_in_less_time() -> None:
    assert recipe(linux(cores=2)).minutes == 10
    assert recipe(linux(cores=16)).minutes < recipe(linux(cores=4)).minutes
    assert recipe(linux(cores=64)).minutes >= 1


@pytest.mark.parametrize(
    ("backend", "tool"), [("cpu", "c++"), ("cuda", "nvcc"), ("vulkan", "glslc"), ("rocm", "hipcc")]
)
def test_a_missing_tool_is_named(backend: str, tool: str) -> None:
    without = tuple(t if t.name != tool else Tool(name=tool, path=None) for t in EVERY_TOOL)
    made = recipe(linux(tools=without), backend)
    assert [t.name for t in made.missing] == [tool]
    assert not made.can_build


def test_a_tool_of_another_backend_is_not_asked_for() -> None:
    assert recipe(linux(tools=(EVERY_TOOL[0],)), "cpu").missing == ()


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (linux(disk_free=GiB // 2), "0.5 GiB of disk are free"),
        (linux(gpus=(RTX_4060,)), "driver does not answer"),
        (with_nvidia(driver_cuda=None), "driver does not answer"),
    ],
)
def test_what_stops_a_build_is_a_problem(machine: Machine, says: str) -> None:
    made = recipe(machine)
    assert says in "; ".join(made.problems)
    assert not made.can_build


def test_a_toolkit_newer_than_the_driver_is_a_problem() -> None:
    old_driver = msgspec.structs.replace(with_nvidia(), driver_cuda=(12, 4))
    assert "newer than the driver" in "; ".join(recipe(old_driver).problems)
    newer_minor = msgspec.structs.replace(with_nvidia(), driver_cuda=(13, 2))
    assert recipe(newer_minor).problems == ()


@pytest.mark.parametrize(
    ("driver", "capability", "tag"),
    [
        ((13, 0), (8, 9), "cu130"),
        ((13, 9), (8, 9), "cu132"),
        ((13, 0), (6, 1), "cu125"),  # Pascal ended with CUDA 12
        ((12, 4), (8, 9), "cu124"),
        ((12, 9), (8, 9), "cu125"),
        ((11, 8), (8, 6), "cu118"),
        ((11, 4), (8, 6), None),
    ],
)
def test_the_prebuilt_cuda_suits_driver_and_card(
    driver: tuple[int, int], capability: tuple[int, int], tag: str | None
) -> None:
    gpu = msgspec.structs.replace(RTX_4060, compute_capability=capability)
    machine = linux(gpus=(gpu,), driver_cuda=driver)
    expected = f"{WHEEL_INDEX}/{tag}" if tag else None
    assert wheel_index(machine, "cuda") == expected


def test_prebuilt_wheels_are_for_any_python_and_few_processors() -> None:
    assert wheel_index(linux(python=(3, 13)), "cpu") is not None
    assert wheel_index(linux(arch="aarch64"), "cpu") is not None
    assert wheel_index(with_nvidia(arch="aarch64"), "cuda") is None
    assert wheel_index(linux(arch="riscv64"), "cpu") is None
    assert wheel_index(linux(), "metal") is None


def test_commands_can_be_pasted() -> None:
    made = recipe(with_nvidia())
    line = build_command(made, with_nvidia(), replaces=True)
    assert line.startswith("CMAKE_ARGS='-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=89 ")
    assert "--force-reinstall --no-deps" in line
    assert line.endswith("--no-binary llama-cpp-python llama-cpp-python==0.3.36")
    fresh = wheel_command(made, with_nvidia(), replaces=False)
    assert "--only-binary llama-cpp-python" in fresh
    assert "--no-deps" not in fresh
