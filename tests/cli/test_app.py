from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm import errors
from edgellm.cli import app as app_
from edgellm.cli import errors as cli_errors
from edgellm.cli.app import COMMANDS, main

HEAVY = ("llama_cpp", "textual", "huggingface_hub", "pynvml", "numpy", "jinja2", "starlette")


def modules_after(code: str) -> set[str]:
    """The modules a fresh interpreter holds after running ``code``."""
    script = f"{code}\nimport sys; print('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import edgellm",
        "from edgellm.cli import main; main(['--help'])",
        "from edgellm.cli import main; main(['--version'])",
        "from edgellm.cli import main; main(['no-such-command'])",
        "from edgellm.cli import main; main(['config', '--json'])",
    ],
)
def test_light_commands_import_nothing_heavy(code: str) -> None:
    assert not modules_after(code).intersection(HEAVY)


@pytest.mark.parametrize("argv", [["plan", "starter"], ["ls"], ["doctor"], ["profile", "ls"]])
def test_commands_that_run_no_model_load_no_engine_and_no_interface(argv: list[str]) -> None:
    loaded = modules_after(f"from edgellm.cli import main; main({argv})")
    assert not loaded.intersection(("llama_cpp", "textual", "huggingface_hub", "numpy", "uvicorn"))


@pytest.mark.parametrize("name", [name for name, *_ in COMMANDS])
def test_each_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: edgellm {name}" in shown
    assert "Example" in shown
    assert f"edgellm {name}" in shown.split("Example", 1)[1]


def test_importing_edgellm_imports_nothing_else() -> None:
    extra = modules_after("import edgellm") - modules_after("")
    assert extra == {"edgellm", "__future__"}


def test_help_imports_no_command() -> None:
    loaded = modules_after("from edgellm.cli import main; main(['--help'])")
    commands = {m for m in loaded if m.startswith("edgellm.cli.")}
    assert commands == {"edgellm.cli.app", "edgellm.cli.errors"}


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, _, _, line in COMMANDS:
        assert name in shown
        assert line.split()[0] in shown


def test_no_arguments_without_a_terminal_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: edgellm COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--version"])
def test_version_is_the_packages(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    from edgellm import __version__

    assert main([flag]) == 0
    assert capsys.readouterr().out.strip() == f"edgellm {__version__}"


def stderr_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    "argv",
    [
        ["plam"],
        ["config", "--nope"],
        ["config", "set", "plan.ctx"],
        ["--nope"],
        ["plan", "starter", "--ctx", "1.5"],
        ["serve", "starter", "--port", "80.5"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    lines = stderr_lines(capsys)
    assert lines[0].startswith("edgellm: error: ")
    assert lines[1].startswith("  try: edgellm")
    assert len(lines) == 2


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plam"]) == 2
    assert "did you mean 'plan'?" in stderr_lines(capsys)[0]


CASES: list[tuple[Callable[[], BaseException], int]] = [
    (lambda: errors.ConfigError("x"), 2),
    (lambda: errors.InvalidRequestError("x", param="n"), 2),
    (lambda: errors.ContextOverflowError(9, 8), 2),
    (lambda: errors.ModelNotFoundError("x"), 3),
    (lambda: errors.DoesNotFitError("x", device="CUDA0", required=2, available=1), 4),
    (lambda: errors.GGUFError("a.gguf", "not a GGUF"), 5),
    (lambda: errors.ChecksumError("x"), 5),
    (lambda: errors.DownloadError("x"), 1),
    (lambda: errors.EngineDeadError("x"), 1),
    (lambda: errors.PlanError("x"), 1),
    (lambda: ZeroDivisionError("x"), 1),
    (KeyboardInterrupt, 130),
]


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(app_, "_run", run)


@pytest.mark.parametrize(("make", "code"), CASES)
def test_each_error_has_its_exit_code(
    make: Callable[[], BaseException], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, make())
    assert main(["plan"]) == code


def test_every_error_of_the_tree_has_an_exit_code() -> None:
    def tree(kind: type[errors.EdgeLLMError]) -> list[type[errors.EdgeLLMError]]:
        return [kind, *(x for sub in kind.__subclasses__() for x in tree(sub))]

    for kind in tree(errors.EdgeLLMError):
        assert any(issubclass(kind, known) for known, _ in cli_errors.EXIT_CODES)


def test_an_error_is_one_line_even_when_its_text_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, errors.EngineError("first\n  second", hint="do\nthis"))
    assert main(["plan"]) == 1
    assert stderr_lines(capsys) == ["edgellm: error: first second", "  try: do this"]


def test_with_json_an_error_is_json_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = errors.DoesNotFitError(
        "too big", device="CUDA0", required=2, available=1, smallest_fix="--ctx 1024"
    )
    raising(monkeypatch, error)
    assert main(["plan", "x", "--json"]) == 4
    (line,) = stderr_lines(capsys)
    said: dict[str, Any] = json.loads(line)["error"]
    assert said["type"] == "DoesNotFitError"
    assert (said["device"], said["required"], said["available"]) == ("CUDA0", 2, 1)
    assert (said["hint"], said["exit_code"]) == ("--ctx 1024", 4)


def test_a_traceback_is_printed_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, ZeroDivisionError("zero"))
    main(["plan"])
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("EDGELLM_DEBUG", "1")
    main(["plan"])
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_not_an_error() -> None:
    script = "import sys; from edgellm.cli import main; sys.exit(main(['config', '--json']))"
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=30) == 0
    child.stderr.close()


def test_what_the_system_refuses_is_one_line_with_its_path_and_is_not_called_unexpected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/models/a.part")

    monkeypatch.setattr(app_, "_run", full)
    assert main(["ls"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("edgellm: error: /models/a.part: No space left on device\n  try: ")


def test_an_error_about_a_name_that_is_not_utf8_is_json_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "\udcff.gguf", "--json"]) == 3
    assert "no such file" in json.loads(capsys.readouterr().err)["error"]["message"]


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["plan", LONG], 3),
        (["plan", "http://["], 3),
        (["plan", "~no-such-person/model.gguf"], 3),
        (["import", LONG], 3),
        (["batch", LONG, "-o", "out.jsonl"], 2),
        (["profile", "show", LONG], 2),
        (["serve", LONG, "--port", "0"], 3),
        (["serve", "starter", "--host", ""], 2),
        (["serve", "starter", "--drain", "nan"], 2),
        (["serve", "starter", "--rate-limit", "-1"], 2),
        (["plan", "starter", "--tensor-split", "nan,1"], 2),
        (["plan", "starter", "--parallel", "257"], 2),
        (["plan", "starter", "--threads", "513"], 2),
        (["bench", "127.0.0.1:99999"], 2),
        (["bench", "ftp://somewhere"], 2),
        (["bench", "127.0.0.1:9", "-c", "nan"], 2),
        (["bench", "127.0.0.1:9", "-c", "1.5"], 2),
        (["bench", "127.0.0.1:9", "--seconds", "nan"], 2),
        (["bench", "127.0.0.1:9", "--html", "/no/such/folder/x.html"], 2),
        (["bench", "show", "9" * 30], 2),
        (["tune", "starter", "--name", "../x", "--dry-run"], 2),
        (["tune", "starter", "--budget", "inf", "--dry-run"], 2),
        (["eval", "perplexity", "starter", "--piece", "0"], 2),
        (["eval", "perplexity", "starter", "--chunks", "0"], 2),
        (["config", "set", "profile", "no-such-profile"], 2),
    ],
    ids=lambda x: " ".join(x)[:50] if isinstance(x, list) else "",
)
def test_a_value_that_cannot_be_is_an_error_with_its_code(
    argv: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    assert main(argv) == code
    said = capsys.readouterr().err
    assert said.startswith("edgellm: error: ")
    assert "unexpected" not in said


@pytest.mark.skipif(os.name == "nt", reason="a shell's redirections")
@pytest.mark.parametrize("command", ["--help", "config", "plan starter", "ls", "profile ls"])
@pytest.mark.parametrize("where", [">&-", "2>&-", "<&-", "| true"])
def test_a_closed_stream_and_a_reader_that_went_away_are_no_error(command: str, where: str) -> None:
    shell = f"set -o pipefail; {sys.executable} -m edgellm {command} {where}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_while_the_program_is_still_imported_leaves_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'cyclopts': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from edgellm.cli import main\n"
        "sys.exit(main(['ls']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (130, b"")


@pytest.mark.parametrize(
    "error", [errors.EdgeLLMError("disk is full"), OSError(errno.ENOSPC, "disk is full")]
)
def test_a_measurement_that_cannot_be_kept_is_shown_all_the_same(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with cli_errors.kept_if_possible():
        raise error
    assert capsys.readouterr().err == "edgellm: warning: this run is not kept: disk is full\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config", "get", "plan.ctx"], "nothing here takes 'get plan.ctx'"),
        (["plan"], "MODEL is missing"),
        (["bench"], "TARGET is missing"),
        (["plan", "starter", "--ctx"], "--ctx needs a value"),
        (["plan", "starter", "--vram", "6"], "a card of 6 bytes\n  try: --vram 6GiB"),
    ],
)
def test_wrong_usage_is_said_in_plain_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
