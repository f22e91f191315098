"""Whether a value is of a JSON Schema's shape, by the keywords that answers are checked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from edgellm.chat.schema import ANNOTATIONS, find

Schema = Mapping[str, Any] | bool

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES: Final = (ANNOTATIONS - {"nullable"}) | {"format"}
_NUMBERS: Final = (int, float)
_BOUNDS: Final[dict[str, tuple[tuple[type, ...], Callable[[Any, Any], bool]]]] = {
    "minimum": (_NUMBERS, lambda value, bound: value >= bound),
    "maximum": (_NUMBERS, lambda value, bound: value <= bound),
    "exclusiveMinimum": (_NUMBERS, lambda value, bound: value > bound),
    "exclusiveMaximum": (_NUMBERS, lambda value, bound: value < bound),
    "multipleOf": (_NUMBERS, lambda value, bound: _is_whole(value / bound)),
    "minLength": ((str,), lambda value, bound: len(value) >= bound),
    "maxLength": ((str,), lambda value, bound: len(value) <= bound),
    "minItems": ((list,), lambda value, bound: len(value) >= bound),
    "maxItems": ((list,), lambda value, bound: len(value) <= bound),
    "minProperties": ((dict,), lambda value, bound: len(value) >= bound),
    "maxProperties": ((dict,), lambda value, bound: len(value) <= bound),
}
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties")
_CLOSE: Final = 1e-9
"""0.3 is a multiple of 0.1."""


def schema_fault(schema: Any, where: str = "schema") -> str:
    """What is wrong with a schema, or in it and not checked here; empty when nothing is.

    A keyword that is passed over in silence would let every answer pass.
    """
    if not isinstance(schema, dict):
        return f"{where} is no object"
    return _fault(schema, where) or _reference_fault(schema, where)


def _fault(schema: Any, where: str) -> str:
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return f"{where} is no object"
    for key, value in schema.items():
        is_note = key in _NOTES or key.startswith("x-")
        if not is_note and (fault := _keyword_fault(key, value)):
            return f"{where}.{key} {fault}"
    return next(filter(None, (_fault(s, f"{where}.{at}") for at, s in _inner(schema))), "")


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _MAPS:
        yield from ((f"{key}.{name}", sub) for name, sub in schema.get(key, {}).items())
    for key in _LISTS:
        yield from ((f"{key}[{i}]", sub) for i, sub in enumerate(schema.get(key, ())))
    yield from ((key, schema[key]) for key in _SINGLE if key in schema)


def _reference_fault(root: dict[str, Any], where: str) -> str:
    """A ``$ref`` that leads to no schema that was looked at, or round in a circle."""
    schemas = list(_walk(root, where))
    known = {id(schema) for _, schema in schemas}
    for at, schema in schemas:
        target = find(root, schema["$ref"]) if "$ref" in schema else True
        if not isinstance(target, bool) and id(target) not in known:
            return f"{at}.$ref names no schema of this one: {schema['$ref']!r}"
    done: set[int] = set()
    circles = (at for at, schema in schemas if _is_endless(schema, root, (), done))
    return next((f"{at} refers to itself" for at in circles), "")


def _walk(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield where, schema
        for at, sub in _inner(schema):
            yield from _walk(sub, f"{where}.{at}")


def _is_endless(schema: Any, root: Any, path: tuple[int, ...], done: set[int]) -> bool:
    """Whether asking it of one value leads back to itself, so that no value answers."""
    if not isinstance(schema, dict) or id(schema) in done:
        return False
    if id(schema) in path:
        return True
    again = [sub for key in ("allOf", "anyOf", "oneOf") for sub in schema.get(key, ())]
    if "$ref" in schema:
        again.append(find(root, schema["$ref"]))
    if any(_is_endless(sub, root, (*path, id(schema)), done) for sub in again):
        return True
    done.add(id(schema))
    return False


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
    if key == "$ref":
        return "" if isinstance(value, str) else f"cannot be {value!r}"
    if key in _BOUNDS:
        is_number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
        return "" if is_number and (key != "multipleOf" or value > 0) else "is no number for it"
    return _form_fault(key, value)


def _form_fault(key: str, value: Any) -> str:
    forms: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(_MAPS, (dict,)),
        **dict.fromkeys(_LISTS, (list,)),
        **dict.fromkeys(_SINGLE, (dict, bool)),
        "enum": (list,),
        "const": (object,),
    }
    if key not in forms:
        return "is a keyword that is not checked here"
    if not isinstance(value, forms[key]) or (key in _LISTS and not value):
        return f"cannot be {value!r}"
    if key == "patternProperties" and isinstance(value, dict):
        return next(filter(None, (_pattern_fault(name) for name in value)), "")
    return ""


def _pattern_fault(value: Any) -> str:
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        return f"is no regular expression: {error}"
    return ""


def nonconforming(value: Any, schema: dict[str, Any]) -> str:
    """Where and how ``value`` departs from a schema that has no fault; empty when it conforms."""
    return _departs(value, schema, "$", schema)


def _departs(value: Any, schema: Schema, where: str, root: Any) -> str:
    if isinstance(schema, bool):
        return "" if schema else f"{where} may not be there"
    if fault := _own_fault(value, schema):
        return f"{where} {fault}"
    if "$ref" in schema and (fault := _departs(value, find(root, schema["$ref"]), where, root)):
        return fault
    if fault := _combined_fault(value, schema, where, root):
        return fault
    inner = _members(value, schema) if isinstance(value, dict) else _items(value, schema)
    return next(filter(None, (_departs(v, s, where + at, root) for v, s, at in inner)), "")


def _combined_fault(value: Any, schema: Mapping[str, Any], where: str, root: Any) -> str:
    def faults(key: str) -> list[str]:
        return [_departs(value, option, where, root) for option in schema.get(key, ())]

    if fault := next(filter(None, faults("allOf")), ""):
        return fault
    for key in ("anyOf", "oneOf"):
        told = faults(key)
        if told and all(told):
            return f"{where} is none of {key}: {'; '.join(dict.fromkeys(told))}"
    n = faults("oneOf").count("")
    return f"{where} is {n} of oneOf at once" if n > 1 else ""


def _members(value: dict[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[Any, Schema, str]]:
    """What is in an object, with the schema it is held against and its path."""
    named = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    for name, member in value.items():
        held = [sub for pattern, sub in patterns.items() if re.search(pattern, name)]
        held += [named[name]] if name in named else []
        others = schema.get("additionalProperties", True)
        for sub in held or ([others] if isinstance(others, dict) else []):
            yield member, sub, f".{name}"


def _items(value: Any, schema: Mapping[str, Any]) -> Iterator[tuple[Any, Schema, str]]:
    first = schema.get("prefixItems", [])
    for i, item in enumerate(value if isinstance(value, list) else ()):
        yield item, first[i] if i < len(first) else schema.get("items", True), f"[{i}]"


def _own_fault(value: Any, schema: Mapping[str, Any]) -> str:
    kinds = schema.get("type")
    allowed = [kinds] if isinstance(kinds, str) else list(kinds or [])
    if allowed and not any(_is_a(value, kind) for kind in allowed):
        return f"is not {' or '.join(allowed)}"
    if "enum" in schema and not any(_is_same(value, known) for known in schema["enum"]):
        return f"is none of {schema['enum']}"
    if "const" in schema and not _is_same(value, schema["const"]):
        return f"is not {schema['const']!r}"
    for key, (kinds_bound, holds) in _BOUNDS.items():
        if key in schema and _is_one(value, kinds_bound) and not holds(value, schema[key]):
            return f"breaks {key} {schema[key]}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return f"does not match {schema['pattern']!r}"
    return _names_fault(value, schema) if isinstance(value, dict) else ""


def _names_fault(value: dict[str, Any], schema: Mapping[str, Any]) -> str:
    if missing := [name for name in schema.get("required", []) if name not in value]:
        return f"lacks {', '.join(missing)}"
    patterns = schema.get("patternProperties", {})
    surplus = [
        name
        for name in value
        if name not in schema.get("properties", {})
        and not any(re.search(pattern, name) for pattern in patterns)
    ]
    if schema.get("additionalProperties") is False and surplus:
        return f"has {', '.join(surplus)} beside its properties"
    return ""


def _is_a(value: Any, kind: str) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return kind == "boolean" if isinstance(value, bool) else isinstance(value, _TYPES[kind])


def _is_same(a: Any, b: Any) -> bool:
    """As JSON has it: true is no 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[k], b[k]) for k in a)
    return bool(a == b)


def _is_one(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_whole(ratio: float) -> bool:
    return abs(ratio - round(ratio)) <= _CLOSE * max(1.0, abs(ratio))
