"""What a sequence may say next: llguidance's token masks over one model's vocabulary.

A :class:`Constraint` belongs to one choice of one request. While it sleeps (its grammar waits for
a trigger or for the end of thinking) it costs a substring search a token; awake, it gives a mask
of packed bits, the few allowed ids, or the tokens that are forced. Masks are computed in Rust with
the GIL released, so several constraints may be asked from several threads at once; one constraint
belongs to one thread at a time.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import llguidance
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from edgellm.errors import InvalidRequestError
from edgellm.request import CONTROL_CLOSE, CONTROL_OPEN, UNTIL_OPEN, Grammar, GrammarKind

MAX_GRAMMAR_CHARS: Final = 1 << 20
# llguidance's compiler recurses along chains of rules and references, about 4 KiB of stack each;
# its own limits (LLParserLimits) bound everything else.
MAX_RULES: Final = 2_000
MAX_REFERENCES: Final = 2_000
COMPILER_STACK: Final = 64 << 20
MAX_NESTING: Final = 100
# Compiled grammars kept: an agent sends the same tools with every request.
CACHED_GRAMMARS: Final = 32
# Subschemas tried when looking for the one that llguidance refuses.
MAX_LOCATE: Final = 500
# llguidance takes a token that begins so for a control token (toktrie, SPECIAL_TOKEN_MARKER).
_SPECIAL_MARK: Final = b"\xff"
_CONTROL: Final = re.compile(f"{CONTROL_OPEN}([^{CONTROL_CLOSE}]*){CONTROL_CLOSE}")
_stack_lock: Final = threading.Lock()
_UNTIL: Final = re.compile(f"{UNTIL_OPEN}(\\w+)=([^{CONTROL_CLOSE}]*){CONTROL_CLOSE}")
_NONZERO: Final = re.compile(rb"[^\0]")
_BITS: Final = tuple(tuple(b for b in range(8) if n >> b & 1) for n in range(256))


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens, as the caller read them from its backend."""

    tokens: Sequence[bytes]
    """The piece of every id (special tokens with their text); b"" for unused ids. As long as a
    row of logits."""
    special: frozenset[int]
    """Control tokens: text never spells them, a grammar reaches them by name alone."""
    eog_ids: tuple[int, ...]
    tokenize: Callable[[bytes], list[int]] | None = None
    """How the model tokenises plain text (no BOS, special tokens not parsed), for forced tokens;
    called from any thread. None: the longest token that fits, again and again."""


@dataclass
class _Tokenizer:
    """The shape llguidance's LLTokenizer reads (llguidance/_tokenizer.py, TokenizerWrapper)."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Callable[[bytes], list[int]]
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str | bytes) -> list[int]:
        return self.encode(text if isinstance(text, bytes) else text.encode())


def make_factory(vocabulary: Vocabulary) -> ConstraintFactory:
    """Index a vocabulary. Takes a second for 128k tokens: once a model, on first use."""
    return ConstraintFactory(vocabulary)


class ConstraintFactory:
    """Compiles grammars for one vocabulary; safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eog_ids:
            raise InvalidRequestError(
                "this model has no end-of-generation token: its output cannot follow a grammar",
                param="grammar",
            )
        self.vocabulary = vocabulary
        self.n_vocab = len(vocabulary.tokens)
        self.mask_bytes = (self.n_vocab + 31) // 32 * 4
        self._eog = frozenset(vocabulary.eog_ids)
        self._ids = {vocabulary.tokens[i].decode("utf-8", "replace"): i for i in vocabulary.special}
        self._tokenizer = _llguidance_tokenizer(vocabulary)
        self._limits = LLParserLimits(verbose_errors=False)
        self._executor = LLExecutor()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[GrammarKind, str], Any] = OrderedDict()

    def compile(self, grammar: Grammar) -> Constraint:
        """A fresh constraint. InvalidRequestError says what in the grammar is wrong.

        A hard grammar takes 100 ms and more, with the GIL released: call it off the loop thread.
        """
        matcher = self._matcher(grammar.kind, grammar.text)
        gates = [_Gate(grammar.after.encode())] if grammar.after else []
        if grammar.trigger:
            gates.append(_Gate(grammar.trigger.encode(), grammar.trigger_at_start))
        return Constraint(self, matcher, tuple(gates), must_wake=bool(grammar.after))

    def check(self, grammar: Grammar) -> None:
        """Raise what :meth:`compile` would raise."""
        self._matcher(grammar.kind, grammar.text)

    def mask_many(self, constraints: Sequence[Constraint], address: int) -> None:
        """Write the masks of awake constraints, in parallel: row i at ``address + i *
        mask_bytes``. A constraint in error leaves an empty row; its ``accept`` says why."""
        rows = [(constraint.matcher, i) for i, constraint in enumerate(constraints)]
        self._executor.unsafe_compute_mask_ptr(rows, address, self.mask_bytes, len(rows))

    def _matcher(self, kind: GrammarKind, text: str) -> Any:
        key = (kind, text)
        with self._lock:
            prototype = self._compiled.get(key)
            if prototype is not None:
                self._compiled.move_to_end(key)
        if prototype is None:
            prototype = self._compile(kind, text)
            with self._lock:
                self._compiled[key] = prototype
                while len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return prototype.deep_copy()

    def _compile(self, kind: GrammarKind, text: str) -> Any:
        source = self._source(kind, text)
        matcher = _on_a_deep_stack(lambda: self._match(source))
        param = "response_format" if kind is GrammarKind.JSON_SCHEMA else "grammar"
        if matcher.is_error():
            raise InvalidRequestError(_explain(kind, text, matcher.get_error()), param=param)
        return matcher

    def _match(self, source: str) -> Any:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds a grammar that matches nothing
        return matcher

    def _source(self, kind: GrammarKind, text: str) -> str:
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"the grammar has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are accepted",
                param="grammar",
            )
        if kind is GrammarKind.JSON_SCHEMA:
            schema = parse_schema(text)
            return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        _check_size(text)
        if kind is GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(text))
        if kind is GrammarKind.GBNF:
            return str(LLMatcher.grammar_from_lark(gbnf_to_lark(text)))
        text = _UNTIL.sub(self._until, text)
        return str(LLMatcher.grammar_from_lark(_CONTROL.sub(self._control, text)))

    def _control(self, match: re.Match[str]) -> str:
        """A marker is the control token of that text, or the text when the model has none."""
        token = self._ids.get(match[1])
        return json.dumps(match[1], ensure_ascii=False) if token is None else f"<[{token}]>"

    def _until(self, match: re.Match[str]) -> str:
        """Text before a control token ends at it by itself; a spelled marker must be the end of
        the text's own lexeme, the shortest that fits."""
        kind = "" if match[2] in self._ids else "[lazy]"
        return f"{match[1]}{kind}: /(?s:.*)/ {CONTROL_OPEN}{match[2]}{CONTROL_CLOSE}"


class Constraint:
    """Where one choice stands in its grammar."""

    def __init__(
        self,
        factory: ConstraintFactory,
        matcher: Any,
        gates: tuple[_Gate, ...] = (),
        *,
        must_wake: bool = False,
    ) -> None:
        self.matcher = matcher
        self._factory = factory
        self._gates = gates
        self._must_wake = must_wake
        self._state = _Sleep(gates)
        self._tokens: list[int] = []
        self._woke_at = 0 if not gates else -1
        self._mask: bytes | None = None

    @property
    def needs_mask(self) -> bool:
        """False while asleep: the next token is sampled freely, then accepted."""
        return self._woke_at >= 0

    @property
    def can_stop(self) -> bool:
        """Whether an end-of-generation token may come next."""
        if not self.needs_mask:
            return not self._must_wake
        return bool(self.matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Nothing but the end can follow: the text is complete."""
        return self.needs_mask and bool(self.matcher.is_stopped())

    def mask(self) -> bytes:
        """Packed bits, little endian, 1 = allowed; ``mask_bytes`` long."""
        if self._mask is None:
            if not self.needs_mask:
                return b"\xff" * self._factory.mask_bytes
            self._mask = bytes(self.matcher.compute_bitmask())[: self._factory.mask_bytes]
            self._check()
        return self._mask

    def mask_into(self, address: int) -> None:
        """Write the mask to memory of ``mask_bytes`` at ``address`` (4-byte aligned)."""
        self.matcher.unsafe_compute_mask_ptr(address, self._factory.mask_bytes)
        self._check()

    def allowed(self, limit: int = 256) -> list[int] | None:
        """The allowed ids in order when there are at most ``limit``, else None."""
        mask = self.mask()
        if int.from_bytes(mask, "little").bit_count() > limit:
            return None
        return [
            match.start() * 8 + bit
            for match in _NONZERO.finditer(mask)
            for bit in _BITS[match[0][0]]
        ]

    def accept(self, token_id: int) -> None:
        """The choice took this token. InvalidRequestError when the grammar does not allow it, or
        has become too complex to follow: fail this choice alone."""
        self._mask = None
        self._tokens.append(token_id)
        if not self.needs_mask:
            self._accept_asleep(token_id)
            return
        if not self.matcher.consume_token(token_id):
            self._check()
            raise self._error(f"token {token_id} does not fit the grammar")

    def _accept_asleep(self, token_id: int) -> None:
        if token_id in self._factory._eog:
            if self._must_wake:
                raise self._error("the model ended before its answer began")
            return
        rest = self._state.feed(self._factory.vocabulary.tokens[token_id])
        if rest is None:
            return
        self._woke_at = len(self._tokens)
        if rest:
            # The token ran past the gate: what hangs over belongs to the grammar when it fits.
            self.matcher.try_consume_tokens(self._factory._tokenizer.tokenize_bytes(rest))
            if self.matcher.is_error():
                self.matcher = self._factory_copy()

    def _factory_copy(self) -> Any:
        fresh = self.matcher.deep_copy()
        fresh.reset()
        return fresh

    def accepts(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first, the grammar allows; nothing changes."""
        if self.needs_mask:
            return int(self.matcher.validate_tokens(list(token_ids)))
        state = self._state.copy()
        for i, token_id in enumerate(token_ids):
            if token_id in self._factory._eog:
                return i + (0 if self._must_wake else 1)
            if state.feed(self._factory.vocabulary.tokens[token_id]) is not None:
                return i + 1
        return len(token_ids)

    def rollback(self, n: int) -> None:
        """Take back the last ``n`` accepted tokens."""
        if n <= 0:
            return
        self._mask = None
        del self._tokens[len(self._tokens) - n :]
        if 0 <= self._woke_at <= len(self._tokens):
            if not self.matcher.rollback(n):
                self._check()
            return
        self.matcher.reset()
        self._woke_at = -1
        self._state = _Sleep(self._gates)
        for token_id in self._tokens:
            self._state.feed(self._factory.vocabulary.tokens[token_id])

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next whatever is sampled; empty when there is a choice."""
        if not self.needs_mask or self.is_finished:
            return []
        return list(self.matcher.compute_ff_tokens())

    def clone(self) -> Constraint:
        """An independent constraint in the same place."""
        twin = Constraint(
            self._factory, self.matcher.deep_copy(), self._gates, must_wake=self._must_wake
        )
        twin._state = self._state.copy()
        twin._tokens = list(self._tokens)
        twin._woke_at = self._woke_at
        return twin

    def _check(self) -> None:
        if self.matcher.is_error():
            raise self._error(str(self.matcher.get_error()).split("\n", maxsplit=1)[0])

    def _error(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"constrained output: {what}", param="grammar")


@dataclass(frozen=True)
class _Gate:
    """Bytes to wait for; ``at_start``: only where the text begins, white space apart."""

    text: bytes
    at_start: bool = False

    def find(self, text: bytes) -> int:
        if not self.at_start:
            return text.find(self.text)
        at = len(text) - len(text.lstrip())
        return at if text.startswith(self.text, at) else -1

    def may_come(self, text: bytes) -> bool:
        return not self.at_start or self.text.startswith(text.lstrip())


class _Sleep:
    """Watches generated bytes for the gates, one after the other."""

    __slots__ = ("gates", "is_shut", "tail")

    def __init__(self, gates: tuple[_Gate, ...], tail: bytes = b"", is_shut: bool = False) -> None:
        self.gates = gates
        self.tail = tail
        self.is_shut = is_shut

    def copy(self) -> _Sleep:
        return _Sleep(self.gates, self.tail, self.is_shut)

    def feed(self, piece: bytes) -> bytes | None:
        """None while still asleep; else the bytes of ``piece`` behind the last gate."""
        text = self.tail + piece
        while self.gates and not self.is_shut:
            gate = self.gates[0]
            at = gate.find(text)
            if at < 0:
                self.is_shut = not gate.may_come(text)
                keep = len(text) if gate.at_start else len(gate.text) - 1
                self.tail = text[max(0, len(text) - keep) :]
                return None
            text = text[at + len(gate.text) :]
            self.gates = self.gates[1:]
        return None if self.is_shut else text


def _llguidance_tokenizer(vocabulary: Vocabulary) -> Any:
    tokens = [
        _SPECIAL_MARK + piece if i in vocabulary.special else piece
        for i, piece in enumerate(vocabulary.tokens)
    ]
    wrapper = _Tokenizer(
        tokens=tokens,
        special_token_ids=sorted(vocabulary.special),
        eos_token_id=vocabulary.eog_ids[0],
        encode=vocabulary.tokenize or _Greedy(vocabulary),
    )
    return LLTokenizer(wrapper, eos_token=list(vocabulary.eog_ids))


@dataclass
class _Greedy:
    """The longest token that fits, again and again: valid bytes, if not the model's own cut."""

    vocabulary: Vocabulary
    ids: dict[bytes, int] = field(default_factory=dict)
    longest: int = 1

    def __post_init__(self) -> None:
        for i, piece in enumerate(self.vocabulary.tokens):
            if piece and i not in self.vocabulary.special:
                self.ids.setdefault(piece, i)
        self.longest = max(map(len, self.ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        out: list[int] = []
        at = 0
        while at < len(text):
            size = next(
                (
                    n
                    for n in range(min(self.longest, len(text) - at), 0, -1)
                    if text[at : at + n] in self.ids
                ),
                0,
            )
            if not size:
                return []
            out.append(self.ids[text[at : at + size]])
            at += size
        return out


def gbnf_to_lark(text: str) -> str:
    """llama.cpp's grammar language (grammars/README.md) in llguidance's; InvalidRequestError with
    the line otherwise."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises Exception itself
        raise InvalidRequestError(f"the GBNF grammar is wrong: {error}", param="grammar") from error


def _on_a_deep_stack(work: Callable[[], Any]) -> Any:
    """Run ``work`` on a thread whose stack the compiler's recursion does not overflow; other
    threads may have 512 KiB, and an overflow would end the process."""
    out: list[Any] = []
    with _stack_lock:
        before = threading.stack_size(COMPILER_STACK)
        thread = threading.Thread(target=lambda: out.append(work()), name="grammar", daemon=True)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if not out:
        raise InvalidRequestError("the grammar cannot be compiled", param="grammar")
    return out[0]


def _check_size(text: str) -> None:
    """Refuse a LARK, GBNF or regex text that could overflow the compiler's stack."""
    if text.count("\n") > MAX_RULES:
        raise InvalidRequestError(f"a grammar has at most {MAX_RULES} lines", param="grammar")


def parse_schema(text: str) -> Any:
    """The JSON Schema in ``text``, an object or a boolean, small enough to compile."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the JSON Schema is not JSON: {error}", param="response_format"
        ) from error
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(
            f"a JSON Schema is an object, not {type(schema).__name__}", param="response_format"
        )
    if isinstance(schema, dict):
        _check_schema(schema)
    return schema


def _check_schema(schema: dict[str, Any]) -> None:
    n_references = 0
    for path, sub in (("$", schema), *_subschemas(schema, "$")):
        n_references += "$ref" in sub
        if n_references > MAX_REFERENCES or path.count(".") > 2 * MAX_NESTING:
            raise InvalidRequestError(
                f"the JSON Schema is too large at {path[:120]}", param="response_format"
            )


def _explain(kind: GrammarKind, text: str, error: str) -> str:
    if kind is not GrammarKind.JSON_SCHEMA:
        return f"the grammar is wrong: {_brief(error)}"
    path, what = _locate(json.loads(text), error)
    return f"the JSON Schema cannot be enforced at {path[:120]}: {_brief(what)}"


def _brief(error: str) -> str:
    """llguidance's message without the picture of the grammar around it."""
    if "NoExtensionBias" in error:
        return "no text can match it"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    first = lines[0] if lines else "it cannot be compiled"
    return f"{first[:200]} {reason[:200]}".strip()


def _locate(schema: Any, error: str) -> tuple[str, str]:
    """The deepest subschema that llguidance refuses by itself, and why."""
    if not isinstance(schema, dict):
        return "$", error
    shared = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    found = ("$", error)
    for n, (path, sub) in enumerate(_subschemas(schema, "$")):
        if n >= MAX_LOCATE:
            break
        source = LLMatcher.grammar_from_json_schema(json.dumps({**shared, **sub}))
        refusal = LLMatcher.validate_grammar(source)
        if refusal and not refusal.startswith("WARNING") and path.startswith(found[0]):
            found = (path, refusal)
    return found


_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


def _subschemas(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside ``schema`` with its JSON path, outer ones first."""
    if path.count(".") > 2 * MAX_NESTING + 2:
        return
    inner: list[tuple[str, Any]] = []
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            inner += [(f"{path}.{key}.{name}", sub) for name, sub in schema[key].items()]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            inner += [(f"{path}.{key}[{i}]", sub) for i, sub in enumerate(schema[key])]
    for key in _SINGLE:
        inner.append((f"{path}.{key}", schema.get(key)))
    for where, sub in inner:
        if isinstance(sub, dict):
            yield where, sub
            yield from _subschemas(sub, where)


def version() -> str:
    """llguidance's version, for `doctor`."""
    return str(llguidance.__version__)
