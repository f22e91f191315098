"""Choosing from the highest logits alone gives the token that all logits would have given."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest

from edgellm.engine.backend import Span
from edgellm.engine.info import EngineOptions
from edgellm.engine.sampling import candidates_needed, min_p_depth, needs_all_logits
from edgellm.request import SamplingParams
from tests.engine.starter import starter_plan

llama = pytest.importorskip("edgellm.engine.llama", reason="the engine is not installed")
rows_module = pytest.importorskip("edgellm.engine.llama.rows", reason="the engine is not installed")


@pytest.fixture(scope="module")
def backend() -> Iterator[llama.LlamaBackend]:
    plan = starter_plan(n_seq_max=8, n_outputs_max=8)
    backend = llama.load(plan, EngineOptions(warmup=False), lambda progress: None)
    yield backend
    backend.close()


def random_params(numbers: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=numbers.choice([0.0, 0.7, 1.3]),
        top_k=numbers.choice([0, 1, 40, 200]),
        top_p=numbers.choice([0.5, 0.95, 1.0]),
        min_p=numbers.choice([0.0, 0.05]),
        typical_p=numbers.choice([1.0, 0.9]),
        repeat_penalty=numbers.choice([1.0, 1.2]),
        presence_penalty=numbers.choice([0.0, 0.5]),
        logit_bias=numbers.choice([{}, {5: -3.0, 28: -100.0}]),
        min_tokens=numbers.choice([0, 5]),
    )


@pytest.mark.model
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_filtered_choices_equal_the_whole_chains(backend: llama.LlamaBackend, seed: int) -> None:
    numbers = random.Random(seed)
    for trial in range(6):
        spans = []
        for slot in range(8):
            backend.seq_rm(slot, 0)
            n = numbers.choice([1, 3, 6])
            tokens = array("i", [numbers.randrange(49000) for _ in range(n)])
            spans.append(Span(slot, 0, tokens, 1))
        assert backend.decode(spans) == 0
        ends = [sum(len(s.tokens) for s in spans[: i + 1]) - 1 for i in range(8)]
        params = [random_params(numbers) for _ in range(8)]
        fast, whole = (
            [backend.make_sampler(p, trial * 9 + i, spans[i].tokens) for i, p in enumerate(params)]
            for _ in range(2)
        )
        for sampler in whole:
            sampler.needed, sampler.depth = 0, 0.0
        assert backend.sample(ends, fast) == backend.sample(ends, whole)
        for sampler in [*fast, *whole]:
            backend.free_sampler(sampler)


@pytest.fixture(scope="module")
def attached() -> Iterator[llama.LlamaBackend]:
    plan = starter_plan(n_seq_max=8, n_outputs_max=8)
    options = EngineOptions(warmup=False, attach_top_k=64)
    backend = llama.load(plan, options, lambda progress: None)
    yield backend
    backend.close()


@pytest.mark.model
@pytest.mark.parametrize("seed", [6, 7])
def test_candidates_read_at_once_give_the_tokens_of_the_librarys_own_sampling(
    attached: llama.LlamaBackend, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    numbers = random.Random(seed)
    plain = attached.limits.plain_ids[0]
    for trial in range(8):
        slots = numbers.sample([*range(8), plain], 6)
        spans = []
        for slot in slots:
            attached.seq_rm(slot, 0)
            n = numbers.choice([1, 3, 6])
            spans.append(Span(slot, 0, array("i", numbers.choices(range(49000), k=n)), 1))
        assert attached.decode(spans) == 0
        which = [i for i, slot in enumerate(slots) if slot != plain]
        rows = [sum(len(s.tokens) for s in spans[: i + 1]) - 1 for i in which]
        params = [narrow_params(numbers) for _ in which]
        fast, slow = (
            [attached.make_sampler(p, trial * 9 + i, [5, 6]) for i, p in enumerate(params)]
            for _ in range(2)
        )
        for _ in range(3):  # penalties hear what was chosen before
            expected = [0] * len(rows)
            attached._rows._sample_chains(rows, slow, list(range(len(rows))), expected)
            with monkeypatch.context() as patched:
                patched.setattr(rows_module, "FEW_ROWS", 0)
                patched.setattr(attached._rows, "_sample_chains", None)
                assert attached.sample(rows, fast) == expected
        for sampler in [*fast, *slow]:
            attached.free_sampler(sampler)


@pytest.mark.model
def test_sequences_with_cells_of_their_own_all_stay_usable() -> None:
    plan = starter_plan(n_seq_max=4, kv_unified=False, n_ctx_seq=512)
    options = EngineOptions(warmup=False, attach_top_k=64)
    backend = llama.load(plan, options, lambda progress: None)
    assert (backend.limits.attached_top_k, backend.limits.slot_ids) == (0, (0, 1, 2, 3))
    backend.close()


def narrow_params(numbers: random.Random) -> SamplingParams:
    """Parameters that 64 candidates decide."""
    while needs_all_logits(params := random_params(numbers), 64):
        pass
    return params


def test_what_can_lift_a_token_from_anywhere_needs_every_logit() -> None:
    assert candidates_needed(SamplingParams()) == 40
    assert candidates_needed(SamplingParams(temperature=0.0)) == 1
    assert candidates_needed(SamplingParams(top_k=0)) == 0
    assert candidates_needed(SamplingParams(presence_penalty=-0.5)) == 0
    assert candidates_needed(SamplingParams(repeat_penalty=0.9)) == 0
    assert candidates_needed(SamplingParams(logit_bias={3: 1.0})) == 0
    assert candidates_needed(SamplingParams(repeat_penalty=1.1)) == 40 + 64


def test_min_p_alone_says_how_deep_to_look() -> None:
    alone = SamplingParams(top_k=0, top_p=1.0, min_p=0.05)
    assert min_p_depth(alone) == pytest.approx(2.9957, abs=1e-3)
    assert min_p_depth(SamplingParams(min_p=0.05)) == 0.0
    assert min_p_depth(SamplingParams(top_k=0, top_p=1.0, min_p=0.0)) == 0.0


def test_candidates_are_too_few_for_logprobs_grammars_and_wide_distributions() -> None:
    assert not needs_all_logits(SamplingParams(), 128)
    assert needs_all_logits(SamplingParams(logprobs=0), 128)
    assert needs_all_logits(SamplingParams(logit_bias={3: 1.0}), 128)
    assert needs_all_logits(SamplingParams(top_k=200), 128)
    assert needs_all_logits(SamplingParams(top_k=0, min_p=0.0), 128)
    assert not needs_all_logits(SamplingParams(logprobs=0), 0)
