"""A killed pull or import is always resumable (``python -m tests.store.killed`` does fifty)."""

from __future__ import annotations

import pytest

from tests.store import killed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pull", "import"])
def test_killed_anywhere_it_goes_on_and_ends_right(kind: str) -> None:
    done = killed.run(kind, kills=3, seed=7)
    assert (done.n_kills, done.n_complete >= 1) == (3, True)
