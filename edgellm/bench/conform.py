"""Whether a value is of a JSON Schema's shape, by the keywords that answers are checked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES: Final = frozenset(
    ("title", "description", "default", "examples", "$schema", "$id", "$comment", "format")
)
_BOUNDS: Final[dict[str, tuple[tuple[type, ...], Callable[[Any, Any], bool]]]] = {
    "minimum": ((int, float), lambda value, bound: value >= bound),
    "maximum": ((int, float), lambda value, bound: value <= bound),
    "minLength": ((str,), lambda value, bound: len(value) >= bound),
    "maxLength": ((str,), lambda value, bound: len(value) <= bound),
    "minItems": ((list,), lambda value, bound: len(value) >= bound),
    "maxItems": ((list,), lambda value, bound: len(value) <= bound),
}


def schema_fault(schema: Any, where: str = "schema") -> str:
    """What is wrong with a schema, or in it and not checked here; empty when nothing is.

    A keyword that is passed over in silence would let every answer pass.
    """
    if not isinstance(schema, dict):
        return f"{where} is no object"
    for key, value in schema.items():
        if key not in _NOTES and (fault := _keyword_fault(key, value)):
            return f"{where}.{key} {fault}"
    return next(filter(None, (schema_fault(s, f"{where}.{at}") for at, s in _inner(schema))), "")


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"properties.{k}", v) for k, v in schema.get("properties", {}).items())
    if "items" in schema:
        yield "items", schema["items"]


def _keyword_fault(key: str, value: Any) -> str:
    if key == "type":
        kinds = value if isinstance(value, list) else [value]
        is_known = bool(kinds) and all(isinstance(k, str) and k in _TYPES for k in kinds)
        return "" if is_known else f"is {value!r}, none of {', '.join(_TYPES)}"
    if key == "required":
        is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
        return "" if is_list else "is no list of names"
    if key == "pattern":
        return _pattern_fault(value)
    if key in _BOUNDS:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if is_number else "is no number"
    forms: dict[str, tuple[type, ...]] = {
        "properties": (dict,),
        "items": (dict,),
        "enum": (list,),
        "additionalProperties": (bool,),
        "const": (object,),
    }
    if key not in forms:
        return "is a keyword that is not checked here"
    return "" if isinstance(value, forms[key]) else f"cannot be {value!r}"


def _pattern_fault(value: Any) -> str:
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        return f"is no regular expression: {error}"
    return ""


def nonconforming(value: Any, schema: dict[str, Any], where: str = "$") -> str:
    """Where and how ``value`` departs from a schema that has no fault; empty when it conforms."""
    if fault := _own_fault(value, schema):
        return f"{where} {fault}"
    inner: list[tuple[Any, dict[str, Any], str]] = []
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        inner = [(value[k], s, f"{where}.{k}") for k, s in properties.items() if k in value]
    elif isinstance(value, list) and "items" in schema:
        inner = [(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value)]
    return next(filter(None, (nonconforming(*each) for each in inner)), "")


def _own_fault(value: Any, schema: dict[str, Any]) -> str:
    kinds = schema.get("type")
    allowed = [kinds] if isinstance(kinds, str) else list(kinds or [])
    if allowed and not any(_is_a(value, kind) for kind in allowed):
        return f"is not {' or '.join(allowed)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"is none of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        return f"is not {schema['const']!r}"
    for key, (kinds_bound, holds) in _BOUNDS.items():
        if key in schema and _is_one(value, kinds_bound) and not holds(value, schema[key]):
            return f"breaks {key} {schema[key]}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return f"does not match {schema['pattern']!r}"
    return _names_fault(value, schema) if isinstance(value, dict) else ""


def _names_fault(value: dict[str, Any], schema: dict[str, Any]) -> str:
    if missing := [name for name in schema.get("required", []) if name not in value]:
        return f"lacks {', '.join(missing)}"
    surplus = [name for name in value if name not in schema.get("properties", {})]
    if schema.get("additionalProperties") is False and surplus:
        return f"has {', '.join(surplus)} beside its properties"
    return ""


def _is_a(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return kind == "boolean" if isinstance(value, bool) else isinstance(value, _TYPES[kind])


def _is_one(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
