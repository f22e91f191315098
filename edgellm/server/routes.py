"""Every endpoint: its path, its handler, its body, one line of what it does.

The OpenAPI document is made from this table, so nothing is served that it does not list.
"""

from __future__ import annotations

from typing import Any, Final

from edgellm.server.core import Server
from edgellm.server.endpoints import (
    admin,
    chat,
    completions,
    embeddings,
    messages,
    models,
    native,
    ops,
    rerank,
    responses,
    text,
)
from edgellm.server.http import Call
from edgellm.server.openapi import document
from edgellm.server.route import Handler, Route
from edgellm.server.wire import anthropic, openai
from edgellm.server.wire import native as native_wire
from edgellm.server.wire import responses as responses_wire


async def _openapi(_: Server, call: Call) -> None:
    """The OpenAPI 3.1 document."""
    await call.reply(document(ALL))


def _all() -> list[Route]:
    chat_body, completion = openai.ChatBody, openai.CompletionBody
    r = Route
    return [
        r("POST", "/v1/chat/completions", chat.chat, "Answer a conversation.", chat_body),
        r("POST", "/v1/completions", completions.completions, "Continue a prompt.", completion),
        r("POST", "/v1/embeddings", embeddings.embeddings, "Embed texts.", openai.EmbeddingBody),
        r("GET", "/v1/models", models.list_models, "Every model, and whether it is loaded."),
        r("GET", "/v1/models/{model}", models.get_model, "One model."),
        r(
            "POST",
            "/v1/responses",
            responses.create,
            "Answer an input; stored unless store is false.",
            responses_wire.ResponseBody,
        ),
        r(
            "POST",
            "/v1/responses/input_tokens",
            responses.input_tokens,
            "How many tokens an input has.",
            responses_wire.ResponseBody,
        ),
        r("GET", "/v1/responses/{id}", responses.retrieve, "A stored response."),
        r("DELETE", "/v1/responses/{id}", responses.delete, "Forget a stored response."),
        r(
            "GET",
            "/v1/responses/{id}/input_items",
            responses.input_items,
            "What a stored response was asked.",
        ),
        *_anthropic(),
        *_native(),
        *_operations(),
    ]


def _anthropic() -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/messages",
            messages.create,
            "Answer a conversation.",
            anthropic.MessagesBody,
            "Anthropic",
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "How many tokens a conversation has.",
            anthropic.CountBody,
            "Anthropic",
        ),
    ]


_RERANK: Final = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")


def _native() -> list[Route]:
    tag = "llama-server"
    w = native_wire

    def r(method: str, path: str, handler: Handler, about: str, body: Any = None) -> Route:
        return Route(method, path, handler, about, body, tag)

    found = [
        r("POST", "/chat/completions", chat.chat, "As /v1, with timings.", openai.ChatBody),
        r("POST", "/responses", responses.create, "As /v1.", responses_wire.ResponseBody),
        r("POST", "/infill", native.infill, "Fill in between two texts.", w.InfillBody),
        r("GET", "/models", models.list_models, "As /v1/models."),
        r("GET", "/props", ops.props, "The model's properties."),
        r("GET", "/slots", ops.slots, "What each sequence is doing."),
    ]
    several = (
        (("/completion", "/completions"), native.completion, "Continue.", w.CompletionBody),
        (("/embedding", "/embeddings"), native.embedding, "Embed texts.", w.EmbeddingBody),
        (_RERANK, rerank.rerank, "Score documents for a query.", w.RerankBody),
    )
    for paths, handler, about, body in several:
        found += [r("POST", path, handler, about, body) for path in paths]
    for prefix in ("", "/v1"):
        found += [
            r("POST", f"{prefix}/tokenize", text.tokenize, "Text to tokens.", w.TokenizeBody),
            r("POST", f"{prefix}/detokenize", text.detokenize, "Back.", w.DetokenizeBody),
            r(
                "POST",
                f"{prefix}/apply-template",
                text.apply_template,
                "The prompt that a conversation becomes.",
                openai.ChatBody,
            ),
            r(
                "POST",
                f"{prefix}/chat/completions/input_tokens",
                text.input_tokens,
                "How many tokens a conversation has.",
                openai.ChatBody,
            ),
        ]
    return found


def _operations() -> list[Route]:
    tag = "Operation"
    html, plain = "text/html", "text/plain"
    w = native_wire
    return [
        Route("GET", "/health", ops.health, "Whether the engines answer.", None, tag),
        Route("GET", "/v1/health", ops.health, "Whether the engines answer.", None, tag),
        Route("GET", "/ping", ops.health, "Whether the engines answer.", None, tag),
        Route("GET", "/version", ops.version, "This program's version.", None, tag),
        Route("GET", "/metrics", ops.metrics, "For Prometheus.", None, tag, plain),
        Route("GET", "/v1/edgellm/stats", ops.stats, "Engines and requests now.", None, tag),
        Route("GET", "/v1/edgellm/plan", ops.plans, "The plans of the loaded models.", None, tag),
        Route("POST", "/v1/edgellm/plan", ops.plan, "Plan a model here.", w.PlanBody, tag),
        Route("POST", "/v1/edgellm/load", admin.load, "Load a model.", w.ModelBody, tag),
        Route("POST", "/v1/edgellm/unload", admin.unload, "Unload a model.", w.ModelBody, tag),
        Route("POST", "/v1/edgellm/cancel", admin.cancel, "End a request.", w.CancelBody, tag),
        Route("POST", "/v1/edgellm/stop", admin.stop, "Drain and stop.", None, tag),
        Route("GET", "/openapi.json", _openapi, "This API's description.", None, tag),
        Route("GET", "/docs", ops.docs, "This API's description, to read.", None, tag, html),
        Route("GET", "/", ops.home, "A page that says what runs here.", None, tag, html),
    ]


ALL: Final = tuple(_all())
ROUTES: Final = {(route.method, route.path): route for route in ALL if "{" not in route.path}
# The longest first, so that .../input_items is not taken for an id.
PARAMETER_ROUTES: Final = tuple(
    sorted((route for route in ALL if "{" in route.path), key=lambda r: -len(r.path))
)
