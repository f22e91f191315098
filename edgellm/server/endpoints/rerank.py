"""``POST /v1/rerank``: scores of documents for a query, in Jina's and TEI's shapes."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from edgellm.errors import InvalidRequestError
from edgellm.request import EmbedResult, Pooling
from edgellm.server.core import Server, View
from edgellm.server.endpoints.embeddings import count_tokens, embed
from edgellm.server.http import Call, decode
from edgellm.server.wire.native import RerankBody

BODY: Final = msgspec.json.Decoder(RerankBody)
MAX_DOCUMENTS: Final = 4096


async def rerank(server: Server, call: Call) -> None:
    """The documents by falling score."""
    body = decode(BODY, await server.body(call))
    texts = _texts(body)
    if body.top_n is not None and body.top_n < 1:
        raise InvalidRequestError("top_n must be at least 1", param="top_n")
    async with server.lease(call, body.model) as view:
        if view.info.pooling != Pooling.RANK.value:
            raise InvalidRequestError(
                f"{view.name} is not a reranker",
                param="model",
                hint="serve a reranking model, such as bge-reranker-v2-m3",
            )
        pairs = [await _pair(view, body.query, text) for text in texts]
        result = await embed(server, call, view, pairs, normalize=False)
        count_tokens(server, view, result)
        await call.json(_answer(view, body, texts, result))


def _texts(body: RerankBody) -> list[str]:
    given = body.documents if body.documents is not None else body.texts
    if not given:
        raise InvalidRequestError("documents is missing or empty", param="documents")
    if len(given) > MAX_DOCUMENTS:
        raise InvalidRequestError(f"at most {MAX_DOCUMENTS} documents", param="documents")
    return [_text(item, i) for i, item in enumerate(given)]


def _text(item: str | dict[str, Any], i: int) -> str:
    text = item if isinstance(item, str) else item.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError("a document is a text", param=f"documents[{i}]")
    return text


async def _pair(view: View, query: str, text: str) -> tuple[int, ...]:
    """Query and document as one sequence: ``[BOS]query[EOS][SEP]doc[EOS]``, as llama-server
    joins them (server-common.cpp, format_prompt_rerank)."""
    info = view.info
    template = info.chat_templates.get("rerank")
    if template:
        whole = template.replace("{query}", query).replace("{document}", text)
        return tuple(await view.engine.tokenize(whole))
    bos = [info.bos_id] if info.add_bos and info.bos_id >= 0 else []
    eos = [info.eos_id] if info.eos_id >= 0 else []
    first = await view.engine.tokenize(query, add_special=False)
    second = await view.engine.tokenize(text, add_special=False)
    return (*bos, *first, *eos, *eos, *second, *eos)


def _answer(view: View, body: RerankBody, texts: list[str], result: EmbedResult) -> Any:
    scored = sorted(
        ((vector[0], i) for i, vector in enumerate(result.vectors)), key=lambda s: (-s[0], s[1])
    )[: body.top_n]
    if body.documents is None:
        with_text = bool(body.return_text)
        return [
            {"index": i, "score": score, **({"text": texts[i]} if with_text else {})}
            for score, i in scored
        ]
    n_tokens = sum(result.n_tokens)
    return {
        "model": view.name,
        "object": "list",
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        "results": [
            {
                "index": i,
                "relevance_score": score,
                **({"document": {"text": texts[i]}} if body.return_documents else {}),
            }
            for score, i in scored
        ],
    }
