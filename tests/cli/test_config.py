from __future__ import annotations

import json

import pytest

from edgellm import paths
from edgellm.cli.app import main


def test_config_prints_each_value_and_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_PLAN_CTX", "8192")
    assert main(["config", "set", "plan.margin", "512MiB"]) == 0
    capsys.readouterr()
    assert main(["config"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "8192" in rows["plan.ctx"]
    assert "variable" in rows["plan.ctx"]
    assert "512 MiB" in rows["plan.margin"]
    assert "default" in rows["serve.port"]


def test_sampling_that_nobody_set_shows_the_default_it_stands_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["chat.temperature"].split()[1:3] == ["0.8", "default"]
    assert rows["chat.top_k"].split()[1:3] == ["40", "default"]
    assert rows["chat.max_tokens"].split()[1:3] == ["-", "default"]


def test_config_json_holds_value_origin_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0
    port = json.loads(capsys.readouterr().out)["serve.port"]
    assert port["value"] == 8080
    assert port["origin"]["kind"] == "default"
    assert port["variable"] == "EDGELLM_SERVE_PORT"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_config_never_prints_a_key(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_SERVE_API_KEY", "sesame")
    assert main(["config", *flags]) == 0
    shown = capsys.readouterr().out
    assert "sesame" not in shown
    assert "(set)" in shown


def test_config_set_refuses_a_wrong_value_with_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "set", "plan.ctx", "hot"]) == 2
    said = capsys.readouterr().err
    assert "plan.ctx: expected int, got 'hot'" in said
    assert "EDGELLM_PLAN_CTX" not in said  # nobody set a variable


def test_config_unset_restores_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "set", "serve.port", "9000"])
    main(["config", "unset", "serve.port"])
    capsys.readouterr()
    main(["config", "--json"])
    assert json.loads(capsys.readouterr().out)["serve.port"]["value"] == 8080


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("plan.type_k", "nonsense"),
        ("plan.vram", "junk"),
        ("plan.ngl", "many"),
        ("plan.backend", "abacus"),
        ("plan.tensor_split", "a,b"),
        ("plan.worker", "nothing:x:y"),
        ("chat.temperature", "-1"),
        ("chat.top_p", "7"),
        ("chat.max_tokens", "-3"),
    ],
)
def test_config_set_refuses_what_every_later_command_would_refuse(
    key: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", key, value]) == 2
    assert not paths.config_file().exists()


def test_a_wrong_value_in_the_file_does_not_keep_a_right_one_out() -> None:
    paths.config_file().parent.mkdir(parents=True)
    paths.config_file().write_text('[plan]\nbackend = "abacus"\n')
    assert main(["config", "set", "plan.backend", "cpu"]) == 0
    assert main(["config", "set", "plan.vram", "6GiB,8GiB"]) == 0
