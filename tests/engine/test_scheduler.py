"""Which tokens a step computes: budget, urgency, cells. No backend at all."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine.costs import Costs
from edgellm.engine.info import EngineOptions
from edgellm.engine.ops import Copy, Restore
from edgellm.engine.scheduler import Scheduler, Step
from edgellm.engine.sequence import Sequence, State
from edgellm.errors import ContextOverflowError, QueueFullError
from edgellm.request import Priority
from tests.engine.factories import limits, sequence


def play(scheduler: Scheduler, step: Step, token: int = 7) -> None:
    """The step happened: tokens are computed, and each last row gives a token."""
    for w in step.work:
        scheduler.computed(w)
        if w.n_out and w.seq.n_pending == 0:
            w.seq.tokens.append(token)
    scheduler.check()


def running(scheduler: Scheduler, *prompts: list[int], now: float = 0.0) -> list[Sequence]:
    """Sequences that have their first token."""
    seqs = [sequence(p) for p in prompts]
    scheduler.add(seqs)
    for _ in range(100):
        if all(s.n_output > 0 for s in seqs):
            return seqs
        play(scheduler, scheduler.schedule(now))
    raise AssertionError("never ready")


def learn(scheduler: Scheduler) -> None:
    """A decode takes 10 ms, a prefill token 1 ms."""
    scheduler.costs = Costs()
    scheduler.costs.observe(1, 0, 0.010)
    scheduler.costs.observe(1, 20, 0.030)


def test_decodes_are_in_the_order_of_their_slots_and_the_lowest_slot_is_taken_first() -> None:
    # llama.cpp computes a split cache together only where ids follow one another in the batch.
    split = limits(sharing="checkpoint", retained_ids=(), n_ctx_seq=64, is_split=True)
    scheduler = Scheduler(split, EngineOptions())
    seqs = running(scheduler, [1] * 5, [2] * 5, [3] * 5, [4] * 5)
    for gone in (seqs[2], seqs[0]):
        scheduler.finish(gone)
    running(scheduler, [5] * 5, [6] * 5)
    slots = [w.seq.slot for w in scheduler.schedule(0.0).work]
    assert slots == sorted(slots) == [0, 1, 2, 3]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    seq = sequence(list(range(150)))
    scheduler.add([seq])
    sizes = []
    while seq.n_output == 0:
        step = scheduler.schedule(0.0)
        sizes.append([(w.n, w.n_out) for w in step.work])
        play(scheduler, step)
    assert sizes == [[(64, 0)], [(64, 0)], [(22, 1)]]


def test_decodes_go_first_and_prompts_get_what_is_left() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    (a,) = running(scheduler, [1, 2, 3])
    learn(scheduler)
    b = sequence(list(range(100, 200)))
    scheduler.add([b])
    step = scheduler.schedule(0.0)
    assert (step.work[0].seq, step.work[0].n) == (a, 1)
    # A step may last 2.2 decodes: 12 ms more at 1 ms a token, but no less than the smallest chunk.
    assert step.work[1].n == 16


def test_many_waiting_prompts_weigh_more_than_one_running_stream() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    running(scheduler, [1, 2, 3])
    learn(scheduler)
    scheduler.add([sequence(list(range(k, k + 20))) for k in (100, 200, 300)])
    assert scheduler.schedule(0.0).n_prefill == 60


def test_prompts_are_read_one_after_another_where_together_is_no_quicker() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    for n in (4, 16, 64):
        scheduler.costs.observe(0, n, n * 0.002)
    prompts = [sequence(list(range(k, k + 20))) for k in (100, 200, 300)]
    scheduler.add(prompts)
    first = scheduler.schedule(0.0)
    assert [(w.seq, w.n) for w in first.work] == [(prompts[0], 20)]
    play(scheduler, first)
    second = scheduler.schedule(0.0)
    assert [w.seq for w in second.work] == prompts[:2]


def test_prompts_are_read_together_where_a_step_costs_much_by_itself() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    for n in (4, 16, 64):
        scheduler.costs.observe(0, n, 0.020 + n * 0.0001)
    scheduler.add([sequence(list(range(k, k + 20))) for k in (100, 200, 300)])
    assert scheduler.schedule(0.0).n_prefill == 60


def test_a_step_carries_no_more_prefill_than_is_computed_in_one_go() -> None:
    scheduler = Scheduler(limits(n_batch=64, n_ubatch=32), EngineOptions())
    scheduler.add([sequence(list(range(100)))])
    assert scheduler.schedule(0.0).n_prefill == 32


def test_the_chunk_grows_with_the_target() -> None:
    scheduler = Scheduler(limits(), EngineOptions(itl_target_s=0.05))
    running(scheduler, [1, 2, 3])
    learn(scheduler)
    scheduler.add([sequence(list(range(100, 200)))])
    assert scheduler.schedule(0.0).work[1].n == 40


def test_no_two_steps_in_a_row_have_the_same_shape_while_a_prompt_is_read() -> None:
    scheduler = Scheduler(limits(n_cells=4096, n_ctx_seq=2048), EngineOptions(itl_target_s=0.05))
    running(scheduler, [1, 2, 3])
    learn(scheduler)
    scheduler.add([sequence(list(range(100, 400)))])
    chunks = []
    for _ in range(6):
        step = scheduler.schedule(0.0)
        chunks.append(step.n_prefill)
        play(scheduler, step)
    assert chunks == [40, 39, 40, 39, 40, 39]


def test_where_each_has_cells_of_its_own_streams_and_prompts_take_turns() -> None:
    split = limits(sharing="checkpoint", retained_ids=(), is_split=True)
    scheduler = Scheduler(split, EngineOptions())
    streams = running(scheduler, [1, 2, 3], [4, 5, 6])
    learn(scheduler)
    prompt = sequence(list(range(100, 150)))
    scheduler.add([prompt])
    turns = []
    while prompt.n_output == 0:
        step = scheduler.schedule(0.0)
        turns.append(([w.seq for w in step.work], step.n_prefill))
        play(scheduler, step)
    reading, decoding = turns[::2], turns[1::2]
    assert all(seqs == [prompt] and 0 < n <= 16 for seqs, n in reading)
    assert all(seqs == streams and n == 0 for seqs, n in decoding)
    assert len(reading) == len(decoding) + 1


def test_a_prompt_read_token_by_token_stands_still_in_no_step() -> None:
    scheduler = Scheduler(limits(n_ubatch=1), EngineOptions())
    running(scheduler, [1, 2, 3])
    learn(scheduler)
    scheduler.add([sequence([4, 5, 6, 7])])
    for _ in range(3):
        step = scheduler.schedule(0.0)
        assert step.n_prefill == 1
        play(scheduler, step)


@pytest.mark.parametrize(("token_s", "chunk"), [(0.001, 16), (0.010, 5), (1.0, 4)])
def test_chunks_are_smaller_where_each_token_takes_long(token_s: float, chunk: int) -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    running(scheduler, [1, 2, 3])
    scheduler.costs = Costs()
    scheduler.costs.observe(1, 0, 0.010)
    scheduler.costs.observe(1, 16, 0.010 + 16 * token_s)
    scheduler.add([sequence(list(range(100, 200)))])
    assert scheduler.schedule(0.0).n_prefill == chunk


def test_an_interactive_prompt_beside_batch_streams_is_not_throttled() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    scheduler.add([sequence([1, 2, 3], priority=Priority.BATCH)])
    play(scheduler, scheduler.schedule(0.0))
    learn(scheduler)
    scheduler.add([sequence(list(range(100, 160)), priority=Priority.INTERACTIVE)])
    assert scheduler.schedule(0.0).work[1].n == 60


def test_urgency_orders_the_queue_and_waiting_raises_it() -> None:
    scheduler = Scheduler(limits(slot_ids=(0,), n_running=1), EngineOptions(aging_s=10.0))
    old = sequence([1] * 4, priority=Priority.BATCH)
    new = sequence([2] * 4, priority=Priority.NORMAL)
    new.waiting_since = new.arrival = 30.0
    scheduler.add([old, new])
    step = scheduler.schedule(31.0)
    assert step.work[0].seq is old  # 3.1 levels of waiting beat one of priority


def test_the_newest_prefix_is_kept_however_long_it_is() -> None:
    scheduler = Scheduler(limits(n_cells=8192, n_ctx_seq=4096, retain_cells=64), EngineOptions())
    (seq,) = running(scheduler, list(range(2000)))
    scheduler.finish(seq)
    assert scheduler.n_cells_retained == 2000


def test_a_prefix_far_above_what_is_used_is_let_go() -> None:
    """Written beside a long prompt: its cells lie above those that are free now."""
    scheduler = Scheduler(limits(n_cells=8192, n_ctx_seq=4096, retain_cells=64), EngineOptions())
    (short,) = running(scheduler, list(range(5000, 5020)))
    (long,) = running(scheduler, list(range(1000)))
    for _ in range(20):
        play(scheduler, scheduler.schedule(0.0))
    scheduler.finish(long)
    assert scheduler.n_cells_retained >= 1000
    scheduler.finish(short)
    assert scheduler.n_cells_retained < 64  # its first cells are as low as any
    assert max(map(scheduler.cells.heights.top, scheduler.cells.tree.holders)) < 128


def test_a_prefix_far_up_is_let_go_also_where_others_are_kept_within_the_budget() -> None:
    large = limits(n_cells=8192, n_ctx_seq=4096, n_batch=512, n_ubatch=512)
    scheduler = Scheduler(large, EngineOptions())
    (kept,) = running(scheduler, list(range(7000, 7040)))
    scheduler.finish(kept)
    (short,) = running(scheduler, list(range(5000, 5020)))
    long = sequence(list(range(1500)), cache_prompt=False)
    scheduler.add([long])
    for _ in range(20):
        play(scheduler, scheduler.schedule(0.0))
    scheduler.finish(long)
    scheduler.finish(short)
    assert 0 < scheduler.n_cells_retained < scheduler.cells.retention.cells
    assert max(map(scheduler.cells.heights.top, scheduler.cells.tree.holders)) < 512


def test_prefixes_that_lie_side_by_side_are_kept() -> None:
    scheduler = Scheduler(limits(n_cells=8192, n_ctx_seq=4096, retain_cells=4096), EngineOptions())
    first, second = running(scheduler, list(range(900)), list(range(3000, 3900)))
    for _ in range(50):
        play(scheduler, scheduler.schedule(0.0))
    scheduler.finish(first)
    scheduler.finish(second)
    assert scheduler.n_cells_retained > 1800


def test_the_queue_is_bounded() -> None:
    scheduler = Scheduler(limits(), EngineOptions(max_waiting=1))
    scheduler.add([sequence([1]) for _ in range(5)])
    with pytest.raises(QueueFullError):
        scheduler.add([sequence([1])])


def test_a_prompt_as_long_as_the_context_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    with pytest.raises(ContextOverflowError) as caught:
        scheduler.add([sequence([1] * 256)])
    assert (caught.value.n_prompt, caught.value.n_ctx) == (256, 256)
    assert not scheduler.waiting


def test_the_least_urgent_newest_is_preempted_when_cells_run_out() -> None:
    scheduler = Scheduler(limits(n_cells=100, n_ctx_seq=100), EngineOptions(prefix_min=1000))
    first, second = running(scheduler, [1] * 40, [2] * 40)
    while second.state is State.RUNNING:
        play(scheduler, scheduler.schedule(0.0))
    assert first.state is State.RUNNING
    assert second.state is State.PREEMPTED
    assert second in scheduler.waiting
    assert scheduler.n_cells_used <= 100


def test_retained_prefixes_go_before_anyone_is_preempted() -> None:
    scheduler = Scheduler(limits(n_cells=128, n_ctx_seq=128), EngineOptions())
    (done,) = running(scheduler, list(range(60)))
    scheduler.finish(done)
    assert scheduler.n_cells_retained == 60
    (other,) = running(scheduler, list(range(500, 600)))
    assert other.state is State.RUNNING
    assert scheduler.n_preemptions == 0


def test_a_finished_prefix_is_shared_without_computing_it() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    (done,) = running(scheduler, list(range(60)))
    scheduler.finish(done)
    again = sequence([*range(60), 99])
    scheduler.add([again])
    step = scheduler.schedule(0.0)
    copies = [op for op in step.ops if isinstance(op, Copy)]
    assert copies[-1].n == 60
    assert (step.work[0].start, step.work[0].n) == (60, 1)
    assert again.n_cached == 60


def test_retained_prefixes_beyond_the_budget_go_the_oldest_first() -> None:
    scheduler = Scheduler(limits(retain_cells=100), EngineOptions())
    seqs = running(scheduler, *(list(range(k, k + 40)) for k in (0, 1000, 2000, 3000)))
    for seq in seqs:
        scheduler.finish(seq)
        scheduler.check()
    assert 80 <= scheduler.n_cells_retained <= 100
    assert scheduler.cells.tree.match(array("i", range(3000, 3040)), 39) is not None
    assert scheduler.cells.tree.match(array("i", range(40)), 39) is None


def test_the_newest_retained_prefix_is_kept_whole_whatever_the_budget() -> None:
    scheduler = Scheduler(limits(retain_cells=10), EngineOptions())
    (done,) = running(scheduler, list(range(60)))
    scheduler.finish(done)
    assert scheduler.n_cells_retained == 60


def test_a_growing_conversation_keeps_one_retained_prefix() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    text = list(range(40))
    for _ in range(4):
        (seq,) = running(scheduler, text)
        scheduler.finish(seq)
        text = [*text, *range(len(text) + 1000, len(text) + 1020)]
    assert len(scheduler.cells.tree.holders) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_no_sequence_is_lost_and_no_step_exceeds_its_budget(seed: int) -> None:
    numbers = random.Random(seed)
    lim = limits(n_cells=numbers.choice([96, 200, 400]), n_ctx_seq=90, n_outputs_max=4)
    scheduler = Scheduler(lim, EngineOptions(max_waiting=1000))
    lengths = {}
    for i in range(numbers.randrange(1, 30)):
        prompt = [numbers.randrange(4) for _ in range(numbers.randrange(1, 80))]
        seq = sequence(prompt, priority=numbers.choice(list(Priority)), id=f"s{i}")
        scheduler.add([seq])
        lengths[seq] = numbers.randrange(1, 1 + min(20, 90 - len(prompt)))
    for turn in range(5000):
        if not scheduler.has_work:
            break
        step = scheduler.schedule(float(turn))
        assert step.n_tokens <= lim.n_batch
        assert sum(w.n_out for w in step.work) <= lim.n_outputs_max
        assert len({w.seq for w in step.work}) == len(step.work)
        play(scheduler, step, token=numbers.randrange(4))
        for seq in list(scheduler.running):
            if seq.n_output >= lengths[seq]:
                scheduler.finish(seq)
    assert all(s.state is State.FINISHED for s in lengths)
    assert all(s.n_output == n for s, n in lengths.items())


def test_every_stream_has_its_row_before_guesses_and_prompts_keep_theirs() -> None:
    scheduler = Scheduler(limits(n_cells=4096, n_ctx_seq=1024, n_outputs_max=12), EngineOptions())
    seqs = running(scheduler, [1] * 5, [2] * 5, [3] * 5)
    for seq in seqs:
        seq.draft = [7] * 8
    scheduler.add([sequence([4] * 5)])
    step = scheduler.schedule(0.0)
    assert [w.n_out for w in step.work] == [4, 4, 3, 1]


def test_a_request_that_cannot_share_does_not_wait_for_a_prefix() -> None:
    scheduler = Scheduler(limits(n_batch=32), EngineOptions())
    text = list(range(100))
    first = sequence(text)
    whole = sequence(text, prompt_logprobs=True)
    scheduler.add([first, whole])
    scheduler.schedule(0.0)
    assert scheduler.running == [first, whole]


def test_whom_an_urgent_request_waits_for_is_as_urgent() -> None:
    scheduler = Scheduler(limits(n_cells=4096, n_ctx_seq=1024, n_batch=32), EngineOptions())
    text = list(range(300))
    batch = sequence([*text, 1], priority=Priority.BATCH)
    scheduler.add([batch])
    play(scheduler, scheduler.schedule(0.0))
    scheduler.add([sequence(list(range(k, k + 300))) for k in (1000, 2000)])
    play(scheduler, scheduler.schedule(0.0))
    assert batch.n_computed == 32
    quick = sequence([*text, 2], priority=Priority.INTERACTIVE)
    scheduler.add([quick])
    for _ in range(10):
        play(scheduler, scheduler.schedule(0.0))
    assert quick.n_cached >= 300
    assert quick.n_output > 0


def test_the_least_urgent_make_room_in_the_cache_for_an_interactive_prompt() -> None:
    scheduler = Scheduler(limits(), EngineOptions())
    scheduler.add([sequence([k] * 110, priority=Priority.BATCH) for k in (1, 2)])
    for _ in range(8):
        play(scheduler, scheduler.schedule(0.0))
    first, second = scheduler.running
    quick = sequence([3] * 40, priority=Priority.INTERACTIVE)
    scheduler.add([quick])
    play(scheduler, scheduler.schedule(0.0))
    assert scheduler.running == [first, quick]
    assert second.state is State.PREEMPTED


@pytest.mark.parametrize("n_running", [4, 2], ids=["for its cells", "for its slot"])
def test_nobody_is_put_out_for_a_prompt_that_would_not_fit_even_so(n_running: int) -> None:
    scheduler = Scheduler(limits(n_running=n_running), EngineOptions())
    urgent = sequence([1] * 150, priority=Priority.INTERACTIVE)
    scheduler.add([urgent, sequence([2] * 60, priority=Priority.BATCH)])
    for _ in range(8):
        play(scheduler, scheduler.schedule(0.0))
    scheduler.add([sequence([3] * 120, priority=Priority.INTERACTIVE)])
    play(scheduler, scheduler.schedule(0.0))
    assert scheduler.n_preemptions == 0


def test_what_slid_lies_where_it_was_computed_again() -> None:
    scheduler = Scheduler(limits(n_cells=4096, n_ctx_seq=1024, can_shift=False), EngineOptions())
    (seq,) = running(scheduler, list(range(200)))
    running(scheduler, list(range(1000, 1900)))
    scheduler.slide(seq, 20, 100)
    while seq.n_pending > 1:
        play(scheduler, scheduler.schedule(0.0))
    scheduler.cells.heights.copied(seq.slot, 11, 90)
    assert scheduler.cells.heights.top(11) > 900


def test_a_long_prefix_stays_that_lies_above_the_empty_cells_of_the_one_before_it() -> None:
    scheduler = Scheduler(limits(n_cells=8192, n_ctx_seq=4096), EngineOptions())
    for start in (0, 3000):
        (seq,) = running(scheduler, list(range(start, start + 1200)))
        scheduler.finish(seq)
    found = scheduler.cells.tree.match(array("i", [*range(3000, 4200), 1]), 1200)
    assert found is not None
    assert found.n == 1200


def test_of_an_answer_kept_far_up_the_low_beginning_stays() -> None:
    scheduler = Scheduler(limits(n_cells=4096, n_ctx_seq=2048), EngineOptions())
    text = list(range(200))
    (first,) = running(scheduler, text)
    scheduler.finish(first)
    (long,) = running(scheduler, list(range(1000, 2000)))
    (again,) = running(scheduler, [*text, *range(300, 340)])
    assert again.n_cached == 200
    scheduler.finish(long)
    scheduler.finish(again)
    found = scheduler.cells.tree.match(array("i", [*text, 9, 9]), 201)
    assert found is not None
    assert found.n == 200
    assert max(map(scheduler.cells.heights.top, scheduler.cells.tree.holders)) < 512
    scheduler.check()


def test_a_budget_of_a_step_has_a_token_for_every_stream() -> None:
    scheduler = Scheduler(limits(), EngineOptions(step_budget=2))
    seqs = [sequence([k] * 3) for k in range(4)]
    scheduler.add(seqs)
    for _ in range(20):
        play(scheduler, scheduler.schedule(0.0))
    assert min(seq.n_output for seq in seqs) >= 15


@pytest.mark.parametrize("few", [{"n_batch": 2}, {"n_outputs_max": 2}])
def test_no_more_run_than_a_step_has_tokens_and_rows_for(few: dict[str, int]) -> None:
    scheduler = Scheduler(limits(**few), EngineOptions())
    running(scheduler, [1, 2], [3, 4])
    scheduler.add([sequence([k, k], priority=Priority.BATCH) for k in (5, 6)])
    for _ in range(5):
        play(scheduler, scheduler.schedule(0.0))
    quick = sequence([7, 8], priority=Priority.INTERACTIVE)
    scheduler.add([quick])
    for _ in range(5):
        play(scheduler, scheduler.schedule(0.0))
    assert quick.n_output >= 4


def test_guesses_leave_a_prompt_its_tokens_of_a_small_budget() -> None:
    scheduler = Scheduler(limits(), EngineOptions(step_budget=4))
    seqs = running(scheduler, [1] * 5, [2] * 5)
    prompt = sequence([4] * 5)
    scheduler.add([prompt])
    for _ in range(6):
        for seq in seqs:
            seq.draft = [7] * 8
        play(scheduler, scheduler.schedule(0.0))
        for seq in seqs:
            scheduler.reject(seq)
    assert prompt.n_output > 0


def test_a_prompt_parts_from_others_and_not_from_one_that_holds_all_of_it() -> None:
    recurrent = limits(
        sharing="checkpoint", can_rewind=False, retained_ids=(), n_ctx_seq=256, n_cells=1024
    )
    scheduler = Scheduler(recurrent, EngineOptions())
    text = list(range(40))
    running(scheduler, [*text, *[1] * 10])
    first = sequence([*text, *[2] * 10])
    scheduler.add([first])
    scheduler.schedule(0.0)
    assert first.checkpoint_at == 40
    scheduler.preempt(first, None)
    scheduler.schedule(0.0)
    assert (first.checkpoint_at, first.checkpoint_next) == (40, 49)
    assert len(scheduler.checkpoints._recent) == 2


def test_where_the_last_token_can_be_taken_back_no_prompt_is_cut_for_its_state() -> None:
    split = limits(
        sharing="checkpoint", retained_ids=(), n_ctx_seq=256, n_cells=1024, is_split=True
    )
    scheduler = Scheduler(split, EngineOptions())
    text = list(range(40))
    first = sequence([*text, *[1] * 10])
    scheduler.add([first])
    assert [w.n for w in scheduler.schedule(0.0).work] == [50]
    assert (first.checkpoint_at, first.checkpoint_next) == (50, 0)
    alike, other = sequence([*text, *[2] * 10]), sequence([*text[:20], *[3] * 30])
    scheduler.add([alike, other])
    scheduler.schedule(0.0)
    # The first one's own tokens are waited for where that spares more than it costs.
    assert scheduler.waiting == [alike]
    assert other in scheduler.running


def test_where_saving_takes_as_long_as_reading_only_where_prompts_part_is_saved() -> None:
    recurrent = limits(
        sharing="checkpoint", can_rewind=False, retained_ids=(), n_ctx_seq=256, n_cells=1024
    )
    scheduler = Scheduler(recurrent, EngineOptions())
    scheduler.costs.observe(0, 100, 0.020)
    for _ in range(3):
        scheduler.costs.observe_save(100, 0.018)
    first, second = (sequence([*range(40), *range(k, k + 10)]) for k in (100, 200))
    scheduler.add([first])
    play(scheduler, scheduler.schedule(0.0))
    assert (first.checkpoint_at, first.checkpoint_next) == (0, 0)
    scheduler.add([second])
    scheduler.schedule(0.0)
    assert (second.checkpoint_at, second.checkpoint_next) == (40, 0)


def test_a_refused_checkpoint_is_not_the_fault_of_who_has_the_slot_now() -> None:
    lim = limits(sharing="checkpoint", retained_ids=(), n_running=1, slot_ids=(0,))
    scheduler = Scheduler(lim, EngineOptions(aging_s=1.0))
    text = array("i", range(40))
    scheduler.checkpoints.add(text, b"state")
    old = sequence([*text, 1], priority=Priority.BATCH)
    quick = sequence([*text, 2], priority=Priority.INTERACTIVE)
    old.waiting_since = -9.0
    scheduler.add([old, quick])
    step = scheduler.schedule(0.0)
    restores = [op for op in step.ops if isinstance(op, Restore)]
    assert [op.seq_id for op in restores] == [0, 0]
    assert scheduler.running == [quick]
    assert not scheduler.restore_failed(restores[0])
    assert quick.n_computed == 40
    assert scheduler.restore_failed(restores[1])
    assert quick.n_computed == 0


@pytest.mark.parametrize("n_cells", [100, 101])
def test_cells_of_one_that_gave_way_are_there_for_the_next_in_the_same_step(n_cells: int) -> None:
    lim = limits(n_cells=n_cells, n_ctx_seq=100)
    scheduler = Scheduler(lim, EngineOptions(prefix_min=1000))
    batch = sequence([1] * 40, priority=Priority.BATCH)
    urgent = sequence([2] * 40, priority=Priority.INTERACTIVE)
    for seq in (batch, urgent):
        scheduler.add([seq])
        play(scheduler, scheduler.schedule(0.0))
    while batch.state is State.RUNNING:
        step = scheduler.schedule(0.0)
        assert not step.finished
        play(scheduler, step)
    assert [w.seq for w in step.work] == [urgent]


def test_who_shares_nothing_needs_cells_for_all_of_its_prompt() -> None:
    scheduler = Scheduler(limits(n_cells=100, n_ctx_seq=100), EngineOptions())
    (first,) = running(scheduler, list(range(60)))
    apart = sequence(list(range(60)), cache_prompt=False)
    scheduler.add([apart])
    for _ in range(20):
        play(scheduler, scheduler.schedule(0.0))
    assert apart.state is State.WAITING
    assert first.state is State.RUNNING


def test_a_state_refused_after_a_preemption_leaves_what_was_cached_at_first() -> None:
    scheduler = Scheduler(limits(sharing="checkpoint"), EngineOptions())
    (seq,) = running(scheduler, list(range(40)))
    for n_output, n_cached in ((1, 30), (0, 0)):
        seq.tokens = seq.tokens[: seq.n_prompt + n_output]
        seq.n_cached = 30
        assert scheduler.restore_failed(Restore(seq.slot, 0, 40, seq))
        assert (seq.n_cached, seq.n_computed) == (n_cached, 0)
