"""Whatever a client sends as messages, tools or formats: a prompt, or an error that names it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from edgellm.chat import ChatModel, prepare_chat
from edgellm.chat.messages import merged, read_messages, system_in_user
from edgellm.errors import InvalidRequestError
from tests.chat.answers import answer_of

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))


def test_null_ids_are_filled_in_the_same_way_each_time() -> None:
    call = {"id": None, "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    read = read_messages(talk)
    assert [c["id"] for c in read[1]["tool_calls"]] == ["call_1_0", "call_1_1"]
    assert [m["tool_call_id"] for m in read[2:]] == ["call_1_0", "call_1_1"]
    assert [m["name"] for m in read[2:]] == ["f", "f"]
    assert read == read_messages(talk)


def test_results_find_their_calls_in_any_order() -> None:
    calls = [{"id": i, "function": {"name": f"f{i}"}} for i in "ab"]
    talk = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "content": "1"},
    ]
    read = read_messages(talk)
    assert [(m["tool_call_id"], m["name"]) for m in read[1:]] == [("b", "fb"), ("a", "fa")]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", {"input": [1]}),
        ("{", {"input": "{"}),
        (5, {"input": 5}),
    ],
)
def test_arguments_become_an_object(given: Any, read: Any) -> None:
    call = {"function": {"name": "f", "arguments": given}}
    [message] = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_the_old_function_call_is_understood() -> None:
    talk = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
    ]
    read = read_messages(talk)
    assert read[0]["tool_calls"][0]["function"]["name"] == "f"
    assert read[1]["role"] == "tool"


def test_the_messages_of_the_caller_are_not_changed() -> None:
    call = {"id": None, "function": {"name": "f", "arguments": "{}"}}
    talk = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = repr(talk)
    prepare_chat(ChatModel(), [{"role": "user", "content": "x"}, *talk])
    assert repr(talk) == before


def test_merging_leaves_calls_alone() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {}}}
    talk = [
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "assistant", "content": "y"},
    ]
    assert merged(talk) == talk


def test_a_system_prompt_without_a_user_becomes_one() -> None:
    assert system_in_user([{"role": "system", "content": "s"}]) == [
        {"role": "user", "content": "s"}
    ]


# Anything

VALUES: list[Any] = [None, True, 0, -1, 1e308, "", "x", "user", "{", "é\ud800", [], {}, [None]]
VALUES += ["system", "assistant", "tool", "function", "text", "<|im_end|>", "{{ 7 * 7 }}", "auto"]
KEYS = ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id"]
KEYS += ["tool_call_id", "parameters", "properties", "required", "a", "schema", "json_schema"]


def anything(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 4 or kind < 0.45:
        return chance.choice(VALUES)
    if kind < 0.65:
        return [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(KEYS): anything(chance, depth + 1) for _ in range(chance.randrange(5))}


def likely_message(chance: random.Random) -> Any:
    if chance.random() < 0.15:
        return anything(chance)
    roles = ["user", "assistant", "tool", "system", "developer"]
    message = {"role": chance.choice(roles), "content": chance.choice(["x", "", None, "y\nz"])}
    if chance.random() < 0.3:
        message[chance.choice(KEYS)] = anything(chance)
    if chance.random() < 0.3:
        function = {"name": "f", "arguments": chance.choice(['{"a": 1}', "{", {}, None])}
        message["tool_calls"] = [{"id": chance.choice(["i", None]), "function": function}]
    return message


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)
def test_anything_is_prepared_or_refused_by_name(path: Path) -> None:
    chance = random.Random(path.stem)
    model = ChatModel(templates={"default": path.read_text()}, bos_text="<s>", eos_text="</s>")
    n_prepared = 0
    for _ in range(300):
        messages = [likely_message(chance) for _ in range(chance.randrange(1, 5))]
        tool = {"type": "function", "function": {"name": "f", "parameters": anything(chance)}}
        tools = chance.choice([None, [tool], [tool], anything(chance)])
        wanted = {"type": "json_schema", "json_schema": {"schema": anything(chance)}}
        try:
            prepared = prepare_chat(
                model,
                messages,
                tools=tools,
                tool_choice=chance.choice(["auto", "required", None, anything(chance)]),
                response_format=chance.choice([None, None, wanted, {"type": "json_object"}]),
                template_kwargs=chance.choice([None, {"enable_thinking": False}]),
            )
        except InvalidRequestError:
            continue
        n_prepared += 1
        prepared.prompt.encode()
        if prepared.grammar is not None:
            prepared.grammar.text.encode()
        assert prepared.turn_starts == tuple(sorted(prepared.turn_starts))
        answer_of(prepared.parser, "any text")
    assert n_prepared > 30
