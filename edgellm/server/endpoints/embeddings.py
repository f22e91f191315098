"""``POST /v1/embeddings``: batches, base64 or floats, fewer dimensions on request."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edgellm.errors import InvalidRequestError
from edgellm.request import EmbedRequest, EmbedResult, Pooling
from edgellm.server.core import Server, View
from edgellm.server.http import Call, decode
from edgellm.server.wire.openai import EmbeddingBody, EmbeddingInput

BODY: Final = msgspec.json.Decoder(EmbeddingBody)
MAX_INPUTS: Final = 2048

Input = str | tuple[int, ...]


async def embeddings(server: Server, call: Call) -> None:
    """One vector an input, in the inputs' order."""
    body = decode(BODY, await server.body(call))
    async with server.lease(call, body.model) as view:
        need_embeddings(view, Pooling.NONE)
        inputs = await inputs_of(view, body.input, "input")
        size = body.dimensions
        if size is not None and not 1 <= size <= view.info.n_embd:
            raise InvalidRequestError(
                f"dimensions must be from 1 to {view.info.n_embd}, got {size}", param="dimensions"
            )
        result = await embed(server, call, view, inputs)
        count_tokens(server, view, result)
        as_base64 = body.encoding_format == "base64"
        n_tokens = sum(result.n_tokens)
        await call.json(
            {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": i, "embedding": _shown(v, size, as_base64)}
                    for i, v in enumerate(result.vectors)
                ],
                "model": view.name,
                "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            }
        )


def need_embeddings(view: View, *refused: Pooling) -> None:
    """Raise InvalidRequestError when the model was not loaded to embed."""
    pooling = view.info.pooling
    if pooling in [p.value for p in refused] or pooling == Pooling.RANK.value:
        raise InvalidRequestError(
            f"{view.name} is loaded with pooling {pooling!r}, which gives no embeddings here",
            param="model",
            hint="serve an embedding model, or start with --embeddings --pooling mean",
        )


async def embed(
    server: Server, call: Call, view: View, inputs: Sequence[Input], *, normalize: bool = True
) -> EmbedResult:
    """Ask the engine."""
    return await view.engine.embed(
        EmbedRequest(
            id=call.next_id(),
            inputs=tuple(inputs),
            normalize=normalize,
            priority=server.options.priority,
            model=view.name,
            client=call.key or call.client,
        )
    )


def count_tokens(server: Server, view: View, result: EmbedResult) -> None:
    """Count an embedding's tokens where a generation counts its prompt."""
    server.metrics.add("edgellm_prompt_tokens_total", sum(result.n_tokens), model=view.name)


def _shown(vector: Sequence[float], size: int | None, as_base64: bool) -> Any:
    """A vector as the client wants it; a shortened one has length 1 again."""
    if size is not None and size < len(vector):
        vector = vector[:size]
        norm = math.sqrt(sum(x * x for x in vector))
        vector = [x / norm for x in vector] if norm > 0 else vector
    if not as_base64:
        return vector
    return base64.b64encode(array("f", vector).tobytes()).decode()


async def inputs_of(view: View, given: Any, param: str) -> list[Input]:
    """The inputs of a body: one text, one list of token ids, or a list of either."""
    if isinstance(given, str | EmbeddingInput):
        return [await _one(view, given, param)]
    if not given:
        raise InvalidRequestError("the input is empty", param=param)
    if len(given) > MAX_INPUTS and not isinstance(given[0], int):
        raise InvalidRequestError(f"at most {MAX_INPUTS} inputs in one call", param=param)
    if any(isinstance(item, int) for item in given):
        return [await _mixed(view, given, param)]
    return [await _one(view, item, f"{param}[{i}]") for i, item in enumerate(given)]


async def _one(view: View, item: Any, param: str) -> Input:
    if isinstance(item, EmbeddingInput):
        item = _object_text(item, param)
    if isinstance(item, str):
        # An embedding of nothing is that of the model's special tokens; without any there is none.
        return item if item or view.info.add_bos or view.info.is_encoder else _empty(param)
    if not item:
        return _empty(param)
    return await _mixed(view, item, param)


def _empty(param: str) -> Input:
    raise InvalidRequestError("the input is empty", param=param)


def _object_text(item: EmbeddingInput, param: str) -> str:
    if item.prompt_string is not None:
        return item.prompt_string
    if item.content is None:
        raise InvalidRequestError("an input object has prompt_string or content", param=param)
    for i, part in enumerate(item.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(
                f"{part.type} input is not supported by this model", param=f"{param}.content[{i}]"
            )
    return "".join(part.text or "" for part in item.content)


async def _mixed(view: View, items: Sequence[Any], param: str) -> Input:
    """Token ids, with texts between them tokenised where they stand."""
    ids: list[int] = []
    for item in items:
        if isinstance(item, int):
            ids.append(item)
        elif isinstance(item, str):
            ids += await view.engine.tokenize(item, add_special=not ids)
        else:
            raise InvalidRequestError("a list is mixed with token ids", param=param)
    return view.check_ids(ids, param)
