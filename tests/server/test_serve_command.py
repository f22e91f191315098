"""What edgellm serve makes of its arguments: models, names, aliases, options."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.cli.errors import UsageError
from edgellm.cli.serve import (
    answering_any_name,
    bind_of,
    find_models,
    options_of,
    with_aliases,
    with_parallel,
)
from edgellm.config import PlanSettings, ServeSettings, Settings, load
from edgellm.errors import ConfigError, ModelNotFoundError
from edgellm.runtime import ModelSpec
from edgellm.server.run import Bind, open_sockets
from edgellm.server.statefile import StateFile, running


def test_a_folder_is_its_models_without_projectors_and_later_shards(tmp_path: Path) -> None:
    for name in (
        "small.gguf",
        "mmproj-small.gguf",
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
        "notes.txt",
    ):
        (tmp_path / name).write_bytes(b"")
    specs = find_models([str(tmp_path)], Settings())
    assert [spec.name for spec in specs] == ["big", "small"]
    assert specs[1].aliases == ("small.gguf",)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFoundError):
        find_models([str(empty)], Settings())


def test_two_files_of_one_name_are_told_apart_and_one_file_twice_is_one_model(
    tmp_path: Path,
) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.gguf").write_bytes(b"")
    one, two = str(tmp_path / "x" / "m.gguf"), str(tmp_path / "y" / "m.gguf")
    assert [s.name for s in find_models([one, two, one], Settings())] == ["m", two]


def test_without_arguments_every_model_here_is_served() -> None:
    names = [spec.name for spec in find_models([], Settings())]
    assert "starter" in names


ONE = [ModelSpec(name="m", ref="/m.gguf", aliases=("m.gguf",))]
TWO = [*ONE, ModelSpec(name="n", ref="/n.gguf")]


def test_an_alias_alone_renames_the_one_model_and_its_old_name_still_works() -> None:
    (spec,) = with_aliases(ONE, ["gpt-4o-mini"])
    assert spec.name == "gpt-4o-mini"
    assert "m" in spec.aliases


def test_aliases_for_named_models_and_for_every_other_name() -> None:
    first, second = with_aliases(TWO, ["a=m", "*=n"])
    assert (first.name, "a" in first.aliases) == ("m", True)
    assert "*" in second.aliases
    (only,) = with_aliases(ONE, ["*"])
    assert (only.name, only.aliases[-1]) == ("m", "*")


def test_a_model_served_alone_answers_to_every_name() -> None:
    (only,) = answering_any_name(ONE)
    assert (only.name, only.aliases) == ("m", ("m.gguf", "*"))
    assert answering_any_name([only]) == [only]
    assert answering_any_name(TWO) == TWO


@pytest.mark.parametrize("alias", ["a", "a=nothing"])
def test_an_alias_that_fits_no_model_is_wrong_usage(alias: str) -> None:
    with pytest.raises(UsageError):
        with_aliases(TWO, [alias])


def test_a_server_runs_eight_sequences_unless_it_was_told() -> None:
    assert with_parallel(Settings()).plan.parallel == 8
    told = Settings(plan=PlanSettings(parallel=2))
    assert with_parallel(told).plan.parallel == 2


def test_settings_become_the_servers_options(tmp_path: Path) -> None:
    settings = load(
        {
            "serve.api_key": ("alice:sk-1",),
            "serve.rate_limit": 60,
            "serve.max_body": 1000,
            "serve.host": "127.0.0.1, ::1",
            "chat.temperature": 0.2,
        }
    ).settings
    bind = bind_of(settings.serve)
    state = StateFile(tmp_path)
    options = options_of(settings, bind, state, quiet=True, priority="batch")
    assert bind.hosts == ("127.0.0.1", "::1")
    assert [key.name for key in options.policy.keys] == ["alice", "edgellm-local"]
    assert options.policy.hosts is None
    assert options.policy.rate_per_minute == 60
    assert options.limits.max_body == 1000
    assert options.sampling.temperature == 0.2
    assert not options.log_requests


def test_an_open_address_without_a_key_is_refused(tmp_path: Path) -> None:
    settings = Settings(serve=ServeSettings(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="no API key"):
        options_of(
            settings,
            bind_of(settings.serve),
            StateFile(tmp_path),
            quiet=False,
            priority="normal",
        )


def test_a_taken_port_is_said() -> None:
    sockets = open_sockets(Bind(port=0))
    port = sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port}"):
        open_sockets(Bind(port=port))
    for opened in sockets:
        opened.close()


def test_a_state_file_is_private_and_a_dead_servers_file_goes(tmp_path: Path) -> None:
    state = StateFile(tmp_path)
    state.write("http://127.0.0.1:1")
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert [s.url for s in running(tmp_path)] == ["http://127.0.0.1:1"]
    stale = tmp_path / "serve-999999.json"
    stale.write_bytes(file.read_bytes().replace(b'"pid":', b'"pid":99'))
    (tmp_path / "serve-1.json").write_text("{")
    assert len(running(tmp_path)) == 1
    assert not stale.exists()
    state.remove()
    assert running(tmp_path) == []
