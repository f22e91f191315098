"""Bodies of llama-server's own endpoints, of rerank, and of edgellm's."""

from __future__ import annotations

from typing import Any, Literal

from edgellm.server.wire.common import ResponseFormat, SamplingFields, Wire
from edgellm.server.wire.openai import EmbeddingInput


class PromptObject(Wire, kw_only=True):
    """A prompt as an object; media is refused."""

    prompt_string: str
    multimodal_data: Any = None


class CompletionBody(SamplingFields, kw_only=True):
    """``POST /completion``."""

    prompt: str | list[str | int | list[int | str] | PromptObject] | PromptObject
    model: str | None = None
    stream: bool | None = None
    n_probs: int | None = None
    max_tokens: int | None = None
    logprobs: int | bool | None = None
    post_sampling_probs: bool | None = None
    response_fields: list[str] | None = None
    response_format: ResponseFormat | None = None
    n_keep: int | None = None
    id_slot: int | None = None


class InfillExtra(Wire, kw_only=True):
    """A file of the project, as context."""

    text: str
    filename: str = "tmp"


class InfillBody(SamplingFields, kw_only=True):
    """``POST /infill``."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[InfillExtra] | None = None
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    response_fields: list[str] | None = None


class TokenizeBody(Wire, kw_only=True):
    """``POST /tokenize``: a text, or texts and token ids; vLLM calls the text ``prompt``."""

    content: str | list[str | int] | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Wire, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class EmbeddingBody(Wire, kw_only=True):
    """``POST /embedding``."""

    content: str | list[str | int | list[int | str]] | None = None
    input: str | list[str | int | list[int | str] | EmbeddingInput] | None = None
    model: str | None = None
    embd_normalize: int | None = None


class RerankBody(Wire, kw_only=True):
    """``POST /v1/rerank``; ``texts`` is TEI's name for the documents."""

    query: str
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None


class ModelBody(Wire, kw_only=True):
    """A model by name."""

    model: str
    force: bool = False


class CancelBody(Wire, kw_only=True):
    """A running or waiting request, by the id that /v1/edgellm/stats shows."""

    request_id: str


class PlanBody(Wire, kw_only=True):
    """``POST /v1/edgellm/plan``: the planner's question, as the plan command's flags."""

    model: str
    ctx: int | None = None
    parallel: int | None = None
    ngl: int | None = None
    batch: int | None = None
    ubatch: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    flash_attn: Literal["on", "off", "auto"] | None = None
    n_cpu_moe: int | None = None
    margin: int | None = None
    objective: Literal["speed", "context"] = "speed"
