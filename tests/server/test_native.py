"""Embeddings, rerank, and llama-server's own endpoints."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

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
    import json

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
    slots = http.get("/slots").json()
    assert len(slots) == 8
    assert not any(slot["is_processing"] for slot in slots)


def test_infill_needs_a_model_that_can(http: httpx.Client) -> None:
    answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert "fill-in-the-middle" in answer.json()["error"]["message"]


def test_paths_without_v1_carry_timings_and_llama_servers_error_type(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert "timings" in http.post("/chat/completions", json=chat).json()
    assert "timings" not in http.post("/v1/chat/completions", json=chat).json()
    asked = http.post("/v1/chat/completions", json={**chat, "timings": True}).json()
    assert asked["timings"]["predicted_n"] == 2
    long = {**chat, "messages": [{"role": "user", "content": "word " * 5000}]}
    assert (
        http.post("/chat/completions", json=long).json()["error"]["type"]
        == "exceed_context_size_error"
    )
