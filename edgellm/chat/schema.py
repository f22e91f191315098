"""JSON Schema as people really send it, made into what the grammar engine takes.

Tools are helpful even when a detail of their schema cannot be enforced: it is dropped, with a
warning. A ``response_format`` is a promise: what cannot be enforced there is an error with its
path (:func:`check`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from edgellm.errors import InvalidRequestError
from edgellm.request import Grammar, GrammarKind

MAX_DEPTH: Final = 90  # serde_json, which reads the schema in the engine, stops at 128
MAX_NODES: Final = 20_000
MAX_ONE_OF: Final = 64
# The engine's compiler recurses along references, 4 KiB of stack each: more are tried there alone.
MAX_TRIED_REFERENCES: Final = 100
TOLERANT: Final = {"coerce_one_of": True, "lenient": True}
TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_TYPE_ALIASES: Final = {
    **{"int": "integer", "float": "number", "double": "number", "str": "string"},
    **{"dict": "object", "map": "object", "list": "array", "tuple": "array", "bool": "boolean"},
    **{"none": "null", "text": "string", "long": "integer"},
}
# llguidance 1.9, docs/json_schema.md.
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
COUNTS: Final = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
)
BOUNDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
UNENFORCEABLE: Final = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("unevaluatedProperties", "unevaluatedItems", "contentEncoding", "contentMediaType"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
ANNOTATIONS: Final = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
        *("writeOnly", "$comment", "$schema", "$id", "id", "$anchor", "strict", "nullable"),
        *("discriminator", "xml", "externalDocs", "contentSchema"),
    )
)
_LOOK_AROUND: Final = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9bB]|\(\?P=|\\k<|\(\?>")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties", "additionalItems")

Refuse = Callable[[str, str], None]
"""Called with the path and what cannot be enforced there: warns or raises."""


class _Cleaner:
    """Walks one schema; ``refuse`` decides what happens with what cannot be enforced."""

    def __init__(self, root: Any, refuse: Refuse) -> None:
        self.root = root
        self.refuse = refuse
        self.n_nodes = 0
        self.n_references = 0
        # The parts of an allOf, wherever they are defined, must let each other's properties in.
        self.closes = not _mentions(root, "allOf")

    def clean(self, schema: Any, path: str, depth: int = 0) -> Any:
        self.n_nodes += 1
        self.n_references += isinstance(schema, Mapping) and "$ref" in schema
        if depth > MAX_DEPTH or self.n_nodes > MAX_NODES:
            raise InvalidRequestError(f"the JSON Schema is too large at {path[:120]}", param=None)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self.refuse(path, f"a schema is an object, not {json.dumps(schema)[:40]}")
            return {}
        out: dict[str, Any] = {}
        kind = schema.get("type", "string")
        is_text = kind == "string" or (isinstance(kind, list) and "string" in kind)
        for key, value in schema.items():
            if key in ("format", "pattern") and not is_text:
                continue  # says nothing about a number
            self._keyword(out, key, value, f"{path}.{key}", depth)
        if schema.get("nullable") is True and isinstance(out.get("type"), str):
            out["type"] = [out["type"], "null"]
        if self.closes:
            _close(out)
        return out

    def _keyword(self, out: dict[str, Any], key: str, value: Any, path: str, depth: int) -> None:
        if key in ANNOTATIONS or key.startswith("x-"):
            return
        if key in UNENFORCEABLE:
            if value not in (None, False):
                self.refuse(path, "this keyword cannot be enforced")
            return
        check = self._check_of(key)
        if key in _MAPS:
            out[key] = self._map(value, path, depth)
        elif key == "oneOf":
            self._one_of(out, value, path, depth)
        elif key in _LISTS:
            out[key] = self._list(value, path, depth)
        elif key in _SINGLE:
            out[key] = self._single(value, path, depth)
        elif check is None or check(value, path):
            out[key] = self.type_of(value, path) if key == "type" else value
        if key in out and out[key] is None:
            del out[key]

    def _check_of(self, key: str) -> Callable[[Any, str], bool] | None:
        if key in COUNTS:
            return self._count
        if key in BOUNDS:
            return self._bound
        checks = {
            "format": self._format,
            "pattern": self._pattern,
            "enum": self._enum,
            "required": self._required,
            "$ref": self._ref,
            "multipleOf": self._multiple,
        }
        return checks.get(key)

    def _count(self, value: Any, path: str) -> bool:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return True
        self.refuse(path, "a whole number, 0 or more, is needed")
        return False

    def _bound(self, value: Any, path: str) -> bool:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return True
        self.refuse(path, "a number is needed")
        return False

    def _multiple(self, value: Any, path: str) -> bool:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and value > 0:
            return True
        self.refuse(path, "a number above 0 is needed")
        return False

    def _map(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, Mapping):
            self.refuse(path, "an object of schemas is needed")
            return None
        return {k: self.clean(v, f"{path}.{k}", depth + 1) for k, v in value.items()}

    def _list(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, list) or not value:
            self.refuse(path, "a list of schemas is needed")
            return None
        return [self.clean(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]

    def _one_of(self, out: dict[str, Any], value: Any, path: str, depth: int) -> None:
        """Options that exclude each other are what anyOf says; others cannot be enforced."""
        options = self._list(value, path, depth)
        if options is None:
            return
        whole = [_follow(self.root, option) for option in value]
        pairs = ((a, b) for i, a in enumerate(whole) for b in whole[:i])
        if len(whole) > MAX_ONE_OF or not all(_are_disjoint(a, b) for a, b in pairs):
            self.refuse(path, "these options may overlap: use anyOf")
        out["allOf" if "anyOf" in out else "anyOf"] = options

    def _single(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, list):
            return self._list(value, path, depth)
        return self.clean(value, path, depth + 1)

    def type_of(self, value: Any, path: str) -> Any:
        names = value if isinstance(value, list) else [value]
        known = [_TYPE_ALIASES.get(str(name).lower(), str(name).lower()) for name in names]
        for name in known:
            if name not in TYPES:
                self.refuse(path, f"{name[:40]!r} is no JSON type")
        kept = [name for name in dict.fromkeys(known) if name in TYPES]
        if not kept:
            return None
        return kept if isinstance(value, list) else kept[0]

    def _format(self, value: Any, path: str) -> bool:
        if value in FORMATS:
            return True
        self.refuse(path, f"the format {str(value)[:40]!r} cannot be enforced")
        return False

    def _pattern(self, value: Any, path: str) -> bool:
        if not isinstance(value, str):
            self.refuse(path, "a pattern is a text")
            return False
        if _LOOK_AROUND.search(value):
            self.refuse(path, "look-around, back-references and \\b cannot be enforced")
            return False
        return True

    def _enum(self, value: Any, path: str) -> bool:
        if isinstance(value, list) and value:
            return True
        self.refuse(path, "a list of values is needed")
        return False

    def _required(self, value: Any, path: str) -> bool:
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return True
        self.refuse(path, "a list of names is needed")
        return False

    def _ref(self, value: Any, path: str) -> bool:
        if isinstance(value, str) and find(self.root, value) is not None:
            return True
        self.refuse(path, f"{str(value)[:80]!r} is not in this schema")
        return False


def _mentions(schema: Any, keyword: str) -> bool:
    left = [schema]
    for _ in range(MAX_NODES):
        if not left:
            return False
        item = left.pop()
        if isinstance(item, Mapping):
            if keyword in item:
                return True
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return False


def _follow(root: Any, schema: Any) -> Any:
    """``schema``, or what its ``$ref`` names."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return find(root, reference) if isinstance(reference, str) else schema


def _are_disjoint(a: Any, b: Any) -> bool:
    """Whether no value fits both: by type, by a constant, or by a property one must have and the
    other cannot."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return False
    if _excludes(_values(a), _values(b)) or _excludes(_types(a), _types(b)):
        return True
    if not _types(a) == _types(b) == {"object"}:
        return False
    names = [name for name in _needs(a) if name in _needs(b)]
    pa, pb = _properties(a), _properties(b)
    if any(_excludes(_values(pa.get(n)), _values(pb.get(n))) for n in names):
        return True
    return _lacks(a, b) or _lacks(b, a)


def _excludes(a: set[Any] | None, b: set[Any] | None) -> bool:
    return a is not None and b is not None and not a & b


def _values(schema: Any) -> set[str] | None:
    """The only values (as JSON) a schema allows; None when it names none."""
    if isinstance(schema, Mapping) and "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
        return {json.dumps(value, sort_keys=True) for value in schema["enum"]}
    return None


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    kind = schema.get("type", "object" if "properties" in schema else None)
    if kind is None:
        return None
    names = {str(name) for name in (kind if isinstance(kind, list) else [kind])}
    return names | {"integer"} if "number" in names else names


def _lacks(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether ``a`` needs a property that the closed object ``b`` does not have."""
    properties = _properties(b)
    is_closed = bool(properties) and b.get("additionalProperties", False) is False
    return is_closed and any(name not in properties for name in _needs(a))


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _needs(schema: Mapping[str, Any]) -> list[str]:
    found = schema.get("required")
    return [n for n in found if isinstance(n, str)] if isinstance(found, list) else []


def find(root: Any, reference: str) -> Any:
    """What a reference within the schema names; None when it is nothing there."""
    if not reference.startswith("#"):
        return None
    here = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list) and name.isdigit() and int(name) < len(here):
            here = here[int(name)]
        elif isinstance(here, Mapping) and name in here:
            here = here[name]
        else:
            return None
    return here


def _close(schema: dict[str, Any]) -> None:
    """An object that lists its properties gets no others unless it says so: a small model would
    go on inventing them. Not beside combinators, where the parts see each other's properties."""
    combined = any(
        key in schema for key in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")
    )
    if schema.get("properties") and "additionalProperties" not in schema and not combined:
        schema["additionalProperties"] = False


def relax(schema: Any, path: str) -> tuple[dict[str, Any], list[str]]:
    """A tool's parameters as an object schema the grammar takes, and a warning for each detail
    that was dropped. InvalidRequestError only when it is too large."""
    given = dict(schema) if isinstance(schema, Mapping) else {}
    for key in ("enum", "const", "nullable"):  # of all arguments together: nobody means that
        given.pop(key, None)
    out, warnings = _relaxed({**given, "type": "object"}, path)
    return {**out, "type": "object"}, warnings


def _relaxed(schema: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    warnings: list[str] = []
    cleaner = _Cleaner(schema, lambda where, what: warnings.append(f"{where}: {what}"))
    out = dict(cleaner.clean(schema, path))
    if cleaner.n_references <= MAX_TRIED_REFERENCES:
        shared = {key: out[key] for key in ("$defs", "definitions") if key in out}
        out = {**_mend(out, shared, path, warnings), **shared}
    return out, warnings


@lru_cache(maxsize=512)
def _refusal(text: str) -> str:
    """Why the grammar engine refuses this schema; empty when it takes it. The library is loaded
    with the first tool: 0.15 s and 10 MiB."""
    from llguidance import LLMatcher

    found = str(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text)))
    return "" if found.startswith("WARNING") else " ".join(found.split())[:200]


def _mend(schema: Any, shared: dict[str, Any], path: str, warnings: list[str]) -> Any:
    """``schema`` without the smallest parts that the engine refuses, each told."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        names = [name for name in _needs(schema) if name in _properties(schema)]
        schema = {**schema, "required": names}
    what = _refusal(json.dumps({**shared, **schema, "x-guidance": TOLERANT}))
    if not what:
        return schema
    out = dict(schema)
    for key in ("properties", "patternProperties"):
        if isinstance(out.get(key), dict):
            out[key] = {
                name: _mend(sub, shared, f"{path}.{key}.{name}", warnings)
                for name, sub in out[key].items()
            }
    for key in ("items", "additionalProperties"):
        if key in out:
            out[key] = _mend(out[key], shared, f"{path}.{key}", warnings)
    if not _refusal(json.dumps({**shared, **out, "x-guidance": TOLERANT})):
        return out
    warnings.append(f"{path}: cannot be enforced: {what}")
    return {}


def check(schema: Any, param: str) -> dict[str, Any]:
    """A response schema, every detail of which can be enforced; InvalidRequestError with the path
    of the first that cannot."""

    def refuse(path: str, what: str) -> None:
        raise InvalidRequestError(f"{path[:200]}: {what}", param=param)

    if not isinstance(schema, Mapping):
        raise InvalidRequestError("the JSON Schema must be an object", param=param)
    out = _Cleaner(schema, refuse).clean(schema, "$")
    return dict(out)


def response_schema(
    response_format: Mapping[str, Any] | None,
) -> tuple[dict[str, Any] | None, list[str]]:
    """The schema an OpenAI ``response_format`` asks for (None for text), and warnings: with
    ``strict: false`` what cannot be enforced is dropped, else it is refused."""
    if response_format is None:
        return None, []
    kind = response_format.get("type")
    if kind in (None, "text"):
        return None, []
    if kind == "json_object":
        # llama-server's clients put a schema here.
        given = response_format.get("schema")
        return (check(given, "response_format.schema") if given else {"type": "object"}), []
    if kind == "json_schema":
        return _json_schema(response_format)
    raise InvalidRequestError(
        f"response_format.type must be text, json_object or json_schema, not {kind!r}",
        param="response_format.type",
    )


def _json_schema(response_format: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    wrapper = response_format.get("json_schema")
    param = "response_format.json_schema.schema"
    if not isinstance(wrapper, Mapping) or "schema" not in wrapper:
        wrapper, param = response_format, "response_format.schema"
    if "schema" not in wrapper:
        raise InvalidRequestError(
            "response_format json_schema needs json_schema.schema",
            param="response_format.json_schema.schema",
        )
    if wrapper.get("strict") is False and isinstance(wrapper["schema"], Mapping):
        return _relaxed(wrapper["schema"], "$")
    return check(wrapper["schema"], param), []


# One space, or a line break with its indentation: room for readable JSON, none to wander.
_READABLE: Final = {"whitespace_pattern": r"( |\n[ \t]{0,40})"}


def readable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` for an answer in JSON that people read."""
    return {**schema, "x-guidance": _READABLE}


def grammar(schema: Mapping[str, Any]) -> Grammar:
    text = json.dumps(readable(schema), ensure_ascii=False)
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
