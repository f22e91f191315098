"""The commands from end to end, with engines that need no model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edgellm import config, paths
from edgellm.bench.archive import Archive
from edgellm.bench.profiles import profile_text, write_profile
from edgellm.cli import main
from edgellm.cli.bench import _write

from .factories import make_run
from .sim import Answer, SimServer


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
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label, flags in (("a", "--parallel 2"), ("b", "--parallel 2 --kv q8_0")):
        monkeypatch.setenv("EDGELLM_ENGINE_SPEC", {"a": "off", "b": "ngram"}[label])
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
    assert ["engine.spec", "off", "ngram"] in found["settings"]
    page = tmp_path / "page.html"
    assert main(["bench", "export", "a", "b", "-o", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert main(["bench", "show", "a", "--plot"]) == 0
    assert "#1 edgellm" in capsys.readouterr().out


def test_a_model_that_is_served_with_a_key_is_measured_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    key = ("--serve-args", "--api-key me:secret-1", "--api-key", "secret-1")
    run = printed(capsys, "bench", "starter", "-c", "1", *SMALL, *key)
    assert run["levels"][0]["errors"] == {}
    assert "secret-1" not in json.dumps(run)


def test_runs_beyond_the_list_are_said_and_in_its_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, archive = make_run(), Archive()
    for _ in range(53):
        archive.add(run)
    assert len(printed(capsys, "bench", "ls")) == 53
    assert main(["bench", "ls"]) == 0
    assert "and 3 older" in capsys.readouterr().out


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
        (["bench", "starter", "--objective", ""], "objective is empty"),
        (["bench", "starter", "--timeout", "0"], "--timeout must be above 0"),
        (["bench", "starter", "--timeout", "1e300"], "is not a time"),
        (["bench", "starter", "-c", "1000000"], "--concurrency: 1000000 is more than"),
        (["bench", "starter", "--rate", ""], "--rate takes numbers"),
        (["bench", "starter", "--rate", "1", "-c", "3"], "exclude one another"),
        (["bench", "starter", "--prompt-words", "99999999999"], "more than 10000000"),
        (["bench", "starter", "-n", "99999999999"], "more than 10000000"),
        (["bench", "starter", "--label", "last"], "take it for a number"),
        (["bench", "starter", "--label", "12"], "take it for a number"),
        (["bench", "starter", "--html", "/"], "/ is a folder"),
        (["bench", "starter", "--html", "/nonesuch/x"], "/nonesuch is not a folder"),
        (["bench", "starter", "--serve-args", "--kv 'q8"], "No closing quotation"),
        (["bench", "export", "-o", "/nonesuch/x"], "/nonesuch is not a folder"),
        (["bench", "localhost:9/v1", "--seconds", "x"], "is not a time"),
        (["bench", "show", ""], "number or a label"),
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


def test_a_broken_file_of_prompts_is_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text("{")
    assert main(["bench", "starter", "-s", str(tmp_path / "p.jsonl")]) == 2
    assert "serving" not in capsys.readouterr().err


def test_more_streams_than_connections_is_said_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 4096))
    assert main(["bench", "starter", "-c", "250"]) == 2
    assert "ulimit -n 314" in capsys.readouterr().err


def test_an_export_that_cannot_be_finished_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("before")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        _write(page, "after")
    assert page.read_text() == "before"
    assert list(tmp_path.glob("*.part")) == []


def fake_server(seen: list[str]) -> ThreadingHTTPServer:
    """Answers one token to everything; the paths that were asked for go to ``seen``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200 if self.path == "/v1/models" else 404, b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append(self.path)
            event = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\n'
            self._send(200, event + b"data: [DONE]\n\n", "text/event-stream")

        def _send(self, code: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_a_level_without_one_answer_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two warm-up rounds and the first level are answered, the second level is not."""
    server = SimServer(lambda i, body: Answer() if i < 16 else Answer(status=500))
    run = make_run(server, repeats=1)
    assert [x.errors for x in run.levels] == [{}, {"http_500": 8}]
    monkeypatch.setattr("edgellm.cli.bench._measured", lambda *_: (run, True))
    printed(capsys, "bench", "h:1", code=1)


def test_a_search_that_cannot_be_kept_is_still_told(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    (home / "state").mkdir()
    (home / "state" / "bench.sqlite3").mkdir()
    args = ("tune", "starter", "--budget", "0", "--max-tokens", "4", "--prompt-words", "8")
    assert printed(capsys, *args)["baseline_score"] > 0
    assert list((home / "state" / "tune").glob("*.jsonl"))


def test_a_search_without_time_says_that_nothing_was_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ("tune", "starter", "--budget", "0", "--max-tokens", "4", "--prompt-words", "8")
    assert main([*args]) == 0
    assert "nothing else was tried" in capsys.readouterr().out


def test_a_profile_in_use_that_is_rolled_back_is_no_longer_in_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_profile(Archive(), "mine", profile_text("t", "card", {"plan.ubatch": 64}, {}))
    assert main(["profile", "use", "mine"]) == 0
    assert main(["profile", "rollback"]) == 0
    assert "it was in use" in capsys.readouterr().out
    assert config.load().settings.profile is None


def test_profiles_are_listed_though_the_one_in_use_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = paths.config_file()
    file.parent.mkdir(parents=True)
    file.write_text('profile = "gone"\n')
    assert main(["profile", "ls"]) == 0
    shown = capsys.readouterr()
    assert "no profile named 'gone'" in shown.err
    assert "6gb" in shown.out


def test_ctrl_c_in_a_run_keeps_what_had_been_measured(home: Path) -> None:
    seen: list[str] = []
    server = fake_server(seen)
    args = [sys.executable, "-m", "edgellm", "bench", f"127.0.0.1:{server.server_port}"]
    args += ["-c", "1", "-n", "5", "--repeats", "100000", "--json"]
    run = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while len(seen) < 20:  # beyond the warm-up and the first repeat
            assert run.poll() is None, run.communicate()
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        server.shutdown()
        server.server_close()
    assert run.returncode == 130, err
    assert any("interrupted" in w for w in json.loads(out)["warnings"])
    assert [entry.kind for entry in Archive().entries()] == ["bench"]


def test_ctrl_c_before_a_repeat_had_ended_says_that_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgellm.cli.bench._measure", interrupted)
    assert main(["bench", "starter"]) == 130
    assert "interrupted before a repeat had ended" in capsys.readouterr().err


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
