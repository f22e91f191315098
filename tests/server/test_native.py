"""Embeddings, rerank, and llama-server's own endpoints."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from edgellm import __version__
from edgellm.config import PlanSettings, Settings
from edgellm.engine.info import EngineOptions
from tests.server.conftest import Running

TEXT = "I believe the meaning of life is"


@pytest.fixture(scope="module")
def embedder() -> Iterator[Running]:
    """The starter, loaded to embed."""
    plan = PlanSettings(ctx=1024, parallel=4, embeddings=True, pooling="mean")
    with Running(backend="llama", engine=EngineOptions(), settings=Settings(plan=plan)) as running:
        yield running


@pytest.fixture(scope="module")
def scorer() -> Iterator[Running]:
    """A scripted model, loaded to score."""
    plan = PlanSettings(ctx=1024, parallel=4, embeddings=True, pooling="rank")
    with Running(settings=Settings(plan=plan)) as running:
        yield running


@pytest.mark.model
def test_the_sdk_gets_vectors_of_length_one_in_the_inputs_order(embedder: Running) -> None:
    with OpenAI(base_url=embedder.url + "/v1", api_key="none") as client:
        both = client.embeddings.create(model="starter", input=[TEXT, "another"])
        alone = client.embeddings.create(model="starter", input="another")
        floats = client.embeddings.create(model="starter", input=TEXT, encoding_format="float")
    assert [item.index for item in both.data] == [0, 1]
    assert both.usage.prompt_tokens == both.usage.total_tokens > 4
    for item in both.data:
        assert math.isclose(sum(x * x for x in item.embedding), 1, abs_tol=1e-3)
    assert both.data[1].embedding == pytest.approx(alone.data[0].embedding, abs=1e-3)
    # The SDK asks for base64 unless told otherwise.
    assert both.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-3)


@pytest.mark.model
def test_base64_fewer_dimensions_and_every_shape_of_input(embedder: Running) -> None:
    with embedder.client() as client:

        def embed(**body: Any) -> list[Any]:
            answer = client.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            return [item["embedding"] for item in answer.json()["data"]]

        (packed,) = embed(input=TEXT, encoding_format="base64")
        (plain,) = embed(input=TEXT)
        unpacked = struct.unpack(f"{len(plain)}f", base64.b64decode(packed))
        assert unpacked == pytest.approx(plain, abs=1e-6)
        (short,) = embed(input=TEXT, dimensions=16)
        assert len(short) == 16
        assert math.isclose(sum(x * x for x in short), 1, abs_tol=1e-6)
        assert len(embed(input=[5, 6, 7])) == 1
        assert len(embed(input=[[5, 6], "text", [7, "and text"]])) == 3
        assert len(embed(input=["a", {"prompt_string": "b"}])) == 2
        parts = {"content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
        one, other = embed(input=["hello", parts])
        assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": ""},
        {"input": [[]]},
        {"input": "x", "dimensions": 0},
        {"input": "x", "dimensions": 10**6},
        {"input": "x", "encoding_format": "hex"},
        {"input": {"content": [{"type": "image_url"}]}},
        {"input": [-1]},
        {"input": "word " * 3000},
    ],
)
def test_inputs_that_cannot_be_embedded_are_400(embedder: Running, body: dict[str, Any]) -> None:
    with embedder.client() as client:
        answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_model_that_embeds_does_not_chat_and_one_that_chats_does_not_embed(
    embedder: Running, http: httpx.Client
) -> None:
    with embedder.client() as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ):
            assert client.post(path, json=body).status_code == 400
    assert http.post("/v1/embeddings", json={"input": "x"}).status_code == 400
    assert http.post("/v1/rerank", json={"query": "x", "documents": ["y"]}).status_code == 400


def test_rerank_sorts_by_score_in_jinas_and_teis_shapes(scorer: Running) -> None:
    documents = ["one", "two two", {"text": "three"}]
    with scorer.client() as client:
        jina = client.post(
            "/v1/rerank",
            json={"query": "which", "documents": documents, "return_documents": True},
        ).json()
        tei = client.post("/rerank", json={"query": "which", "texts": ["one", "two"]}).json()
        top = client.post(
            "/rerank", json={"query": "which", "documents": ["a", "b", "c"], "top_n": 2}
        ).json()
    scores = [r["relevance_score"] for r in jina["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {r["index"] for r in jina["results"]} == {0, 1, 2}
    assert {r["document"]["text"] for r in jina["results"]} == {"one", "two two", "three"}
    assert jina["usage"]["prompt_tokens"] > 0
    assert {r["index"] for r in tei} == {0, 1}
    assert len(top["results"]) == 2


def test_a_native_completion_has_llama_servers_fields(http: httpx.Client) -> None:
    body = http.post(
        "/completion", json={"prompt": TEXT, "n_predict": 8, "return_tokens": True, "seed": 3}
    ).json()
    assert body["stop"] is True
    assert body["stop_type"] == "limit"
    assert len(body["tokens"]) == 8
    assert body["tokens_predicted"] == 8
    assert body["timings"]["prompt_n"] + body["timings"]["cache_n"] == body["tokens_evaluated"]
    assert body["generation_settings"]["seed"] == 3
    assert isinstance(body["has_new_line"], bool)


def test_a_native_stream_ends_with_the_final_object(http: httpx.Client) -> None:
    with http.stream(
        "POST", "/completion", json={"prompt": TEXT, "n_predict": 5, "stream": True, "seed": 1}
    ) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    decoded = [json.loads(event) for event in events]
    assert [event["stop"] for event in decoded] == [False] * 5 + [True]
    text = "".join(event["content"] for event in decoded)
    whole = http.post("/completion", json={"prompt": TEXT, "n_predict": 5, "seed": 1}).json()
    assert text == whole["content"]


def test_prompts_in_lists_ids_and_objects(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"content": TEXT}).json()["tokens"]
    one = http.post("/completion", json={"prompt": ids, "n_predict": 2})
    assert isinstance(one.json(), dict)
    several = http.post(
        "/completion",
        json={"prompt": [ids, TEXT, {"prompt_string": TEXT}, [5, "text"]], "n_predict": 2},
    )
    assert [answer["index"] for answer in several.json()] == [0, 1, 2, 3]
    mixed = http.post("/completion", json={"prompt": [5, "text", 6], "n_predict": 2})
    assert mixed.status_code == 200


def test_a_list_of_one_prompt_is_answered_as_the_prompt_alone(http: httpx.Client) -> None:
    assert isinstance(
        http.post("/completion", json={"prompt": [TEXT], "n_predict": 2}).json(), dict
    )


def test_the_prompt_of_token_ids_is_shown_as_text(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"content": TEXT}).json()["tokens"]
    assert http.post("/completion", json={"prompt": ids, "n_predict": 1}).json()["prompt"] == TEXT


@pytest.mark.parametrize("prompts", [TEXT, [TEXT, "another"]])
def test_each_of_n_native_answers_stands_alone(
    http: httpx.Client, prompts: str | list[str]
) -> None:
    n_prompts = 1 if isinstance(prompts, str) else len(prompts)
    body = {"prompt": prompts, "n_predict": 3, "n": 2, "return_tokens": True}
    answers = http.post("/completion", json=body).json()
    assert [answer["index"] for answer in answers] == list(range(2 * n_prompts))
    for answer in answers:
        assert len(answer["tokens"]) == answer["tokens_predicted"] == 3
        assert answer["tokens_evaluated"] > 0
    with http.stream("POST", "/completion", json={**body, "stream": True}) as streamed:
        events = [json.loads(x[6:]) for x in streamed.iter_lines() if x.startswith("data: ")]
    assert sorted(e["index"] for e in events if e["stop"]) == list(range(2 * n_prompts))


def test_the_settings_are_those_that_llama_server_shows(http: httpx.Client) -> None:
    answer = http.post("/completion", json={"prompt": TEXT, "n_predict": 1}).json()
    shown = answer["generation_settings"]
    assert {"samplers", "dry_multiplier", "mirostat", "xtc_probability", "n_keep"} <= set(shown)
    params = http.get("/props").json()["default_generation_settings"]["params"]
    assert set(params) == set(shown)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": TEXT, "n_predict": 4.0, "top_k": 40.0}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 4.0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 1.0}),
    ],
)
def test_a_whole_number_may_be_written_as_a_float(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json={"max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text


def test_a_part_of_a_token_is_a_mistake(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 4.5})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


def test_minus_one_of_n_predict_is_as_many_tokens_as_fit(http: httpx.Client) -> None:
    end = {"n_predict": -1, "stop": ["e"]}
    chat = {"messages": [{"role": "user", "content": "x"}], **end}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert http.post("/v1/completions", json={"prompt": TEXT, **end}).status_code == 200


def test_no_tokens_of_a_completion_are_no_text(http: httpx.Client) -> None:
    body = http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 0}).json()
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("given", "n_top"), [(True, 1), (False, None)])
def test_logprobs_of_a_completion_may_be_a_yes_or_no(
    http: httpx.Client, given: bool, n_top: int | None
) -> None:
    body = {"prompt": TEXT, "max_tokens": 2, "logprobs": given}
    shown = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert (shown is None) is (n_top is None)
    if shown is not None:
        assert len(shown["token_logprobs"]) == 2


def test_a_schema_beside_the_type_is_enforced(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    wrong = {"type": "json_schema", "schema": {"type": "no such type"}}
    answer = http.post("/v1/chat/completions", json={**chat, "response_format": wrong})
    assert answer.status_code == 400


@pytest.mark.parametrize(("pairs", "status"), [([[100, 1000]], 200), ({"100": 1000}, 400)])
def test_llama_servers_pairs_of_a_bias_take_any_number(
    http: httpx.Client, pairs: Any, status: int
) -> None:
    body = {"prompt": TEXT, "n_predict": 1, "logit_bias": pairs}
    answer = http.post("/completion", json=body)
    assert answer.status_code == status
    if status == 200:
        biases = answer.json()["generation_settings"]["logit_bias"]
        assert biases == [{"token": 100, "bias": 100.0}]


def test_a_chat_front_end_may_name_every_speaker_as_a_stop_string(http: httpx.Client) -> None:
    stop = [f"\nSpeaker {i}:" for i in range(40)]
    body = {"prompt": TEXT, "max_tokens": 2, "stop": stop}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_probabilities_and_chosen_fields(http: httpx.Client) -> None:
    body = http.post("/completion", json={"prompt": TEXT, "n_predict": 3, "n_probs": 2}).json()
    assert len(body["completion_probabilities"]) == 3
    assert len(body["completion_probabilities"][0]["top_logprobs"]) == 2
    as_probs = http.post(
        "/completion",
        json={"prompt": TEXT, "n_predict": 1, "n_probs": 2, "post_sampling_probs": True},
    ).json()
    assert 0 < as_probs["completion_probabilities"][0]["prob"] <= 1
    fields = ["content", "generation_settings/n_predict", "nothing"]
    chosen = http.post(
        "/completion", json={"prompt": TEXT, "n_predict": 3, "response_fields": fields}
    ).json()
    assert set(chosen) == {"content", "generation_settings/n_predict"}
    assert chosen["generation_settings/n_predict"] == 3


def test_text_to_tokens_and_back(http: httpx.Client) -> None:
    text = "unicode 媽 and emoji 🤗"
    tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == text
    pieces = http.post("/tokenize", json={"content": "a b", "with_pieces": True}).json()["tokens"]
    assert all({"id", "piece"} <= set(piece) for piece in pieces)


def test_texts_and_ids_are_tokenized_together(http: httpx.Client) -> None:
    def tokens(content: Any) -> list[int]:
        found: list[int] = http.post("/tokenize", json={"content": content}).json()["tokens"]
        return found

    assert tokens([5, "a b", 6]) == [5, *tokens("a b"), 6]


def test_the_length_of_a_response_before_it_is_asked_for(http: httpx.Client) -> None:
    body = {"input": "Hi there", "instructions": "Be brief."}
    counted = http.post("/v1/responses/input_tokens", json=body).json()
    used = http.post("/v1/responses", json={**body, "max_output_tokens": 1}).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used["input_tokens"]}


def test_the_rendered_prompt_and_its_length(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi there"}]}
    prompt = http.post("/apply-template", json=body).json()["prompt"]
    assert "Hi there" in prompt
    counted = http.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"]
    used = http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()["usage"]
    assert counted == used["prompt_tokens"]
    closed = http.post("/apply-template", json={**body, "add_generation_prompt": False}).json()
    assert len(closed["prompt"]) < len(prompt)


def test_props_and_slots(http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert props["total_slots"] == 8
    assert props["model_path"].endswith(".gguf")
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["default_generation_settings"]["params"]["temperature"] == pytest.approx(0.8)
    assert [model["name"] for model in http.get("/v1/models").json()["models"]] == ["starter"]
    slots = http.get("/slots").json()
    assert len(slots) == 8
    assert not any(slot["is_processing"] for slot in slots)


def test_infill_needs_a_model_that_can(http: httpx.Client) -> None:
    answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert "fill-in-the-middle" in answer.json()["error"]["message"]


def last_chunk(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    found: dict[str, Any] = json.loads(events[-1])
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
def test_answers_and_last_chunks_carry_llama_servers_timings_unless_told_not_to(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "max_tokens": 2}
    usage = {"stream_options": {"include_usage": True}}
    assert http.post(path, json=body).json()["timings"]["predicted_n"] == 2
    assert last_chunk(http, path, body)["timings"]["predicted_n"] == 2
    assert last_chunk(http, path, {**body, **usage})["timings"]["predicted_n"] == 2
    without = {**body, "timings": False}
    assert "timings" not in http.post(path, json=without).json()
    assert "timings" not in last_chunk(http, path, without)


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = http.post(path, json={**body, "stream": True}).text
    return [json.loads(x[6:]) for x in text.splitlines() if x.startswith("data: {")]


LONG_BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "word " * 400}]},
    "/v1/completions": {"prompt": "word " * 400},
    "/completion": {"prompt": "word " * 400},
}


@pytest.mark.parametrize("path", LONG_BODIES)
def test_return_progress_tells_how_far_the_prompt_was_read(http: httpx.Client, path: str) -> None:
    body = {**LONG_BODIES[path], "max_tokens": 3, "ignore_eos": True, "cache_prompt": False}
    chunks = streamed(http, path, {**body, "return_progress": True})
    told = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
    assert chunks[0]["prompt_progress"]["processed"] == chunks[0]["prompt_progress"]["cache"]
    assert told[-1]["processed"] == told[-1]["total"] > 300
    assert all("prompt_progress" not in c for c in chunks[len(told) :])
    assert all("prompt_progress" not in c for c in streamed(http, path, body))


@pytest.mark.parametrize("path", LONG_BODIES)
def test_timings_per_token_counts_up_in_every_chunk(http: httpx.Client, path: str) -> None:
    body = {**LONG_BODIES[path], "max_tokens": 4, "ignore_eos": True, "timings_per_token": True}
    chunks = streamed(http, path, body)
    counts = [c["timings"]["predicted_n"] for c in chunks if "timings" in c]
    assert counts == sorted(counts)
    assert set(counts) >= {1, 2, 3, 4}
    timings = next(c["timings"] for c in chunks if "timings" in c)
    assert timings["prompt_n"] + timings["cache_n"] > 300
    assert not any("prompt_progress" in c for c in chunks)


@pytest.mark.parametrize("samplers", [["penalties", "top_k", "temperature"], "ekt"])
def test_samplers_that_are_not_named_do_nothing(http: httpx.Client, samplers: Any) -> None:
    body = {"prompt": TEXT, "n_predict": 1, "top_p": 0.5, "top_k": 7, "samplers": samplers}
    used = http.post("/completion", json=body).json()["generation_settings"]
    assert (used["top_k"], used["top_p"], used["min_p"]) == (7, 1.0, 0.0)
    body["samplers"] = []
    used = http.post("/completion", json=body).json()["generation_settings"]
    assert (used["top_k"], used["top_p"]) == (7, 0.5)


def test_responses_tell_progress_and_timings_too(http: httpx.Client) -> None:
    body = {"input": "word " * 400, "max_output_tokens": 4, "ignore_eos": True, "store": False}
    asked = {"return_progress": True, "timings_per_token": True}
    events = streamed(http, "/v1/responses", {**body, **asked})
    told = [e for e in events if "prompt_progress" in e]
    assert {e["type"] for e in told} == {"response.in_progress"}
    assert told[0]["prompt_progress"]["processed"] == told[0]["prompt_progress"]["cache"]
    assert told[-1]["prompt_progress"]["processed"] == told[-1]["prompt_progress"]["total"] > 300
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [e["timings"]["predicted_n"] for e in deltas[:3]] == [1, 2, 3]
    assert events[-1]["timings"]["predicted_n"] == 4
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    plain = streamed(http, "/v1/responses", body)
    assert not any("prompt_progress" in e or "timings" in e for e in plain)


def test_the_sdk_reads_a_stream_with_progress(scripted: Running) -> None:
    client = OpenAI(base_url=scripted.url + "/v1", api_key="none")
    with client.chat.completions.stream(
        model="starter",
        messages=[{"role": "user", "content": "word " * 400}],
        max_tokens=4,
        extra_body={"return_progress": True, "timings_per_token": True, "ignore_eos": True},
    ) as stream:
        for _ in stream:
            pass
        message = stream.current_completion_snapshot.choices[0].message
    assert message.role == "assistant"
    assert message.content


@pytest.mark.model
def test_pieces_of_half_characters_are_their_bytes(starter: Running) -> None:
    text = "a \N{COMBINING PALATALIZED HOOK BELOW} \U0001f9ff"
    with starter.client() as http:
        body = {"content": text, "with_pieces": True}
        pieces = [t["piece"] for t in http.post("/tokenize", json=body).json()["tokens"]]
    assert any(isinstance(piece, list) for piece in pieces)
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces) == text.encode()


def test_what_operators_of_other_servers_ask_is_answered(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/ping").json() == http.get("/health").json()


def test_the_first_chunk_of_a_chat_has_no_timings(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=chat) as answer:
        first = next(line for line in answer.iter_lines() if line.startswith("data: "))
    assert "timings" not in json.loads(first[6:])


def test_paths_without_v1_have_llama_servers_error_type(http: httpx.Client) -> None:
    chat = {"max_tokens": 2}
    long = {**chat, "messages": [{"role": "user", "content": "word " * 5000}]}
    assert (
        http.post("/chat/completions", json=long).json()["error"]["type"]
        == "exceed_context_size_error"
    )
