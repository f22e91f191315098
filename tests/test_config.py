from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgellm import config, paths
from edgellm.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_profile(name: str, text: str) -> None:
    write(paths.config_dir() / "profiles" / f"{name}.toml", text)


def test_flags_win_over_variables_over_the_file_over_the_profile_over_defaults() -> None:
    write_profile("small", "[plan]\nctx = 1\nbatch = 1\nubatch = 1\nparallel = 1")
    write(paths.config_file(), 'profile = "small"\n[plan]\nctx = 2\nbatch = 2\nubatch = 2')
    loaded = config.load(
        {"plan.ctx": 4}, environ={"EDGELLM_PLAN_CTX": "3", "EDGELLM_PLAN_BATCH": "3"}
    )
    plan = loaded.settings.plan
    assert (plan.ctx, plan.batch, plan.ubatch, plan.parallel) == (4, 3, 2, 1)
    assert plan.objective == "speed"
    kinds = [loaded.origins[f"plan.{k}"].kind for k in ("ctx", "batch", "ubatch", "parallel")]
    assert kinds == ["flag", "variable", "file", "profile"]
    assert loaded.origins["plan.objective"].kind == "default"


def test_a_flag_that_was_not_given_leaves_the_value_alone() -> None:
    loaded = config.load({"plan.ctx": None}, environ={"EDGELLM_PLAN_CTX": "512"})
    assert loaded.settings.plan.ctx == 512


def test_an_origin_names_the_flag_variable_file_or_profile() -> None:
    write_profile("small", '[plan]\nctx = { value = 1024, why = "a 4 GiB card" }')
    loaded = config.load(
        {"profile": "small", "plan.n_cpu_moe": 3}, environ={"EDGELLM_SERVE_PORT": "1"}
    )
    assert str(loaded.origins["plan.n_cpu_moe"]) == "flag --n-cpu-moe"
    assert str(loaded.origins["serve.port"]) == "variable EDGELLM_SERVE_PORT"
    assert str(loaded.origins["plan.ctx"]) == "profile small"
    assert loaded.origins["plan.ctx"].why == "a 4 GiB card"


def test_the_profile_may_come_from_a_flag_a_variable_or_the_file() -> None:
    for name in ("a", "b", "c"):
        write_profile(name, f'[chat]\nsystem = "{name}"')
    write(paths.config_file(), 'profile = "a"')
    assert config.load(environ={}).settings.chat.system == "a"
    assert config.load(environ={"EDGELLM_PROFILE": "b"}).settings.chat.system == "b"
    variables = {"EDGELLM_PROFILE": "b"}
    assert config.load({"profile": "c"}, environ=variables).settings.chat.system == "c"


@pytest.mark.parametrize(
    ("source", "nearest"),
    [
        ({"flags": {"plan.ctz": 1}}, "plan.ctx"),
        ({"environ": {"EDGELLM_PLAN_CTZ": "1"}}, "EDGELLM_PLAN_CTX"),
        ({"environ": {"EDGELLM_HOM": "x"}}, "EDGELLM_HOME"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(
    source: dict[str, Any], nearest: str
) -> None:
    with pytest.raises(ConfigError, match=nearest):
        config.load(**{"environ": {}, **source})


def test_an_unknown_key_in_the_file_names_the_file_and_the_nearest() -> None:
    path = write(paths.config_file(), "[serve]\nprot = 1")
    with pytest.raises(ConfigError) as caught:
        config.load(environ={})
    assert str(path) in caught.value.message
    assert "serve.port" in caught.value.message


def test_an_unknown_section_is_an_error() -> None:
    write(paths.config_file(), "[plans]\nctx = 1")
    with pytest.raises(ConfigError, match=r"plan\.ctx"):
        config.load(environ={})


def test_a_key_far_from_every_known_one_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown key 'zzzzzz'"):
        config.load({"zzzzzz": 1}, environ={})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("plan.ctx", "hot", "expected int, got 'hot'"),
        ("plan.margin", "hot", "is not a size"),
        ("plan.objective", "size", "got 'size'"),
        ("plan.flash_attn", "maybe", "got 'maybe'"),
        ("tui.animations", "often", "got 'often'"),
        ("chat.temperature", "hot", "expected float, got 'hot'"),
    ],
)
def test_a_value_of_the_wrong_kind_says_where_it_stands(key: str, value: str, says: str) -> None:
    variable = config.known_keys()[key].variable
    with pytest.raises(ConfigError) as caught:
        config.load(environ={variable: value})
    assert variable in caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("text", "value"), [("6GiB", 6 * 2**30), ("512MiB", 512 * 2**20), ("1000", 1000)]
)
def test_sizes_are_read_as_powers_of_1024(text: str, value: int) -> None:
    assert config.load({"plan.margin": text}, environ={}).settings.plan.margin == value


def test_on_and_off_may_be_written_as_booleans_in_toml() -> None:
    write(paths.config_file(), "[plan]\nkv_unified = false\nflash_attn = true")
    plan = config.load(environ={}).settings.plan
    assert (plan.kv_unified, plan.flash_attn) == ("off", "on")


def test_a_whole_number_may_be_written_where_text_is_kept() -> None:
    write(paths.config_file(), "[plan]\nngl = 12")
    assert config.load(environ={}).settings.plan.ngl == "12"


def test_a_list_in_a_variable_is_separated_by_commas() -> None:
    loaded = config.load(environ={"EDGELLM_PLAN_VRAM": "6GiB, 4GiB"})
    assert loaded.settings.plan.vram == ("6GiB", "4GiB")


def test_broken_toml_names_the_file_and_the_line() -> None:
    path = write(paths.config_file(), "[plan]\nctx = = 1")
    with pytest.raises(ConfigError, match="line 2") as caught:
        config.load(environ={})
    assert str(path) in caught.value.message


def test_a_file_that_is_not_text_is_an_error_not_a_crash() -> None:
    path = paths.config_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        config.load(environ={})


def test_an_unknown_profile_names_the_nearest() -> None:
    write_profile("laptop", "")
    with pytest.raises(ConfigError, match="laptop"):
        config.load({"profile": "labtop"}, environ={})


def test_a_profile_may_not_name_unknown_keys() -> None:
    write_profile("odd", "[plan]\nctz = 1")
    with pytest.raises(ConfigError, match=r"plan\.ctx"):
        config.load({"profile": "odd"}, environ={})


def test_own_profiles_come_before_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "shipped" / "x.toml", "[plan]\nctx = 1")
    own = paths.config_dir() / "profiles"
    monkeypatch.setattr(paths, "profile_dirs", lambda: (own, tmp_path / "shipped"))
    assert config.read_profile("x").values == {"plan.ctx": 1}
    write_profile("x", "[plan]\nctx = 2")
    assert config.read_profile("x").values == {"plan.ctx": 2}
    assert config.list_profiles() == ["x"]


def test_a_profile_keeps_its_title_and_the_reason_of_each_value() -> None:
    write_profile(
        "p", '[profile]\ntitle = "Six"\n[plan]\nctx = { value = 1, why = "small" }\nbatch = 2'
    )
    profile = config.read_profile("p")
    assert profile.about == {"title": "Six"}
    assert profile.values == {"plan.ctx": 1, "plan.batch": 2}
    assert profile.reasons == {"plan.ctx": "small"}


@pytest.mark.parametrize("name", config.list_profiles())
def test_every_shipped_profile_is_valid_and_gives_its_reasons(name: str) -> None:
    profile = config.read_profile(name)
    config.load({"profile": name}, environ={})
    assert set(profile.reasons) == set(profile.values)
    assert all(profile.reasons.values())


def test_set_in_file_keeps_other_lines_and_comments() -> None:
    path = write(
        paths.config_file(), "# mine\n[plan]\n# long talks\nctx = 1\nbatch = 2\n[serve]\nport = 3\n"
    )
    config.set_in_file("plan.ctx", "4096")
    text = path.read_text()
    assert "# mine" in text
    assert "# long talks" in text
    assert "batch = 2" in text
    assert config.load(environ={}).settings.plan.ctx == 4096
    assert config.load(environ={}).settings.serve.port == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("plan.ctx", "99"),
        ("profile", "a"),
        ("plan.margin", "512MiB"),
        ("tui.animations", "false"),
        ("chat.temperature", "0.5"),
        ("chat.system", 'say "yes"\nor \\ no'),
        ("chat.system", "no delete \x7f key"),
        ("serve.api_key", "a,b"),
        ("plan.ngl", "-1"),
    ],
)
def test_what_is_set_in_the_file_is_what_is_loaded(key: str, value: str) -> None:
    write_profile("a", "")
    config.set_in_file(key, value)
    expected = config.load({key: value}, environ={}).value(key)
    assert config.load(environ={}).value(key) == expected
    config.set_in_file(key, None)
    assert config.load(environ={}).value(key) == config.known_keys()[key].default


def test_setting_a_wrong_value_leaves_the_file_untouched() -> None:
    path = write(paths.config_file(), "[plan]\nctx = 1\n")
    with pytest.raises(ConfigError):
        config.set_in_file("plan.ctx", "hot")
    with pytest.raises(ConfigError):
        config.set_in_file("plan.ctz", "1")
    assert path.read_text() == "[plan]\nctx = 1\n"


def test_every_setting_has_a_description_and_a_default_of_its_own_type() -> None:
    for known in config.known_keys().values():
        assert known.description, known.key
        msgspec.convert(known.default, known.type)


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(paths.config_file(), "[plan]\nctx = 1\n")

    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        config.set_in_file("plan.ctx", "2")
    assert path.read_text() == "[plan]\nctx = 1\n"
    assert list(path.parent.iterdir()) == [path]
