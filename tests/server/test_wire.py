"""Names on the wire become the engine's parameters; mistakes name their field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from edgellm.errors import InvalidRequestError
from edgellm.request import GrammarKind, Priority, SamplingParams
from edgellm.server.errors import Problem
from edgellm.server.http import decode
from edgellm.server.openapi import document
from edgellm.server.routes import ALL
from edgellm.server.wire.common import (
    SamplingFields,
    explicit_grammar,
    priority_of,
    sampling_params,
)
from edgellm.server.wire.openai import ChatBody

FIELDS = msgspec.json.Decoder(SamplingFields)
CHAT = msgspec.json.Decoder(ChatBody)


def sampling(max_tokens: int | None = None, **body: Any) -> SamplingParams:
    fields = decode(FIELDS, json.dumps(body).encode())
    return sampling_params(fields, SamplingParams(), max_tokens=max_tokens)


def test_what_is_not_given_is_the_servers_default() -> None:
    defaults = SamplingParams(temperature=0.1, seed=5)
    fields = decode(FIELDS, b"{}")
    assert sampling_params(fields, defaults, max_tokens=None) == defaults
    null = decode(FIELDS, b'{"temperature": null, "stop": null, "seed": null}')
    assert sampling_params(null, defaults, max_tokens=None) == defaults


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 7}, "top_k", 7),
        ({"seed": -1}, "seed", None),
        ({"seed": 3}, "seed", 3),
        ({"repetition_penalty": 1.2}, "repeat_penalty", 1.2),
        ({"repetition_penalty": 1.2, "repeat_penalty": 1.1}, "repeat_penalty", 1.1),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"stop": ""}, "stop", ()),
        ({"stop": []}, "stop", ()),
        ({"temperature": 1}, "temperature", 1.0),
        ({"ignore_eos": True}, "ignore_eos", True),
    ],
)
def test_other_names_and_values_mean_the_same(body: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(sampling(**body), name) == value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 5000]}, "stop"),
        ({"n": 0}, "n"),
        ({"top_k": -5}, "top_k"),
    ],
)
def test_values_out_of_range_name_their_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampling(**body)
    assert caught.value.param == param


def test_a_huge_count_is_no_limit_and_fits_the_frames_between_the_processes() -> None:
    assert sampling(max_tokens=10**30).max_tokens == 2**31 - 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"priority": "batch"}, Priority.BATCH),
        ({"priority": "INTERACTIVE"}, Priority.INTERACTIVE),
        ({"priority": 0}, Priority.INTERACTIVE),
        ({"priority": 99}, Priority.BATCH),
        ({"priority": -4}, Priority.INTERACTIVE),
        ({"service_tier": "flex"}, Priority.BATCH),
        ({"service_tier": "auto"}, Priority.NORMAL),
        ({}, Priority.NORMAL),
    ],
)
def test_priorities_by_name_number_and_service_tier(
    body: dict[str, Any], expected: Priority
) -> None:
    assert priority_of(decode(FIELDS, json.dumps(body).encode()), Priority.NORMAL) is expected


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"grammar": "root ::= x"}, GrammarKind.GBNF),
        ({"guided_grammar": "root ::= x"}, GrammarKind.GBNF),
        ({"guided_regex": "a+"}, GrammarKind.REGEX),
        ({"guided_choice": ["a", "b"]}, GrammarKind.JSON_SCHEMA),
        ({"json_schema": {"type": "object"}}, GrammarKind.JSON_SCHEMA),
        ({"guided_json": '{"type": "object"}'}, GrammarKind.JSON_SCHEMA),
    ],
)
def test_grammars_under_all_their_names(body: dict[str, Any], kind: GrammarKind) -> None:
    grammar = explicit_grammar(decode(FIELDS, json.dumps(body).encode()))
    assert grammar is not None
    assert grammar.kind is kind


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role"),
        (b"{}", "messages"),
        (b'{"messages": [], "max_tokens": 1.5}', "max_tokens"),
        (b'{"messages": [], "stream": "yes"}', "stream"),
        (b'{"messages": [], "messages": []}', "messages"),
    ],
)
def test_a_body_of_the_wrong_shape_names_the_field(body: bytes, param: str) -> None:
    with pytest.raises(Problem) as caught:
        decode(CHAT, body)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_unknown_fields_are_ignored_because_clients_send_many() -> None:
    assert decode(CHAT, b'{"messages": [], "something_new": {"a": [1]}}').messages == []


def test_the_openapi_document_lists_every_route_and_resolves_its_references() -> None:
    built = json.loads(document(ALL))
    assert built["openapi"] == "3.1.0"
    for route in ALL:
        operation = built["paths"][route.path][route.method.lower()]
        assert operation["summary"].endswith(".")
        assert ("requestBody" in operation) == (route.body is not None)
    ids = [op["operationId"] for path in built["paths"].values() for op in path.values()]
    assert len(ids) == len(set(ids))
    text = document(ALL).decode()
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in built["components"]["schemas"]
