"""Out of memory goes down a fixed ladder, each step said, at most three tries."""

from __future__ import annotations

import pytest

from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions, Fault, LoadProgress, Script
from edgellm.engine.loading import is_out_of_memory, next_rung
from edgellm.errors import DoesNotFitError, EngineDeadError, EngineError
from tests.engine.factories import plan


def test_the_ladder_is_ubatch_then_cache_then_layers_then_context_then_nothing() -> None:
    current, said = plan(n_ubatch=256, n_gpu_layers=1, n_ctx=4096, n_ctx_seq=4096), []
    while (rung := next_rung(current)) is not None:
        current, words = rung
        said.append(words.split(": ")[1].split(" ", 1)[0])
    assert said == ["n_ubatch", "KV", "GPU", "context"]
    assert (current.params.n_ubatch, current.params.type_k) == (64, "q8_0")
    assert (current.params.n_gpu_layers, current.params.n_ctx) == (0, 2048)


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


async def test_after_three_tries_the_error_is_the_callers() -> None:
    script = Script(faults=(Fault(kind="oom", code=1),))
    with pytest.raises(DoesNotFitError):
        await Engine.load(plan(), backend="scripted", options=EngineOptions(script=script))
