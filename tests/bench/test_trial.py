"""Trials with real child processes: what an engine does wrong is a reason, never an exception."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgellm import config
from edgellm.bench.archive import Archive
from edgellm.bench.profiles import profile_name, profile_path, profile_text, rollback, write_profile
from edgellm.bench.trial import (
    EngineTrials,
    Workload,
    session_name,
    spilled,
    variables_for,
)
from edgellm.bench.tune import Settings, Trial, Variable
from edgellm.devices import Devices, Host, hypothetical
from edgellm.engine.info import EngineOptions, Fault, Script
from edgellm.errors import ConfigError, ModelNotFoundError
from edgellm.planner import observed
from edgellm.planner.plan import LoadReport, MeasuredDevice, Observation, Plan, PlanRequest
from edgellm.runtime import plan_model
from edgellm.units import GiB, MiB

HOST = Host(cpu="c", n_physical=4, n_logical=8, total=16 * GiB, available=12 * GiB)
CPU = Devices(host=HOST)
CARD = Devices(host=HOST, gpus=hypothetical([6 * GiB]))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    monkeypatch.setenv("EDGELLM_ENGINE_BACKEND", "scripted")
    return tmp_path


class Scripted(EngineTrials):
    """Engines without a model, with faults that settings bring out."""

    faults: tuple[Fault, ...] = ()

    def options(self, resolved: config.Settings) -> EngineOptions:
        ubatch = resolved.plan.ubatch or 0
        faults = self.faults if ubatch in (64, 1024) else ()
        return msgspec.structs.replace(
            super().options(resolved), script=Script(step_s=0.001, faults=faults)
        )


def measure(settings: Settings, *faults: Fault, objective: str = "throughput") -> Trial:
    workload = Workload(objective=objective, prompt_words=20, max_tokens=8)
    trials = Scripted("starter", workload, flags={"plan.parallel": 2}, devices=CPU)
    trials.faults = faults
    return asyncio.run(trials(settings, 0))


@pytest.mark.parametrize("objective", ["latency", "throughput", "context"])
def test_a_trial_measures_its_objective(objective: str) -> None:
    trial = measure({"plan.ubatch": 128}, objective=objective)
    expected = {
        "latency": 1 / trial.figures["e2e_p50_s"],
        "throughput": trial.figures["output_tps"],
        "context": trial.figures["n_ctx"],
    }
    assert trial.score == pytest.approx(expected[objective])
    assert trial.figures["n_output_mean"] == 8
    assert trial.reason == ""


def test_what_loads_show_waits_for_the_end_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembered at once, it would change the plans that the next trials begin with."""
    shown = Observation(device="GPU-1")
    monkeypatch.setattr(observed, "observe", lambda plan, report: (shown,))
    trials = Scripted("starter", Workload(max_tokens=8), devices=CPU)
    for number in range(2):
        assert asyncio.run(trials({"plan.ubatch": 128}, number)).is_ok
    assert trials.seen == [shown, shown]
    assert observed.load() == ()


def test_an_engine_that_dies_is_a_rejected_trial() -> None:
    trial = measure({"plan.ubatch": 64}, Fault(kind="abort", at_step=2))
    assert trial.score is None
    assert trial.reason.startswith("EngineDeadError")


def test_an_engine_that_had_to_shrink_to_load_is_rejected() -> None:
    trial = measure({"plan.ubatch": 1024}, Fault(kind="oom", code=1024))
    assert trial.score is None
    assert "loaded only after" in trial.reason


def test_settings_that_do_not_fit_are_rejected() -> None:
    trial = measure({"plan.ctx": 1 << 30})
    assert trial.score is None
    assert trial.reason


def plan(request: PlanRequest | None = None, devices: Devices = CARD) -> Plan:
    return plan_model("starter", request or PlanRequest(), devices)


def report(allocated: int, grown: int) -> LoadReport:
    device = MeasuredDevice(
        id=plan().devices[0].id, weights=allocated, used_before=GiB, used_after=GiB + grown
    )
    return LoadReport(measured=(device,))


def test_a_card_that_grew_by_less_than_was_allocated_has_spilled() -> None:
    assert spilled(plan(), report(4 * GiB, 3 * GiB)) == (
        f"1.00 GiB spilled from {plan().devices[0].id} into host memory"
    )


def test_a_card_that_grew_by_more_has_not() -> None:
    assert spilled(plan(), report(4 * GiB, 4 * GiB + 600 * MiB)) == ""
    assert spilled(plan(), report(4 * GiB, 4 * GiB - 100 * MiB)) == ""


def names(found: list[Variable]) -> set[str]:
    return {v.name for v in found}


def variables(devices: Devices, objective: str = "throughput", **fixed: Any) -> list[Variable]:
    given = {f"plan.{k}": v for k, v in fixed.items()}
    return variables_for(plan(devices=devices), devices, objective, given)


def test_a_cpu_machine_tries_threads_and_a_full_card_does_not() -> None:
    assert "n_threads" in names(variables(CPU))
    assert "n_threads" not in names(variables(CARD))


def test_what_a_person_fixed_is_not_tried() -> None:
    assert names(variables(CPU)) - names(variables(CPU, threads=2, ubatch=64)) == {
        "n_threads",
        "n_ubatch",
    }


def test_latency_does_not_try_more_sequences_or_a_smaller_cache() -> None:
    assert not {"n_seq_max", "kv", "n_ctx"} & names(variables(CPU, "latency"))


@pytest.mark.parametrize("devices", [CPU, CARD])
@pytest.mark.parametrize("objective", ["latency", "throughput", "context"])
def test_every_value_is_one_that_the_settings_accept(devices: Devices, objective: str) -> None:
    for variable in variables(devices, objective):
        for option in variable.options:
            config.load(option)


def test_another_card_model_or_objective_is_another_search() -> None:
    w = Workload()
    base = session_name(plan(), CARD, w, {}, "d")
    assert base == session_name(plan(), CARD, w, {}, "d")
    others = {
        session_name(plan(), CPU, w, {}, "d"),
        session_name(plan(), CARD, Workload(objective="latency"), {}, "d"),
        session_name(plan(), CARD, w, {"plan.ctx": 1}, "d"),
        session_name(plan(), CARD, w, {}, "e"),
    }
    assert len(others - {base}) == 4


TEXT = profile_text(
    'a "title"', "card", {"plan.ubatch": 64, "plan.flash_attn": "on"}, {"plan.ubatch": "+4 %"}
)


def test_a_written_profile_is_read_back_with_its_reasons() -> None:
    write_profile(Archive(), "tuned-x", TEXT)
    profile = config.read_profile("tuned-x")
    assert profile.values == {"plan.ubatch": 64, "plan.flash_attn": "on"}
    assert profile.reasons["plan.ubatch"] == "+4 %"
    assert config.load({"profile": "tuned-x"}).settings.plan.ubatch == 64


def test_rollback_goes_back_one_write_at_a_time() -> None:
    archive = Archive()
    write_profile(archive, "a", TEXT)
    write_profile(archive, "a", TEXT.replace("64", "128"))
    assert rollback(archive, "a") == ("a", profile_path("a"), True, None)
    assert profile_path("a").read_text() == TEXT
    assert rollback(archive) == ("a", profile_path("a"), False, None)
    assert not profile_path("a").exists()
    with pytest.raises(ConfigError, match="profile a"):
        rollback(archive, "a")


def test_what_a_person_changed_in_a_profile_outlives_its_rollback() -> None:
    write_profile(Archive(), "a", TEXT)
    path = profile_path("a")
    path.write_text(TEXT + "# my own note\n")
    undone = rollback(Archive(), "a")
    assert undone.kept is not None
    assert undone.kept.read_text().endswith("# my own note\n")
    assert not path.exists()


def test_a_profile_that_cannot_be_written_leaves_no_trace_in_the_history() -> None:
    profile_path("a").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_profile(Archive(), "a", TEXT)
    with pytest.raises(ConfigError, match="not written"):
        rollback(Archive())


def test_a_model_that_went_away_ends_the_search_and_rejects_nothing(tmp_path: Path) -> None:
    gone = EngineTrials(
        str(tmp_path / "gone.gguf"), Workload(), flags={"engine.backend": "scripted"}
    )
    with pytest.raises(ModelNotFoundError):
        asyncio.run(gone({"plan.ubatch": 64}, 0))


@pytest.mark.parametrize(
    ("model", "card", "name"),
    [
        ("Llama-3.1-8B Q4_K_M.gguf", "GPU-1F2e3d4c-5b", "tuned-llama-3-1-8b-q4-k-m-1f2e3d4c"),
        ("m.gguf", None, "tuned-m-cpu"),
    ],
)
def test_profiles_are_named_after_model_and_card(model: str, card: str | None, name: str) -> None:
    assert profile_name(model, card) == name
