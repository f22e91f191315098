"""Frames are paced by what they cost."""

from __future__ import annotations

import pytest

from edgellm.tui.pacing import FASTEST_S, PLENTY, SCARCE, SHARED, SLOWEST_S, Pacer, share_for


def run(pacer: Pacer, frame_s: float, token_share: float, seconds: float) -> float:
    """The share of a core after a while of frames that cost so much; the tokens cost theirs."""
    now = cpu = 0.0
    start: tuple[float, float] = (0.0, 0.0)
    while now < seconds:
        pause = pacer.note(now, cpu)
        if now < seconds / 2:
            start = (now, cpu)
        now += pause
        cpu += frame_s + token_share * pause
    return (cpu - start[1]) / (now - start[0])


def test_with_plenty_of_cpu_frames_come_at_thirty_a_second() -> None:
    pacer = Pacer(PLENTY)
    run(pacer, 0.007, 0.02, 10)
    assert pacer.interval_s == FASTEST_S


@pytest.mark.parametrize("share", [SHARED, SCARCE])
def test_the_process_stays_within_its_share(share: float) -> None:
    assert run(Pacer(share), 0.006, 0.005, 30) <= share * 1.15


def test_frames_never_stop_altogether() -> None:
    pacer = Pacer(SCARCE)
    run(pacer, 0.2, 0.5, 30)
    assert pacer.interval_s == SLOWEST_S


def test_the_share_follows_where_the_model_computes() -> None:
    assert share_for(None, 0, 8) == PLENTY
    assert share_for("gpu", 8, 8) == PLENTY
    assert share_for("cpu", 4, 8) == SHARED
    assert share_for("partial", 8, 8) == SCARCE
