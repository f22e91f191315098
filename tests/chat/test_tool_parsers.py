# ruff: noqa: E501  (recorded answers are not wrapped)
"""Each family's calls, as models wrote them, however the text is cut; and its grammar."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from edgellm.chat.deltas import ContentDelta, ToolArgsDelta, ToolCallStart
from edgellm.chat.reasoning import DEFAULT
from edgellm.chat.tool_parsers import FAMILIES, GENERIC, Family, choose, generic
from edgellm.chat.tool_parsers import deepseek as deepseek_module
from edgellm.engine.constrain import Constraint, ConstraintFactory, Vocabulary, make_factory
from edgellm.request import Grammar, GrammarKind
from tests.chat.answers import TOOLS, answer_of, every_cut, parser_of

BY_NAME = {family.name: family for family in FAMILIES}
PARIS = ("get_weather", {"city": "Paris"})
PARIS_2 = ("get_weather", {"city": "Paris", "days": 2})
NOTE = ("save-note", {"text": 'a "b"\n<c> é', "tags": ["x", 1]})
PING = ("ping", {})

# family, what the model wrote, the content it should leave, the calls it makes
SAMPLES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [PARIS],
    ),
    (
        "hermes",
        "Let me look.\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n<tool_call>\n'
        '{"name": "save-note", "arguments": {"text": "a \\"b\\"\\n<c> \\u00e9", "tags": ["x", 1]}}\n</tool_call>',
        "Let me look.",
        [PARIS_2, NOTE],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
        "",
        [PARIS],
    ),
    ("hermes", '<tool_call>\n{"name": "ping"}\n</tool_call>', "", [PING]),
    ("hermes", '<tool_call>\n{"name": "ping", "arguments": null}\n</tool_call>', "", [PING]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        "",
        [PARIS],
    ),
    ("hermes", '{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}</tool_call>',
        "",
        [PARIS],
    ),
    (
        "hermes",
        "Use <tool_call> to call, says the manual.",
        "Use <tool_call> to call, says the manual.",
        [],
    ),
    ("hermes", "1 < 2 and <tool_ is nothing", "1 < 2 and <tool_ is nothing", []),
    ("hermes", '{"answer": 42, "name": "x"}', '{"answer": 42, "name": "x"}', []),
    ("hermes", '{"name": "Bob", "arguments": []}', '{"name": "Bob", "arguments": []}', []),
    (
        "qwen-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "",
        [PARIS_2],
    ),
    (
        "qwen-coder",
        'I save it.\n<function=save-note>\n<parameter=text>\na "b"\n<c> é\n</parameter>\n<parameter=tags>\n["x", 1]\n</parameter>\n</function>\n</tool_call>',
        "I save it.",
        [NOTE],
    ),
    ("qwen-coder", "<tool_call>\n<function=ping>\n</function>\n</tool_call>", "", [PING]),
    (
        "qwen-coder",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call><tool_call><function=ping></function></tool_call>",
        "",
        [PARIS, PING],
    ),
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "",
        [PARIS_2],
    ),
    ("glm", "<tool_call>ping</tool_call>", "", [PING]),
    (
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "",
        [PARIS],
    ),
    ("llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (
        "llama",
        '\n\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        "",
        [PARIS_2],
    ),
    (
        "llama",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [PARIS],
    ),
    ("llama", '<|python_tag|>get_weather.call(city="Paris", days=2)', "", [PARIS_2]),
    (
        "llama",
        '{"name": "ping", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [PING, PARIS],
    ),
    ("llama", '{"temperature": 20}', '{"temperature": 20}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdef123"}]',
        "",
        [PARIS],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "ping", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "",
        [PING, PARIS],
    ),
    ("mistral-args", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    (
        "mistral-args",
        'Sure.[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{"city": "Paris"}[TOOL_CALLS]ping[ARGS]{}',
        "Sure.",
        [PARIS, PING],
    ),
    ("mistral-args", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", [PARIS]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Weather, then.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        "",
        [PARIS],
    ),
    (
        "harmony",
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Paris"}',
        "",
        [PARIS],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.ping<|message|>{}<|call|>",
        "I will look.",
        [PING],
    ),
    ("harmony", "<|channel|>final<|message|>It is 20 < 30.<|return|>", "It is 20 < 30.", []),
    ("harmony", "Plain text", "Plain text", []),
    (
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "",
        [PARIS, PING],
    ),
    (
        "deepseek-v3.1",
        "Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Wait.",
        [PARIS, PING],
    ),
    (
        "deepseek-dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
        [PARIS_2],
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
        "",
        [PARIS, PING],
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
        "",
        [PARIS_2],
    ),
    (
        "gemma4",
        '<|tool_call>call:save-note{text:<|"|>a "b"\n<c> é<|"|>,tags:[<|"|>x<|"|>,1]}<tool_call|><|tool_call>call:ping{}<tool_call|>',
        "",
        [NOTE, PING],
    ),
    (
        "function-gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        "",
        [PARIS],
    ),
    (
        "command",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
        "",
        [PARIS],
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "",
        [PARIS],
    ),
    (
        "phi",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        "",
        [PARIS],
    ),
    (
        "nemotron",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "ping", "arguments": {}}]</TOOLCALL>',
        "",
        [PARIS, PING],
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.ping:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [PARIS, PING],
    ),
    (
        "pythonic",
        '<|tool_call_start|>[get_weather(city="Paris", days=2), ping()]<|tool_call_end|>It is',
        "It is",
        [PARIS_2, PING],
    ),
    (
        "pythonic",
        "<|tool_call_start|>[f(x=open('a'))]<|tool_call_end|>",
        "<|tool_call_start|>[f(x=open('a'))]<|tool_call_end|>",
        [],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), SAMPLES)
def test_a_recorded_answer_reads_the_same_however_it_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    whole = answer_of(parser_of(BY_NAME[name]), [text])
    assert whole.content == content
    assert whole.values == calls
    for pieces in every_cut(text):
        assert answer_of(parser_of(BY_NAME[name]), pieces).summary == whole.summary


def test_every_family_has_a_sample() -> None:
    assert {name for name, *_ in SAMPLES} == set(BY_NAME)


def test_a_call_streams_as_it_is_written() -> None:
    parser = parser_of(GENERIC)
    assert parser.feed('<tool_call>\n{"name": "get_weather", ') == []
    started = parser.feed('"arguments": {"ci')
    assert isinstance(started[0], ToolCallStart)
    assert (started[0].index, started[0].name) == (0, "get_weather")
    assert started[1:] == [ToolArgsDelta(0, '{"ci')]
    assert parser.feed('ty": "P') == [ToolArgsDelta(0, 'ty": "P')]


def test_text_streams_at_once_where_nothing_can_begin() -> None:
    parser = parser_of(GENERIC)
    assert parser.feed("Hello") == [ContentDelta("Hello")]
    assert parser.feed(" wor") == [ContentDelta(" wor")]


def test_text_arguments_stream_in_the_tagged_formats_too() -> None:
    parser = parser_of(BY_NAME["qwen-coder"])
    parser.feed("<tool_call>\n<function=save-note>\n<parameter=text>\nDear")
    assert parser.feed(" all") == [ToolArgsDelta(0, " all")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
    ],
)
def test_a_cut_call_is_told(text: str) -> None:
    parser = parser_of(GENERIC)
    answer = answer_of(parser, [text])
    assert answer.calls[0][0] == "get_weather"
    assert answer.calls[0][1].endswith("Par")
    assert any("inside a tool call" in warning for warning in parser.warnings)


def test_broken_arguments_end_with_their_tag() -> None:
    text = '<tool_call>{"name": "ping", "arguments": {"a": </tool_call> and on'
    answer = answer_of(parser_of(GENERIC), [text])
    assert answer.calls == [("ping", '{"a": ')]
    assert answer.content == "and on"


def test_thinking_about_a_call_is_no_call() -> None:
    text = "<think>I could write <tool_call>{...}</think>No need."
    for pieces in every_cut(text):
        answer = answer_of(parser_of(GENERIC, thinking=DEFAULT), pieces)
        assert answer.summary == ("No need.", "I could write <tool_call>{...}", [])


def test_a_model_told_in_the_generic_way_may_still_use_its_own() -> None:
    family = generic(deepseek_module.V31)
    own = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    told = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    assert answer_of(parser_of(family), [own]).values == [PING]
    assert answer_of(parser_of(family), [told]).values == [PING]


# Any text at all

PIECES = sorted(
    {
        *(tag for family in FAMILIES for tag in family.begins),
        *("</tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", "<think>"),
        *("</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", "ping"),
        *("[CALL_ID]", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|message|>", "<|channel|>"),
        *("<|start|>", "<|end|>", "assistant", "analysis", "final", "to=functions.ping", "\\"),
        *('{"name": "ping", "arguments": {', "}}", "}", "{", "[", "]", '"', ":", ",", "<", ">"),
        *("\n", " ", "a", "é", "get_weather", "call:", '<|"|>', "1", "null", "(", ")", "="),
        *(
            '<invoke name="ping">',
            '<parameter name="city">',
            "</invoke>",
            "<tool_call|>",
            "```json",
        ),
    }
)


@pytest.mark.parametrize("family", [None, *FAMILIES], ids=lambda f: f.name if f else "none")
def test_any_text_is_read_without_an_error_and_the_same_in_pieces(family: Family | None) -> None:
    chance = random.Random(f"seed {family.name if family else ''}")
    for _ in range(150):
        text = "".join(chance.choices(PIECES, k=chance.randrange(1, 25)))
        if family and family.begins and chance.random() < 0.5:
            text = family.begins[0] + text
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        is_open = chance.random() < 0.2
        whole = answer_of(parser_of(family, thinking=DEFAULT, is_open=is_open), [text])
        cut = answer_of(parser_of(family, thinking=DEFAULT, is_open=is_open), pieces)
        letters = answer_of(parser_of(family, thinking=DEFAULT, is_open=is_open), text)
        assert whole.summary == cut.summary == letters.summary, (text, pieces)


# Grammars

MARKERS = sorted(
    {
        *(tag for family in FAMILIES for tag in family.begins if tag != "<function="),
        *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "[ARGS]", "<|end|>"),
        *("<|message|>", "<|channel|>", "<|start|>", "<|constrain|>", "<|tool_call_end|>", '<|"|>'),
        *("<tool_call|>", "<|END_ACTION|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_argument_begin|>",),
    }
)


def byte_vocabulary(*, control: bool) -> Vocabulary:
    """Every byte a token, and the markers as control tokens or not at all."""
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]
    special = {256}
    if control:
        special |= set(range(257, 257 + len(MARKERS)))
        tokens += [m.encode() for m in MARKERS]
    return Vocabulary(tokens, frozenset(special), (256,))


@pytest.fixture(scope="module", params=[True, False], ids=["control tokens", "spelled"])
def factory(request: pytest.FixtureRequest) -> ConstraintFactory:
    return make_factory(byte_vocabulary(control=request.param))


def write_randomly(factory: ConstraintFactory, family: Family, *, parallel: bool, seed: int) -> str:
    """A text of the grammar, written by a model that likes to end strings."""
    chance = random.Random(seed)
    text = f"start: {family.leads_with} calls\n{family.rules(TOOLS, parallel)}\n"
    constraint = factory.compile(Grammar(kind=GrammarKind.LARK, text=text))
    out = b""
    for _ in range(4000):
        if constraint.is_finished or (constraint.can_stop and chance.random() < 0.6):
            return out.decode("utf-8", "replace")
        if chance.random() < 0.1 and _close(constraint, ENDS.get(family.name, ()), (end := [])):
            out += bytes(end)
            continue
        allowed = [i for i in constraint.allowed(100_000) or () if i not in (256,)]
        liked = (
            [i for i in allowed if i > 256 or chr(i) in '"}]<pca0,:']
            if chance.random() < 0.7
            else []
        )
        plain = [i for i in allowed if i > 256 or 32 <= i < 127]
        picked = chance.choice(allowed if len(allowed) < 9 else liked or plain or allowed)
        constraint.accept(picked)
        out += factory.vocabulary.tokens[picked]
    pytest.fail(f"no end: {out[-200:]!r}")


ENDS = {
    "qwen-coder": ("</parameter>",),
    "minimax": ("</parameter>",),
    "deepseek-dsml": ("</｜DSML｜parameter>",),
}


def _close(constraint: Constraint, ends: Iterable[str], out: list[int]) -> bool:
    """Write an end of a text argument when one fits: chance alone would never."""
    for end in ends:
        ids = list(end.encode())
        if constraint.accepts(ids) == len(ids):
            for i in ids:
                constraint.accept(i)
            out += ids
            return True
    return False


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_whatever_the_grammar_lets_through_is_read_as_calls(
    factory: ConstraintFactory, family: Family
) -> None:
    for seed in range(8):
        text = write_randomly(factory, family, parallel=False, seed=seed)
        answer = answer_of(parser_of(family), [text])
        assert len(answer.values) == 1, text
        name, arguments = answer.values[0]
        tool = next(t for t in TOOLS if t.name == name)
        assert set(tool.required) <= set(arguments), text
        assert set(arguments) <= set(tool.properties)
        assert not answer.content


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_parallel_calls_are_allowed_or_not(factory: ConstraintFactory, family: Family) -> None:
    counts = {
        parallel: {
            len(
                answer_of(
                    parser_of(family),
                    [write_randomly(factory, family, parallel=parallel, seed=seed)],
                ).calls
            )
            for seed in range(10)
        }
        for parallel in (False, True)
    }
    assert counts[False] == {1}
    assert max(counts[True]) > 1 or family.name == "harmony"  # one call a message there


SIGNED = {
    "qwen-coder": "<function= <parameter= <tool_call>",
    "hermes": "<tool_call>",
    "glm": "<tool_call> <arg_key>",
    "mistral": "[TOOL_CALLS]",
    "mistral-args": "[TOOL_CALLS] [ARGS]",
    "harmony": "<|channel|> <|message|>",
}


@pytest.mark.parametrize("name", SIGNED)
def test_a_family_is_known_by_its_template(name: str) -> None:
    family = choose(SIGNED[name])
    assert family is not None
    assert family.name == name


def test_a_template_without_calls_has_no_family_unless_the_architecture_tells() -> None:
    assert choose("<|im_start|>") is None
    lfm = choose("<|im_start|>", "lfm2moe")
    assert lfm is not None
    assert lfm.name == "pythonic"
