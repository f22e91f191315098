"""One table: error class -> HTTP status, OpenAI type and code, Anthropic type.

An error reaches a client in one of two shapes, chosen by the path it asked: Anthropic's for
``/v1/messages``, OpenAI's everywhere else. Errors of the engine process arrive as ErrorInfo, by
class name, and pass through the same table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from edgellm import errors as e
from edgellm.errors import EdgeLLMError
from edgellm.request import ErrorInfo


class Row(NamedTuple):
    """How a class of errors looks over HTTP."""

    status: int
    type: str
    code: str | None
    anthropic: str


_BAD: Final = "invalid_request_error"

TABLE: Final[dict[type[EdgeLLMError], Row]] = {
    EdgeLLMError: Row(500, "server_error", "internal_error", "api_error"),
    e.ConfigError: Row(400, _BAD, "invalid_configuration", _BAD),
    e.ModelNotFoundError: Row(404, _BAD, "model_not_found", "not_found_error"),
    e.GGUFError: Row(422, _BAD, "bad_model_file", _BAD),
    e.StoreError: Row(500, "server_error", "store_error", "api_error"),
    e.DownloadError: Row(502, "server_error", "download_failed", "api_error"),
    e.ChecksumError: Row(502, "server_error", "checksum_mismatch", "api_error"),
    e.DiskFullError: Row(507, "server_error", "disk_full", "api_error"),
    e.PlanError: Row(422, _BAD, "no_plan", _BAD),
    # Trying again does not help, so this must not be a status that SDKs retry.
    e.DoesNotFitError: Row(422, _BAD, "does_not_fit", _BAD),
    e.RequestError: Row(400, _BAD, None, _BAD),
    e.InvalidRequestError: Row(400, _BAD, "invalid_value", _BAD),
    e.ContextOverflowError: Row(400, _BAD, "context_length_exceeded", _BAD),
    e.QueueFullError: Row(429, "rate_limit_error", "queue_full", "rate_limit_error"),
    e.EngineError: Row(500, "server_error", "engine_error", "api_error"),
    e.KVFullError: Row(503, "server_error", "kv_cache_full", "overloaded_error"),
    e.DecodeError: Row(500, "server_error", "decode_failed", "api_error"),
    e.EngineDeadError: Row(503, "server_error", "engine_dead", "api_error"),
}

BY_NAME: Final[dict[str, Row]] = {cls.__name__: row for cls, row in TABLE.items()}

ANTHROPIC_BY_STATUS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Problem(EdgeLLMError):
    """An error as HTTP tells it. Raised by the server for what only HTTP knows (404, 413, ...)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        hint: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        extra: dict[str, Any] | None = None,
        anthropic: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers
        self.extra = extra or {}
        self.anthropic = anthropic or ANTHROPIC_BY_STATUS.get(
            status, "invalid_request_error" if status < 500 else "api_error"
        )
        self.kind = "HTTP"


def problem(error: EdgeLLMError) -> Problem:
    """``error`` through the table."""
    if isinstance(error, Problem):
        return error
    row = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    return _build(type(error).__name__, row, error.message, error.hint, vars(error))


def problem_of_info(info: ErrorInfo) -> Problem:
    """An error of the engine process through the same table, found by its class's name."""
    row = BY_NAME.get(info.type, TABLE[EdgeLLMError])
    return _build(info.type, row, info.message, info.hint, info.attributes)


def _build(
    kind: str, row: Row, message: str, hint: str | None, attributes: dict[str, Any]
) -> Problem:
    extra: dict[str, Any] = {}
    anthropic_message = None
    if row.code == "context_length_exceeded":
        n_prompt, n_ctx = attributes.get("n_prompt"), attributes.get("n_ctx")
        extra = {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
        # Clients look for these three phrases (OpenAI's, llama-server's and Anthropic's) to
        # decide that a conversation must be shortened.
        message = (
            f"The request exceeds the available context size: this model's maximum context "
            f"length is {n_ctx} tokens, but the prompt has {n_prompt} tokens"
        )
        anthropic_message = f"prompt is too long: {n_prompt} tokens > {n_ctx} maximum"
    elif row.code == "does_not_fit":
        extra = {k: attributes[k] for k in ("device", "required", "available") if k in attributes}
    headers = ((b"retry-after", b"1"),) if row.status in (429, 503) else ()
    built = Problem(
        row.status,
        message,
        type=row.type,
        code=row.code,
        param=attributes.get("param"),
        hint=hint,
        headers=headers,
        extra=extra,
        anthropic=row.anthropic,
    )
    built.kind = kind
    if anthropic_message:
        built.extra["anthropic_message"] = anthropic_message
    return built


def openai_body(p: Problem) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}`` and the counts of an overflow."""
    message = p.message if p.hint is None else f"{p.message} ({p.hint})"
    extra = {k: v for k, v in p.extra.items() if k != "anthropic_message"}
    return {
        "error": {"message": message, "type": p.type, "param": p.param, "code": p.code, **extra}
    }


def anthropic_body(p: Problem, request_id: str) -> dict[str, Any]:
    """``{"type": "error", "error": {"type", "message"}, "request_id"}``."""
    message = p.extra.get("anthropic_message") or p.message
    if p.param and p.param not in message:
        message = f"{p.param}: {message}"
    error: dict[str, Any] = {"type": p.anthropic, "message": message}
    if "details" in p.extra:
        error["details"] = p.extra["details"]
    return {"type": "error", "error": error, "request_id": request_id}


def invalid_json(error: Exception) -> Problem:
    """A body that is not JSON, or JSON of another shape than the endpoint takes."""
    if isinstance(error, RecursionError):
        return Problem(400, "the JSON body is nested too deeply", code="invalid_json")
    if isinstance(error, msgspec.ValidationError):
        text, at, path = str(error).rpartition(" - at `")
        if not at:
            text, path = path, ""
        param = path.rstrip("`").removeprefix("$").removeprefix(".") or None
        missing = "required field `"
        if missing in text:
            name = text.split(missing)[1].rstrip("`")
            param = f"{param}.{name}" if param else name
        return Problem(
            400, text if param is None else f"{param}: {text}", code="invalid_type", param=param
        )
    return Problem(400, f"the request body is not valid JSON: {error}", code="invalid_json")


def every_error_class() -> Iterator[type[EdgeLLMError]]:
    """Every class of the tree in edgellm.errors."""
    for value in vars(e).values():
        if isinstance(value, type) and issubclass(value, EdgeLLMError):
            yield value
