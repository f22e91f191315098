"""Whole distributions in a file, the same however the text was cut into batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm.engine.client import Engine
from edgellm.engine.info import EngineOptions, Script
from edgellm.errors import InvalidRequestError
from tests.engine.factories import plan, request
from tests.engine.starter import starter_plan


def rows(path: Path, n: int) -> np.ndarray:
    return np.fromfile(path, "<f4").reshape(n, -1)


@pytest.mark.parametrize("n_outputs_max", [1, 3, 64])
async def test_every_position_from_first_on_gives_a_row(tmp_path: Path, n_outputs_max: int) -> None:
    engine = await Engine.load(plan(n_outputs_max=n_outputs_max, n_batch=8), backend="scripted")
    try:
        out = tmp_path / "logits"
        n = await engine.score(list(range(5, 25)), first=6, out=str(out))
        assert n == 14
        assert rows(out, n).shape == (14, engine.info.n_vocab)
        assert (await engine.stats()).cells_used == 0
    finally:
        await engine.close()


async def test_a_text_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    engine = await Engine.load(plan(), backend="scripted")
    try:
        with pytest.raises(InvalidRequestError, match="do not fit"):
            await engine.score([5] * 2000, first=0, out=str(tmp_path / "x"))
        with pytest.raises(InvalidRequestError, match="do not fit"):
            await engine.score([5], first=1, out=str(tmp_path / "x"))
    finally:
        await engine.close()


async def test_a_busy_engine_does_not_score(tmp_path: Path) -> None:
    options = EngineOptions(script=Script(step_s=0.05, answer_tokens=0))
    engine = await Engine.load(plan(), backend="scripted", options=options)
    try:
        stream = engine.generate(request("hello", max_tokens=500))
        await stream.__anext__()
        with pytest.raises(InvalidRequestError, match="without other requests"):
            await engine.score([5, 6], first=0, out=str(tmp_path / "x"))
        await stream.aclose()
    finally:
        await engine.close()


@pytest.mark.model
async def test_the_starters_rows_agree_with_its_prompt_logprobs(tmp_path: Path) -> None:
    engine = await Engine.load(starter_plan(n_outputs_max=16, n_seq_max=1))
    try:
        ids = await engine.tokenize("The capital of France is Paris, a city on the Seine.")
        out = tmp_path / "logits"
        n = await engine.score(ids, first=0, out=str(out))
        logits = rows(out, n).astype(np.float64)
        total = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
        expected = [logits[i, ids[i + 1]] - total[i] for i in range(n - 1)]
        r = request(tuple(ids), max_tokens=1, prompt_logprobs=True)
        events = [event async for event in engine.generate(r)]
        given = next(e.prompt_logprobs for e in events if e.prompt_logprobs is not None)
        assert [x.logprob for x in given if x is not None] == pytest.approx(expected, abs=1e-3)
    finally:
        await engine.close()
