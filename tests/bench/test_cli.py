"""The commands from end to end, with engines that need no model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgellm import config
from edgellm.cli import main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    monkeypatch.setenv("EDGELLM_ENGINE_BACKEND", "scripted")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert main([*args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


SMALL = ("-n", "2", "--repeats", "1", "--max-tokens", "4", "--prompt-words", "8")


def test_a_model_is_served_measured_kept_compared_and_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for label, flags in (("a", "--parallel 2"), ("b", "--parallel 2 --kv q8_0")):
        run = printed(
            capsys, "bench", "starter", "-c", "1,2", *SMALL, "--label", label, "--serve-args", flags
        )
        assert [level["concurrency"] for level in run["levels"]] == [1, 2]
        assert run["levels"][0]["stats"]["n_output_mean"]["median"] == 4
        assert run["target"]["about"]["kind"] == "edgellm"
        assert run["target"]["model_digest"].startswith("ends-sha256:")
        assert run["target"]["memory"]["resident"] > 0
        assert run["target"]["about"]["plan"]["report"]["build"] == "scripted"
    listed = printed(capsys, "bench", "ls")
    assert [entry["label"] for entry in listed] == ["b", "a"]
    found = printed(capsys, "bench", "diff", "a", "b")
    assert ["params.type_k", "f16", "q8_0"] in found["settings"]
    page = tmp_path / "page.html"
    assert main(["bench", "export", "a", "b", "-o", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert main(["bench", "show", "a", "--plot"]) == 0
    assert "#1 edgellm" in capsys.readouterr().out


def test_a_run_need_not_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "bench", "starter", "-c", "1", *SMALL, "--no-save")
    assert printed(capsys, "bench", "ls") == []


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["bench", "starter", "-c", "none"], "numbers such as"),
        (["bench", "starter", "-c", "0"], "above 0"),
        (["bench", "starter", "-s", "nonesuch"], "no scenario"),
        (["bench", "starter", "--objective", "fast"], "an objective reads"),
        (["bench", "show", "99"], "no run '99'"),
        (["bench", "diff"], "no run before the last one is kept"),
        (["bench", "show"], "no run is kept yet"),
        (["eval", "kl", "starter"], "configurations needed"),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], args: list[str], word: str
) -> None:
    assert main(args) == 2
    assert word in capsys.readouterr().err.splitlines()[0]


def test_a_server_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_tune_measures_keeps_its_run_and_what_it_writes_can_be_rolled_back(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    args = ("tune", "starter", "--budget", "2s", "--max-tokens", "4", "--prompt-words", "8")
    result = printed(capsys, *args, "--threads", "1", "--ubatch", "64", "--batch", "512")
    assert result["baseline_score"] > 0
    assert not {"plan.threads", "plan.ubatch"} & set(result["best"])
    (entry,) = printed(capsys, "bench", "ls", "--kind", "tune")
    assert entry["label"] == "tuned-smollm2-135m-instruct-q4-1-cpu"
    assert main(["bench", "show", "1"]) == 0
    assert "over the plan" in capsys.readouterr().out
    if result["best"]:
        assert config.load({"profile": entry["label"]}).settings.plan.ubatch == 64
        assert main(["profile", "rollback", entry["label"]]) == 0
    assert not (home / "config" / "profiles" / f"{entry['label']}.toml").exists()


def test_tune_shows_what_it_would_try(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "tune", "starter", "--dry-run", "--for", "throughput")
    names = [variable["name"] for variable in found]
    assert "n_ubatch" in names
    assert "n_seq_max" in names


def test_rollback_with_nothing_to_undo_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "rollback"]) == 2
    assert "tuning has not written any profile" in capsys.readouterr().err


def test_ctrl_c_leaves_a_search_that_goes_on_where_it_was(home: Path) -> None:
    args = [sys.executable, "-m", "edgellm", "tune", "starter", "--max-tokens", "4"]
    args += ["--prompt-words", "8", "--budget"]
    first = subprocess.Popen(
        [*args, "60s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert first.stderr is not None
    heard = []
    while len(heard) < 3:
        heard.append(first.stderr.readline())
    first.send_signal(signal.SIGINT)
    _, rest = first.communicate(timeout=60)
    assert first.returncode == 130, rest
    (journal,) = (home / "state" / "tune").glob("*.jsonl")
    n_known = len(journal.read_text().splitlines())
    assert n_known >= 2
    second = subprocess.run([*args, "0s"], capture_output=True, text=True, check=True)
    assert second.stderr.startswith(f"going on after {n_known} trials")
    assert "the plan, round 1" in second.stderr
