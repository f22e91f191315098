"""Guessing pays or stops: measured against steps without guesses, and tried again later."""

from __future__ import annotations

from array import array
from typing import Any

from edgellm.engine.info import EngineOptions
from edgellm.engine.sequence import State
from edgellm.engine.spec import (
    HOPELESS_STEPS,
    MAX_PAUSE,
    PAUSE_STEPS,
    PLAIN_STEPS,
    TRIAL_STEPS,
    NgramIndex,
    Speculation,
)
from tests.engine.factories import limits, sequence

LOOP = [1, 2, 3, 4] * 4


def speculation(**changes: Any) -> Speculation:
    backend: Any = type("Backend", (), {"limits": limits(**changes), "has_draft": False})
    return Speculation(backend, EngineOptions(spec="ngram"))


def decoding(n: int) -> list[Any]:
    found = []
    for _ in range(n):
        seq = sequence(LOOP)
        seq.tokens.append(1)
        seq.n_computed = len(seq.tokens) - 1
        seq.state = State.RUNNING
        found.append(seq)
    return found


def plain(spec: Speculation, n_seqs: int, seconds: float, times: int = PLAIN_STEPS) -> None:
    for _ in range(times):
        spec.observe(n_seqs, n_seqs, 0, seconds)


def guesses(spec: Speculation, n_seqs: int) -> int:
    seqs = decoding(n_seqs)
    spec.propose(seqs)
    return sum(len(s.draft) for s in seqs)


def test_the_first_steps_of_each_size_of_batch_set_the_measure() -> None:
    spec = speculation()
    assert guesses(spec, 1) == 0
    plain(spec, 1, 0.01)
    assert guesses(spec, 1) > 0
    assert guesses(spec, 8) == 0


def test_a_draft_model_is_not_asked_about_nobody() -> None:
    def draft(asked: list[Any], k: int) -> list[list[int]]:
        assert asked
        return [[9] * k for _ in asked]

    backend: Any = type("Backend", (), {"limits": limits(), "has_draft": True})
    backend.draft = draft
    spec = Speculation(backend, EngineOptions(spec="draft"))
    plain(spec, 1, 0.01)
    assert guesses(spec, 1) > 0  # the text repeats: nothing is left to draft


def test_guesses_of_many_streams_are_measured_against_steps_of_as_many() -> None:
    spec = speculation()
    plain(spec, 1, 0.001)
    plain(spec, 8, 0.010)
    for _ in range(2 * TRIAL_STEPS):
        spec.observe(8, 16, 16, 0.012)
    assert spec.status == "on, +67% measured, 50% of guesses right"


def test_a_gain_under_the_wanted_one_pauses_and_is_tried_again_later() -> None:
    spec = speculation()
    plain(spec, 1, 0.010)
    for _ in range(TRIAL_STEPS):
        spec.observe(1, 1, 2, 0.010)
    assert spec.status == "paused: +0% measured, 5% wanted, 0% of guesses right"
    assert guesses(spec, 1) == 0
    plain(spec, 1, 0.010, PAUSE_STEPS)
    assert guesses(spec, 1) > 0


def test_a_hopeless_trial_ends_early_and_each_pause_is_longer() -> None:
    spec = speculation()
    plain(spec, 1, 0.010)
    pauses = []
    for _ in range(8):
        for _ in range(HOPELESS_STEPS):
            assert guesses(spec, 1) > 0
            spec.observe(1, 1, 8, 0.040)
        n = 0
        while guesses(spec, 1) == 0:
            plain(spec, 1, 0.010, 100)
            n += 100
        pauses.append(n)
    assert pauses[:3] == [PAUSE_STEPS, 2 * PAUSE_STEPS, 4 * PAUSE_STEPS]
    assert pauses[-1] == MAX_PAUSE


def test_right_guesses_make_longer_ones_and_wrong_ones_short() -> None:
    index = NgramIndex()
    tokens = array("i", LOOP)
    lengths = []
    for n_right in (2, 4, 8, 3, 0):
        guess = index.propose(tokens, 8)
        lengths.append(len(guess))
        index.learn(len(guess), min(n_right, len(guess)))
    assert lengths == [2, 4, 4, 4, 4]
    assert len(index.propose(tokens, 8)) == 1


def test_a_cache_that_cannot_rewind_says_why_nothing_is_guessed() -> None:
    spec = speculation(sharing="checkpoint", can_rewind=False)
    assert spec.status == "off: the cache cannot take tokens back"
    assert guesses(spec, 1) == 0
