"""Layers, experts and splits on devices that are not the host: RPC servers on the loopback."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgellm.engine.build import inspect_build, library_folder
from edgellm.engine.client import Engine, dry_run
from edgellm.engine.info import EngineOptions
from edgellm.errors import DoesNotFitError, EngineError
from edgellm.planner.plan import DeviceLedger, Plan
from edgellm.units import MiB
from tests.engine.factories import plan, request
from tests.engine.rpc import rpc_server
from tests.engine.starter import starter_plan
from tests.engine.tiny import tiny_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str]]:
    with rpc_server() as first, rpc_server() as second:
        yield first, second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def offloaded(path: str, *cards: str, **changes: Any) -> Plan:
    """A plan that uses these cards."""
    planned = plan(path, **changes)
    ledgers = tuple(
        DeviceLedger(id=c, name=c, backend="rpc", total=1, free=1, margin=0) for c in cards
    )
    return msgspec.structs.replace(planned, devices=ledgers, verdict="gpu" if cards else "cpu")


def through(planned: Plan, servers: tuple[str, ...]) -> Plan:
    """The plan with these servers' devices as RPC0, RPC1."""
    params = msgspec.structs.replace(planned.params, rpc=servers)
    return msgspec.structs.replace(planned, params=params)


async def loaded(planned: Plan, servers: tuple[str, ...]) -> tuple[Engine, dict[str, int], str]:
    """The engine, bytes of weights by device, and a few greedy tokens' text."""
    engine = await Engine.load(through(planned, servers))
    weights = {m.id: m.weights for m in engine.report.measured}
    text = ""
    async for event in engine.generate(request("The quick brown fox", max_tokens=6)):
        text += event.text
    return engine, weights, text


def test_layers_that_a_card_would_take_which_is_not_here_count_as_computed_here() -> None:
    """A warm-up for a GPU took minutes on two cores, where a plan was for a card to come."""
    from edgellm.engine.llama import load

    build = inspect_build().build
    assert build is not None
    cards = [device for device in build.devices if device.kind in ("gpu", "igpu")]
    options = EngineOptions(warmup=False)
    backend = load(starter_plan(n_ctx=256, n_ctx_seq=256, n_gpu_layers=-1), options, lambda _: None)
    try:
        assert backend.limits.is_async is bool(cards)
    finally:
        backend.close()


async def test_layers_go_to_the_device_and_the_text_is_the_same(
    servers: tuple[str, str], folder: Path
) -> None:
    path = tiny_model(folder, "llama")
    texts, held = [], []
    for n in (0, 2, 5):
        cards = ("RPC0",) if n else ()
        engine, weights, text = await loaded(offloaded(path, *cards, n_gpu_layers=n), servers[:1])
        assert engine.report.offloaded == (f"{n}/5" if n else engine.report.offloaded)
        await engine.close()
        texts.append(text)
        held.append(weights.get("RPC0", 0))
    assert texts[0] == texts[1] == texts[2] != ""
    assert held[0] == 0 < held[1] < held[2]


async def test_experts_of_the_first_layers_stay_on_the_host(
    servers: tuple[str, str], folder: Path
) -> None:
    path = tiny_model(folder, "qwen3moe")
    held, texts = [], []
    for n, mmap in ((0, True), (2, True), (2, False), (4, False)):
        planned = offloaded(path, "RPC0", n_gpu_layers=-1, n_cpu_moe=n, use_mmap=mmap)
        engine, weights, text = await loaded(planned, servers[:1])
        await engine.close()
        held.append(weights["RPC0"])
        texts.append(text)
    a_layer = 3 * 64 * 96 * 4 * 4  # gate, up and down of 4 experts, float32
    assert [held[0] - h for h in held] == pytest.approx(
        [0, 2 * a_layer, 2 * a_layer, 4 * a_layer], abs=20_000
    )
    assert len(set(texts)) == 1


async def test_a_split_puts_each_share_on_its_device(
    servers: tuple[str, str], folder: Path
) -> None:
    path = tiny_model(folder, "llama")
    planned = offloaded(path, "RPC0", "RPC1", n_gpu_layers=-1, tensor_split=(4.0, 1.0))
    engine, weights, _ = await loaded(planned, servers)
    await engine.close()
    swapped = msgspec.structs.replace(planned.params, devices=("RPC1", "RPC0"))
    engine, other, _ = await loaded(msgspec.structs.replace(planned, params=swapped), servers)
    await engine.close()
    assert weights["RPC0"] != weights["RPC1"] > 0
    assert (other["RPC0"], other["RPC1"]) == (weights["RPC1"], weights["RPC0"])


async def test_a_card_that_is_left_out_holds_nothing(
    servers: tuple[str, str], folder: Path
) -> None:
    planned = offloaded(
        tiny_model(folder, "llama"), "RPC0", "RPC1", n_gpu_layers=-1, devices=("RPC1",)
    )
    engine, weights, _ = await loaded(planned, servers)
    await engine.close()
    assert weights["RPC1"] > 0
    assert "RPC0" not in weights
    assert engine.info.devices == ("RPC1",)


async def test_a_device_that_does_not_exist_is_named(
    servers: tuple[str, str], folder: Path
) -> None:
    planned = offloaded(tiny_model(folder, "llama"), "RPC0", n_gpu_layers=-1, devices=("CUDA7",))
    with pytest.raises(EngineError, match="knows no device CUDA7"):
        await Engine.load(through(planned, servers))


async def test_a_dry_run_measures_experts_on_the_host(
    servers: tuple[str, str], folder: Path
) -> None:
    path = tiny_model(folder, "qwen3moe")
    planned = offloaded(path, "RPC0", n_gpu_layers=-1, n_cpu_moe=2)
    report = await dry_run(through(planned, servers[:1]))
    found = {m.id: m for m in report.measured}
    assert found["RPC0"].compute > 0
    assert found["host"].compute > 0


async def test_libraries_from_another_folder_place_experts_too(
    servers: tuple[str, str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The package without libraries of its own, as when a GPU build lies elsewhere.
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    shutil.copytree(package, tmp_path / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pyc*"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(library_folder()))
    planned = offloaded(tiny_model(folder, "qwen3moe"), "RPC0", n_gpu_layers=-1, n_cpu_moe=1)
    engine, weights, text = await loaded(planned, servers[:1])
    await engine.close()
    assert weights["RPC0"] > 0
    assert text


async def test_a_card_that_is_too_small_gets_smaller_plans_and_each_is_said(folder: Path) -> None:
    # A cache of 128 MiB, 68 with q8_0, on a device that has 110.
    with rpc_server(limit=110 * MiB) as server:
        planned = offloaded(
            tiny_model(folder, "llama"), "RPC0", n_gpu_layers=-1, n_ctx=1 << 18, n_ctx_seq=4096
        )
        engine, _, text = await loaded(planned, (server,))
        await engine.close()
    # What the server's process itself takes of the limit differs: a third step may be needed.
    assert engine.report.fallbacks[:2] == (
        "out of memory: n_ubatch 256 -> 64",
        "out of memory: KV cache f16 -> q8_0",
    )
    assert engine.plan.params.type_k == "q8_0"
    assert text


async def test_no_plan_small_enough_is_an_error_that_names_the_card(folder: Path) -> None:
    with rpc_server(limit=4 * MiB) as server:
        planned = offloaded(
            tiny_model(folder, "llama"), "RPC0", n_gpu_layers=-1, n_ctx=1 << 18, n_ctx_seq=4096
        )
        seen: list[str] = []
        with pytest.raises(DoesNotFitError, match="no memory for") as caught:
            await Engine.load(
                through(planned, (server,)),
                on_progress=lambda p: seen.append(p.message),
            )
    assert caught.value.device == "RPC0"
    assert len([words for words in seen if words]) == 3
