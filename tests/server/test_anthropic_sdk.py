"""The official anthropic client against a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.server.conftest import Running

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = {"city": "Paris"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture
def client(scripted: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def real(starter: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=starter.url, api_key="none", max_retries=0) as opened:
        yield opened


def test_a_message_has_every_field_of_anthropics(client: Anthropic) -> None:
    message = client.messages.create(model="starter", max_tokens=5, messages=HELLO)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "starter")
    assert message.content[0].type == "text"
    assert message.content[0].text
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 5
    read = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + read > 5
    assert message._request_id


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    message = client.messages.create(
        model="starter", max_tokens=400, messages=HELLO, stop_sequences=["a", "e"]
    )
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence in ("a", "e")


def test_the_streaming_helper_gathers_the_same_message(client: Anthropic) -> None:
    with client.messages.stream(model="starter", max_tokens=6, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 6


def test_events_come_in_anthropics_order(client: Anthropic) -> None:
    events = list(
        client.messages.create(model="starter", max_tokens=4, messages=HELLO, stream=True)
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[1] == "content_block_start"
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]
    assert start.type == "message_start"
    assert start.message.content == []
    assert start.message.usage.input_tokens > 5


def test_counted_tokens_are_those_of_the_answer(client: Anthropic) -> None:
    conversation: dict[str, Any] = {"model": "starter", "messages": HELLO, "system": "Be short."}
    counted = client.messages.count_tokens(**conversation).input_tokens
    usage = client.messages.create(max_tokens=2, **conversation).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_the_async_client_streams(scripted: Running) -> None:
    async with (
        AsyncAnthropic(base_url=scripted.url, api_key="none") as client,
        client.messages.stream(model="starter", max_tokens=6, messages=HELLO) as stream,
    ):
        final = await stream.get_final_message()
    assert final.usage.output_tokens == 6


def test_tool_results_and_thinking_in_a_history_are_accepted(client: Anthropic) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather in Paris?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I call it.", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "get_weather",
                    "input": {"city": "Paris"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "Sunny"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    message = client.messages.create(
        model="starter", max_tokens=4, messages=messages, tools=[WEATHER]
    )
    assert message.content


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"model": "claude-9"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        (
            {"extra_body": {"temperature": "hot"}},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        (
            {"messages": [{"role": "user", "content": "word " * 5000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
    ],
)
def test_mistakes_are_the_sdks_own_errors(
    client: Anthropic, change: dict[str, Any], error: type[anthropic.APIStatusError], kind: str
) -> None:
    body = {"model": "starter", "messages": HELLO, "max_tokens": 2} | change
    with pytest.raises(error) as caught:
        client.messages.create(**body)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.request_id


def test_a_prompt_that_is_too_long_says_so_in_anthropics_words(client: Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048"):
        client.messages.create(model="starter", max_tokens=2, messages=messages)


def test_an_image_is_refused_with_words_a_person_understands(client: Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages: list[Any] = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match="image input is not supported"):
        client.messages.create(model="starter", max_tokens=2, messages=messages)


def test_the_model_list_reads_in_anthropics_shape(client: Anthropic) -> None:
    page = client.models.list()
    assert [model.id for model in page.data] == ["starter"]
    assert page.data[0].display_name == "starter"
    assert client.models.retrieve("starter").id == "starter"


@pytest.mark.model
def test_a_last_assistant_message_is_continued(real: Anthropic) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "The capital of France is"}]
    message = real.messages.create(model="starter", max_tokens=8, messages=messages)
    assert message.content[0].type == "text"
    assert message.content[0].text.lstrip().startswith("Paris")
