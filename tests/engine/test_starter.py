"""The engine over the real starter model: its tokens are the library's own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edgellm.engine.client import Engine, dry_run
from edgellm.engine.info import EngineOptions
from edgellm.errors import ContextOverflowError, EngineDeadError, InvalidRequestError
from edgellm.request import EmbedRequest, Grammar, GrammarKind, Request, TokenEvent
from tests.engine.factories import request
from tests.engine.starter import library_greedy, starter_plan

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small engine that",
    "def fibonacci(n):\n    ",
    "The three laws of motion are",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    engine = await Engine.load(starter_plan())
    yield engine
    await engine.close()


async def collect(engine: Engine, r: Request) -> list[TokenEvent]:
    return [event async for event in engine.generate(r)]


def ids(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_greedy_alone_equals_the_librarys_greedy(engine: Engine, prompt: str) -> None:
    events = await collect(engine, request(prompt, max_tokens=40, cache_prompt=False))
    assert ids(events) == library_greedy(prompt, 40)


# Continuations that the model is sure of: the second best token is a nat away or more. On a CPU a
# row's logits depend on how many rows are computed with it (other kernels, up to 0.15 nats on this
# model): where two tokens are that close, another batch may take the other one, and which requests
# share a batch depends on when they come.
SURE = tuple(
    (text * n).strip()
    for text, n in (
        ("one two three four five six seven eight ", 6),
        ("q w e r t y ", 9),
        ("a b c d e f g h i j k l m n o p ", 6),
        ("1 2 3 4 5 6 7 8 9 ", 6),
    )
)


async def test_greedy_in_a_batch_equals_the_librarys_greedy(engine: Engine) -> None:
    results = await asyncio.gather(
        *(collect(engine, request(p, max_tokens=40, cache_prompt=False)) for p in SURE)
    )
    assert [ids(r) for r in results] == [library_greedy(p, 40) for p in SURE]


LONG = "The history of the steam engine begins with simple pumps. " * 12


async def greedy_ids(engine: Engine, prompts: list[str], **kw: object) -> list[tuple[int, ...]]:
    results = await asyncio.gather(
        *(collect(engine, request(p, max_tokens=24, **kw)) for p in prompts)
    )
    return [ids(r) for r in results]


async def test_a_shared_prefix_changes_no_token(engine: Engine) -> None:
    prompts = [LONG + p for p in SURE[:2]]
    expected = [library_greedy(p, 24) for p in prompts]
    assert await greedy_ids(engine, prompts) == expected
    again = await collect(engine, request(prompts[0], max_tokens=24))
    assert ids(again) == expected[0]
    assert again[-1].usage is not None
    assert again[-1].usage.n_cached > 100


async def test_logprobs_are_those_of_the_distribution(engine: Engine) -> None:
    events = await collect(engine, request(PROMPTS[0], max_tokens=4, logprobs=5))
    for event in events:
        assert event.logprobs is not None
        chosen = event.logprobs[0]
        assert chosen.top[0].token_id == chosen.token_id
        assert chosen.top[0].logprob == chosen.logprob <= 0.0
        assert sum(2.718281828**t.logprob for t in chosen.top) <= 1.0001


async def test_a_schema_constrains_the_real_model(engine: Engine) -> None:
    schema = (
        '{"type":"object","properties":{"name":{"type":"string","maxLength":12},'
        '"age":{"type":"integer","maximum":99}},"required":["name","age"],'
        '"additionalProperties":false}'
    )
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema)
    prompt = "Describe a person as JSON: "
    events = await collect(engine, request(prompt, max_tokens=60, grammar=grammar))
    value = json.loads("".join(e.text for e in events))
    assert set(value) == {"name", "age"}


async def test_the_seed_decides_the_text(engine: Engine) -> None:
    texts = []
    for seed in (1, 1, 2):
        r = request(PROMPTS[1], temperature=1.0, seed=seed, max_tokens=12)
        texts.append(ids(await collect(engine, r)))
    assert texts[0] == texts[1] != texts[2]


async def test_penalties_bias_and_forbidden_tokens_are_obeyed(engine: Engine) -> None:
    plain = ids(await collect(engine, request(PROMPTS[0], max_tokens=1)))[0]
    r = request(PROMPTS[0], max_tokens=3, logit_bias={plain: -100.0}, repeat_penalty=1.3)
    assert plain not in ids(await collect(engine, r))


async def test_a_ten_megabyte_prompt_is_refused_while_others_stream(engine: Engine) -> None:
    async def others() -> int:
        return len(await collect(engine, request(PROMPTS[2], max_tokens=30, ignore_eos=True)))

    huge = collect(engine, request("word " * 2_000_000, max_tokens=1))
    refused, n = await asyncio.gather(huge, others(), return_exceptions=True)
    assert isinstance(refused, ContextOverflowError)
    assert n == 30


async def test_attached_candidates_speculation_and_small_chunks_change_no_token() -> None:
    options = EngineOptions(attach_top_k=64, spec="ngram", step_budget=24)
    engine = await Engine.load(starter_plan(n_outputs_max=24), options=options)
    try:
        prompts = list(SURE)
        expected = [library_greedy(p, 24) for p in prompts]
        assert await greedy_ids(engine, prompts) == expected
        with_logprobs = await collect(engine, request(SURE[0], max_tokens=24, logprobs=1))
        assert ids(with_logprobs) == expected[0]
        assert (await engine.stats()).accepted_tokens > 0
    finally:
        await engine.close()


async def test_a_pooled_decoder_embeds() -> None:
    plan = starter_plan(embeddings=True, pooling="mean")
    engine = await Engine.load(plan)
    try:
        inputs = ("a cat sat", "a cat sat", "stock markets fell sharply today")
        result = await engine.embed(EmbedRequest(id="e", inputs=inputs))
        a, b, c = result.vectors
        assert len(a) == engine.info.n_embd == 576
        assert sum(x * y for x, y in zip(a, b, strict=True)) == pytest.approx(1.0, abs=1e-3)
        assert sum(x * y for x, y in zip(a, c, strict=True)) < 0.99
        too_long = EmbedRequest(id="f", inputs=("word " * 1000,))
        with pytest.raises(InvalidRequestError, match="the batch holds 256"):
            await engine.embed(too_long)
    finally:
        await engine.close()


async def test_a_dry_run_measures_without_allocating() -> None:
    report = await dry_run(starter_plan())
    host = {m.id: m for m in report.measured}["host"]
    assert host.compute > 1_000_000


async def test_killed_while_streaming_the_next_request_is_served() -> None:
    engine = await Engine.load(starter_plan())
    try:
        stream = engine.generate(request(PROMPTS[0], ignore_eos=True))
        await stream.__anext__()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in stream:
                pass
        assert await greedy_ids(engine, [PROMPTS[0]]) == [library_greedy(PROMPTS[0], 24)]
    finally:
        await engine.close()
