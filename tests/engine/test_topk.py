"""The k highest logits of every row of a step, found together, are those of each row alone."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgellm.engine.backend import Span
from edgellm.engine.info import EngineOptions
from tests.engine.starter import starter_plan

llama = pytest.importorskip("edgellm.engine.llama", reason="the engine is not installed")
topk = pytest.importorskip("edgellm.engine.llama.topk", reason="the engine is not installed")

K = 64


@pytest.mark.parametrize(
    ("n_vocab", "sizes"),
    [
        (128_256, [16, 16]),  # Llama 3: 501 groups of groups to sort
        (262_144, [16, 16]),  # Gemma 3: 1,024 of them
        (151_936, [16, 8]),  # Qwen 3: 1,187, a sort of several passes
        (32_000, [16, 16]),  # Llama 2
        (1_000, []),  # sorted as it is
        (50_257, None),  # GPT-2: 29 x 1,733, its tail would be in no group
        (63, None),  # fewer than the candidates
    ],
)
def test_a_vocabulary_is_cut_into_groups_that_hold_all_of_it(
    n_vocab: int, sizes: list[int] | None
) -> None:
    assert topk.group_sizes(n_vocab, K) == sizes


def test_more_candidates_make_smaller_groups() -> None:
    assert topk.group_sizes(128_256, 256) == [4, 4, 4, 4]


def test_a_library_without_one_of_the_functions_has_none_of_them() -> None:
    known = {"ggml_cont": (ctypes.c_void_p, ctypes.c_void_p)}
    assert list(topk.ggml_functions(known, {})) == ["ggml_cont"]
    assert topk.ggml_functions({**known, "ggml_from_the_future": ()}, {}) == {}


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    yield from _open()


@pytest.fixture
def other_kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device whose kernels nothing was laid out for."""
    monkeypatch.setattr(topk, "KINDS", frozenset())
    yield from _open()


@pytest.fixture
def other_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library whose tensors have their fields elsewhere."""
    monkeypatch.setattr(topk, "_is_laid_out", lambda graph: False)
    yield from _open()


def _open() -> Iterator[Any]:
    plan = starter_plan(n_seq_max=8, n_outputs_max=8)
    backend = llama.load(plan, EngineOptions(warmup=False, attach_top_k=K), lambda progress: None)
    yield backend
    backend.close()


def _candidates(backend: Any, row: int) -> tuple[Any, Any]:
    attached, ctx = backend._rows._attached, backend._ctx
    assert attached._count(ctx, row) == K
    ids = (ctypes.c_int32 * K).from_address(attached._ids(ctx, row))
    values = (ctypes.c_float * K).from_address(attached._logits(ctx, row))
    return np.array(ids), np.array(values)


def _step(backend: Any, prompts: dict[int, array[int]]) -> dict[int, int]:
    """Compute one prompt a sequence; the row of each."""
    for seq_id in prompts:
        backend.seq_rm(seq_id, 0)
    spans = [Span(seq_id, 0, tokens, 1) for seq_id, tokens in prompts.items()]
    assert backend.decode(spans) == 0
    ends = np.cumsum([len(tokens) for tokens in prompts.values()]) - 1
    return dict(zip(prompts, map(int, ends), strict=True))


def _joined(backend: Any) -> bool:
    return any(isinstance(kept, topk.TopK) and kept.is_joined for kept in backend._keep)


@pytest.mark.model
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_rows_candidates_are_its_k_highest_logits_in_order(backend: Any, seed: int) -> None:
    assert _joined(backend)
    numbers = random.Random(seed)
    plain = backend.limits.plain_ids[0]
    for _ in range(4):
        slots = numbers.sample(range(8), numbers.randrange(1, 8))
        prompts = {slot: _prompt(numbers) for slot in slots}
        twin = numbers.choice(slots)  # the same prompt where all logits are kept
        prompts[plain] = prompts[twin]
        order = list(prompts)
        numbers.shuffle(order)
        rows = _step(backend, {seq_id: prompts[seq_id] for seq_id in order})
        ids, values = _candidates(backend, rows[twin])
        logits = backend._rows._row(rows[plain])
        assert sorted(values, reverse=True) == list(values)
        assert list(values) == list(np.sort(logits)[: -K - 1 : -1])
        assert list(values) == list(logits[ids])
        assert len(set(ids)) == K


@pytest.mark.model
def test_rows_of_one_step_are_not_mixed_up(backend: Any) -> None:
    numbers = random.Random(4)
    prompts = {slot: _prompt(numbers) for slot in (5, 0, 7, 3)}
    rows = _step(backend, prompts)
    together = {slot: _candidates(backend, rows[slot]) for slot in prompts}
    for slot, tokens in prompts.items():
        alone = _step(backend, {slot: tokens})
        ids, values = _candidates(backend, alone[slot])
        assert len(set(ids) & set(together[slot][0])) > K - 4  # sums differ in their last bits
        assert np.allclose(values, together[slot][1], atol=0.05)


@pytest.mark.model
@pytest.mark.parametrize("kind", ["other_kind", "other_layout"])
def test_elsewhere_each_row_is_llama_cpps_own_top_k(
    request: pytest.FixtureRequest, kind: str
) -> None:
    backend = request.getfixturevalue(kind)
    assert not _joined(backend)
    numbers = random.Random(5)
    plain, tokens = backend.limits.plain_ids[0], _prompt(numbers)
    rows = _step(backend, {2: tokens, plain: tokens})
    ids, values = _candidates(backend, rows[2])
    logits = backend._rows._row(rows[plain])
    assert sorted(values) == list(np.sort(logits)[-K:])
    assert list(values) == list(logits[ids])


@pytest.mark.model
def test_a_vocabulary_smaller_than_the_candidates_is_read_whole() -> None:
    options = EngineOptions(warmup=False, attach_top_k=60_000)
    backend = llama.load(starter_plan(), options, lambda progress: None)
    assert backend.limits.attached_top_k == 0
    assert backend.decode([Span(0, 0, array("i", [1, 2]), 1)]) == 0
    backend.close()


def _prompt(numbers: random.Random) -> array[int]:
    return array("i", numbers.choices(range(49_000), k=numbers.randrange(1, 9)))
