"""A small soak with a fixed seed, in a real child: nothing may be left over."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.soak import soak


@pytest.mark.parametrize("ctx", [512, 1024])
async def test_random_requests_leave_nothing_behind(ctx: int) -> None:
    args = argparse.Namespace(
        model="scripted",
        backend="scripted",
        requests=150,
        concurrency=24,
        most=60,
        ctx=ctx,
        ngl=0,
        threads=1,
        seed=ctx,
    )
    assert await soak(args) == 0
