from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgellm import paths
from edgellm.cli import checks
from edgellm.cli.app import main
from edgellm.cli.bandwidth import measure_bandwidth
from edgellm.cli.checks import Check, Facts, judge
from edgellm.cli.recipes import Tool
from edgellm.devices import Devices
from edgellm.engine.build import BuildDevice, BuildReport
from edgellm.units import GiB
from tests.cli.machines import EVERY_TOOL, HOST, build, facts, linux, with_nvidia

CUDA0 = BuildDevice(name="CUDA0", description="NVIDIA GeForce RTX 4060", kind="gpu")


def complaints(found: Facts) -> list[Check]:
    return [check for check in judge(found) if check.status != "ok"]


def test_a_healthy_machine_has_no_complaints() -> None:
    assert complaints(facts()) == []
    assert complaints(facts(with_nvidia(), report=build(CUDA0, backends=("CUDA", "CPU")))) == []


def test_a_gpu_with_a_cpu_only_build_prints_the_line_that_mends_it() -> None:
    (check,) = complaints(facts(with_nvidia()))
    assert check.status == "problem"
    assert "RTX 4060 is unused: the engine was built for the CPU only" in check.detail
    assert check.fix is not None
    assert check.fix.startswith("CMAKE_ARGS='-DGGML_CUDA=ON")
    assert "pip install --force-reinstall --no-deps" in check.fix


def test_the_line_for_a_missing_toolkit_comes_with_it() -> None:
    tools = tuple(Tool(name="nvcc", path=None) if t.name == "nvcc" else t for t in EVERY_TOOL)
    found = complaints(facts(msgspec.structs.replace(with_nvidia(), tools=tools)))
    assert [c.name for c in found] == ["offload", "build"]
    assert "cuda-downloads" in (found[1].fix or "")


def test_a_build_with_the_backend_that_lists_no_card_points_at_the_driver() -> None:
    (check,) = complaints(facts(with_nvidia(), report=build(backends=("CUDA", "CPU"))))
    assert "lists no card" in check.detail
    assert "drivers" in (check.fix or "")


def test_a_missing_engine_says_what_still_works_and_how_to_get_it() -> None:
    (check,) = complaints(facts(report=BuildReport(problem="missing"), engine_version=None))
    assert (check.status, check.fix) == ("problem", "edgellm setup")
    assert "plan, ls, pull and search work without it" in check.detail


def test_a_broken_engine_says_why_and_how_to_rebuild_it() -> None:
    report = BuildReport(problem="broken", detail="libcudart.so.13: cannot open shared object")
    (check,) = complaints(facts(report=report))
    assert "libcudart.so.13" in check.detail
    assert "--no-binary llama-cpp-python" in (check.fix or "")


def test_a_library_that_the_system_lacks_is_installed_not_compiled_around() -> None:
    why = "OSError: libgomp.so.1: cannot open shared object file: No such file or directory"
    (check,) = complaints(facts(report=BuildReport(problem="broken", detail=why)))
    assert check.fix == "sudo apt install libgomp1   (Fedora: sudo dnf install libgomp)"


def test_another_engine_version_is_a_warning() -> None:
    (check,) = complaints(facts(engine_version="0.3.20"))
    assert check.status == "warning"
    assert "0.3.20" in check.detail


def test_a_card_without_a_driver_is_a_problem_with_a_fix() -> None:
    devices = Devices(host=HOST, notes=("an NVIDIA card is here, but its driver is not installed",))
    (check,) = complaints(facts(linux(vendors=("nvidia",)), devices=devices))
    assert check.status == "problem"
    assert check.fix


def test_other_notes_are_warnings() -> None:
    devices = Devices(host=HOST, notes=("CUDA_VISIBLE_DEVICES leaves 0 of 1 NVIDIA cards",))
    (check,) = complaints(facts(devices=devices))
    assert check.status == "warning"


@pytest.mark.parametrize(
    ("python", "status"),
    [((3, 9), "problem"), ((3, 10), None), ((3, 13), None), ((3, 15), "warning")],
)
def test_only_the_pythons_it_is_tested_on_pass(python: tuple[int, int], status: str | None) -> None:
    found = complaints(facts(linux(python=python)))
    assert [c.status for c in found] == ([status] if status else [])


def test_little_ram_little_disk_and_a_locked_store_are_said() -> None:
    small = msgspec.structs.replace(HOST, available=GiB)
    store = checks.Store(folder="/m", n_models=0, used=0, free=GiB, is_writable=False)
    found = complaints(facts(devices=Devices(host=small), store=store))
    assert [(c.name, c.status) for c in found] == [
        ("ram", "warning"),
        ("store", "problem"),
        ("disk", "warning"),
    ]


def test_wrong_settings_are_a_problem() -> None:
    (check,) = complaints(facts(config_error="unknown key 'plan.ctz'"))
    assert (check.name, check.status) == ("config", "problem")


def test_every_complaint_has_a_command_that_mends_it() -> None:
    sick = [
        facts(report=BuildReport(problem="missing")),
        facts(with_nvidia()),
        facts(config_error="x"),
        facts(linux(python=(3, 9))),
    ]
    assert all(check.fix for found in sick for check in complaints(found))


def pretend(monkeypatch: pytest.MonkeyPatch, found: Facts) -> None:
    monkeypatch.setattr(checks, "examine", lambda: found)


def test_doctor_exits_1_with_a_problem_and_0_with_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, facts(with_nvidia()))
    assert main(["doctor"]) == 1
    assert "CMAKE_ARGS='-DGGML_CUDA=ON" in capsys.readouterr().out
    pretend(monkeypatch, facts(engine_version="0.3.20"))
    assert main(["doctor"]) == 0


def test_doctor_json_holds_facts_and_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, facts(with_nvidia()))
    main(["doctor", "--json"])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["schema"] == "edgellm.doctor/1"
    assert said["devices"]["gpus"][0]["name"] == "NVIDIA GeForce RTX 4060"
    assert any(c["status"] == "problem" for c in said["checks"])


def test_doctor_examines_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["devices"]["host"]["n_physical"] >= 1
    assert said["store"]["folder"] == str(paths.store_dir())
    assert {c["name"] for c in said["checks"]} >= {"python", "engine", "ram", "disk"}


def test_wrong_settings_do_not_stop_doctor(
    edgellm_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = edgellm_home / "config" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[plan]\nctz = 1\n")
    assert main(["doctor", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert "plan.ctx" in said["config_error"]


def test_bandwidth_counts_what_is_read_and_written() -> None:
    rate = measure_bandwidth(2, block=8 * 2**20, rounds=2)
    assert 10**8 < rate < 10**13
