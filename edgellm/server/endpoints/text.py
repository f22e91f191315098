"""Tokenize, detokenize, and the prompt a conversation becomes."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from edgellm.errors import InvalidRequestError
from edgellm.server.core import Server, View
from edgellm.server.endpoints.chat import BODY as CHAT
from edgellm.server.endpoints.chat import render
from edgellm.server.http import Call, decode
from edgellm.server.wire.native import DetokenizeBody, TokenizeBody

TOKENIZE: Final = msgspec.json.Decoder(TokenizeBody)
DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(server: Server, call: Call) -> None:
    """``{"tokens": [...], "count", "max_model_len"}``; pieces on request."""
    body = decode(TOKENIZE, await server.body(call))
    given = body.content if body.content is not None else body.prompt
    if given is None:
        raise InvalidRequestError("content is missing", param="content")
    async with server.lease(call, body.model) as view:
        ids = await _ids(view, given, body)
        tokens: list[Any] = ids
        if body.with_pieces:
            pieces = await view.engine.pieces(ids)
            tokens = [{"id": i, "piece": _piece(p)} for i, p in zip(ids, pieces, strict=True)]
        n_ctx = view.info.n_ctx_seq
        await call.json({"tokens": tokens, "count": len(ids), "max_model_len": n_ctx})


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are not whole characters (llama-server's way)."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _ids(view: View, given: str | list[str | int], body: TokenizeBody) -> list[int]:
    """The tokens of a text, or of texts with token ids between them."""
    ids: list[int] = []
    for item in [given] if isinstance(given, str) else given:
        if isinstance(item, int):
            ids += view.check_ids([item], "content")
            continue
        ids += await view.engine.tokenize(
            item, add_special=body.add_special and not ids, parse_special=body.parse_special
        )
    return ids


async def detokenize(server: Server, call: Call) -> None:
    """``{"content", "prompt"}`` (the same text under llama-server's and vLLM's names)."""
    body = decode(DETOKENIZE, await server.body(call))
    async with server.lease(call, body.model) as view:
        text = await view.engine.detokenize(list(view.check_ids(body.tokens, "tokens")))
        await call.json({"content": text, "prompt": text})


async def apply_template(server: Server, call: Call) -> None:
    """``{"prompt": ...}``: what a chat completion with this body would give the model."""
    body = decode(CHAT, await server.body(call))
    async with server.lease(call, body.model) as view:
        prepared = render(view, body)
        await call.json({"prompt": prepared.prompt, "warnings": list(prepared.warnings)})


async def input_tokens(server: Server, call: Call) -> None:
    """``{"input_tokens": n}`` of a chat completion with this body."""
    body = decode(CHAT, await server.body(call))
    async with server.lease(call, body.model) as view:
        prepared = render(view, body)
        ids = await view.engine.tokenize(prepared.prompt, add_special=prepared.add_special)
        await call.json({"input_tokens": len(ids), "object": "response.input_tokens"})
