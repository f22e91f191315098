"""The official openai client against a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.server.conftest import Running

HELLO: list[Any] = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]


ROLE = "messages[0].role"
VOWELS = ["a", "e", "i", "o"]  # ends every made-up answer early, and by itself


@pytest.fixture
def client(scripted: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def real(starter: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=starter.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_a_chat_completion_has_every_field_of_openais(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="starter", messages=HELLO, max_tokens=5)
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.created > 1_700_000_000
    assert answer.model == "starter"
    assert answer.system_fingerprint is not None
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + 5
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_a_second_prompt_with_the_same_start_reports_cached_tokens(fresh: Running) -> None:
    messages: list[Any] = [{"role": "user", "content": "the same long beginning " * 20}]
    with OpenAI(base_url=fresh.url + "/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(model="starter", messages=messages, max_tokens=2)
        again = client.chat.completions.create(model="starter", messages=messages, max_tokens=2)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 20


def test_a_stream_is_role_then_content_then_finish_then_usage(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="starter",
            messages=HELLO,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    first, *middle, finish, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert not first.choices[0].delta.content
    assert all(chunk.choices[0].delta.content for chunk in middle)
    assert all(chunk.choices[0].finish_reason is None for chunk in middle)
    assert all(chunk.usage is None for chunk in [first, *middle, finish])
    assert finish.choices[0].finish_reason == "length"
    assert finish.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 4


def test_without_include_usage_no_chunk_has_usage_or_empty_choices(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model="starter", messages=HELLO, max_tokens=4, stream=True)
    )
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


@pytest.mark.model
def test_streamed_and_whole_text_are_the_same_at_temperature_0(real: OpenAI) -> None:
    same: dict[str, Any] = {
        "model": "starter",
        "messages": HELLO,
        "max_tokens": 24,
        "temperature": 0,
        "seed": 3,
    }
    whole = real.chat.completions.create(**same).choices[0].message.content
    chunks = real.chat.completions.create(stream=True, **same)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole
    assert "Paris" in streamed


def test_n_choices_have_their_own_indexes(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="starter", messages=HELLO, max_tokens=3, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9
    finished = set()
    for chunk in client.chat.completions.create(
        model="starter", messages=HELLO, max_tokens=3, n=3, stream=True
    ):
        if chunk.choices[0].finish_reason:
            finished.add(chunk.choices[0].index)
    assert finished == {0, 1, 2}


def test_logprobs_cover_the_whole_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="starter", messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert len(entries) == 6
    assert "".join(e.token for e in entries) == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token
        assert len(entry.top_logprobs) == 2


def test_streamed_logprobs_cover_the_whole_text(client: OpenAI) -> None:
    text = tokens = ""
    for chunk in client.chat.completions.create(
        model="starter", messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=1, stream=True
    ):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        if choice.logprobs is not None:
            tokens += "".join(e.token for e in choice.logprobs.content or [])
    assert text == tokens


def test_completions_take_several_prompts_and_token_ids(client: OpenAI) -> None:
    answer = client.completions.create(model="starter", prompt=["one", "two"], max_tokens=3, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.object == "text_completion"
    ids = client.completions.create(model="starter", prompt=[[5, 6, 7], [8, 9]], max_tokens=2)
    assert len(ids.choices) == 2


def test_echo_returns_the_prompt_before_the_text(client: OpenAI) -> None:
    answer = client.completions.create(model="starter", prompt="one two", max_tokens=2, echo=True)
    assert answer.choices[0].text.startswith("one two")


def test_streamed_completions_end_with_a_finish_chunk_and_usage(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="starter",
            prompt="one",
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "length"
    assert "".join(c.choices[0].text for c in chunks[:-1])


def test_the_model_list_and_one_model(client: OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["starter"]
    one = client.models.retrieve("starter")
    assert one.owned_by == "edgellm"
    assert one.object == "model"


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, None),
        ({"max_tokens": -2}, openai.BadRequestError, "max_tokens"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"temperature": 99}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            openai.BadRequestError,
            "messages[0].role",
        ),
    ],
)
def test_mistakes_are_the_sdks_own_errors_with_the_parameter(
    client: OpenAI, change: dict[str, Any], error: type[openai.APIStatusError], param: str | None
) -> None:
    body = {"model": "starter", "messages": HELLO, "max_tokens": 2} | change
    with pytest.raises(error) as caught:
        client.chat.completions.create(**body)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"max_tokens": 2, "max_completion_tokens": 2, "store": True, "metadata": {"a": "b"}},
        {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]},
        {"prediction": {"type": "content", "content": "x"}, "service_tier": "auto", "user": "u"},
    ],
)
def test_what_editors_send_without_meaning_it_is_no_mistake(
    client: OpenAI, more: dict[str, Any]
) -> None:
    body = {"model": "starter", "messages": HELLO, "max_tokens": 2} | more
    assert client.chat.completions.create(**body).choices[0].message.content


def test_a_prompt_over_the_context_says_so_with_both_counts(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="starter", messages=messages)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in caught.value.message
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="starter", messages=messages, stream=True)


async def test_eight_async_streams_finish_and_one_closed_early_harms_none(
    scripted: Running,
) -> None:
    async with AsyncOpenAI(base_url=scripted.url + "/v1", api_key="none") as client:

        async def run(stop_early: bool) -> int:
            stream = await client.chat.completions.create(
                model="starter",
                messages=HELLO,
                max_tokens=40,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            n = 0
            async for chunk in stream:
                n += bool(chunk.choices and chunk.choices[0].delta.content)
                if stop_early and n == 3:
                    await stream.close()
                    break
            return n

        counts = await asyncio.gather(*(run(i == 0) for i in range(8)))
    assert counts[0] == 3
    assert counts[1:] == [40] * 7


def test_the_streaming_helper_gathers_the_message(client: OpenAI) -> None:
    with client.chat.completions.stream(model="starter", messages=HELLO, stop=VOWELS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "chunk" in kinds
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content is not None


def test_responses_whole_and_continued(client: OpenAI) -> None:
    first = client.responses.create(model="starter", input="My name is Ada.", max_output_tokens=5)
    assert first.id.startswith("resp_")
    assert first.output[0].type == "message"
    assert first.output_text
    assert first.status == "incomplete"
    assert first.incomplete_details is not None
    second = client.responses.create(
        model="starter", input="Who am I?", previous_response_id=first.id, max_output_tokens=5
    )
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).id == first.id
    assert client.responses.input_items.list(first.id).data[0].type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="starter", input="x", previous_response_id=first.id)


def test_a_response_that_is_not_stored_cannot_be_continued(client: OpenAI) -> None:
    first = client.responses.create(
        model="starter", input="hello", store=False, max_output_tokens=2
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_response_events_are_numbered_and_end_with_the_whole_response(client: OpenAI) -> None:
    events = list(
        client.responses.create(model="starter", input="hello", stream=True, max_output_tokens=6)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text


def test_the_responses_streaming_helper_works(client: OpenAI) -> None:
    with client.responses.stream(
        model="starter", input="hello", extra_body={"stop": VOWELS}
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.status == "completed"


@pytest.mark.model
def test_real_text_over_every_generating_endpoint(real: OpenAI) -> None:
    chat = real.chat.completions.create(model="starter", messages=HELLO, max_tokens=20)
    assert "Paris" in (chat.choices[0].message.content or "")
    text = real.completions.create(model="starter", prompt="The capital of France is", max_tokens=8)
    assert "Paris" in text.choices[0].text
    response = real.responses.create(
        model="starter",
        instructions="You answer in one short sentence.",
        input="What is the capital of France?",
        max_output_tokens=20,
    )
    assert "Paris" in response.output_text


@pytest.mark.model
def test_a_stop_string_is_never_shown(real: OpenAI) -> None:
    answer = real.chat.completions.create(
        model="starter", messages=HELLO, max_tokens=30, stop=["Paris"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" not in (answer.choices[0].message.content or "")


@pytest.mark.model
def test_a_prompt_is_scored_without_generating(real: OpenAI) -> None:
    prompt = "The capital of France is Paris"
    answer = real.completions.create(
        model="starter", prompt=prompt, max_tokens=0, echo=True, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text == prompt == "".join(logprobs.tokens or [])
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert [prompt[at] for at in logprobs.text_offset or []] == [
        t[0] for t in logprobs.tokens or []
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.model
def test_the_token_that_ends_an_answer_has_no_logprobs_entry(real: OpenAI) -> None:
    answer = real.chat.completions.create(
        model="starter",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=40,
        logprobs=True,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert "".join(e.token for e in choice.logprobs.content or []) == choice.message.content
