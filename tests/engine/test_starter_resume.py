"""The starter again: what is taken away and given back, guessed or shared, changes no token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions
from edgellm.engine.spec import PLAIN_STEPS
from edgellm.request import Priority
from tests.engine.factories import request
from tests.engine.simulate import over_model
from tests.engine.starter import library_greedy, starter_path, starter_plan
from tests.engine.test_starter import LONG, SURE, collect, greedy_ids, ids
from tests.engine.tiny import tiny_model

pytestmark = pytest.mark.model


def test_a_preempted_stream_goes_on_with_its_text() -> None:
    with over_model(starter_plan(n_seq_max=1)) as simulation:
        slow = request(SURE[0], max_tokens=40, priority=Priority.BATCH)
        urgent = request(SURE[1], max_tokens=10, priority=Priority.INTERACTIVE)
        expected = [library_greedy(SURE[0], 40), library_greedy(SURE[1], 10)]
        assert simulation.preempted(slow, urgent) == expected
        assert simulation.loop.scheduler.n_preemptions == 1


def test_too_few_cells_for_all_change_no_token() -> None:
    # 198 tokens of prompts and 144 of answers, in 256 cells.
    plan = starter_plan(n_ctx=256, n_ctx_seq=256, n_batch=64, n_ubatch=64)
    options = EngineOptions(retain_prefixes=False, warmup=False)
    with over_model(plan, options) as simulation:
        results = simulation.ids_of(*(request(p, max_tokens=48) for p in SURE[:3]))
        assert results == [library_greedy(p, 48) for p in SURE[:3]]
        stats = simulation.loop.stats()
        assert stats.preemptions >= 1
        assert stats.cells_used == 0


async def test_in_caches_of_their_own_a_prompt_begins_with_a_part_of_a_saved_state() -> None:
    plan = starter_plan(n_ctx=4096, n_ctx_seq=1024, kv_unified=False)
    engine = await Engine.load(plan)
    try:
        for n, sure in enumerate(SURE[:3]):
            prompt = LONG + sure
            events = await collect(engine, request(prompt, max_tokens=20))
            assert ids(events) == library_greedy(prompt, 20)
            usage = events[-1].usage
            assert usage is not None
            assert (usage.n_cached > 100) is (n > 0)
        together = [request(LONG + p, max_tokens=20) for p in SURE[:3]]
        results = await asyncio.gather(*(collect(engine, r) for r in together))
        assert [ids(r) for r in results] == [library_greedy(LONG + p, 20) for p in SURE[:3]]
        assert (await engine.stats()).prefix_hits == 5
    finally:
        await engine.close()


async def test_in_caches_of_their_own_guesses_are_taken_back_and_change_no_token() -> None:
    plan = starter_plan(n_ctx=2048, n_ctx_seq=512, kv_unified=False, n_outputs_max=24)
    engine = await Engine.load(plan, options=EngineOptions(spec="ngram", spec_min_gain=-9.0))
    try:
        assert await greedy_ids(engine, list(SURE)) == [library_greedy(p, 24) for p in SURE]
        assert (await engine.stats()).drafted_tokens > 0
    finally:
        await engine.close()


async def test_the_choices_of_one_request_compute_their_prompt_once() -> None:
    engine = await Engine.load(starter_plan())
    try:
        prompt = LONG + SURE[0]
        events = await collect(engine, request(prompt, max_tokens=20, n=3))
        expected = library_greedy(prompt, 20)
        for index in range(3):
            assert ids([e for e in events if e.index == index]) == expected
        stats = await engine.stats()
        assert stats.prefix_hits == 2
        assert stats.cells_used < 300
    finally:
        await engine.close()


async def test_the_starter_as_its_own_draft_is_believed_and_changes_no_token() -> None:
    plan = starter_plan(draft_model=starter_path(), n_outputs_max=24)
    engine = await Engine.load(plan, options=EngineOptions(spec="draft", spec_max=4))
    try:
        assert await greedy_ids(engine, list(SURE)) == [library_greedy(p, 24) for p in SURE]
        stats = await engine.stats()
        assert stats.drafted_tokens > 0
        assert stats.accepted_tokens > 0.8 * stats.drafted_tokens
    finally:
        await engine.close()


def test_a_sequence_that_keeps_all_logits_is_drafted_for_too() -> None:
    options = EngineOptions(
        spec="draft", spec_max=2, spec_min_gain=-9.0, attach_top_k=64, warmup=False
    )
    plan = starter_plan(draft_model=starter_path(), n_seq_max=2, n_outputs_max=4)
    with over_model(plan, options) as simulation:
        both = [request(SURE[i], max_tokens=24, logprobs=k) for i, k in enumerate((None, 0))]
        assert simulation.ids_of(*both) == [library_greedy(p, 24) for p in SURE[:2]]
        assert simulation.last(both[1].id).usage.n_accepted > 0  # type: ignore[union-attr]
        assert simulation.loop.meter.n_steps < 24


# Sure continuations in which nothing repeats: only the draft model has something to guess.
COUNTS = (
    "a b c d e f g h i j k l m",
    "one two three four five six seven",
    "Mon Tue Wed",
)


async def test_the_guesses_of_a_model_that_knows_nothing_change_no_token(tmp_path: Path) -> None:
    plan = starter_plan(draft_model=tiny_model(tmp_path, "llama"), n_outputs_max=24)
    engine = await Engine.load(plan, options=EngineOptions(spec="draft", spec_max=4))
    try:
        await collect(engine, request(COUNTS[0], max_tokens=PLAIN_STEPS + 1))
        for prompt in COUNTS:
            events = await collect(engine, request(prompt, max_tokens=6))
            assert ids(events) == library_greedy(prompt, 6)
        stats = await engine.stats()
        assert stats.drafted_tokens >= 12
        assert stats.accepted_tokens < 3
    finally:
        await engine.close()


async def test_a_pinned_prefix_read_from_disk_after_a_restart_changes_no_token(
    tmp_path: Path,
) -> None:
    options = EngineOptions(pin_dir=str(tmp_path))
    for is_again in (False, True):
        engine = await Engine.load(starter_plan(), options=options)
        try:
            prompt = LONG + SURE[0]
            r = request(prompt, max_tokens=20, pin_prefix=True, n_keep=120)
            events = await collect(engine, r)
            assert ids(events) == library_greedy(prompt, 20)
            usage = events[-1].usage
            assert usage is not None
            assert (usage.n_cached > 100) is is_again
        finally:
            await engine.close()
