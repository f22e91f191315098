"""Out of memory goes down a fixed ladder, each step said, at most three tries."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edgellm.devices import Gpu
from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions, Fault, LoadProgress, Script, load_words
from edgellm.engine.loading import Ladder, is_out_of_memory, lost_cards, nothing_smaller
from edgellm.errors import DoesNotFitError, EdgeLLMError, EngineDeadError, EngineError
from edgellm.planner.plan import DeviceLedger, Plan
from tests.engine.factories import plan

OOM = DoesNotFitError("out of memory", device="CUDA0", required=2, available=1)


def model_plan(n_layer: int, n_expert: int = 0, **changes: Any) -> Plan:
    planned = plan(**changes)
    facts = msgspec.structs.replace(planned.model, n_layer=n_layer, n_expert=n_expert)
    return msgspec.structs.replace(planned, model=facts, verdict="gpu")


def all_steps(ladder: Ladder, error: EdgeLLMError = OOM) -> list[str]:
    said = []
    while (words := ladder.step_down(error)) is not None:
        said.append(words.removeprefix("out of memory: "))
    return said


def test_the_ladder_is_ubatch_then_cache_then_layers_and_three_steps_long() -> None:
    ladder = Ladder(model_plan(32, n_ubatch=512, n_gpu_layers=-1, n_ctx=4096), min_ctx=1024)
    said = all_steps(ladder)
    assert said == ["n_ubatch 512 -> 128", "KV cache f16 -> q8_0", "n_gpu_layers -1 -> 24"]
    assert (ladder.plan.verdict, ladder.plan.params.type_v) == ("partial", "q8_0")


def test_experts_go_to_the_host_before_layers_do() -> None:
    ladder = Ladder(model_plan(32, 8, n_ubatch=64, type_k="q8_0", n_gpu_layers=-1), None)
    assert all_steps(ladder) == ["n_cpu_moe 0 -> 8"]
    assert not ladder.plan.params.use_mmap


def test_the_context_shrinks_only_where_that_is_allowed() -> None:
    small = {"n_ubatch": 64, "type_k": "q8_0", "n_ctx": 4096, "n_ctx_seq": 4096}
    assert all_steps(Ladder(plan(**small), None)) == []
    assert all_steps(Ladder(plan(**small), 4096)) == []
    ladder = Ladder(plan(**small), 3000)
    assert all_steps(ladder) == ["n_ctx 4096 -> 3000"]
    assert ladder.plan.params.n_ctx_seq == 3000


def test_a_rung_that_the_library_refuses_is_taken_back() -> None:
    ladder = Ladder(model_plan(30, n_ubatch=64, n_gpu_layers=31), None)
    assert ladder.step_down(OOM) == "out of memory: KV cache f16 -> q8_0"
    refused = EngineError("K cache type q8_0 with block size 32 does not divide 80")
    assert ladder.step_down(refused) == "out of memory: n_gpu_layers 31 -> 23"
    assert ladder.plan.params.type_k == "f16"
    assert ladder.said[0].endswith("(refused)")


def test_an_error_that_is_not_about_memory_is_the_callers_at_once() -> None:
    assert Ladder(plan(), None).step_down(EngineError("no such device")) is None
    assert Ladder(plan(), None).step_down(EngineDeadError("ended by SIGSEGV")) is None


def test_a_death_counts_as_out_of_memory_only_when_the_log_says_so() -> None:
    assert is_out_of_memory(EngineDeadError("CUDA error: out of memory"))
    assert not is_out_of_memory(EngineDeadError("ended by SIGSEGV"))
    assert not is_out_of_memory(EngineError("out of memory"))
    assert is_out_of_memory(DoesNotFitError("x", device="CUDA0", required=2, available=1))


async def test_loading_goes_down_a_rung_and_says_it() -> None:
    # The scripted backend is out of memory from n_ubatch 200 on.
    script = Script(faults=(Fault(kind="oom", code=200),))
    seen: list[LoadProgress] = []
    engine = await Engine.load(
        plan(), backend="scripted", options=EngineOptions(script=script), on_progress=seen.append
    )
    assert engine.plan.params.n_ubatch == 64
    assert engine.report.fallbacks == ("out of memory: n_ubatch 256 -> 64",)
    assert [p.stage for p in seen if p.stage in ("fallback", "ready")] == ["fallback", "ready"]
    await engine.close()


def test_after_the_last_rung_the_error_names_the_device_what_was_tried_and_what_to_do() -> None:
    words = "ended by SIGABRT while loading; its last words:\nreserve took 11 ms\n"
    died = EngineDeadError(words + "CUDA error: out of memory\n  current device: 0")
    error = nothing_smaller(plan(), died, ["a", "b", "c"])
    assert isinstance(error, DoesNotFitError)
    assert "after 3 smaller plans: CUDA error: out of memory" in error.message
    assert "reserve took" not in error.message
    assert "edgellm plan" in (error.hint or "")


def test_an_error_that_is_not_about_memory_stays_itself_after_the_last_rung() -> None:
    error = EngineDeadError("ended by SIGSEGV")
    assert nothing_smaller(plan(), error, ["a"]) is error


async def test_a_model_that_no_rung_makes_fit_ends_in_an_error_with_the_next_step() -> None:
    script = Script(faults=(Fault(kind="oom", code=1),))
    with pytest.raises(DoesNotFitError) as caught:
        await Engine.load(plan(), backend="scripted", options=EngineOptions(script=script))
    assert "smaller plans" in caught.value.message
    assert caught.value.hint


async def test_memory_that_others_took_since_the_plan_was_made_is_planned_again_for() -> None:
    script = Script(faults=(Fault(kind="oom", code=200),))
    asked: list[tuple[str, ...]] = []

    def for_what_is_free(_: Plan, gone: tuple[str, ...]) -> Plan:
        asked.append(gone)
        return plan(n_ubatch=128)

    engine = await Engine.load(
        plan(), backend="scripted", options=EngineOptions(script=script), replan=for_what_is_free
    )
    assert (asked, engine.plan.params.n_ubatch) == ([()], 128)
    assert engine.report.fallbacks == ("out of memory: planned again for what is free now",)
    await engine.close()


async def test_the_same_plan_again_is_no_step_and_the_ladder_follows() -> None:
    script = Script(faults=(Fault(kind="oom", code=200),))
    engine = await Engine.load(
        plan(),
        backend="scripted",
        options=EngineOptions(script=script),
        replan=lambda before, _: before,
    )
    assert engine.report.fallbacks == ("out of memory: n_ubatch 256 -> 64",)
    await engine.close()


def test_a_card_that_is_gone_or_another_one_now_is_named() -> None:
    def card(name: str, uuid: str | None, used: int = 1) -> DeviceLedger:
        return DeviceLedger(
            id=name, name="H200", backend="cuda", total=2, free=2, margin=0, used=used, uuid=uuid
        )

    def gpu(name: str, uuid: str) -> Gpu:
        return Gpu(id=name, name="H200", backend="cuda", total=2, free=2, uuid=uuid)

    cards = (card("CUDA0", "a"), card("CUDA1", "b"), card("GPU0", None), card("CUDA2", "c", 0))
    planned = msgspec.structs.replace(plan(), devices=cards)
    both = (gpu("CUDA0", "a"), gpu("CUDA1", "b"))
    assert lost_cards(planned, both) == ()
    assert lost_cards(planned, both[:1]) == ("CUDA1 (H200)",)
    turned = (gpu("CUDA0", "b"), gpu("CUDA1", "a"))
    assert lost_cards(planned, turned) == ("CUDA0 (H200)", "CUDA1 (H200)")


async def test_after_three_smaller_plans_the_error_is_the_callers() -> None:
    script = Script(faults=(Fault(kind="oom", code=1),))
    seen: list[LoadProgress] = []
    with pytest.raises(DoesNotFitError):
        await Engine.load(
            plan(n_gpu_layers=1),
            backend="scripted",
            options=EngineOptions(script=script),
            on_progress=seen.append,
        )
    said = [p.message for p in seen if p.stage == "fallback"]
    assert [words.split()[3] for words in said] == ["n_ubatch", "KV", "n_gpu_layers"]


def test_only_what_is_counted_has_a_percentage() -> None:
    """ "warmup 0 %" stood there for all of a warm-up."""
    assert load_words("weights", 0.4) == "reading the weights 40%"
    assert load_words("warmup", 0.0) == "warming up"
    assert load_words("planning", 0.0) == "planning"
