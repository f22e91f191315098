"""JSON Schema as people send it: relaxed for tools, promised or refused for answers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from edgellm.chat.schema import check, relax, response_schema
from edgellm.chat.tool_parsers.family import json_schema
from edgellm.engine.constrain import ConstraintFactory, Vocabulary, make_factory
from edgellm.errors import InvalidRequestError
from edgellm.request import Grammar, GrammarKind


@pytest.fixture(scope="module")
def factory() -> ConstraintFactory:
    tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]
    return make_factory(Vocabulary(tokens, frozenset({256}), (256,)))


def accepts(factory: ConstraintFactory, schema: Any, value: Any) -> bool:
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
    constraint = factory.compile(grammar)
    text = json.dumps(value).encode()
    if constraint.accepts(list(text)) < len(text):
        return False
    for byte in text:
        constraint.accept(byte)
    return constraint.can_stop


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


# schema, what it must still allow, what it must not (None: nothing tried)
KEPT: dict[str, tuple[Any, Any, Any]] = {
    "an unanchored pattern": (
        obj(a={"type": "string", "pattern": "\\d+"}),
        {"a": "x1y"},
        {"a": "xy"},
    ),
    "an anchored pattern": (
        obj(a={"type": "string", "pattern": "^\\d{2}$"}),
        {"a": "12"},
        {"a": "x12"},
    ),
    "a reference": (
        {**obj(a={"$ref": "#/$defs/n"}), "$defs": {"n": {"type": "integer"}}},
        {"a": 1},
        {"a": "x"},
    ),
    "recursion": (
        {**obj(a={"$ref": "#/$defs/t"}), "$defs": {"t": obj(next={"$ref": "#/$defs/t"})}},
        {"a": {"next": {"next": {}}}},
        {"a": {"next": 1}},
    ),
    "anyOf": (obj(a={"anyOf": [{"type": "string"}, {"type": "null"}]}), {"a": None}, {"a": 1}),
    "a format": (obj(a={"type": "string", "format": "date"}), {"a": "2026-01-31"}, {"a": "soon"}),
    "a format of a number": (obj(a={"type": "integer", "format": "int32"}), {"a": 1}, {"a": "1"}),
    "empty properties": ({"type": "object", "properties": {}}, {"any": 1}, [1]),
    "no properties": ({"type": "object"}, {"any": 1}, 1),
    "closed": ({**obj(a={}), "additionalProperties": False}, {"a": [1]}, {"b": 1}),
    "open": ({**obj(a={}), "additionalProperties": True}, {"b": 1}, 1),
    "values of a map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"x": 1},
        {"x": "1"},
    ),
    "required": ({**obj(a={}, b={}), "required": ["b"]}, {"b": 1}, {"a": 1}),
    "titles and examples": (
        {
            **obj(a={"type": "string", "title": "A", "examples": ["x"], "default": "y"}),
            "$schema": "x",
        },
        {"a": "x"},
        {"a": 1},
    ),
    "nullable": (obj(a={"type": "string", "nullable": True}), {"a": None}, {"a": 1}),
    "an enum": (obj(a={"enum": ["x", 1, None]}), {"a": None}, {"a": "y"}),
    "a constant": (obj(a={"const": {"k": [1]}}), {"a": {"k": [1]}}, {"a": {}}),
    "bounds": (obj(a={"type": "integer", "minimum": 3, "exclusiveMaximum": 5}), {"a": 4}, {"a": 5}),
    "allOf with a base": (
        {
            **obj(a={"allOf": [{"$ref": "#/$defs/Base"}, obj(b={"type": "integer"})]}),
            "$defs": {"Base": {**obj(id={"type": "string"}), "required": ["id"]}},
        },
        {"a": {"id": "x", "b": 1}},
        {"a": {"b": 1}},
    ),
    "oneOf by a constant": (
        obj(
            a={
                "oneOf": [
                    {**obj(kind={"const": "x"}, n={}), "required": ["kind"]},
                    {**obj(kind={"enum": ["y", "z"]}, n={}), "required": ["kind"]},
                ]
            }
        ),
        {"a": {"kind": "z"}},
        {"a": {"kind": "w"}},
    ),
    "oneOf by what is needed": (
        {
            **obj(a={"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}),
            "$defs": {
                "A": {**obj(x={"type": "integer"}), "required": ["x"]},
                "B": {**obj(y={"type": "integer"}), "required": ["y"]},
            },
        },
        {"a": {"y": 1}},
        {"a": {"z": 1}},
    ),
    "oneOf by type": (
        obj(a={"oneOf": [{"type": "string"}, {"type": "null"}]}),
        {"a": None},
        {"a": 1},
    ),
    "allOf": (
        {"type": "object", "allOf": [obj(a={"type": "string"}), obj(b={"type": "integer"})]},
        {"a": "x", "b": 1},
        {"a": 1},
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_can_be_enforced_is(factory: ConstraintFactory, name: str) -> None:
    schema, good, bad = KEPT[name]
    relaxed, warnings = relax(schema, "p")
    assert not warnings
    assert accepts(factory, relaxed, good)
    assert not accepts(factory, relaxed, bad)


# schema, what the relaxed one allows, where the warning points
RELAXED: dict[str, tuple[Any, Any, str]] = {
    "look-ahead": (
        obj(a={"type": "string", "pattern": "^(?!x).*$"}),
        {"a": "x"},
        "p.properties.a.pattern",
    ),
    "a word boundary": (
        obj(a={"type": "string", "pattern": "\\bx\\b"}),
        {"a": "y"},
        "p.properties.a.pattern",
    ),
    "an unknown format": (
        obj(a={"type": "string", "format": "binary"}),
        {"a": "x"},
        "p.properties.a.format",
    ),
    "not": (obj(a={"not": {"type": "string"}}), {"a": "x"}, "p.properties.a.not"),
    "oneOf that overlaps": (
        obj(a={"oneOf": [{"type": "number"}, {"type": "integer"}]}),
        {"a": 1},
        "p.properties.a.oneOf",
    ),
    "if and then": ({**obj(a={}), "if": {}, "then": {}}, {"a": 1}, "p.if"),
    "unique items": (
        obj(a={"type": "array", "uniqueItems": True}),
        {"a": [1, 1]},
        "p.properties.a.uniqueItems",
    ),
    "a distant reference": (obj(a={"$ref": "https://x.org/y"}), {"a": 1}, "p.properties.a.$ref"),
    "a lost reference": (obj(a={"$ref": "#/$defs/no"}), {"a": 1}, "p.properties.a.$ref"),
    "an unknown type": (obj(a={"type": "date"}), {"a": "x"}, "p.properties.a.type"),
    "required as a flag": (
        obj(a={"type": "string", "required": True}),
        {"a": "x"},
        "p.properties.a.required",
    ),
    "an empty enum": (obj(a={"enum": []}), {"a": 1}, "p.properties.a.enum"),
    "properties as a list": ({"type": "object", "properties": ["a"]}, {"a": 1}, "p.properties"),
    "a schema that is a text": (obj(a="string"), {"a": 1}, "p.properties.a"),
    "an unknown required name": (
        {**obj(a={}), "additionalProperties": False, "required": ["b"]},
        {"a": 1},
        "",
    ),
}


@pytest.mark.parametrize("name", RELAXED)
def test_what_cannot_be_enforced_in_a_tool_is_dropped_and_told(
    factory: ConstraintFactory, name: str
) -> None:
    schema, good, where = RELAXED[name]
    relaxed, warnings = relax(schema, "p")
    assert accepts(factory, relaxed, good)
    assert [w.split(":")[0] for w in warnings][:1] == ([where] if where else [])


@pytest.mark.parametrize("given", [None, [], "x", 1, {}, {"type": "string"}])
def test_a_tools_parameters_are_always_an_object(factory: ConstraintFactory, given: Any) -> None:
    relaxed, _ = relax(given, "p")
    assert accepts(factory, relaxed, {})


@pytest.mark.parametrize(
    ("alias", "value"), [("int", 1), ("str", "x"), ("list", []), ("bool", True)]
)
def test_types_named_as_in_python_are_understood(
    factory: ConstraintFactory, alias: str, value: Any
) -> None:
    relaxed, warnings = relax(obj(a={"type": alias}), "p")
    assert not warnings
    assert accepts(factory, relaxed, {"a": value})


def test_the_schema_of_the_caller_is_not_changed() -> None:
    schema = obj(a={"type": "str", "title": "x"})
    before = json.dumps(schema)
    relax(schema, "p")
    assert json.dumps(schema) == before


@pytest.mark.parametrize("name", [n for n, (_, _, where) in RELAXED.items() if where])
def test_an_answers_schema_is_refused_with_the_path(name: str) -> None:
    schema, _, where = RELAXED[name]
    with pytest.raises(InvalidRequestError) as caught:
        check(schema, "response_format.json_schema.schema")
    assert caught.value.message.startswith("$" + where.removeprefix("p"))
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("schema", [{"items": {}}, {"anyOf": [{}]}, {"properties": {"a": {}}}])
def test_a_bottomless_schema_is_refused(schema: dict[str, Any]) -> None:
    for _ in range(400):
        key = next(iter(schema))
        schema = {key: {"items": schema, "anyOf": [schema], "properties": {"a": schema}}[key]}
    for action in (relax, check):
        with pytest.raises(InvalidRequestError, match="too large"):
            action(schema, "p")


def test_text_needs_no_schema() -> None:
    assert response_schema(None) == (None, [])
    assert response_schema({"type": "text"}) == (None, [])


def test_json_object_is_any_object() -> None:
    assert response_schema({"type": "json_object"}) == ({"type": "object"}, [])


def test_json_schema_is_unwrapped() -> None:
    wrapped = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": obj(a={"type": "integer"})},
    }
    schema, _ = response_schema(wrapped)
    assert schema is not None
    assert schema["properties"] == {"a": {"type": "integer"}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": 1}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_wrong_response_format_names_its_part(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        response_schema(given)
    assert caught.value.param == param


def test_a_schema_that_is_not_strict_is_relaxed_with_a_warning() -> None:
    inner = {"name": "x", "strict": False, "schema": obj(a={"type": "string", "format": "odd"})}
    schema, warnings = response_schema({"type": "json_schema", "json_schema": inner})
    assert schema is not None
    assert schema["properties"] == {"a": {"type": "string"}}
    assert warnings == ["$.properties.a.format: the format 'odd' cannot be enforced"]


WORDS: dict[str, list[Any]] = {
    "type": ["string", "integer", "object", "array", "any", ["string", "null"], None, 5],
    "enum": [[], ["a", 1], [None], "a"],
    "const": [1, "a", None, {"a": 1}],
    "minLength": [0, 3, -1, "x", 2.5],
    "maxLength": [1, 10, None],
    "pattern": ["\\d+", "^a$", "(?=x)", "[", "a{2,1}", "\\p{L}+", 5],
    "format": ["date", "uuid", "x"],
    "minimum": [0, 5, "1", True],
    "exclusiveMinimum": [0, True],
    "multipleOf": [0, 0.1, -1],
    "minItems": [0, 5, -1],
    "maxItems": [0, 3],
    "required": [["a"], ["zz"], True, [1]],
    "additionalProperties": [True, False, {"type": "string"}],
    "minProperties": [1, 3],
    "maxProperties": [0, 1],
    "$ref": ["#", "#/$defs/x", "#/properties/a", "x"],
    "not": [{}],
    "nullable": [True],
}


def any_schema(chance: random.Random, depth: int = 0) -> Any:
    if chance.random() < 0.05:
        return chance.choice([True, False, None, "string", [], 5, {}])
    words = chance.sample(sorted(WORDS), chance.randrange(5))
    schema: dict[str, Any] = {word: chance.choice(WORDS[word]) for word in words}
    if depth < 3:
        if chance.random() < 0.5:
            names = chance.sample("abcd", chance.randrange(4))
            schema["properties"] = {name: any_schema(chance, depth + 1) for name in names}
        for word in ("items", "additionalProperties"):
            if chance.random() < 0.2:
                schema[word] = any_schema(chance, depth + 1)
        for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if chance.random() < 0.1:
                schema[word] = [any_schema(chance, depth + 1) for _ in range(chance.randrange(3))]
        if chance.random() < 0.1:
            schema["patternProperties"] = {
                chance.choice(["^x", "["]): any_schema(chance, depth + 1)
            }
    if depth == 0:
        schema["$defs"] = {"x": any_schema(chance, 2)}
    return schema


def test_any_schema_of_a_tool_can_be_enforced_once_relaxed(factory: ConstraintFactory) -> None:
    chance = random.Random(11)
    for _ in range(300):
        schema = any_schema(chance)
        relaxed, _ = relax(schema, "p")
        text = f"start: {json_schema(relaxed)}"
        try:
            factory.compile(Grammar(kind=GrammarKind.LARK, text=text))
        except InvalidRequestError as error:
            pytest.fail(f"{error}: {schema}")
