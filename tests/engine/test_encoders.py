"""Encoders and rerankers, on tiny random models: shapes, determinism, and what is too long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from edgellm.engine.client import Engine
from edgellm.errors import InvalidRequestError
from edgellm.request import EmbedRequest, EmbedResult
from tests.engine.factories import plan, request
from tests.engine.tiny import N_EMBD, tiny_model

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

CLOSE = 2e-3
"""Other kernels compute other numbers of rows; other texts are 0.1 away."""
TEXTS = ("a cat sat on the mat", "stock markets fell", "a dog ran", "the moon", "a", "two words")


async def loading(folder: Path, *, rank: bool) -> Engine:
    path = tiny_model(folder, "bert", rank=rank)
    return await Engine.load(
        plan(path, embeddings=True, n_ctx=512, n_ctx_seq=512, n_batch=128, n_ubatch=128)
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def encoder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    engine = await loading(tmp_path_factory.mktemp("tiny"), rank=False)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reranker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    engine = await loading(tmp_path_factory.mktemp("tiny"), rank=True)
    yield engine
    await engine.close()


async def embed(engine: Engine, *texts: str, normalize: bool = True) -> EmbedResult:
    return await engine.embed(EmbedRequest(id="e", inputs=texts, normalize=normalize))


async def test_an_encoder_says_what_it_is(encoder: Engine) -> None:
    info = encoder.info
    assert (info.is_encoder, info.pooling, info.n_embd) == (True, "mean", N_EMBD)


async def test_each_input_gets_a_vector_of_length_one(encoder: Engine) -> None:
    result = await embed(encoder, *TEXTS)
    assert [len(v) for v in result.vectors] == [N_EMBD] * len(TEXTS)
    assert [sum(x * x for x in v) for v in result.vectors] == pytest.approx([1.0] * len(TEXTS))
    assert len({round(v[0], 6) for v in result.vectors}) == len(TEXTS)
    assert all(n > 0 for n in result.n_tokens)


async def test_without_normalising_the_vector_is_the_models_own(encoder: Engine) -> None:
    raw = (await embed(encoder, TEXTS[0], normalize=False)).vectors[0]
    unit = (await embed(encoder, TEXTS[0])).vectors[0]
    length = sum(x * x for x in raw) ** 0.5
    assert length != pytest.approx(1.0, abs=0.01)
    assert [x / length for x in raw] == pytest.approx(unit, abs=1e-5)


async def test_a_vector_does_not_depend_on_its_company(encoder: Engine) -> None:
    together = (await embed(encoder, *TEXTS)).vectors
    alone = [(await embed(encoder, text)).vectors[0] for text in TEXTS]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=CLOSE)
    assert (await embed(encoder, TEXTS[0])).vectors[0] == alone[0]


async def test_more_inputs_than_a_batch_holds_are_computed_in_several(encoder: Engine) -> None:
    texts = tuple(f"{' '.join(['word'] * 60)} {i}" for i in range(9))
    result = await embed(encoder, *texts)
    assert sum(result.n_tokens) > 4 * 128
    first = (await embed(encoder, texts[0])).vectors[0]
    assert result.vectors[0] == pytest.approx(first, abs=CLOSE)


async def test_an_input_longer_than_the_batch_is_an_error_with_both_numbers(
    encoder: Engine,
) -> None:
    with pytest.raises(InvalidRequestError, match=r"input 1 has \d+ tokens, the batch holds 128"):
        await embed(encoder, "short", "word " * 200)
    assert len((await embed(encoder, "still there")).vectors) == 1


async def test_an_encoder_refuses_to_generate(encoder: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="generate"):
        [event async for event in encoder.generate(request("hello", max_tokens=2))]
    assert len((await embed(encoder, "still there")).vectors) == 1


async def test_a_reranker_gives_one_score_for_each_input(reranker: Engine) -> None:
    assert reranker.info.pooling == "rank"
    scores = (await embed(reranker, *TEXTS)).vectors
    assert [len(v) for v in scores] == [1] * len(TEXTS)
    assert len(set(scores)) == len(TEXTS)
    assert (await embed(reranker, *TEXTS)).vectors == scores
