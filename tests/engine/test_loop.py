"""What the loop promises, over the scripted backend whose text depends on every cached token."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from edgellm.engine import wire
from edgellm.engine.backend import NO_CELLS
from edgellm.engine.constrain import make_factory
from edgellm.engine.embed import EmbedJob, embed
from edgellm.engine.info import EngineOptions, Fault, Script
from edgellm.engine.loop import Withdrawn
from edgellm.engine.score import ScoreJob
from edgellm.engine.scripted import tokenize
from edgellm.engine.worker import vocabulary_of
from edgellm.errors import EngineError, InvalidRequestError
from edgellm.request import (
    EmbedRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    Overflow,
    Priority,
    Request,
)
from tests.engine.factories import request
from tests.engine.simulate import Simulation, alone

CACHES: dict[str, dict[str, Any]] = {
    "cells": {},
    "states": {"share": "checkpoint"},
    "states of caches that can rewind": {"share": "checkpoint", "can_rewind": True},
    "nothing": {"share": "none"},
}
"""What sequences can share, by the kind of cache."""
LONG = "the of and to in is it that for was on are as with his they be at one have this "


def test_sharing_chunking_and_preemption_give_the_text_of_a_request_alone() -> None:
    requests = [request(LONG * 3 + f"number {i}", max_tokens=60) for i in range(8)]
    expected = [alone(r) for r in requests]
    tight = Simulation(n_ctx=256, n_ctx_seq=256, n_batch=32)
    for r in requests:
        tight.add(r)
    tight.run()
    assert [tight.text(r.id) for r in requests] == expected
    assert tight.loop.scheduler.n_preemptions > 0


def test_two_requests_with_one_new_prefix_compute_it_once() -> None:
    simulation = Simulation(n_batch=32)
    a, b = (request(LONG * 4 + tail, max_tokens=4) for tail in ("one", "two"))
    simulation.add(a)
    simulation.add(b)
    simulation.run()
    usage = simulation.last(b.id).usage
    assert usage is not None
    assert usage.n_cached >= 80
    assert simulation.last(a.id).usage.n_cached == 0  # type: ignore[union-attr]
    assert simulation.text(b.id) == alone(b)


def test_a_device_computes_the_next_step_while_this_one_is_told() -> None:
    simulation = Simulation(script=Script(is_async=True, answer_tokens=0))
    r = request("tell me", max_tokens=3)
    simulation.add(r)
    told = []
    for _ in range(3):
        simulation.turn()
        told.append(len(simulation.ids(r.id)) if r.id in simulation.events else 0)
    assert told == [0, 1, 3]  # the last step has no next one to wait for
    assert simulation.last(r.id).is_last
    assert simulation.text(r.id) == alone(r)


def test_a_step_of_another_shape_waits_until_this_one_is_told() -> None:
    """It may take long to hand over, and the streams that run would wait for that too."""
    simulation = Simulation(script=Script(is_async=True, answer_tokens=0), n_batch=32)
    r = request("tell me", max_tokens=99)
    simulation.add(r)
    told_before: list[int] = []
    inner = simulation.backend.decode

    def decode(spans: Any, meanwhile: Any = None) -> int:
        told_before.append(len(simulation.ids(r.id)) if r.id in simulation.events else 0)
        return inner(spans, meanwhile)

    simulation.backend.decode = decode  # type: ignore[method-assign]
    for _ in range(4):
        simulation.turn()
    # The prompt; the first decode, of another shape; then two of its shape, told meanwhile.
    assert told_before == [0, 1, 1, 2]
    simulation.add(request(LONG * 3, max_tokens=2))
    simulation.turn()
    assert told_before[-1] == 4


def test_scores_wait_until_the_step_before_them_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(script=Script(is_async=True, answer_tokens=0))
    r = request("tell me", max_tokens=99)
    simulation.add(r)
    simulation.turn()
    simulation.turn()
    told: list[int] = []
    loop = simulation.loop
    monkeypatch.setattr(loop, "_embed", lambda job: told.append(len(simulation.ids(r.id))))
    loop.inbox.put(ScoreJob(1, array("i", [5, 6, 7]), 1, "logprobs"))
    simulation.turn()
    assert told == [2]


def test_what_an_error_or_a_cancel_leaves_is_told_at_once_beside_a_device() -> None:
    script = Script(
        is_async=True, answer_tokens=0, faults=(Fault(kind="raise", at_step=3, times=1),)
    )
    simulation = Simulation(script=script)
    r = request("tell me", max_tokens=9)
    simulation.add(r)
    simulation.run()
    assert len(simulation.ids(r.id)) == 2
    assert simulation.last(r.id).finish_reason is FinishReason.ERROR
    other = request("and me", max_tokens=9)
    simulation.add(other)
    simulation.turn()
    simulation.cancel(other.id)
    simulation.turn()
    assert simulation.last(other.id).finish_reason is FinishReason.CANCELLED


def test_choices_share_their_prompt_and_differ_by_seed() -> None:
    simulation = Simulation()
    r = request(LONG * 2, n=3, temperature=1.0, seed=7, max_tokens=12)
    simulation.add(r)
    simulation.run()
    texts = {simulation.text(r.id, i) for i in range(3)}
    assert len(texts) == 3
    assert sum(e.is_last for e in simulation.events[r.id]) == 1
    assert simulation.last(r.id).usage.n_output <= 36  # type: ignore[union-attr]
    # One prompt, and one token more for each further choice.
    assert simulation.loop.meter.n_steps <= 16


def test_a_choice_that_ended_without_a_word_is_not_the_best() -> None:
    simulation = Simulation(n_seq_max=2, n_outputs_max=2, script=Script(answer_tokens=0))
    r = request(LONG, n=1, best_of=3, temperature=1.0, seed=3, max_tokens=5)
    simulation.add(r)
    simulation.turn()
    simulation.turn_until(lambda: simulation.loop.output.groups[r.id].open == 2)
    assert [s.n_output for s in simulation.loop.scheduler.waiting] == [0]
    simulation.cancel(r.id)
    simulation.run()
    assert simulation.ids(r.id)


def test_best_of_sends_only_the_best_and_nothing_before_it_is_known() -> None:
    simulation = Simulation()
    r = request(LONG, n=1, best_of=3, temperature=1.0, seed=3, max_tokens=5)
    simulation.add(r)
    simulation.run()
    assert {e.index for e in simulation.events[r.id]} == {0}
    assert simulation.last(r.id).is_last


def test_the_same_seed_gives_the_same_text_whatever_else_runs() -> None:
    r = request("a story", temperature=1.0, seed=42, max_tokens=20)
    simulation = Simulation()
    for i in range(6):
        simulation.add(request(f"noise {i}", temperature=1.0, max_tokens=15))
    simulation.add(r)
    simulation.run()
    assert simulation.text(r.id) == alone(r)


def test_a_stop_string_ends_the_text_before_it() -> None:
    whole = alone(request(LONG, max_tokens=40))
    stop = whole.split()[6]
    simulation = Simulation()
    r = request(LONG, max_tokens=40, stop=(stop,))
    simulation.add(r)
    simulation.run()
    assert simulation.text(r.id) == whole[: whole.index(stop)]
    assert simulation.last(r.id).stop == stop
    assert simulation.last(r.id).finish_reason is FinishReason.STOP


def test_min_tokens_keeps_the_end_away_and_ignore_eos_for_good() -> None:
    simulation = Simulation(script=Script(answer_tokens=2))
    short = request(LONG + "x", max_tokens=50)
    least = request(LONG + "x", max_tokens=50, min_tokens=20)
    never = request(LONG + "x", max_tokens=50, ignore_eos=True)
    for r in (short, least, never):
        simulation.add(r)
    simulation.run()
    counts = [simulation.last(r.id).usage.n_output for r in (short, least, never)]  # type: ignore[union-attr]
    assert counts[0] < 20 <= counts[1] < 50 == counts[2]


def test_a_request_that_wants_progress_hears_how_far_its_prompt_was_read() -> None:
    simulation = Simulation(n_batch=32)
    r = structs.replace(request(LONG * 4 + "one", max_tokens=3), wants_progress=True)
    plain = request(LONG * 4 + "two", max_tokens=3)
    for one in (r, plain):
        simulation.add(one)
        simulation.run()
    told = [e.progress for e in simulation.events[r.id] if e.progress is not None]
    assert [e.progress is not None for e in simulation.events[r.id]] == [True] * len(told) + [
        False
    ] * 3
    assert len(told) > 3
    assert {p.n_prompt for p in told} == {simulation.last(r.id).usage.n_prompt}  # type: ignore[union-attr]
    counts = [p.n_computed for p in told]
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (told[0].n_cached, told[0].n_prompt)
    assert all(e.progress is None for e in simulation.events[plain.id])


def test_progress_begins_at_what_was_cached() -> None:
    simulation = Simulation(n_batch=32)
    first = request(LONG * 4 + "one", max_tokens=3)
    again = structs.replace(request(LONG * 4 + "one", max_tokens=3), wants_progress=True)
    for one in (first, again):
        simulation.add(one)
        simulation.run()
    begun = simulation.events[again.id][0].progress
    assert begun is not None
    assert begun.n_computed == begun.n_cached > 32


def test_prompt_logprobs_come_with_the_first_event_whatever_the_outputs_of_a_step() -> None:
    simulation = Simulation(n_outputs_max=3)
    r = request(tuple(range(300, 340)), prompt_logprobs=True, logprobs=2, max_tokens=2)
    simulation.add(r)
    simulation.run()
    first = simulation.events[r.id][0]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 40
    assert first.prompt_logprobs[0] is None
    assert [p.token_id for p in first.prompt_logprobs[1:] if p] == list(range(301, 340))


def test_an_interactive_request_takes_a_batch_requests_slot_and_that_one_resumes() -> None:
    simulation = Simulation(n_seq_max=2, script=Script(answer_tokens=0))
    slow = [request(f"{LONG} {i}", priority=Priority.BATCH, max_tokens=60) for i in range(2)]
    for r in slow:
        simulation.add(r)
    for _ in range(10):
        simulation.turn()
    quick = request("quick", priority=Priority.INTERACTIVE, max_tokens=3)
    simulation.add(quick)
    for _ in range(5):
        simulation.turn()
    assert simulation.last(quick.id).is_last
    simulation.run()
    assert [simulation.last(r.id).usage.n_output for r in slow] == [60, 60]  # type: ignore[union-attr]


def test_a_full_queue_refuses_and_goes_on() -> None:
    options = EngineOptions(max_waiting=2, seed=1)
    simulation = Simulation(options)
    requests = [request(f"number {i}", max_tokens=3) for i in range(10)]
    for r in requests:
        simulation.add(r)
    simulation.run()
    errors = [simulation.last(r.id).error for r in requests]
    assert [e.type for e in errors if e is not None] == ["QueueFullError"] * 4


@pytest.mark.parametrize("can_shift", [True, False])
def test_a_sliding_context_goes_on_beyond_the_context(can_shift: bool) -> None:
    script = Script(answer_tokens=0, can_shift=can_shift)
    simulation = Simulation(script=script, n_ctx=256, n_ctx_seq=128)
    r = request(LONG, overflow=Overflow.SLIDE, n_keep=8, max_tokens=300)
    simulation.add(r)
    simulation.run()
    usage = simulation.last(r.id).usage
    assert usage is not None
    assert usage.n_output == 300
    assert usage.n_slid > 100


def test_a_long_prompt_slides_by_whole_turns_and_says_so() -> None:
    simulation = Simulation(n_ctx=256, n_ctx_seq=128)
    turns = [LONG, LONG, LONG, LONG, LONG, LONG, LONG]
    starts = tuple(sum(map(len, turns[:i])) for i in range(len(turns)))
    r = request("".join(turns), overflow=Overflow.SLIDE, n_keep=5, turn_starts=starts, max_tokens=4)
    simulation.add(r)
    simulation.run()
    warnings = [e.warning for e in simulation.events[r.id] if e.warning]
    assert len(warnings) == 1
    assert simulation.last(r.id).usage.n_slid > 20  # type: ignore[union-attr]


def test_a_last_message_longer_than_the_context_is_refused_and_not_cut() -> None:
    simulation = Simulation(n_ctx=256, n_ctx_seq=128)
    starts = (0, len(LONG))
    r = request(LONG + "x" * 300, overflow=Overflow.SLIDE, turn_starts=starts, max_tokens=4)
    simulation.add(r)
    simulation.run()
    error = simulation.last(r.id).error
    assert error is not None
    assert error.attributes == {"n_prompt": 300, "n_ctx": 128}
    assert error.message.startswith("the last message")


def test_a_last_message_that_just_fits_loses_the_turns_before_it_and_nothing_else() -> None:
    simulation = Simulation(n_ctx=256, n_ctx_seq=128)
    starts = (0, len(LONG))
    r = request(LONG + "x" * 120, overflow=Overflow.SLIDE, turn_starts=starts, max_tokens=100)
    simulation.add(r)
    simulation.turn()
    (seq,) = simulation.loop.scheduler.running
    assert simulation.backend.piece(seq.tokens[0]) == b"x"
    assert seq.n_prompt == 120


def test_overflow_error_says_both_counts() -> None:
    simulation = Simulation(n_ctx=256, n_ctx_seq=128)
    r = request("x" * 400)
    simulation.add(r)
    simulation.run()
    error = simulation.last(r.id).error
    assert error is not None
    assert error.attributes == {"n_prompt": 401, "n_ctx": 128}


def test_generation_to_the_contexts_end_is_length() -> None:
    simulation = Simulation(n_ctx=256, n_ctx_seq=128, script=Script(answer_tokens=0))
    r = request("hello")
    simulation.add(r)
    simulation.run()
    assert simulation.last(r.id).finish_reason is FinishReason.LENGTH


def test_checkpoints_stand_in_for_shared_cells() -> None:
    simulation = Simulation(script=Script(share="checkpoint"))
    first = request(LONG * 2, max_tokens=5)
    simulation.add(first)
    simulation.run()
    again = request(LONG * 2 + "and more", max_tokens=5)
    simulation.add(again)
    simulation.run()
    assert simulation.last(again.id).usage.n_cached > 30  # type: ignore[union-attr]
    assert simulation.text(again.id) == alone(again)
    assert simulation.loop.scheduler.misses["no_checkpoint"] == 1


def test_what_saving_a_state_takes_is_no_part_of_what_its_prompt_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(script=Script(share="checkpoint"))

    def taking(seconds: float, call: Any) -> Any:
        def slow(*args: Any) -> Any:
            simulation.now += seconds
            return call(*args)

        return slow

    backend = simulation.backend
    monkeypatch.setattr(backend, "decode", taking(0.02, backend.decode))
    monkeypatch.setattr(backend, "state_get", taking(0.03, backend.state_get))
    for tail in ("one", "two", "three", "four"):
        simulation.add(request(f"{tail} " * 20 + LONG, max_tokens=1))
        simulation.run()
    # A prompt takes two steps, 0.04 s: most of that is not cheap.
    assert not simulation.loop.scheduler.costs.is_worth_saving(60, 60)


def cached_of(simulation: Simulation, wave: list[Request]) -> list[int]:
    """The cached tokens of each of these, which come together and say what each says alone."""
    for r in wave:
        simulation.add(r)
    simulation.run()
    assert [simulation.text(r.id) for r in wave] == [alone(r) for r in wave]
    return [simulation.last(r.id).usage.n_cached for r in wave]  # type: ignore[union-attr]


def test_a_third_prompt_begins_where_two_others_parted() -> None:
    """A system prompt, and three conversations under it: the state is saved where they differ."""
    simulation = Simulation(script=Script(share="checkpoint"))
    cached = []
    for tail in ("one", "two", "three"):
        r = request(LONG * 3 + f"{tail} " * 6, max_tokens=5)
        cached += cached_of(simulation, [r])
    assert cached[:2] == [0, 0]
    assert cached[2] >= 60


def test_a_second_prompt_begins_where_it_parts_from_one_whose_cache_can_rewind() -> None:
    simulation = Simulation(script=Script(share="checkpoint", can_rewind=True))
    first, second = (request(LONG * 3 + f"{t} " * 6, max_tokens=5) for t in ("one", "two"))
    cached_of(simulation, [first])
    assert cached_of(simulation, [second])[0] >= 60


def test_a_new_prefix_of_many_is_computed_once_where_caches_can_rewind() -> None:
    simulation = Simulation(script=Script(share="checkpoint", can_rewind=True), n_batch=32)
    wave = [request(LONG * 3 + f"{i} " * 6, max_tokens=4) for i in range(4)]
    assert [n >= 60 for n in cached_of(simulation, wave)] == [False, True, True, True]


def test_a_conversations_next_turn_begins_after_the_answer() -> None:
    simulation = Simulation(script=Script(share="checkpoint", can_rewind=True, answer_tokens=0))
    first = request(LONG * 2, max_tokens=20)
    simulation.add(first)
    simulation.run()
    whole = tuple(tokenize(first.prompt)) + tuple(simulation.ids(first.id))
    again = request((*whole, *tokenize("and then")), max_tokens=5)
    simulation.add(again)
    simulation.run()
    assert simulation.last(again.id).usage.n_cached == len(whole) - 1  # type: ignore[union-attr]
    assert len(simulation.loop.scheduler.checkpoints) == 1  # the prompt's own was let go


def test_whoever_asks_again_at_once_does_not_wait_for_the_answer_to_be_saved() -> None:
    simulation = Simulation(script=Script(share="checkpoint", can_rewind=True, answer_tokens=0))
    saved = simulation.loop.scheduler.checkpoints
    first = request(LONG * 2, max_tokens=20)
    simulation.add(first)
    while first.id not in simulation.events or not simulation.last(first.id).is_last:
        simulation.turn()
    n_bytes = saved.n_bytes
    simulation.add(request("something else", max_tokens=1))
    simulation.run()
    assert saved.n_bytes == n_bytes


def test_a_state_that_takes_long_to_save_keeps_no_stream_waiting() -> None:
    simulation = Simulation(script=Script(share="checkpoint", answer_tokens=0), n_ctx=4096)
    scheduler = simulation.loop.scheduler
    running = request("a stream", max_tokens=200)
    simulation.add(running)
    while not simulation.events.get(running.id):
        simulation.turn()
    scheduler.costs.observe(1, 0, 0.010)
    for _ in range(3):
        scheduler.costs.observe_save(1, 0.1)
    scheduler.costs.observe(0, 1, 10.0)
    long = request(LONG * 4, max_tokens=1)
    simulation.add(long)
    while not simulation.events.get(long.id):
        simulation.turn()
    assert scheduler.running
    assert len(scheduler.checkpoints) == 0


def test_prompts_that_begin_alike_and_come_together_wait_for_one_of_them() -> None:
    simulation = Simulation(script=Script(share="checkpoint"), n_batch=32)
    seen = request(LONG * 3 + "seen " * 6, max_tokens=2)
    simulation.add(seen)
    simulation.run()
    wave = [request(LONG * 3 + f"{i} " * 6, max_tokens=4) for i in range(4)]
    assert sorted(n >= 60 for n in cached_of(simulation, wave)) == [False, True, True, True]


def test_a_request_withdrawn_before_it_arrived_counts_as_cancelled() -> None:
    simulation = Simulation()
    simulation.loop.inbox.put(Withdrawn())
    simulation.loop._take_in()
    assert simulation.loop.stats().requests_cancelled == 1


def test_a_cancelled_first_leaves_nobody_waiting_for_its_state() -> None:
    simulation = Simulation(script=Script(share="checkpoint"), n_batch=32)
    seen = request(LONG * 3 + "seen " * 6, max_tokens=2)
    simulation.add(seen)
    simulation.run()
    first, second = (request(LONG * 3 + f"{t} " * 6, max_tokens=4) for t in ("first", "second"))
    simulation.add(first)
    simulation.turn()
    simulation.add(second)
    simulation.turn()
    simulation.cancel(first.id)
    simulation.run()
    assert simulation.last(first.id).finish_reason is FinishReason.CANCELLED
    assert simulation.text(second.id) == alone(second)


@pytest.mark.parametrize("cache", CACHES)
def test_every_kind_of_cache_gives_the_same_text(cache: str) -> None:
    requests = [request(LONG * 2 + f"{i}", max_tokens=30) for i in range(6)]
    simulation = Simulation(script=Script(**CACHES[cache]), n_ctx=512, n_ctx_seq=256)
    for r in requests:
        simulation.add(r)
    simulation.run()
    assert [simulation.text(r.id) for r in requests] == [alone(r) for r in requests]


def test_speculation_changes_no_text_and_says_what_it_guessed() -> None:
    options = EngineOptions(spec="ngram", seed=1, script=Script(answer_tokens=0))
    simulation = Simulation(options, n_outputs_max=32)
    r = request(LONG * 4, max_tokens=80)
    for seq_prompt in (r,):
        simulation.add(seq_prompt)
    while not simulation.loop.scheduler.running:
        simulation.turn()
    seq = simulation.loop.scheduler.running[0]
    plain = Simulation(EngineOptions(seed=1, script=Script(answer_tokens=0)))
    plain.add(r)
    plain.run()
    truth = plain.ids(r.id)
    numbers = random.Random(1)
    while simulation.loop.scheduler.has_work:
        n = seq.n_output
        guess = truth[n : n + 4]
        if guess and numbers.random() < 0.5:
            guess[numbers.randrange(len(guess))] = 300
        seq.draft = guess if seq.is_decoding else []
        simulation.turn()
    simulation.turn()
    assert simulation.ids(r.id) == truth
    usage = simulation.last(r.id).usage
    assert usage is not None
    assert 0 < usage.n_accepted < usage.n_drafted


def test_guesses_that_found_no_room_are_not_made_for_the_tokens_after_them() -> None:
    simulation = Simulation(EngineOptions(seed=1, script=Script(answer_tokens=0)), n_outputs_max=1)
    simulation.add(request(LONG, max_tokens=9))
    simulation.turn()
    seq = simulation.loop.scheduler.running[0]
    assert seq.is_decoding
    seq.draft = [300, 301]
    simulation.turn()
    assert seq.draft == []


def test_the_rows_of_greedy_guesses_are_chosen_in_one_call() -> None:
    options = EngineOptions(spec="draft", spec_max=4, seed=1, script=Script(answer_tokens=0))
    simulation = Simulation(options, n_outputs_max=32, draft_model="scripted")
    sizes: list[int] = []
    sample = simulation.backend.sample

    def counted(rows: list[int], samplers: list[Any]) -> list[int]:
        sizes.append(len(rows))
        return sample(rows, samplers)

    simulation.backend.sample = counted  # type: ignore[method-assign,assignment]
    r = request(LONG, max_tokens=60)
    simulation.add(r)
    simulation.run()
    plain = Simulation(EngineOptions(seed=1, script=Script(answer_tokens=0)))
    plain.add(r)
    plain.run()
    assert simulation.ids(r.id) == plain.ids(r.id)
    assert len(sizes) <= simulation.loop.meter.n_steps
    assert max(sizes) == 5


def test_a_choice_that_fails_takes_its_sibling_along_and_nobody_else() -> None:
    class Broken:
        """Refuses its second token."""

        needs_mask = False
        can_stop = True
        is_finished = False

        def __init__(self) -> None:
            self.n = 0

        def clone(self) -> Broken:
            return Broken()

        def accept(self, token: int) -> None:
            self.n += 1
            if self.n == 2:
                raise EngineError("refused")

    simulation = Simulation()
    bad, good = request(LONG, n=2, max_tokens=20), request("hello", max_tokens=20)
    simulation.add(good)
    simulation.add(bad, Broken())
    simulation.run()
    assert simulation.last(bad.id).finish_reason is FinishReason.ERROR
    assert simulation.text(good.id) == alone(good)


def test_a_schema_is_followed_and_others_are_not_disturbed() -> None:
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    simulation = Simulation(n_outputs_max=16)
    factory = make_factory(vocabulary_of(simulation.backend))
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema)
    r = request("json please", grammar=grammar, max_tokens=60)
    other = request(LONG, max_tokens=30)
    simulation.add(other)
    simulation.add(r, factory.compile(grammar))
    simulation.run()
    text = simulation.text(r.id)
    assert text.startswith("{")
    assert '"a"' in text
    assert simulation.text(other.id) == alone(other)


def no_text_is_lost(*faults: Fault) -> None:
    """Three requests over a backend with these faults say what each says alone."""
    simulation = Simulation(script=Script(faults=faults))
    requests = [request(f"{LONG} {i}", max_tokens=20) for i in range(3)]
    for r in requests:
        simulation.add(r)
    simulation.run()
    assert [simulation.text(r.id) for r in requests] == [alone(r) for r in requests]


def test_no_cells_from_the_library_preempts_and_goes_on() -> None:
    no_text_is_lost(Fault(kind="code", code=1, at_step=6), Fault(kind="code", code=2, at_step=9))


def test_an_exception_in_a_step_ends_requests_but_not_the_loop() -> None:
    faults = (Fault(kind="raise", at_step=3),)
    simulation = Simulation(script=Script(faults=faults))
    simulation.add(request("one", id="one", max_tokens=10))
    simulation.run()
    assert simulation.last("one").error is not None
    simulation.add(request("two", id="two", max_tokens=10))
    simulation.run()
    assert simulation.last("two").finish_reason is not FinishReason.ERROR


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(CACHES)))
def test_nothing_leaks_whatever_comes(seed: int, cache: str) -> None:
    run_random(seed, 25, cache)


def run_random(seed: int, n_requests: int, cache: str = "cells") -> Simulation:
    """Random requests on a small context; every invariant after every step; empty at the end."""
    numbers = random.Random(seed)
    script = Script(answer_tokens=20, **CACHES[cache])
    options = EngineOptions(
        seed=seed, script=script, spec=numbers.choice(["off", "auto"]), max_waiting=n_requests
    )
    draft = numbers.choice([None, "small"])
    simulation = Simulation(
        options,
        n_ctx=512,
        n_ctx_seq=256,
        n_batch=64,
        n_seq_max=6,
        n_outputs_max=12,
        draft_model=draft,
    )
    open_ids: list[str] = []
    for i in range(n_requests):
        sampling = {
            "max_tokens": numbers.randrange(1, 80),
            "temperature": numbers.choice([0.0, 1.0]),
            "n": numbers.choice([1, 1, 1, 2, 3]),
            "stop": numbers.choice([(), (), (" the",), ("a", "bo")]),
            "logprobs": numbers.choice([None, None, 2]),
        }
        prompt = LONG * numbers.randrange(0, 4) + "x" * numbers.randrange(1, 120)
        r = request(
            prompt,
            id=f"q{i}",
            priority=numbers.choice(list(Priority)),
            overflow=numbers.choice(list(Overflow)),
            n_keep=numbers.randrange(0, 20),
            cache_prompt=numbers.random() < 0.8,
            **sampling,
        )
        simulation.add(r)
        open_ids.append(r.id)
        for _ in range(numbers.randrange(0, 12)):
            simulation.turn()
        if numbers.random() < 0.2:
            simulation.cancel(numbers.choice(open_ids[-8:]))
    simulation.run()
    for request_id in open_ids:
        assert simulation.last(request_id).is_last, request_id
    simulation.loop.scheduler.cells.drop_retained()
    simulation.loop._apply(simulation.loop.scheduler.take_ops())
    assert simulation.backend.n_cells_used == 0
    assert simulation.backend.n_samplers == 0
    assert simulation.loop.scheduler.n_cells_used == 0
    assert not simulation.loop.output.groups
    return simulation


def test_a_draft_model_confirms_several_tokens_a_step_and_changes_none() -> None:
    options = EngineOptions(spec="draft", spec_max=4, seed=1, script=Script(answer_tokens=0))
    simulation = Simulation(options, n_outputs_max=32, draft_model="small")
    r = request(LONG, max_tokens=100)
    simulation.add(r)
    simulation.run()
    usage = simulation.last(r.id).usage
    assert usage is not None
    assert usage.n_accepted > 30
    plain = Simulation(EngineOptions(seed=1, script=Script(answer_tokens=0)))
    plain.add(r)
    plain.run()
    assert simulation.ids(r.id) == plain.ids(r.id)


def test_a_pinned_prefix_survives_pressure_and_a_restart(tmp_path: Path) -> None:
    options = EngineOptions(seed=1, pin_dir=str(tmp_path))
    simulation = Simulation(options, n_ctx=256, n_ctx_seq=256)
    simulation.add(request(LONG, pin_prefix=True, max_tokens=3))
    simulation.run()
    for i in range(6):
        simulation.add(request("x" * 200 + str(i), max_tokens=3))
    simulation.run()
    for again in (simulation, Simulation(options, n_ctx=256, n_ctx_seq=256)):
        r = request(LONG + "and then", max_tokens=3)
        again.add(r)
        again.run()
        assert again.last(r.id).usage.n_cached > 20  # type: ignore[union-attr]
        assert again.text(r.id) == alone(r)


@pytest.mark.parametrize("lengths", [(90, 90, 40, 75), (90, 90, 40, 90), (120, 120, 120, 120)])
def test_too_few_cells_for_all_cut_no_answer(lengths: tuple[int, ...]) -> None:
    script = Script(answer_tokens=0)
    simulation = Simulation(script=script, n_ctx=256, n_ctx_seq=256, n_seq_max=4)
    requests = [request("A", max_tokens=n) for n in lengths]
    for r in requests:
        simulation.add(r)
    simulation.run()
    for r, n in zip(requests, lengths, strict=True):
        last = simulation.last(r.id)
        assert last.usage is not None
        assert (last.usage.n_output, last.finish_reason) == (n, FinishReason.LENGTH)
    n_preempted = simulation.loop.scheduler.n_preemptions
    assert (n_preempted > 0) == (sum(lengths) > 300)


def test_a_pinned_prefix_goes_before_an_answer_is_cut() -> None:
    options = EngineOptions(seed=1, script=Script(answer_tokens=0))
    simulation = Simulation(options, n_ctx=256, n_ctx_seq=256)
    simulation.add(request("p" * 100, pin_prefix=True, max_tokens=3))
    simulation.run()
    assert simulation.loop.scheduler.n_cells_retained >= 100
    r = request("x" * 50, max_tokens=200)
    simulation.add(r)
    simulation.run()
    last = simulation.last(r.id)
    assert last.usage is not None
    assert last.usage.n_output == 200


def test_stop_strings_are_text_until_min_tokens_are_there() -> None:
    whole = alone(request(LONG, max_tokens=40))
    stop = whole.split()[2]
    simulation = Simulation()
    r = request(LONG, max_tokens=40, stop=(stop,), min_tokens=12)
    simulation.add(r)
    simulation.run()
    text = simulation.text(r.id)
    assert stop in text
    assert whole.startswith(text)


def test_states_too_large_to_be_saved_are_read_once_and_nobody_waits_for_more() -> None:
    options = EngineOptions(seed=1, checkpoint_bytes=100, script=Script(share="checkpoint"))
    simulation = Simulation(options, n_batch=512, n_ctx=4096, n_seq_max=8)
    reads: list[int] = []
    read = simulation.backend.state_get

    def counted(slot: int) -> bytes:
        reads.append(slot)
        return read(slot)

    simulation.backend.state_get = counted  # type: ignore[method-assign]
    for wave in range(2):
        requests = [request(LONG * 3 + f"{wave} {i} " * 6, max_tokens=4) for i in range(8)]
        for r in requests:
            simulation.add(r)
        simulation.run()
        assert [simulation.text(r.id) for r in requests] == [alone(r) for r in requests]
    assert len(reads) <= 3, reads


def test_a_step_that_fails_for_ever_ends_a_request_whose_cache_cannot_go_back() -> None:
    simulation = Simulation(script=Script(share="checkpoint", answer_tokens=0))
    inner = simulation.backend.decode

    def decode(spans: Any, meanwhile: Any = None) -> int:
        code = inner(spans, meanwhile)  # as llama.cpp: what the failed step computed is there
        return -3 if any(span.start for span in spans) else code

    simulation.backend.decode = decode  # type: ignore[method-assign]
    requests = [request(LONG * 3 + f"{i}", max_tokens=4) for i in range(3)]
    for r in requests:
        simulation.add(r)
    simulation.run(300)
    for r in requests:
        error = simulation.last(r.id).error
        assert error is not None
        assert error.attributes == {"code": -3}


def test_an_exception_while_embedding_answers_who_asked() -> None:
    script = Script(faults=(Fault(kind="raise", at_step=1),))
    simulation = Simulation(script=script, embeddings=True)
    answers: list[Any] = []
    simulation.loop._send = answers.append
    for call in (7, 8):
        ask = EmbedRequest(id=f"e{call}", inputs=("x",))
        simulation.loop.inbox.put(EmbedJob(call, ask, (array("i", [1, 2]),)))
    simulation.loop._take_in()
    simulation.loop.turn()
    simulation.loop.turn()
    assert [type(answer) for answer in answers] == [wire.Failed, wire.Reply]
    assert [answer.call for answer in answers] == [7, 8]


def test_what_ended_before_a_close_is_told() -> None:
    simulation = Simulation(script=Script(is_async=True, answer_tokens=0))
    short, long = request("a", max_tokens=3), request("b", max_tokens=99)
    simulation.add(short)
    simulation.add(long)
    for _ in range(3):
        simulation.turn()
    simulation.loop.inbox.put(wire.Close())
    simulation.loop.run()
    assert simulation.last(short.id).is_last


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(CACHES)), st.booleans())
def test_whatever_fails_or_is_cancelled_each_text_is_told_once_and_in_order(
    seed: int, cache: str, is_async: bool
) -> None:
    rng = random.Random(seed)
    simulation, requests = faulty(rng, cache, is_async=is_async)
    for r in requests:
        events = simulation.events[r.id]
        assert [e.is_last for e in events] == [False] * (len(events) - 1) + [True]
        truth = alone(r, n_ctx_seq=256)
        if events[-1].finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            assert truth.startswith(simulation.text(r.id))
        else:
            assert simulation.text(r.id) == truth
    assert not simulation.loop.output.events


def faulty(rng: random.Random, cache: str, *, is_async: bool) -> tuple[Simulation, list[Request]]:
    """Random requests over a backend that fails now and then, some cancelled; run to the end."""
    faults = tuple(
        Fault(
            kind=rng.choice(["code", "code", "raise"]),  # type: ignore[arg-type]
            code=rng.choice([1, 2, -3]),
            at_step=rng.randrange(1, 200),
        )
        for _ in range(rng.randrange(6))
    )
    script = Script(is_async=is_async, faults=faults, **CACHES[cache])
    options = EngineOptions(
        seed=1,
        script=script,
        spec=rng.choice(["off", "auto"]),
        checkpoint_bytes=rng.choice([400, 3000, 10**8]),
        attach_top_k=rng.choice([None, 64]),
    )
    simulation = Simulation(
        options,
        n_ctx=rng.choice([300, 512, 2048]),
        n_ctx_seq=256,
        n_batch=rng.choice([32, 64, 256]),
        n_ubatch=rng.choice([1, 16, 256]),
        n_seq_max=rng.choice([1, 3, 6]),
        n_outputs_max=12,
        draft_model=rng.choice([None, "small"]),
    )
    requests: list[Request] = []
    for i in range(rng.randrange(1, 20)):
        r = request(
            LONG * rng.randrange(3) + rng.choice(["", "a b c ", "q" * 30]) + f"{i}",
            priority=rng.choice(list(Priority)),
            max_tokens=rng.randrange(1, 60),
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            cache_prompt=rng.random() < 0.8,
            prompt_logprobs=rng.random() < 0.15,
            pin_prefix=rng.random() < 0.1,
            logprobs=rng.choice([None, None, 0]),
        )
        requests.append(r)
        simulation.add(r)
        for _ in range(rng.randrange(9)):
            simulation.turn()
        if rng.random() < 0.2:
            simulation.cancel(rng.choice(requests).id)
        if rng.random() < 0.1:
            simulation.loop.inbox.put(wire.Ping(1))
    simulation.run(20_000)
    return simulation, requests


@pytest.mark.parametrize("share", ["cells", "checkpoint", "none"])
def test_a_cache_with_less_room_than_is_counted_still_answers_everybody(share: str) -> None:
    simulation = Simulation(script=Script(share=share), n_ctx=512)  # type: ignore[arg-type]
    backend, decode = simulation.backend, simulation.backend.decode

    def cramped(spans: Any, meanwhile: Any = None) -> int:
        n = sum(len(span.tokens) for span in spans)
        return NO_CELLS if backend.n_cells_used + n > 130 else decode(spans, meanwhile)

    backend.decode = cramped  # type: ignore[method-assign]
    requests = [request(f"ab cd {i}" * 6, max_tokens=40, ignore_eos=True) for i in range(3)]
    simulation.ids_of(*requests)
    assert [simulation.text(r.id) for r in requests] == [alone(r) for r in requests]
    backend.decode = decode  # type: ignore[method-assign]
    more = [request(f"more {i}", max_tokens=5) for i in range(3)]
    for r in more:
        simulation.add(r)
    simulation.turn()
    assert len(simulation.loop.scheduler.running) == 3  # it is not thought full for ever


def test_who_ends_while_a_failure_is_looked_for_leaves_no_cells_to_the_next_one() -> None:
    simulation = Simulation(script=Script(faults=(Fault(kind="code", code=-3, at_step=4),)))
    backend, decode = simulation.backend, simulation.backend.decode
    tree = simulation.loop.scheduler.cells.tree

    def looking(spans: Any, meanwhile: Any = None) -> int:
        assert backend.n_cells_used == tree.n_cells
        return decode(spans, meanwhile)

    backend.decode = looking  # type: ignore[method-assign]
    requests = [
        request(f"hello {i}", max_tokens=n, cache_prompt=False) for i, n in enumerate((4, 4, 9))
    ]
    simulation.ids_of(*requests)
    assert [simulation.text(r.id) for r in requests] == [alone(r) for r in requests]


@pytest.mark.parametrize("code", [1, 2])
def test_who_finds_no_cells_or_is_aborted_while_a_failure_is_looked_for_goes_on(code: int) -> None:
    no_text_is_lost(
        Fault(kind="code", code=-3, at_step=4), Fault(kind="code", code=code, at_step=5)
    )


class Stuck:
    """A constraint that lets nothing through after two tokens, or can be followed no further."""

    needs_mask = True
    can_stop = True
    is_finished = False

    def __init__(self, ids: list[int] | None) -> None:
        self.ids, self.n = ids, 0

    def clone(self) -> Stuck:
        return Stuck(self.ids)

    def allowed(self) -> list[int] | None:
        if self.n == 2 and self.ids is None:
            raise InvalidRequestError("too complex", param="grammar")
        return [300, 301] if self.n < 2 else self.ids

    def accept(self, token: int) -> None:
        self.n += 1

    def forced_tokens(self) -> list[int]:
        return []


@pytest.mark.parametrize("ids", [None, []])
@pytest.mark.parametrize("spec", ["off", "auto"])
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    ids: list[int] | None, spec: str
) -> None:
    simulation = Simulation(EngineOptions(seed=1, spec=spec))  # type: ignore[arg-type]
    pick = simulation.backend.sample_allowed

    def sample_allowed(row: int, sampler: Any, allowed: Any) -> int:
        if allowed == ():
            raise EngineError("the grammar allows no token")
        return pick(row, sampler, allowed)

    simulation.backend.sample_allowed = sample_allowed  # type: ignore[method-assign]
    good, bad = request("hello", max_tokens=20), request(LONG, n=2, max_tokens=20)
    simulation.add(good)
    simulation.add(bad, Stuck(ids))
    simulation.run()
    assert simulation.last(bad.id).finish_reason is FinishReason.ERROR
    assert simulation.text(good.id) == alone(good)


def test_logits_that_nothing_can_be_chosen_from_end_their_request_alone() -> None:
    simulation = Simulation()
    good, bad = request("hello", max_tokens=20), request(LONG, max_tokens=20)
    pick = simulation.backend.sample

    def sample(rows: Any, samplers: Any) -> list[int]:
        poisoned = [s.sampler for s in simulation.loop.scheduler.running if s.request is bad]
        if any(sampler in poisoned for sampler in samplers):
            raise EngineError("nothing to choose from")
        return pick(rows, samplers)

    simulation.backend.sample = sample  # type: ignore[method-assign]
    for r in (good, bad):
        simulation.add(r)
    simulation.run()
    assert simulation.last(bad.id).finish_reason is FinishReason.ERROR
    assert simulation.text(good.id) == alone(good)


def test_what_a_prompt_computed_before_it_was_preempted_is_not_called_cached() -> None:
    simulation = Simulation(n_batch=32, n_ubatch=32, n_seq_max=1, n_ctx=2048)
    slow = request(LONG * 6, max_tokens=5, priority=Priority.BATCH)
    simulation.add(slow)
    for _ in range(3):
        simulation.turn()
    simulation.add(request("hello you", max_tokens=5, priority=Priority.INTERACTIVE))
    simulation.run()
    assert simulation.loop.scheduler.n_preemptions == 1
    assert simulation.last(slow.id).usage.n_cached == 0  # type: ignore[union-attr]


def test_a_step_that_is_tried_again_counts_its_cached_tokens_once() -> None:
    script = Script(
        faults=tuple(Fault(kind="code", code=2, at_step=i) for i in (3, 4)), answer_tokens=0
    )
    simulation = Simulation(script=script)
    first, again = (request(LONG * 3, max_tokens=2) for _ in range(2))
    for r in (first, again):
        simulation.add(r)
        simulation.run()
    n_cached = simulation.last(again.id).usage.n_cached  # type: ignore[union-attr]
    assert simulation.loop.meter.cached_tokens == n_cached > 0


def test_an_id_that_comes_twice_leaves_nothing_running_that_nobody_hears() -> None:
    simulation = Simulation()
    first = request(LONG, max_tokens=20)
    simulation.add(first)
    simulation.turn()
    simulation.add(first)
    later = request("hello", max_tokens=20)
    simulation.add(later)
    simulation.run()
    assert simulation.last(first.id).finish_reason is FinishReason.ERROR
    assert simulation.text(later.id) == alone(later)


def test_an_exception_over_a_message_ends_that_request_and_not_the_loop() -> None:
    class Uncopied(Stuck):
        def clone(self) -> Stuck:
            raise RuntimeError("not today")

    simulation = Simulation()
    bad, good = request(LONG, n=2, max_tokens=20), request("hello", max_tokens=20)
    simulation.add(bad, Uncopied(None))
    simulation.add(good)
    simulation.run()
    assert simulation.last(bad.id).finish_reason is FinishReason.ERROR
    assert simulation.text(good.id) == alone(good)


def test_an_empty_input_is_called_empty_not_too_long() -> None:
    simulation = Simulation(embeddings=True)
    inputs = (array("i", [1]), array("i"))
    with pytest.raises(InvalidRequestError, match="input 1 is empty"):
        embed(simulation.backend, EmbedJob(1, EmbedRequest(id="e", inputs=("a", "")), inputs))


@pytest.mark.parametrize("name", ["seq_rm", "seq_cp"])
def test_operations_that_break_off_leave_no_cell_behind(name: str) -> None:
    simulation = Simulation()
    backend, todo = simulation.backend, getattr(simulation.backend, name)

    def broken(*args: Any) -> None:
        setattr(backend, name, todo)
        raise MemoryError("just now")

    first, again = (request(LONG, max_tokens=6, ignore_eos=True) for _ in range(2))
    simulation.add(first)
    setattr(backend, name, broken)  # the first one's end is what is broken off
    simulation.run()
    assert getattr(backend, name) == todo
    simulation.ids_of(again)
    assert simulation.text(again.id) == alone(again)


def test_guesses_in_a_saved_state_are_not_put_back_with_it() -> None:
    simulation = Simulation(script=Script(share="checkpoint", can_rewind=True))
    ids = tuple(range(300, 340))
    (said,) = simulation.ids_of(request(ids, max_tokens=6, ignore_eos=True))
    again = request((*ids, *said, 300), max_tokens=6, ignore_eos=True)
    checkpoints = simulation.loop.scheduler.checkpoints
    for key, saved in checkpoints._saved.items():  # as with two guesses that were beside it
        state = bytes(saved.state) + bytes(16)
        checkpoints._saved[key] = structs.replace(saved, state=state)
    simulation.ids_of(again)
    assert simulation.loop.scheduler.n_hits == 1
    assert simulation.text(again.id) == alone(again)
