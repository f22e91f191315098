"""Several models behind one Runtime: loaded once, drained, evicted by bytes, none lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from edgellm.devices import Devices, Gpu, Host
from edgellm.engine.info import LoadProgress
from edgellm.errors import (
    ConfigError,
    DoesNotFitError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
)
from edgellm.planner.plan import (
    DeviceLedger,
    HostLedger,
    ModelFacts,
    Plan,
    PlanParams,
    PlanRequest,
    Speed,
)
from edgellm.runtime import Lease, ModelSpec, Runtime
from edgellm.units import GiB, MiB
from tests.server.conftest import Running, default_settings

HOST = Host(cpu="cpu", n_physical=4, n_logical=8, total=32 * GiB, available=32 * GiB)


class FakeEngine:
    """What a Runtime needs of an engine; its memory is the card's."""

    def __init__(self, plan: Plan, card: Card) -> None:
        self.plan = plan
        self.card = card
        self.is_dead = False
        self.n_closed = 0

    async def close(self) -> None:
        self.n_closed += 1
        await asyncio.sleep(0)
        self.card.give_back(self.plan.devices[0].used)


class Card:
    """One GPU that fills and empties, late if it is told so."""

    def __init__(self, free: int, *, release_s: float = 0.0) -> None:
        self.free = free
        self.total = free
        self.release_s = release_s
        self.coming: list[tuple[float, int]] = []
        self.lowest_at_load: list[int] = []

    def give_back(self, n: int) -> None:
        self.coming.append((time.monotonic() + self.release_s, n))

    def probe(self) -> Devices:
        now = time.monotonic()
        self.free += sum(n for at, n in self.coming if at <= now)
        self.coming = [(at, n) for at, n in self.coming if at > now]
        gpu = Gpu(id="CUDA0", name="card", backend="cuda", total=self.total, free=self.free)
        return Devices(host=HOST, gpus=(gpu,))


class Shop:
    """A Runtime over models of these sizes on one card."""

    def __init__(
        self, sizes: dict[str, int], card: Card, *, load_s: float = 0.0, **more: Any
    ) -> None:
        self.sizes = sizes
        self.card = card
        self.load_s = load_s
        self.loads: list[str] = []
        self.engines: list[FakeEngine] = []
        self.failures: list[Exception] = []
        specs = more.pop("specs", None) or [ModelSpec(name=n, ref=n) for n in sizes]
        self.runtime = Runtime(
            specs, planner=self.plan, loader=self.load, prober=card.probe, **more
        )

    def plan(self, spec: ModelSpec, devices: Devices, _: PlanRequest | None) -> Plan:
        size, free = self.sizes[spec.ref], devices.gpus[0].free
        if size > free:
            raise DoesNotFitError(
                f"{spec.name} needs {size}", device="CUDA0", required=size, available=free
            )
        return plan_of(spec.name, size)

    async def load(self, plan: Plan, progress: Callable[[LoadProgress], None]) -> Any:
        progress(LoadProgress(stage="weights", fraction=0.5))
        await asyncio.sleep(self.load_s)
        if self.failures:
            raise self.failures.pop()
        self.card.probe()
        assert self.card.free >= plan.devices[0].used, "loaded before the memory was back"
        self.card.free -= plan.devices[0].used
        self.loads.append(plan.model.name)
        engine = FakeEngine(plan, self.card)
        self.engines.append(engine)
        return engine


def plan_of(name: str, size: int) -> Plan:
    return Plan(
        model=ModelFacts(
            name=name,
            path=name,
            arch="a",
            quant="q",
            file_bytes=size,
            n_params=1,
            n_layer=1,
            n_ctx_train=1,
        ),
        params=PlanParams(
            n_gpu_layers=1,
            n_ctx=64,
            n_ctx_seq=64,
            n_batch=1,
            n_ubatch=1,
            n_seq_max=1,
            n_outputs_max=1,
        ),
        devices=(
            DeviceLedger(
                id="CUDA0", name="card", backend="cuda", total=1, free=1, margin=0, used=size
            ),
        ),
        host=HostLedger(total=1, available=1),
        verdict="gpu",
        speed=Speed(prefill_tps=1, decode_tps=1, basis="table"),
    )


def state(runtime: Runtime, name: str) -> str:
    return next(m.state for m in runtime.models() if m.name == name)


async def test_twenty_requests_for_a_model_that_is_not_loaded_load_it_once() -> None:
    shop = Shop({"a": GiB}, Card(8 * GiB), load_s=0.02)

    async def use() -> str:
        async with shop.runtime.lease("a") as lease:
            return lease.name

    assert await asyncio.gather(*(use() for _ in range(20))) == ["a"] * 20
    assert shop.loads == ["a"]
    assert shop.runtime.models()[0].in_use == 0


async def test_models_that_fit_beside_one_another_stay() -> None:
    shop = Shop({"a": 3 * GiB, "b": 3 * GiB}, Card(8 * GiB))
    for name in ("a", "b", "a", "b"):
        async with shop.runtime.lease(name):
            pass
    assert shop.loads == ["a", "b"]


async def test_the_least_recently_used_goes_and_only_as_many_as_must() -> None:
    shop = Shop({"a": 3 * GiB, "b": 3 * GiB, "c": 4 * GiB}, Card(8 * GiB))
    for name in ("a", "b", "a", "c"):
        async with shop.runtime.lease(name):
            pass
    assert state(shop.runtime, "b") == "unloaded"
    assert state(shop.runtime, "a") == "loaded"
    assert state(shop.runtime, "c") == "loaded"


async def test_a_load_waits_until_the_memory_is_seen_to_be_back() -> None:
    shop = Shop({"a": 6 * GiB, "b": 6 * GiB}, Card(8 * GiB, release_s=0.25))
    async with shop.runtime.lease("a"):
        pass
    began = time.monotonic()
    async with shop.runtime.lease("b"):
        pass
    # The loader itself refuses to load into memory that is not free.
    assert time.monotonic() - began >= 0.25
    assert shop.loads == ["a", "b"]


async def test_a_model_in_use_is_drained_and_new_requests_for_it_wait_and_are_served() -> None:
    shop = Shop({"a": 6 * GiB, "b": 6 * GiB}, Card(8 * GiB))
    order: list[str] = []
    may_end = asyncio.Event()

    async def hold_a() -> None:
        async with shop.runtime.lease("a"):
            await may_end.wait()
            order.append("first a ends")

    async def use(name: str) -> None:
        async with shop.runtime.lease(name):
            order.append(name)

    holding = asyncio.create_task(hold_a())
    await wait(lambda: shop.runtime.models()[0].in_use == 1)
    wants_b = asyncio.create_task(use("b"))
    await wait(lambda: state(shop.runtime, "a") == "draining")
    late_a = asyncio.create_task(use("a"))
    await asyncio.sleep(0.02)
    assert order == []
    may_end.set()
    await asyncio.gather(holding, wants_b, late_a)
    assert order == ["first a ends", "b", "a"]
    assert shop.loads == ["a", "b", "a"]


async def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_a_pinned_model_never_goes() -> None:
    specs = [ModelSpec(name="a", ref="a", is_pinned=True), ModelSpec(name="b", ref="b")]
    shop = Shop({"a": 6 * GiB, "b": 6 * GiB}, Card(8 * GiB), specs=specs)
    async with shop.runtime.lease("a"):
        pass
    with pytest.raises(DoesNotFitError):
        async with shop.runtime.lease("b"):
            pass
    assert state(shop.runtime, "a") == "loaded"
    assert state(shop.runtime, "b") == "failed"


async def test_what_can_never_fit_unloads_nothing() -> None:
    shop = Shop({"a": GiB, "huge": 80 * GiB}, Card(8 * GiB))
    async with shop.runtime.lease("a"):
        pass
    with pytest.raises(DoesNotFitError):
        async with shop.runtime.lease("huge"):
            pass
    assert state(shop.runtime, "a") == "loaded"


async def test_max_loaded_is_kept() -> None:
    shop = Shop(dict.fromkeys("abc", MiB), Card(8 * GiB), max_loaded=2)
    for name in "abcabc":
        async with shop.runtime.lease(name):
            pass
        assert len(shop.runtime.loaded()) <= 2


async def test_an_idle_model_is_unloaded_after_its_ttl_and_one_in_use_is_not() -> None:
    shop = Shop({"a": MiB, "b": MiB}, Card(8 * GiB), ttl_s=0.1)
    watch = asyncio.create_task(shop.runtime.watch_idle())
    async with shop.runtime.lease("a"):
        async with shop.runtime.lease("b"):
            pass
        await wait(lambda: state(shop.runtime, "b") == "unloaded")
        await asyncio.sleep(0.15)
        assert state(shop.runtime, "a") == "loaded"
    await wait(lambda: state(shop.runtime, "a") == "unloaded")
    watch.cancel()


async def test_a_failed_load_fails_those_who_waited_and_the_next_request_tries_again() -> None:
    shop = Shop({"a": MiB}, Card(8 * GiB))
    shop.failures.append(EngineError("no luck"))

    async def use() -> Lease:
        async with shop.runtime.lease("a") as lease:
            return lease

    results = await asyncio.gather(use(), use(), return_exceptions=True)
    assert [type(r) for r in results] == [EngineError, EngineError]
    assert shop.runtime.models()[0].error == "no luck"
    assert (await use()).name == "a"
    assert shop.runtime.models()[0].error is None


async def test_an_error_nobody_planned_for_leaves_nobody_waiting() -> None:
    shop = Shop({"a": MiB}, Card(8 * GiB))
    shop.failures.append(ZeroDivisionError("what"))
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        async with shop.runtime.lease("a"):
            pass
    async with shop.runtime.lease("a"):
        pass


async def test_a_dead_engine_is_replaced_on_the_next_request() -> None:
    shop = Shop({"a": GiB}, Card(8 * GiB))
    async with shop.runtime.lease("a"):
        pass
    shop.engines[0].is_dead = True
    async with shop.runtime.lease("a") as lease:
        assert lease.engine is shop.engines[1]  # type: ignore[comparison-overlap]
    assert shop.engines[0].n_closed == 1


async def test_a_client_that_leaves_the_queue_takes_no_place() -> None:
    shop = Shop({"a": GiB}, Card(8 * GiB), load_s=0.05)

    async def use() -> None:
        async with shop.runtime.lease("a"):
            await asyncio.sleep(10)

    leaving = [asyncio.create_task(use()) for _ in range(5)]
    await asyncio.sleep(0.01)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    async with shop.runtime.lease("a"):
        assert shop.runtime.models()[0].in_use == 1
    assert shop.runtime.models()[0].in_use == 0


async def test_unloading_waits_for_running_requests_and_stopping_the_wait_undoes_it() -> None:
    shop = Shop({"a": GiB}, Card(8 * GiB))
    async with shop.runtime.lease("a"):
        unloading = asyncio.create_task(shop.runtime.unload("a"))
        await wait(lambda: state(shop.runtime, "a") == "draining")
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        assert state(shop.runtime, "a") == "loaded"
        again = asyncio.create_task(shop.runtime.unload("a"))
        await asyncio.sleep(0.01)
    assert await again
    assert not await shop.runtime.unload("a")


async def test_closing_fails_those_who_wait() -> None:
    shop = Shop({"a": GiB}, Card(8 * GiB), load_s=5)

    async def use() -> None:
        async with shop.runtime.lease("a"):
            pass

    waiting = asyncio.create_task(use())
    await asyncio.sleep(0.01)
    await shop.runtime.close()
    with pytest.raises((EngineDeadError, EngineError)):
        await waiting
    with pytest.raises(EngineDeadError):
        await use()


async def test_names_aliases_case_and_the_name_for_all_others() -> None:
    specs = [
        ModelSpec(name="Small", ref="a", aliases=("s", "gpt-4o")),
        ModelSpec(name="large", ref="b", aliases=("*",)),
    ]
    runtime = Shop({"a": 1, "b": 1}, Card(GiB), specs=specs).runtime
    assert runtime.find("small").ref == "a"
    assert runtime.find("gpt-4o").ref == "a"
    assert runtime.find(None).ref == "a"
    assert runtime.find("anything").ref == "b"
    # Unloading by a mistyped name must not hit the model that answers to all names.
    with pytest.raises(ModelNotFoundError):
        await runtime.unload("anything")
    strict = Shop({"a": 1}, Card(GiB), specs=specs[:1]).runtime
    with pytest.raises(ModelNotFoundError, match="did you mean 'Small'"):
        strict.find("Smal")
    with pytest.raises(ConfigError):
        Shop({"a": 1}, Card(GiB), specs=[specs[0], specs[0]])


@pytest.fixture
def two_models() -> Any:
    """Two scripted models, of which one may be loaded."""
    specs = (ModelSpec(name="a", ref="starter"), ModelSpec(name="b", ref="starter"))
    settings = default_settings(max_loaded=1)
    with Running(specs=specs, settings=settings, preload=False) as running:
        yield running


@pytest.mark.slow
async def test_two_models_swapped_under_load_lose_no_request_and_no_memory(
    two_models: Running,
) -> None:
    own = psutil.Process()
    n_children = len(own.children(recursive=True))

    async with httpx.AsyncClient(base_url=two_models.url, timeout=120) as client:

        async def ask(model: str) -> tuple[str, int]:
            body = {"model": model, "prompt": "hello", "max_tokens": 20}
            answer = await client.post("/v1/completions", json=body)
            return answer.json()["model"], answer.json()["usage"]["completion_tokens"]

        wanted = ["a", "b"] * 8
        for _ in range(2):
            answers = await asyncio.gather(*(ask(name) for name in wanted))
            assert answers == [(name, 20) for name in wanted]
        for name in ("a", "b"):
            await client.post("/v1/edgellm/unload", json={"model": name})
    assert two_models.server.runtime.n_loads >= 4
    assert two_models.server.runtime.n_loads == two_models.server.runtime.n_unloads
    assert len(own.children(recursive=True)) == n_children
