"""Jobs of a step run at the same time; the order and the errors are the caller's."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from edgellm.engine.team import Team


def test_jobs_run_at_the_same_time_and_their_results_are_in_order() -> None:
    team = Team(3, "test")
    together = threading.Barrier(3, timeout=10)

    def job(number: int) -> int:
        together.wait()  # passes only when all three are here
        return number

    assert team.run([partial(job, i) for i in range(3)]) == [0, 1, 2]
    team.close()


def test_one_job_needs_no_other_thread() -> None:
    team = Team(1, "test")
    assert team.size == 1
    assert team.run([threading.current_thread]) == [threading.current_thread()]
    assert team.run([]) == []
    team.close()


def test_the_first_error_is_raised_once_every_job_has_ended() -> None:
    team = Team(3, "test")
    ended: list[int] = []

    def fail(number: int) -> None:
        ended.append(number)
        raise ValueError(f"job {number}")

    with pytest.raises(ValueError, match="job 1"):
        team.run([partial(ended.append, 0), partial(fail, 1), partial(fail, 2)])
    assert sorted(ended) == [0, 1, 2]
    assert team.run([partial(int, "7"), partial(int, "8")]) == [7, 8]
    team.close()


def test_a_closed_team_leaves_no_thread_behind() -> None:
    team = Team(4, "gone")
    team.run([list, list])
    team.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("gone")]
