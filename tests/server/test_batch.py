"""edgellm batch: every line answered once, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli import errors
from edgellm.cli.app import main
from edgellm.cli.batch import alone, resume

RUN = ["-m", "starter", "--engine", "scripted", "--ctx", "4096"]


def write_requests(path: Path, n: int, **body: Any) -> None:
    with path.open("w") as file:
        for i in range(n):
            text = {"model": "gpt-4o", "prompt": f"line {i}", "max_tokens": 4, **body}
            line = {
                "custom_id": f"r{i}",
                "method": "POST",
                "url": "/v1/completions",
                "body": text,
            }
            file.write(json.dumps(line) + "\n")


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_is_answered_in_openais_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "deep" / "out.jsonl"
    write_requests(source, 20)
    assert main(["batch", str(source), "-o", str(out), *RUN]) == errors.DONE
    found = answers(out)
    assert sorted(a["custom_id"] for a in found) == sorted(f"r{i}" for i in range(20))
    assert all(a["error"] is None and a["response"]["status_code"] == 200 for a in found)
    assert found[0]["id"].startswith("batch_req_")
    assert found[0]["response"]["request_id"]
    assert found[0]["response"]["body"]["choices"][0]["text"]
    assert "20 answered, 0 failed" in capsys.readouterr().out


def test_two_batches_never_write_one_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 2)
    with alone(out):
        assert main(["batch", str(source), "-o", str(out), *RUN]) == errors.USAGE
    assert f"another batch is writing {out}" in capsys.readouterr().err
    assert not out.exists()
    assert main(["batch", str(source), "-o", str(out), *RUN]) == errors.DONE


def test_a_bad_body_is_an_answer_of_its_own_and_the_exit_code_says_so(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 3, temperature="hot")
    assert main(["batch", str(source), "-o", str(out), *RUN]) == errors.FAILED
    assert {a["response"]["status_code"] for a in answers(out)} == {400}
    assert answers(out)[0]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "in.jsonl:2"),
        ('{"custom_id": "x", "url": "/v1/files", "body": {}}', "cannot be batched"),
        ('{"custom_id": "r0", "url": "/v1/completions", "body": {}}', "that of line 1"),
        ('{"url": "/v1/completions", "body": {}}', "custom_id"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 1)
    source.write_text(source.read_text() + line + "\n")
    assert main(["batch", str(source), "-o", str(out), *RUN]) == errors.USAGE
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_a_second_run_does_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_requests(source, 5)
    main(["batch", str(source), "-o", str(out), *RUN])
    first = out.read_bytes()
    main(["batch", str(source), "-o", str(out), *RUN])
    assert out.read_bytes() == first
    assert "0 answered, 0 failed, 5 were done before" in capsys.readouterr().out


def test_what_a_kill_cut_off_and_what_failed_here_is_done_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    good = '{"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": null}\n'
    bad = '{"custom_id": "b", "response": {"status_code": 503, "body": {}}, "error": null}\n'
    wrong = '{"custom_id": "c", "response": {"status_code": 400, "body": {}}, "error": null}\n'
    out.write_text(good + bad + wrong + '{"custom_id": "d", "respo')
    assert resume(out) == {"a", "c"}
    assert out.read_text() == good + wrong


@pytest.mark.slow
def test_after_a_kill_it_goes_on_and_no_line_is_answered_twice(
    tmp_path: Path, edgellm_home: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    n = 3000
    write_requests(source, n)
    command = [sys.executable, "-m", "edgellm", "batch", str(source), "-o", str(out), *RUN]
    environ = {**os.environ, "EDGELLM_HOME": str(edgellm_home)}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 50:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    before = out.read_bytes().count(b"\n")
    assert before < n, "it was done before it could be killed"
    done = subprocess.run(command, env=environ, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    ids = [a["custom_id"] for a in answers(out)]
    assert len(ids) == n
    assert len(set(ids)) == n


@pytest.mark.parametrize("what", ["the input", "notes", "a folder", "nothing"])
def test_an_output_that_holds_no_answers_is_refused_and_left_as_it_is(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}
    requests = tmp_path / "in.jsonl"
    requests.write_text(json.dumps(line) + "\n")
    (tmp_path / "notes.txt").write_text("what nobody may lose\n")
    outputs = {
        "the input": str(requests),
        "notes": str(tmp_path / "notes.txt"),
        "a folder": str(tmp_path),
        "nothing": "",
    }
    argv = ["batch", str(requests), "-o", outputs[what], "-m", "starter", "--engine", "scripted"]
    assert main(argv) == errors.USAGE
    assert json.loads(requests.read_text()) == line
    assert (tmp_path / "notes.txt").read_text() == "what nobody may lose\n"
    assert capsys.readouterr().err.startswith("edgellm: error: ")
