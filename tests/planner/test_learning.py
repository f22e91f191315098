"""What a real load shows changes the next plan: the whole way through a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.config import Settings
from edgellm.planner import observed
from edgellm.planner.plan import PlanRequest
from edgellm.request import Request, SamplingParams
from edgellm.runtime import open_engine, plan_model


@pytest.mark.model
async def test_the_next_prediction_is_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed, "file", lambda: tmp_path / "observed.json")
    asked = PlanRequest(n_ctx=1024)
    before = plan_model("starter", asked)
    engine = await open_engine("starter", asked, settings=Settings())
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0)
    async for _ in engine.generate(Request(id="one", prompt="Once", sampling=sampling)):
        pass
    measured = engine.alone_tps
    await engine.close()
    after = plan_model("starter", PlanRequest(n_ctx=1024, observed=observed.load()))
    assert before.speed.basis == "table"
    assert after.speed.basis == "measured"
    assert after.speed.decode_tps == pytest.approx(measured)
