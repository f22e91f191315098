"""Embeddings and scores of a model that was loaded for them: as many inputs a step as fit."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from edgellm.engine.backend import Backend, Limits, Span
from edgellm.errors import InvalidRequestError
from edgellm.request import EmbedRequest, EmbedResult, Pooling


class EmbedJob(msgspec.Struct, frozen=True):
    """Inputs to embed, as token ids."""

    call: int
    request: EmbedRequest
    inputs: tuple[array[int], ...]


def embed(backend: Backend, job: EmbedJob) -> EmbedResult:
    """A vector an input, in their order. The cache must hold nothing that matters.

    Raises InvalidRequestError for a model that generates, and for an input that no batch holds.
    """
    if not backend.info.is_encoder:
        raise InvalidRequestError("this model was loaded to generate, not to embed", param="model")
    _check_lengths(job.inputs, backend.limits.n_ubatch)
    pooling, normalize = Pooling(backend.info.pooling), job.request.normalize
    vectors: list[tuple[float, ...]] = []
    for batch in _batches(job.inputs, backend.limits):
        vectors += backend.embed(batch, pooling, normalize=normalize)
    return EmbedResult(
        request_id=job.request.id,
        vectors=tuple(vectors),
        n_tokens=tuple(len(tokens) for tokens in job.inputs),
    )


def _check_lengths(inputs: tuple[array[int], ...], most: int) -> None:
    for i, tokens in enumerate(inputs):
        if not tokens:
            raise InvalidRequestError(f"input {i} is empty", param="input")
        if len(tokens) > most:
            raise InvalidRequestError(
                f"input {i} has {len(tokens)} tokens, the batch holds {most}",
                param="input",
                hint="shorten it, or plan with a larger --ubatch",
            )


def _batches(inputs: tuple[array[int], ...], limits: Limits) -> Iterator[list[Span]]:
    """An ubatch of tokens each, and no more inputs than sequences."""
    batch: list[Span] = []
    room = limits.n_ubatch
    for tokens in inputs:
        if batch and (len(tokens) > room or len(batch) == limits.n_running):
            yield batch
            batch, room = [], limits.n_ubatch
        batch.append(Span(len(batch), 0, tokens, len(tokens)))
        room -= len(tokens)
    if batch:
        yield batch
