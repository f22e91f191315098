"""A ninth row is computed where that is quicker, and nobody can tell."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from edgellm.engine.backend import NO_CELLS, OK, Span
from edgellm.engine.info import EngineOptions
from edgellm.request import SamplingParams
from tests.engine.factories import limits
from tests.engine.starter import starter_plan

pytest.importorskip("edgellm.engine.llama", reason="the engine is not installed")
from edgellm.engine import llama
from edgellm.engine.llama.padding import Padding, may_pad

EIGHT = [Span(slot, 3, array("i", [slot + 100]), 1) for slot in range(8)]


class Card:
    """Takes so many seconds for eight rows, and so many for nine."""

    def __init__(self, eight: float, nine: float, code: int = OK) -> None:
        self.now = 0.0
        self.code = code
        self.seconds = {8: eight, 9: nine}
        self.held: dict[int, int] = {}

    def compute(self, spans: Sequence[Span]) -> int:
        self.now += self.seconds[len(spans)]
        for span in spans:
            assert self.held.get(span.seq_id, 0) == span.start
            self.held[span.seq_id] = span.start + 1
        return self.code

    def forget(self, seq_id: int, start: int) -> bool:
        assert start == 0
        self.held.pop(seq_id, None)
        return True

    def learned(self) -> Padding:
        padding = Padding(40)
        padding.learn(self.compute, self.forget, range(10), lambda: self.now)
        assert not self.held
        return padding


@pytest.mark.parametrize(
    ("card", "is_on"),
    [
        (Card(0.0093, 0.0090), True),
        (Card(0.0093, 0.0093), False),
        (Card(0.0093, 0.0120), False),
        (Card(0.0093, 0.0010, code=NO_CELLS), False),
    ],
)
def test_a_ninth_row_is_added_only_where_it_was_measured_to_pay(card: Card, is_on: bool) -> None:
    assert card.learned().is_on is is_on


def test_only_eight_single_tokens_get_a_ninth_row() -> None:
    padding = Card(2.0, 1.0).learned()
    assert [s.seq_id for s in padding.of(EIGHT)] == [*range(8), 40]
    assert padding.of(EIGHT[:7]) == EIGHT[:7]
    chunk = [*EIGHT[:7], Span(7, 0, array("i", [1, 2]), 1)]
    assert padding.of(chunk) == chunk


def test_a_cache_that_is_not_shared_or_a_processor_gets_none() -> None:
    on_card = {"is_async": True, "n_running": 8}
    assert may_pad(limits(**on_card))
    assert not may_pad(limits(**{**on_card, "is_async": False}))
    assert not may_pad(limits(**{**on_card, "sharing": "checkpoint"}))
    assert not may_pad(limits(**{**on_card, "n_running": 4}))


@pytest.fixture
def backend() -> Iterator[Any]:
    plan = starter_plan(n_seq_max=9, n_outputs_max=16, n_ctx=256, n_ctx_seq=256)
    backend = llama.load(plan, EngineOptions(warmup=False), lambda progress: None)
    backend._padding = Padding(8)
    yield backend
    backend.close()


def step(backend: Any, at: int, tokens: list[int]) -> list[int]:
    """The greedy tokens after one more token of each of eight sequences."""
    spans = [Span(slot, at, array("i", [token]), 1) for slot, token in enumerate(tokens)]
    assert backend.decode(spans) == OK
    greedy = [backend.make_sampler(SamplingParams(temperature=0.0), 0, []) for _ in tokens]
    return list(backend.sample(list(range(len(tokens))), greedy))


@pytest.mark.model
def test_the_row_changes_no_token_and_leaves_no_cell(backend: Any) -> None:
    texts = []
    for is_on in (False, True):
        backend._padding.is_on = is_on
        tokens = [300 + slot for slot in range(8)]
        chosen = []
        for at in range(32):  # 8 x 32 cells: the last step leaves no cell for a ninth row
            tokens = step(backend, at, tokens)
            chosen.append(tokens)
        texts.append(chosen)
        for slot in range(8):
            assert backend.seq_rm(slot, 0)
    assert texts[0] == texts[1]
