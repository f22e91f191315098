"""The race of several cards: what llama-server's log says, which splits are tried, what is judged.

The log lines are llama-server's own (-lv 4), of two devices on which nothing, a dense model and a
model of experts were fitted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edgellm.devices import Devices, Gpu, Host
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import PlanRequest
from edgellm.units import GiB, MiB
from tests.planner.test_fit import synthetic

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
LOADED = """\
0.00.169 I load_tensors: offloaded 31/31 layers to GPU
0.00.169 I load_tensors:   CPU_Mapped model buffer size =    28.69 MiB
0.00.169 I load_tensors: RPC0[127.0.0.1:50161] model buffer size =    33.82 MiB
0.00.309 I llama_kv_cache: RPC0[127.0.0.1:50161] KV buffer size =    48.00 MiB
0.00.338 I sched_reserve: RPC0[127.0.0.1:50161] compute buffer size =    32.91 MiB
"""
UNCHANGED = """\
0.00.09 I common_params_fit_impl: targets for free memory can be met on all devices, no changes \
needed
"""
DENSE = """\
0.00.44 I common_params_fit_impl:   - RPC1 (127.0.0.1:50162):  7 layers,     74 MiB used,  24030 \
MiB free
0.00.64 I common_params_fit_impl:   - RPC0 (127.0.0.1:50161):  0 layers,      0 MiB used,  24105 \
MiB free
"""
EXPERTS = """\
0.00.44 I common_params_fit_impl:   - CUDA0 (NVIDIA H200):  0 layers,  0 MiB used,  8105 MiB free
0.00.64 I common_params_fit_impl:   - CUDA0 (NVIDIA H200): 30 layers ( 1 overflowing),   7105 MiB \
used,   1000 MiB free
0.00.64 I common_params_fit_impl:   - CUDA1 (NVIDIA H200): 19 layers ( 9 overflowing),   3105 MiB \
used,   1000 MiB free
0.00.65 I load_tensors: offloaded 49/49 layers to GPU
"""


@pytest.fixture
def gpu_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(GPU))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(GPU)):
            del sys.modules[name]


def module(name: str) -> ModuleType:
    return __import__(name)


@pytest.mark.usefixtures("gpu_folder")
@pytest.mark.parametrize(
    ("log", "words"),
    [
        (UNCHANGED + LOADED, "as its defaults"),
        (LOADED, "31 of 31"),
        (DENSE + LOADED.replace("31/31", "7/31"), "7 + 0 of 31"),
        (EXPERTS, "30 (1 in part) + 19 (9 in part) of 49"),
    ],
)
def test_the_fit_of_llama_server_is_read_from_its_log(log: str, words: str) -> None:
    assert str(module("fitted").read_fit(log.splitlines())) == words


@pytest.mark.usefixtures("gpu_folder")
def test_buffers_are_those_of_the_load_not_of_the_trials_before_it() -> None:
    trial = LOADED.replace("33.82", "0.00")
    fitted = module("fitted").read_fit((trial + LOADED).splitlines())
    held = fitted.buffers["RPC0[127.0.0.1:50161]"]
    assert held == {"model": 33.82, "KV": 48.0, "compute": 32.91}


def cards(*gib: float) -> Devices:
    gpus = tuple(
        Gpu(
            id=f"CUDA{i}", name="NVIDIA H200", backend="cuda", total=140 * GiB, uuid=f"GPU-{i}",
            free=int(size * GiB), compute_capability=(9, 0),
        )
        for i, size in enumerate(gib)
    )  # fmt: skip
    host = Host(cpu="cpu", n_physical=8, n_logical=8, total=64 * GiB, available=60 * GiB)
    return Devices(host=host, gpus=gpus)


@pytest.mark.usefixtures("gpu_folder")
def test_the_sweep_holds_the_split_by_free_memory_the_halves_and_the_neighbours() -> None:
    pairs = module("pairs")
    shape = synthetic(n_layer=31, n_embd=2048, n_ff=8192)
    found = cards(1.8, 1.5)
    plan = make_plan(shape, found, PlanRequest(n_ctx=4096, n_seq_max=4))
    planned = plan.devices[0].n_layers
    assert 0 < planned < 32
    names = [name for name, _ in pairs.others(plan, shape, [gpu.free for gpu in found.gpus])]
    layered = [name for name in names if "+" in name]
    assert f"{planned}+{32 - planned}" not in layered
    assert {"17+15", "16+16"} - {f"{planned}+{32 - planned}"} <= set(layered)
    assert names[len(layered) :] == ["tensor", "row", "ubatch 2048", "ubatch 128"]


def row(decode: float, **others: float) -> dict[str, Any]:
    def trial(name: str, tps: float) -> dict[str, Any]:
        card = {
            "id": "CUDA0",
            "planned": {
                "weights": 100 * MiB, "kv_cache": 0, "recurrent_state": 0, "compute": 40 * MiB,
                "overhead": 600 * MiB, "used": 740 * MiB, "n_layers": 9,
            },
            "measured": {"weights": 100 * MiB, "compute": 60 * MiB},
            "process": 765 * MiB,
        }  # fmt: skip
        return {
            "name": name, "decode_tps": tps, "prefill_tps": 1.0, "error": "", "fallbacks": [],
            "cards": [card] if name == "edgellm" else [], "split": "9+1", "seconds": 1.0,
            "plan": None, "elsewhere": 0,
        }  # fmt: skip

    made = [trial("edgellm", decode)]
    made += [trial(name.replace("_", " "), tps) for name, tps in others.items()]
    return {"pair": [8, 4], "model": "m", "n_ctx": 4096, "trials": made}


@pytest.mark.usefixtures("gpu_folder")
def test_what_is_judged_names_each_figure_that_is_off() -> None:
    report = module("pairs_report")
    lines = list(report.judged([row(90.0, larger_alone=100.0, **{"5+5": 91.0})]))
    # compute by -20 MiB and the whole by -25; the overhead by -5 is close enough
    assert lines[0].startswith("4 of 6 ledger entries within 1 % or 16 MiB; outside: ")
    assert "CUDA0 compute -20.0 MiB" in lines[0]
    assert "CUDA0 used -25.0 MiB" in lines[0]
    assert lines[3].startswith("decode at 0.95 of the best split of the sweep or better: 1 of 1")
    assert lines[4].startswith("decode at 0.95 of the larger card alone or better: 0 of 1 (0.90")
    assert "| 90.0 |" in report.markdown([row(90.0)], {"taken away": "loaded"})
