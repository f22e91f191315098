"""Structured output and tools through the official SDKs' helpers, with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic, beta_tool
from openai import OpenAI
from pydantic import BaseModel

from tests.server.conftest import Running

pytestmark = pytest.mark.model

ASK: list[Any] = [{"role": "user", "content": "Name a city and how many people live there."}]
WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": WEATHER_SCHEMA,
    },
}


class City(BaseModel):
    name: str
    is_capital: bool


@pytest.fixture
def client(starter: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=starter.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def claude(starter: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=starter.url, api_key="none", max_retries=0) as opened:
        yield opened


def test_parse_gives_the_object_for_chat(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="starter", messages=ASK, response_format=City, max_tokens=120
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_parse_gives_the_object_for_responses(client: OpenAI) -> None:
    response = client.responses.parse(
        model="starter", input="Name a city.", text_format=City, max_output_tokens=120
    )
    assert isinstance(response.output_parsed, City)


def test_the_streaming_helper_parses(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="starter", messages=ASK, response_format=City, max_tokens=120
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


def test_json_object_is_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="starter",
        messages=[{"role": "user", "content": "Reply in JSON with one key, a."}],
        response_format={"type": "json_object"},
        max_tokens=60,
        stop=["\n\n\n"],
    )
    content = answer.choices[0].message.content or ""
    assert content.lstrip().startswith("{")


def test_a_schema_that_cannot_be_kept_is_400_with_the_path(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "hiccup"}}, "required": ["a"]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="starter",
            messages=ASK,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema, "strict": True},
            },
            max_tokens=8,
        )
    assert "a" in (caught.value.param or "") + caught.value.message


@pytest.mark.parametrize(
    "field",
    [
        {"grammar": "root ::= this is (not valid"},
        {"json_schema": {"type": 5}},
        {"guided_regex": "((("},
    ],
)
def test_a_grammar_that_is_none_is_400(client: OpenAI, field: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="starter", messages=ASK, max_tokens=8, extra_body=field
        )


def test_llama_servers_own_grammar_fields_constrain(client: OpenAI) -> None:
    for field, text in (
        ({"grammar": 'root ::= "abc"'}, "abc"),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"guided_choice": ["yes"]}, "yes"),
    ):
        answer = client.chat.completions.create(
            model="starter", messages=ASK, max_tokens=12, extra_body=field
        )
        assert text in (answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_required_tool_call_is_made_and_its_arguments_fit(client: OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="starter", messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=80
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    assert call.type == "function"
    assert call.id
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_a_streamed_tool_call_begins_with_id_name_and_empty_arguments(client: OpenAI) -> None:
    deltas = []
    finish = None
    for chunk in client.chat.completions.create(
        model="starter",
        messages=ASK,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        stream=True,
    ):
        deltas += chunk.choices[0].delta.tool_calls or []
        finish = chunk.choices[0].finish_reason or finish
    first, *rest = deltas
    assert first.index == 0
    assert first.id
    assert first.type == "function"
    assert first.function is not None
    assert (first.function.name, first.function.arguments) == ("get_weather", "")
    assert all(d.id is None for d in rest)
    arguments = "".join(d.function.arguments or "" for d in rest if d.function)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert finish == "tool_calls"


def test_null_ids_in_a_history_are_filled_in(client: OpenAI) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = {"id": None, "type": "function", "function": function}
    messages: list[Any] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": None, "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model="starter", messages=messages, tools=[WEATHER], max_tokens=8
    )
    assert answer.choices[0].finish_reason


def test_responses_make_function_calls_with_every_event(client: OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "name": "get_weather",
        "parameters": WEATHER_SCHEMA,
        "strict": True,
    }
    events = list(
        client.responses.create(
            model="starter",
            input="Weather?",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=80,
            stream=True,
        )
    )
    kinds = [event.type for event in events]
    for kind in (
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ):
        assert kind in kinds
    last = events[-1]
    assert last.type == "response.completed"
    call = last.response.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    again = client.responses.create(
        model="starter",
        previous_response_id=last.response.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        max_output_tokens=8,
    )
    assert again.output


def test_tools_that_openai_runs_are_left_out_beside_functions_and_refused_alone(
    client: OpenAI,
) -> None:
    function: Any = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    hosted: Any = {"type": "web_search"}
    more: dict[str, Any] = {"model": "starter", "input": "hi", "max_output_tokens": 16}
    answer = client.responses.create(tools=[hosted, function], **more)
    assert "'web_search' is not supported" in answer.to_dict()["warnings"][0]  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(tools=[hosted], **more)


def test_tools_that_anthropic_runs_are_left_out_beside_others_and_refused_alone(
    claude: Anthropic,
) -> None:
    own: Any = {"name": "f", "input_schema": {"type": "object"}}
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    more: dict[str, Any] = {
        "model": "starter",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
    }
    assert claude.messages.create(tools=[hosted, own], **more).content
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        claude.messages.create(tools=[hosted], **more)


def test_claudes_tools_are_called_whole_and_streamed(claude: Anthropic) -> None:
    tool: Any = {"name": "get_weather", "input_schema": WEATHER_SCHEMA}
    asked: dict[str, Any] = {
        "model": "starter",
        "max_tokens": 80,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "get_weather"},
    }
    message = claude.messages.create(**asked)
    block = message.content[-1]
    assert block.type == "tool_use"
    assert block.id
    assert block.input["city"] in ("Paris", "Rome")
    assert message.stop_reason == "tool_use"
    with claude.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert final.content[-1].type == "tool_use"
    assert final.content[-1].input["city"] in ("Paris", "Rome")


def test_the_tool_runner_runs_a_tool_and_gives_its_result_back(claude: Anthropic) -> None:
    called = []

    @beta_tool
    def get_time(city: str) -> str:
        """The time in a city.

        Args:
            city: The city.
        """
        called.append(city)
        return "noon"

    runner = claude.beta.messages.tool_runner(
        model="starter",
        max_tokens=100,
        tools=[get_time],
        tool_choice={"type": "any"},
        messages=[{"role": "user", "content": "What time is it in Paris?"}],
        max_iterations=2,
    )
    messages = list(runner)
    assert called
    assert len(messages[0].content) >= 1
    assert messages[0].stop_reason == "tool_use"
    assert len(messages) == 2


def test_a_thread_that_is_not_stored_is_not_found_in_the_sdks_words(claude: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.beta.messages.create(
            model="starter",
            max_tokens=4,
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"thread": {"type": "continue", "previous_message_id": "msg_none"}},
        )
    assert caught.value.error_code == "thread_not_found"
