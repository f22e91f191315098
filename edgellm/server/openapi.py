"""The OpenAPI 3.1 document, made from the routes and the structs of their bodies."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

import msgspec

from edgellm import __version__
from edgellm.server.route import Route

_ERROR: Final = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}
_STREAMS: Final = frozenset(
    {"ChatBody", "CompletionBody", "ResponseBody", "MessagesBody", "InfillBody"}
)


@cache
def document(routes: tuple[Route, ...]) -> bytes:
    """The document of these routes as JSON."""
    bodies = sorted({r.body for r in routes if r.body is not None}, key=lambda b: b.__qualname__)
    refs, components = msgspec.json.schema_components(
        bodies, ref_template="#/components/schemas/{name}"
    )
    by_body = dict(zip(bodies, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_body)
    built = {
        "openapi": "3.1.0",
        "info": {
            "title": "edgellm",
            "version": __version__,
            "description": "GGUF models over OpenAI's, Anthropic's and llama-server's APIs.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }
    return msgspec.json.encode(built)


def _operation(route: Route, bodies: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.answer: {"schema": {}}}
    if route.body is not None and route.body.__name__ in _STREAMS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "tags": [route.tag],
        "summary": route.about,
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', route.path)}",
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {
                "description": "What is wrong with the request.",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    names = re.findall(r"\{(\w+)\}", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.body is not None:
        schema = {"application/json": {"schema": bodies[route.body]}}
        operation["requestBody"] = {"required": True, "content": schema}
    return operation
