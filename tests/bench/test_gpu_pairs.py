"""The race of several cards: what llama-server's log says, which splits are tried, what is judged.

The log lines are llama-server's own (-lv 4), of two devices on which nothing, a dense model and a
model of experts were fitted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from edgellm.devices import Devices, Gpu, Host
from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions, Script
from edgellm.planner.fit import make_plan
from edgellm.planner.plan import PlanRequest
from edgellm.store import catalog
from edgellm.units import GiB, MiB
from edgellm.workers import Pool
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


class Imagined:
    """Two cards that are not there, for engines without a model."""

    def __init__(self) -> None:
        self.pool = Pool(())
        self.order = 1
        self.count = 2
        self.sizes: Sequence[float] = ()

    @contextmanager
    def emulated(self, sizes: Sequence[float]) -> Iterator[Devices]:
        self.sizes = sizes
        yield self.found()

    def found(self) -> Devices:
        made = cards(*self.sizes)
        gpus = made.gpus[: self.count][:: self.order]
        named = (msgspec.structs.replace(g, id=f"CUDA{i}") for i, g in enumerate(gpus))
        return msgspec.structs.replace(made, gpus=tuple(named))

    @contextmanager
    def reversed(self) -> Iterator[None]:
        self.order = -1
        yield
        self.order = 1

    @contextmanager
    def without_last(self) -> Iterator[None]:
        self.count = 1
        yield
        self.count = 2

    def filled_last(self) -> Any:
        return nullcontext()

    def processes(self) -> dict[str, dict[int, int]]:
        return {"GPU-0": {1: 5 * MiB}, "GPU-1": {}}

    def owners(self, _: Engine) -> frozenset[int]:
        return frozenset({2})

    def server_arguments(self) -> list[str]:
        return []


async def run_race(
    monkeypatch: pytest.MonkeyPatch, out: Path, pairs_text: str, limit_s: float
) -> dict[str, Any]:
    """The whole of pairs.py over imagined cards and scripted engines; what it wrote."""
    pairs = module("pairs")
    load = Engine.load

    async def scripted(plan: Any, *, options: EngineOptions, **more: Any) -> Engine:
        script = Script(answer_tokens=0)
        options = msgspec.structs.replace(options, script=script)
        return await load(plan, backend="scripted", options=options, **more)

    def few_words(n: int, n_vocab: int, seed: int) -> tuple[int, ...]:
        return tuple((i * (seed + 3)) % (n_vocab - 40) + 20 for i in range(n))

    monkeypatch.setattr(pairs.Engine, "load", scripted)
    for where in (pairs, module("timing")):
        monkeypatch.setattr(where, "prompt", few_words)
    arguments = argparse.Namespace(
        out=out, folder=out, pairs=pairs_text, limit_s=limit_s, llama_server="", vocab=[]
    )
    race = pairs.Race(arguments, Imagined())
    await race.run()
    race.save()
    return dict(json.loads((out / "pairs.json").read_text()))


@pytest.mark.usefixtures("gpu_folder")
async def test_the_race_makes_every_trial_and_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = catalog.resolve("starter").path
    text = f"0.9+0.88:{path}@8192,4+2:{path}@2048"
    found = await run_race(monkeypatch, tmp_path, text, 300)
    both, alone = found["rows"]
    assert [r.get("errors") for r in (both, alone)] == [None, None]
    names = [t["name"] for t in both["trials"]]
    assert names[:2] == ["edgellm", "larger alone"]
    assert {"reversed", "tensor", "row", "ubatch 128"} <= set(names)
    assert len(names) == len(set(names))
    assert "larger alone" not in [t["name"] for t in alone["trials"]]
    assert set(found["extra"]) >= {"reversed", "taken away", "taken away, not replanned"}
    report = (tmp_path / "pairs.md").read_text()
    assert "## Memory, card by card" in report
    assert "not begun" not in report


@pytest.mark.usefixtures("gpu_folder")
async def test_the_race_stops_at_its_limit_and_still_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = f"1+1:{catalog.resolve('starter').path}@2048"
    found = await run_race(monkeypatch, tmp_path, text, 0.5)
    assert [row["trials"] for row in found["rows"]] == [[]]
    assert "not begun" in (tmp_path / "pairs.md").read_text()
