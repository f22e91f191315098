"""Quality figures are right where the truth is known, and agree with llama.cpp's own tool."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.bench import quality, regress
from edgellm.bench.quality import read_text
from edgellm.bench.regress import Answer, Ballot, Case, Tally
from edgellm.bench.variant import Variant, opened
from edgellm.cli import main
from edgellm.cli.eval import _ask, vote
from edgellm.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    return tmp_path


# -- the arithmetic ------------------------------------------------------------------------------


def test_a_uniform_model_is_as_surprised_as_it_has_tokens() -> None:
    rows = quality.log_softmax(np.zeros((7, 50), np.float32))
    text = quality.Text(pieces=((0,) * 16,), n_ctx=16)
    found = quality.perplexity_of(-rows[:, 3].astype(np.float64), text)
    assert found.value == pytest.approx(50)
    assert found.error == pytest.approx(0, abs=1e-6)


def test_divergence_is_zero_for_the_same_and_known_for_two_coins() -> None:
    p = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    q = np.log(np.array([[0.9, 0.1], [0.9, 0.1]], np.float32))
    assert quality.kl_rows(p, p) == pytest.approx([0, 0])
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert quality.kl_rows(p, q) == pytest.approx([expected, 0], abs=1e-6)


def test_logits_far_from_zero_do_not_overflow() -> None:
    rows = quality.log_softmax(np.array([[1000.0, 999.0]], np.float32))
    assert np.exp(rows[0]).sum() == pytest.approx(1)


# -- against llama.cpp's own tool -----------------------------------------------------------------

# llama-perplexity of the same llama.cpp on this text: -c 256 -fa on, its first running value.
REFERENCE = {"f16": 16.4872, "q8_0": 16.6474, "q4_0": 16.2536}


async def measured(kv: str, folder: Path, *, keep: bool = False) -> tuple[Any, Any]:
    """(perplexity, divergence from the reference); ``keep`` makes this the reference."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    flags = "--parallel 1 --ctx 256 --outputs 256 --threads 2 --flash-attn on"
    async with opened(Variant.parse(f"starter --kv {kv} {flags}")) as engine:
        cut = await quality.cut(engine, text, n_ctx=256, n_chunks=1)
        if keep:
            base = await quality.keep_reference(engine, cut, folder)
            assert base.value == pytest.approx(REFERENCE[kv], rel=0.005)
        found, mine = await quality.divergence(engine, cut, folder)
        return mine, found


@pytest.mark.model
async def test_perplexity_and_divergence_agree_with_llama_cpp(tmp_path: Path) -> None:
    divergences = []
    for kv in ("f16", "q8_0", "q4_0"):
        mine, found = await measured(kv, tmp_path, keep=kv == "f16")
        assert mine.value == pytest.approx(REFERENCE[kv], rel=0.005)
        assert found.ppl_ratio == pytest.approx(mine.value / REFERENCE["f16"], rel=0.005)
        divergences.append(found.mean)
    same, q8, q4 = divergences
    assert same == pytest.approx(0, abs=1e-6)
    assert same < q8 < q4


# -- configurations -------------------------------------------------------------------------------


def test_a_variant_is_a_model_and_flags() -> None:
    variant = Variant.parse('"my model" --kv q8_0 --ctx 4096 --spec off')
    assert variant.model == "my model"
    assert variant.settings == {
        "plan.type_k": "q8_0",
        "plan.type_v": "q8_0",
        "plan.ctx": "4096",
        "engine.spec": "off",
    }


@pytest.mark.parametrize("text", ["", "m --kv", "m q8_0 x", "m --nonesuch 1", 'm "'])
def test_a_malformed_variant_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Variant.parse(text)


# -- own prompts ----------------------------------------------------------------------------------


CITY = {"$defs": {"City": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/City"}}}
TREE = {"properties": {"v": {"type": "integer"}, "kids": {"items": {"$ref": "#"}}}}
PAIR = {"prefixItems": [{"const": 1}], "items": {"const": 2}}
OTHERS = {
    "properties": {"a": {"const": 1}},
    "patternProperties": {"^x": {"const": 2}},
    "additionalProperties": {"const": 3},
}
SCHEMA = {
    "type": "object",
    "required": ["city"],
    "properties": {"city": {"type": "string"}, "n": {"type": ["integer", "null"]}},
}


@pytest.mark.parametrize(
    ("case", "text", "fault"),
    [
        (Case(expect=r"\bParis\b"), "It is Paris.", ""),
        (Case(expect=r"\bParis\b"), "It is Lyon.", "does not match"),
        (Case(equals="4"), " 4\n", ""),
        (Case(equals="4"), "5", "is not '4'"),
        (Case(json_schema=SCHEMA), '{"city": "Paris", "n": null}', ""),
        (Case(json_schema=SCHEMA), '```json\n{"city": "Paris"}\n```', ""),
        (Case(json_schema=SCHEMA), "{}", "$ lacks city"),
        (Case(json_schema=SCHEMA), '{"city": 1}', "$.city is not string"),
        (Case(json_schema=SCHEMA), '{"city": "x", "n": true}', "$.n is not integer or null"),
        (Case(json_schema={"items": {"enum": [1]}}), "[1, 2]", "$[1] is none of [1]"),
        (Case(json_schema=SCHEMA), "Paris", "is not JSON"),
        (Case(json_schema={"minimum": 3}), "2", "$ breaks minimum 3"),
        (Case(json_schema={"minimum": 3}), "3", ""),
        (Case(json_schema={"maxItems": 1}), "[1, 2]", "$ breaks maxItems 1"),
        (Case(json_schema={"minLength": 2}), '"a"', "$ breaks minLength 2"),
        (Case(json_schema={"pattern": "^x"}), '"ax"', "$ does not match '^x'"),
        (Case(json_schema={"const": 1}), "2", "$ is not 1"),
        (Case(json_schema={"const": {"a": [1]}}), '{"a": [1.0]}', ""),
        (Case(json_schema={"enum": [0, [1]]}), "[true]", "$ is none of"),
        (Case(json_schema={"additionalProperties": False}), '{"a": 1}', "$ has a beside"),
        (Case(json_schema={"type": "integer"}), "3.0", ""),
        (Case(json_schema=CITY), '{"a": "Paris"}', ""),
        (Case(json_schema=CITY), '{"a": 1}', "$.a is not string"),
        (Case(json_schema=TREE), '{"v": 1, "kids": [{"v": 2}, {"v": 3, "kids": []}]}', ""),
        (Case(json_schema=TREE), '{"kids": [{"kids": [{"v": "x"}]}]}', "$.kids[0].kids[0].v is"),
        (Case(json_schema={"anyOf": [{"const": 1}, {"type": "string"}]}), '"x"', ""),
        (Case(json_schema={"anyOf": [{"const": 1}, {"type": "string"}]}), "2", "$ is none of any"),
        (Case(json_schema={"oneOf": [{"minimum": 1}, {"minimum": 5}]}), "3", ""),
        (Case(json_schema={"oneOf": [{"minimum": 1}, {"minimum": 5}]}), "7", "$ is 2 of oneOf"),
        (Case(json_schema={"oneOf": [{"minimum": 1}, {"minimum": 5}]}), "0", "$ is none of oneOf"),
        (Case(json_schema={"allOf": [{"minimum": 1}, {"maximum": 5}]}), "6", "$ breaks maximum"),
        (Case(json_schema={"exclusiveMinimum": 3}), "3", "$ breaks exclusiveMinimum 3"),
        (Case(json_schema={"multipleOf": 0.1}), "0.3", ""),
        (Case(json_schema={"multipleOf": 2}), "3", "$ breaks multipleOf 2"),
        (Case(json_schema={"minProperties": 1}), "{}", "$ breaks minProperties 1"),
        (Case(json_schema=PAIR), "[1, 2, 2]", ""),
        (Case(json_schema=PAIR), "[1, 2, 3]", "$[2] is not 2"),
        (Case(json_schema=OTHERS), '{"a": 1, "xy": 2, "b": 3}', ""),
        (Case(json_schema=OTHERS), '{"xy": 3}', "$.xy is not 2"),
        (Case(json_schema=OTHERS), '{"b": 1}', "$.b is not 3"),
        (Case(json_schema={"properties": {"a": False}}), '{"a": 1}', "$.a may not be there"),
        (Case(), "anything", ""),
    ],
)
def test_an_answer_is_checked_against_what_its_case_expects(
    case: Case, text: str, fault: str
) -> None:
    found = regress.fault_of(case, text)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)


def said(text: str, n: int = 10, **kw: Any) -> Answer:
    return Answer(text=text, n_tokens=n, finish=kw.pop("finish", "stop"), **kw)


def test_two_configurations_are_compared_case_by_case() -> None:
    cases = [Case(name=n, prompt="p") for n in ("same", "broken", "mended", "foreign")]
    a = [said("x"), said("y"), said("z", fault="bad"), said("a good English answer")]
    b = [
        said("x"),
        said("Y", 20, fault="bad", finish="length"),
        said("w"),
        said("это хороший русский ответ"),
    ]
    s = regress.summarise(regress.compare(cases, a, b))
    assert (s.n, s.exact, s.length_ratio) == (4, 0.25, 1.0)
    assert (s.broken, s.mended, s.language_switches) == (("broken",), ("mended",), ("foreign",))
    assert (s.cut_a, s.cut_b, s.faults_a, s.faults_b) == (0, 1, 1, 1)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("The quick brown fox", "latin"),
        ("Съешь ещё этих мягких булок", "cyrillic"),
        ("今天天气很好我们去公园散步吧", "cjk"),
        ("42", ""),
    ],
)
def test_the_script_of_a_text_is_that_of_most_letters(text: str, script: str) -> None:
    assert regress.script_of(text) == script


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "{}",
        '{"prompt": "x", "expect": "("}',
        '{"prompt": "x", "max_tokens": -1}',
        '{"prompt": "x", "schema": {"type": "strng"}}',
        '{"prompt": "x", "schema": {"type": 5}}',
        '{"prompt": "x", "schema": {"properties": {"a": {"enum": 3}}}}',
        '{"prompt": "x", "schema": {"properties": [1]}}',
        '{"prompt": "x", "schema": {"required": "city"}}',
        '{"prompt": "x", "schema": {"pattern": "("}}',
        '{"prompt": "x", "schema": {"items": {"$ref": "#/x"}}}',
        '{"prompt": "x", "schema": {"x-a": {"b": 1}, "items": {"$ref": "#/x-a"}}}',
        '{"prompt": "x", "schema": {"items": {"$ref": 1}}}',
        '{"prompt": "x", "schema": {"$defs": {"a": {"nonsense": 1}}}}',
        '{"prompt": "x", "schema": {"anyOf": []}}',
        '{"prompt": "x", "schema": {"anyOf": [{"type": "strng"}]}}',
        '{"prompt": "x", "schema": {"$ref": "#"}}',
        '{"prompt": "x", "schema": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}}',
        '{"prompt": "x", "schema": {"patternProperties": {"(": {}}}}',
        '{"prompt": "x", "schema": {"multipleOf": 0}}',
    ],
)
def test_a_malformed_case_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"cases\.jsonl:2"):
        regress.read_cases(str(path))


def test_a_file_from_another_system_is_read_as_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}\r\n')
    assert [(c.prompt, c.name) for c in regress.read_cases(str(path))] == [
        ("one", "line 1"),
        ("two", "line 3"),
    ]
    assert read_text(str(path)) == "one\n\ntwo"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    assert read_text(str(tmp_path / "a.txt")) == "text"


@pytest.mark.parametrize("line", ["{", "[1]", '{"prompt": 3}'])
def test_a_text_of_broken_prompts_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"text\.jsonl:2"):
        read_text(str(path))


def test_a_case_that_no_side_could_answer_is_no_success() -> None:
    lost = Answer(error="engine died", fault="failed: engine died")
    cases = [Case(name="lost", prompt="p"), Case(name="fine", prompt="p")]
    s = regress.summarise(regress.compare(cases, [lost, said("x")], [lost, said("x")]))
    assert (s.failed, s.broken) == (("lost",), ())


# -- blind choice ---------------------------------------------------------------------------------


def ballots(n: int = 40) -> list[Ballot]:
    cases = [Case(name=str(i), prompt="p") for i in range(n)]
    a = [said(f"a{i}") for i in range(n)]
    b = [said(f"b{i}" if i % 4 else f"a{i}") for i in range(n)]
    return regress.ballots(cases, a, b, "seed")


def test_failures_are_neither_asked_about_nor_called_equal() -> None:
    lost = Answer(error="engine died")
    cases = [Case(name=str(i), prompt="p") for i in range(3)]
    a, b = [lost, lost, said("a")], [lost, said("b"), said("b")]
    asked = regress.ballots(cases, a, b, "seed")
    assert [x.case.name for x in asked] == ["2"]
    assert Tally(a=0, b=0, ties=0, same=0, failed=3).verdict("A", "B") == "no question was answered"


def test_a_vote_that_ended_early_is_not_called_equal() -> None:
    tally = vote(ballots(), 10, lambda *_: "q")
    assert (tally.same, tally.left) == (10, 30)
    assert tally.verdict("A", "B") == "no question was answered"


def test_thousands_of_votes_can_be_counted() -> None:
    assert Tally(a=1000, b=1000, ties=0, same=0).p_value == 1.0
    assert Tally(a=2000, b=100, ties=0, same=0).p_value < 1e-100


def test_ctrl_c_at_a_question_counts_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressed(io.StringIO):
        def readline(self, *_: object) -> str:  # type: ignore[override]
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Pressed())
    asked = ballots()
    assert vote(asked, 0, _ask).left == len(asked)


def test_equal_answers_are_not_asked_about_and_sides_are_mixed() -> None:
    asked = ballots()
    assert len(asked) == 30
    assert 5 < sum(x.first_is_a for x in asked) < 25
    assert [x.case.name for x in asked] != sorted((x.case.name for x in asked), key=int)


def test_votes_are_counted_for_the_configuration_not_the_side() -> None:
    def likes_b(ballot: Ballot, number: int, of: int) -> str:
        return "1" if ballot.first.startswith("b") else "2"

    tally = vote(ballots(), 10, likes_b)
    assert tally == Tally(a=0, b=30, ties=0, same=10)
    assert "new is liked better" in tally.verdict("old", "new")


def test_stopping_counts_what_was_answered() -> None:
    choices = iter(["=", "1", "q"])
    tally = vote(ballots(), 0, lambda *_: next(choices))
    assert (tally.a + tally.b, tally.ties) == (1, 1)


@pytest.mark.parametrize(
    ("typed", "choice"), [("1\n", "1"), ("yes\n=\n", "="), ("\n\n2\n", "2"), ("", "q")]
)
def test_a_question_shows_both_answers_and_asks_until_it_is_understood(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, choice: str
) -> None:
    ballot = Ballot(case=Case(prompt="why?"), first="because", second="so", first_is_a=True)
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert _ask(ballot, 3, 9) == choice
    shown = capsys.readouterr().err
    assert all(word in shown for word in ("why?", "because", "so", "3 of 9"))


@pytest.mark.parametrize(
    ("a", "b", "p"), [(5, 5, 1.0), (0, 5, 0.0625), (2, 8, 0.109375), (0, 0, 1.0)]
)
def test_the_confidence_is_that_of_the_sign_test(a: int, b: int, p: float) -> None:
    tally = Tally(a=a, b=b, ties=0, same=0)
    assert tally.p_value == pytest.approx(p)
    assert ("proven" in tally.verdict("x", "y")) == (a + b > 0)


def test_wilsons_interval_is_the_published_one() -> None:
    """Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662, 0 of 20 gives 0 to 0.1611."""
    assert regress.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-4)
    assert regress.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-4)


# -- the commands, without a model ----------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_ENGINE_BACKEND", "scripted")


def printed(capsys: pytest.CaptureFixture[str], args: Sequence[str], code: int = 0) -> Any:
    assert main([*args, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("scripted")
def test_the_commands_answer_in_json_and_keep_their_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    common = ["--text", str(ROOT / "LICENSE"), "--piece", "64", "--chunks", "2"]
    ppl = printed(capsys, ["eval", "perplexity", "starter", *common])
    assert ppl["starter"]["n_tokens"] == 2 * 31
    kl = printed(capsys, ["eval", "kl", "starter", "starter --ctx 512", *common])
    assert kl["variants"]["starter --ctx 512"]["mean"] == pytest.approx(0, abs=1e-9)
    cases = tmp_path / "cases.jsonl"
    cases.write_text('{"prompt": "hello", "max_tokens": 8}\n{"prompt": "x", "max_tokens": 4}\n')
    found = printed(capsys, ["eval", "regress", str(cases), "starter", "starter --ubatch 64"])
    assert found["summary"]["exact"] == 1.0
    votes = [*cases_and_sides(cases, "starter", "starter --ubatch 64"), "--seed", "1"]
    assert printed(capsys, votes)["same"] == 2
    runs = printed(capsys, ["bench", "ls"])
    assert [r["scenario"] for r in runs] == ["ab", "regress", "kl", "perplexity"]


def cases_and_sides(cases: Path, a: str, b: str) -> list[str]:
    return ["eval", "ab", str(cases), a, b]


@pytest.mark.usefixtures("scripted")
def test_an_evaluation_is_shown_again_as_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Tables and sentences, not the JSON that is kept."""
    cases = tmp_path / "cases.jsonl"
    cases.write_text('{"prompt": "hello", "max_tokens": 8, "expect": "no such word"}\n')
    text = ["--text", str(ROOT / "LICENSE"), "--piece", "64", "--chunks", "2"]
    commands = [
        ["eval", "perplexity", "starter", *text],
        ["eval", "kl", "starter", "starter --ctx 512", *text],
        ["eval", "regress", str(cases), "starter", "starter --ubatch 64"],
        [*cases_and_sides(cases, "starter", "starter --ubatch 64"), "--seed", "1"],
    ]
    for number, command in enumerate(commands, 1):
        assert main(command) == 0
        said = capsys.readouterr().out
        assert main(["bench", "show", str(number)]) == 0
        again = capsys.readouterr().out
        assert again.endswith(said)
        assert not again.startswith("{")
        assert printed(capsys, ["bench", "show", str(number)])["schema"] == "edgellm.eval/1"


@pytest.mark.usefixtures("scripted")
def test_a_set_that_breaks_ends_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The second configuration's context is too small for the prompt: an error, not an answer."""
    cases = tmp_path / "cases.jsonl"
    cases.write_text(json.dumps({"prompt": "word " * 700, "max_tokens": 4}) + "\n")
    args = ["eval", "regress", str(cases), "starter --ctx 2048", "starter --ctx 256"]
    found = printed(capsys, args, code=1)
    assert found["summary"]["broken"] == ["line 1"]


@pytest.mark.usefixtures("scripted")
def test_too_short_a_text_says_how_much_is_needed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("short")
    assert main(["eval", "perplexity", "starter", "--text", str(tmp_path / "t.txt")]) == 2
    assert "at least 1024 are needed" in capsys.readouterr().err
