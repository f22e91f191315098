"""Fields that several endpoints share, and how they become SamplingParams and a Grammar.

Every limit lives in :mod:`edgellm.request`; here are only names: OpenAI's, llama-server's and
vLLM's for the same thing. Fields nobody knows are ignored, because clients send many.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import msgspec

from edgellm.errors import InvalidRequestError
from edgellm.request import Grammar, GrammarKind, Priority, SamplingParams

# A count beyond this means "no limit" and must still fit the frames between the processes.
MAX_COUNT: Final = 2**31 - 1
MAX_STOP_CHARS: Final = 1024
NO_LIMIT: Final = -1
"""A count of tokens that means as many as fit (llama-server and LM Studio)."""


class Wire(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of every body."""


class SamplingFields(Wire, kw_only=True):
    """How tokens are chosen, under every name that clients use."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    n_predict: int | None = None
    samplers: list[str] | str | None = None
    grammar: str | None = None
    json_schema: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    priority: int | str | None = None
    service_tier: str | None = None
    cache_prompt: bool | None = None
    timings: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    return_tokens: bool | None = None
    user: str | None = None


class StreamOptions(Wire, kw_only=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Wire, kw_only=True):
    """The schema of a ``json_schema`` response format."""

    name: str = "response"
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Wire, kw_only=True):
    """OpenAI's ``response_format``; ``schema`` beside the type is llama-server's way."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None
    grammar: str | None = None
    pattern: str | None = None


_NOT_TYPICAL: Final = {"typical_p": 1.0}
_NO_PENALTIES: Final = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

# wire name -> SamplingParams name; the first that is given wins.
_SAME: Final = (
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("typical_p", "typical_p"),
    ("repeat_penalty", "repeat_penalty"),
    ("repeat_last_n", "repeat_last_n"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
    ("ignore_eos", "ignore_eos"),
    ("min_tokens", "min_tokens"),
    ("n", "n"),
)


# llama-server's samplers (common/sampling.cpp, common_sampler_types_from_names and _from_chars):
# the letter, the names, and what the parameters are without it.
_SAMPLERS: Final[tuple[tuple[str, frozenset[str], dict[str, Any]], ...]] = (
    ("k", frozenset({"top_k", "top-k"}), {"top_k": 0}),
    ("p", frozenset({"top_p", "top-p", "nucleus"}), {"top_p": 1.0}),
    ("m", frozenset({"min_p", "min-p"}), {"min_p": 0.0}),
    ("y", frozenset({"typ_p", "typ-p", "typ", "typical", "typical_p", "typical-p"}), _NOT_TYPICAL),
    ("t", frozenset({"temperature", "temp"}), {"temperature": 1.0}),
    ("e", frozenset({"penalties"}), _NO_PENALTIES),
)


def left_out(samplers: list[str] | str | None) -> dict[str, Any]:
    """The parameters of the samplers that llama-server's ``samplers`` does not name, switched off.
    Nothing where the field is absent or empty; their order here is always the same."""
    if not samplers:
        return {}
    off: dict[str, Any] = {}
    for letter, names, without in _SAMPLERS:
        is_named = letter in samplers if isinstance(samplers, str) else names & {*samplers}
        if not is_named:
            off |= without
    return off


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...] = (),
    logit_bias: dict[int, float] | None = None,
    grammar: Grammar | None = None,
    **more: Any,
) -> SamplingParams:
    """The request's sampling over the server's defaults, validated.

    ``stop`` are the template's own stop strings, added to the client's.
    """
    given: dict[str, Any] = dict(more)
    for wire, name in _SAME:
        value = getattr(fields, wire)
        if value is not None:
            given[name] = value
    if fields.repetition_penalty is not None:
        given.setdefault("repeat_penalty", fields.repetition_penalty)
    if fields.top_k is not None:
        given["top_k"] = max(fields.top_k, 0) if fields.top_k >= -1 else fields.top_k
    if fields.seed is not None:
        # llama-server draws a seed for -1.
        given["seed"] = None if fields.seed == -1 else fields.seed
    if max_tokens is not None:
        given["max_tokens"] = min(max_tokens, MAX_COUNT)
    if fields.min_tokens is not None:
        given["min_tokens"] = min(fields.min_tokens, MAX_COUNT)
    mine = stop_strings(fields.stop)
    if mine or stop:
        given["stop"] = mine + tuple(s for s in stop if s not in mine)
    if fields.stop_token_ids:
        given["stop_token_ids"] = tuple(check_ids(fields.stop_token_ids, "stop_token_ids"))
    if logit_bias:
        given["logit_bias"] = logit_bias
    if grammar is not None:
        given["grammar"] = grammar
    given |= left_out(fields.samplers)
    if not given:
        return defaults
    return msgspec.structs.replace(defaults, **given).validate()


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """``stop`` as a tuple; an empty string alone means none."""
    if not stop:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(len(s) > MAX_STOP_CHARS for s in strings):
        raise InvalidRequestError(
            f"a stop string is over {MAX_STOP_CHARS} characters", param="stop"
        )
    return strings


def check_ids(ids: list[int], param: str, n_vocab: int = MAX_COUNT) -> list[int]:
    """``ids`` when each is a token of the vocabulary; InvalidRequestError otherwise."""
    for i in ids:
        if not 0 <= i < n_vocab:
            raise InvalidRequestError(f"{i} is not a token id of this model", param=param)
    return ids


def priority_of(fields: SamplingFields, default: Priority) -> Priority:
    """From ``priority`` (a number, lower is sooner, or a name) or OpenAI's ``service_tier``."""
    value = fields.priority
    if value is None:
        tier = {"flex": Priority.BATCH, "priority": Priority.INTERACTIVE}
        return tier.get(fields.service_tier or "", default)
    if isinstance(value, int):
        return Priority(min(max(value, 0), 2))
    try:
        return Priority[value.upper()]
    except KeyError:
        names = ", ".join(p.name.lower() for p in Priority)
        raise InvalidRequestError(
            f"priority must be {names} or a number", param="priority"
        ) from None


def explicit_grammar(fields: SamplingFields) -> Grammar | None:
    """The grammar that llama-server's and vLLM's own fields ask for, if any."""
    if fields.grammar:
        return Grammar(kind=GrammarKind.GBNF, text=fields.grammar)
    if fields.guided_grammar:
        return Grammar(kind=GrammarKind.GBNF, text=fields.guided_grammar)
    if fields.guided_regex:
        return Grammar(kind=GrammarKind.REGEX, text=fields.guided_regex)
    if fields.guided_choice:
        return schema_grammar({"enum": fields.guided_choice}, "guided_choice")
    for name in ("json_schema", "guided_json"):
        schema = getattr(fields, name)
        if schema is not None:
            return schema_grammar(schema, name)
    return None


def schema_grammar(schema: Any, param: str) -> Grammar:
    """``schema`` (an object, or JSON text of one) as a grammar."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"{param} is not JSON: {error}", param=param) from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequestError(f"{param} must be a JSON Schema object", param=param)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


def format_grammar(fmt: ResponseFormat | None) -> Grammar | None:
    """The grammar of a response format where no chat template is involved (completions)."""
    if fmt is None or fmt.type == "text":
        return None
    if fmt.type == "grammar":
        return Grammar(kind=GrammarKind.GBNF, text=_need(fmt.grammar, "response_format.grammar"))
    if fmt.type == "regex":
        return Grammar(kind=GrammarKind.REGEX, text=_need(fmt.pattern, "response_format.pattern"))
    schema = format_schema(fmt)
    return schema_grammar({"type": "object"} if schema is None else schema, "response_format")


def _need(value: str | None, param: str) -> str:
    if not value:
        raise InvalidRequestError(f"{param} is missing", param=param)
    return value


def format_schema(fmt: ResponseFormat) -> dict[str, Any] | bool | None:
    """The schema inside a response format; None for a plain ``json_object``."""
    if fmt.type == "json_object" or (fmt.json_schema is None and fmt.schema is not None):
        return fmt.schema
    if fmt.json_schema is None or fmt.json_schema.schema is None:
        raise InvalidRequestError(
            "response_format json_schema needs json_schema.schema",
            param="response_format.json_schema.schema",
        )
    return fmt.json_schema.schema


def first_limit(*max_tokens: int | None, n_predict: int | None) -> int | None:
    """The first of OpenAI's names that is given, else n_predict, where -1 means no limit."""
    for value in max_tokens:
        if value is not None:
            return value
    return None if n_predict == NO_LIMIT else n_predict
