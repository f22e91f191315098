"""Machines that tests pretend to be on."""

from __future__ import annotations

from typing import Any

import msgspec

from edgellm.cli.checks import Facts, Store
from edgellm.cli.recipes import Machine, Tool
from edgellm.devices import Devices, Gpu, Host
from edgellm.engine.build import ENGINE_VERSION, BuildDevice, BuildReport, EngineBuild
from edgellm.units import GiB

RTX_4060 = Gpu(
    id="CUDA0",
    name="NVIDIA GeForce RTX 4060",
    backend="cuda",
    total=8 * GiB,
    free=7 * GiB,
    compute_capability=(8, 9),
    driver="580.1",
)
RADEON = Gpu(id="Vulkan0", name="Radeon RX 7600", backend="vulkan", total=8 * GiB, free=7 * GiB)
HOST = Host(cpu="A CPU", n_physical=8, n_logical=16, total=32 * GiB, available=24 * GiB, os="Linux")
EVERY_TOOL = tuple(
    Tool(name=name, path=f"/usr/bin/{name}", version="13.0" if name == "nvcc" else "")
    for name in ("c++", "nvcc", "glslc", "hipcc")
)


def linux(**changes: Any) -> Machine:
    """A Linux laptop with every tool and no GPU."""
    base = Machine(
        system="Linux",
        arch="x86_64",
        python=(3, 12),
        cores=8,
        tools=EVERY_TOOL,
        disk_free=100 * GiB,
        installer=("/venv/bin/python", "-m", "pip"),
    )
    return msgspec.structs.replace(base, **changes)


def with_nvidia(**changes: Any) -> Machine:
    card: dict[str, Any] = {"gpus": (RTX_4060,), "vendors": ("nvidia",), "driver_cuda": (13, 0)}
    return linux(**{**card, **changes})


def build(*devices: BuildDevice, backends: tuple[str, ...] = ("CPU",)) -> BuildReport:
    cpu = BuildDevice(name="CPU", description="A CPU", kind="cpu")
    return BuildReport(
        build=EngineBuild(version=ENGINE_VERSION, backends=backends, devices=(*devices, cpu))
    )


def facts(machine: Machine | None = None, **changes: Any) -> Facts:
    """A healthy machine; ``changes`` make it sick."""
    here = machine or linux()
    base = Facts(
        version="0.1.0",
        python="3.12.1",
        executable="/venv/bin/python",
        devices=Devices(host=HOST, gpus=here.gpus),
        machine=here,
        report=build(),
        engine_version=ENGINE_VERSION,
        store=Store(folder="/models", n_models=0, used=0, free=100 * GiB, is_writable=True),
        has_starter=True,
    )
    return msgspec.structs.replace(base, **changes)
