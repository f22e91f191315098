"""edgellm plan: JSON and words, margins of 0, fixed parameters, force."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.app import main
from edgellm.units import MiB

HEADERS = Path(__file__).parents[1] / "data" / "planner" / "headers"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    path = tmp_path / "llama-3.1-8b.gguf"
    shutil.copyfile(HEADERS / "llama-3.1-8b.gguf-header", path)
    os.truncate(path, json.loads((HEADERS / "file_bytes.json").read_text())["llama-3.1-8b"])
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--ram", "32GiB", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_is_the_whole_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, model, "--vram", "6GiB", "--ctx", "4096")
    assert plan["schema"] == "edgellm.plan/1"
    assert (plan["verdict"], plan["proof"]) == ("gpu", "analytic")
    card = plan["devices"][0]
    entries = ("weights", "kv_cache", "recurrent_state", "compute", "extra", "overhead")
    assert card["used"] == sum(card[name] for name in entries)
    assert card["headroom"] == card["free"] - card["margin"] - card["used"]
    assert card["kv_cache"] == 512 * MiB
    assert 2 <= len(plan["alternatives"]) <= 4
    assert {r["param"] for r in plan["reasons"]} >= {"n_gpu_layers", "n_ctx", "n_ubatch"}


def test_the_6gb_profile_holds_an_8b_whole(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, model, "--vram", "6GiB", "--profile", "6gb")
    assert plan["verdict"] == "gpu"
    assert (plan["params"]["n_ctx"], plan["params"]["type_k"]) == (4096, "f16")


def test_a_margin_of_0_means_0(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, model, "--vram", "6GiB", "--margin", "0")
    assert plan["devices"][0]["margin"] == 0


def test_fixed_takes_llama_cpps_defaults(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, model, "--fixed", "--vram", "24GiB", "--ctx", "4096")
    params = plan["params"]
    assert (params["n_batch"], params["n_ubatch"], params["n_outputs_max"]) == (2048, 512, 0)
    assert params["n_gpu_layers"] == -1
    assert plan["devices"][0]["compute"] > 250 * MiB


def test_fixed_reports_what_does_not_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, model, "--fixed", "--vram", "2GiB")
    assert plan["verdict"] == "does_not_fit"
    assert plan["devices"][0]["headroom"] < 0


def test_what_fits_nowhere_names_the_smallest_fix(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--vram", "1GiB", "--ram", "1GiB", "--json"]) != 0
    assert "smallest_fix" in capsys.readouterr().err
    assert main(["plan", model, "--vram", "1GiB", "--ram", "1GiB", "--force"]) == 0


def test_words(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", model, "--vram", "4GiB", "--vram", "2GiB", "--ram", "32GiB", "--explain"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "binding constraint" in out
    assert "KV: 32 layers x 8192 cells" in out


def test_a_dry_run_needs_this_machine(model: str) -> None:
    assert main(["plan", model, "--vram", "4GiB", "--dry-run"]) == 2


HEAVY = {
    "edgellm.engine.client",
    "edgellm.engine.wire",
    "edgellm.store.hub",
    "edgellm.store.transfer",
    "edgellm.gguf.remote",
    "http.client",
    "urllib.request",
    "numpy",
    "llama_cpp",
    "huggingface_hub",
    "textual",
}


def test_a_plan_of_a_local_file_loads_no_engine_and_no_http(model: str) -> None:
    """The command is to take a third of a second: what it does not need stays unloaded."""
    script = (
        "import sys\nfrom edgellm.cli.app import main\n"
        f"main(['plan', {model!r}, '--vram', '6GiB', '--ram', '16GiB', '--json'])\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert not HEAVY & set(done.stderr.split())


def test_a_worker_that_does_not_answer_is_said(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--worker", "127.0.0.1:1", "--ram", "32GiB"]) == 0
    assert "warning: the worker 127.0.0.1:1 cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("profile", ["6gb", "cpu-8gb"])
def test_a_profile_with_a_least_context_plans_without_a_card(
    model: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(capsys, model, "--profile", profile, "--backend", "cpu")["verdict"] == "cpu"
