"""A person's own prompts answered by two configurations: what changed, what broke, which is liked.

Answers are greedy and made one at a time, so that a difference is the configuration's and not the
batch's.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import count
from typing import Annotated, Any, Final

import msgspec

from edgellm.bench.conform import nonconforming, schema_fault
from edgellm.bench.jsonl import FORM, read_rows
from edgellm.bench.variant import chat_model
from edgellm.chat import ContentDelta, prepare_chat
from edgellm.engine.client import Engine
from edgellm.errors import ConfigError, EdgeLLMError
from edgellm.metrics import percentile
from edgellm.request import FinishReason, Request, SamplingParams

_IDS: Final = count()
MIN_LETTERS: Final = 12
"""Fewer letters say nothing about a text's script."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a regression set: a prompt, and optionally what the answer must be like."""

    name: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    expect: str | None = None
    """A regular expression that must be found in the answer."""
    equals: str | None = None
    json_schema: dict[str, Any] | None = msgspec.field(default=None, name="schema")
    """The answer must be JSON of this shape (bench/conform.py)."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256

    def turns(self) -> list[dict[str, Any]]:
        """The conversation to answer."""
        return self.messages or [{"role": "user", "content": self.prompt or ""}]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one configuration said."""

    text: str = ""
    n_tokens: int = 0
    finish: str = ""
    error: str = ""
    fault: str = ""
    """Why it is not what the case expects; empty when it is, or when nothing was expected."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case under two configurations."""

    name: str
    a: Answer
    b: Answer
    is_same: bool
    language: str = ""
    """``latin -> cjk`` when the second answer's script is another than the first's."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A regression set in figures."""

    n: int
    exact: float
    """Share of answers that are the same to the character."""
    length_ratio: float
    """Median of the second's tokens over the first's."""
    faults_a: int
    faults_b: int
    broken: tuple[str, ...]
    """Cases that the first passes and the second does not."""
    mended: tuple[str, ...]
    language_switches: tuple[str, ...]
    cut_a: int
    """Answers that ran into max_tokens."""
    cut_b: int
    failed: tuple[str, ...] = ()
    """Cases that a side could not answer at all: nothing is known of them."""


def read_cases(path: str) -> list[Case]:
    """A JSONL file's cases; raises ConfigError with the line that is wrong."""
    return [_checked(case, f"{path}:{number}", number) for number, case in read_rows(path, Case)]


def _checked(case: Case, where: str, number: int) -> Case:
    try:
        re.compile(case.expect or "")
    except re.error as error:
        raise ConfigError(f"{where}: expect is no regular expression: {error}") from error
    if case.json_schema is not None and (fault := schema_fault(case.json_schema)):
        raise ConfigError(f"{where}: {fault}")
    if case.prompt is None and not case.messages:
        raise ConfigError(f"{where}: neither prompt nor messages", hint=FORM)
    return case if case.name else msgspec.structs.replace(case, name=f"line {number}")


async def answer_all(
    engine: Engine, cases: Sequence[Case], on_done: Callable[[int], None] = lambda _: None
) -> list[Answer]:
    """Every case's answer, one after another; an engine's error is an answer's error."""
    answers = []
    for number, case in enumerate(cases, 1):
        answers.append(await _answer(engine, case))
        on_done(number)
    return answers


async def _answer(engine: Engine, case: Case) -> Answer:
    try:
        prepared = prepare_chat(chat_model(engine), case.turns())
        sampling = SamplingParams(
            temperature=0.0, max_tokens=case.max_tokens, stop=prepared.stop, seed=1
        )
        request = Request(
            id=f"regress-{next(_IDS)}",
            prompt=prepared.prompt,
            sampling=sampling,
            add_special=prepared.add_special,
        )
        raw, n, finish = "", 0, ""
        parts: list[str] = []
        async for event in engine.generate(request):
            raw += event.text
            n += len(event.token_ids)
            parts += _content(prepared.parser.feed(event.text))
            if event.finish_reason is not None:
                finish = event.finish_reason.value
        parts += _content(prepared.parser.finish())
    except EdgeLLMError as error:
        return Answer(error=error.message, fault=f"failed: {error.message}")
    text = "".join(parts).strip()
    return Answer(text=text, n_tokens=n, finish=finish, fault=fault_of(case, text))


def _content(deltas: Sequence[object]) -> list[str]:
    return [d.text for d in deltas if isinstance(d, ContentDelta)]


def fault_of(case: Case, text: str) -> str:
    """Why ``text`` is not what the case expects; empty when it is."""
    if case.equals is not None and text.strip() != case.equals.strip():
        return f"is not {case.equals!r}"
    if case.expect is not None and re.search(case.expect, text) is None:
        return f"does not match {case.expect!r}"
    if case.json_schema is not None:
        try:
            value = msgspec.json.decode(_unfenced(text).encode())
        except msgspec.DecodeError as error:
            return f"is not JSON: {error}"
        return nonconforming(value, case.json_schema)
    return ""


def _unfenced(text: str) -> str:
    """JSON that a model put into a Markdown fence is JSON all the same."""
    match = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL)
    return match.group(1) if match else text


def script_of(text: str) -> str:
    """The script most letters are in (latin, cyrillic, cjk ...); empty with too few letters."""
    names = Counter(unicodedata.name(ch, "?").split()[0].lower() for ch in text if ch.isalpha())
    if names.total() < MIN_LETTERS:
        return ""
    return names.most_common(1)[0][0]


def compare(cases: Sequence[Case], a: Sequence[Answer], b: Sequence[Answer]) -> list[Row]:
    """The two configurations' answers side by side."""
    return [
        Row(
            name=case.name,
            a=x,
            b=y,
            is_same=x.text == y.text and not x.error and not y.error,
            language=_switch(script_of(x.text), script_of(y.text)),
        )
        for case, x, y in zip(cases, a, b, strict=True)
    ]


def _switch(before: str, after: str) -> str:
    return f"{before} -> {after}" if before and after and before != after else ""


def summarise(rows: Sequence[Row]) -> Summary:
    """The set in figures."""
    ratios = sorted(r.b.n_tokens / r.a.n_tokens for r in rows if r.a.n_tokens)
    cut = FinishReason.LENGTH.value
    return Summary(
        n=len(rows),
        exact=sum(r.is_same for r in rows) / len(rows) if rows else 0.0,
        length_ratio=percentile(ratios, 50) or 0.0,
        faults_a=sum(bool(r.a.fault) for r in rows),
        faults_b=sum(bool(r.b.fault) for r in rows),
        broken=tuple(r.name for r in rows if r.b.fault and not r.a.fault),
        mended=tuple(r.name for r in rows if r.a.fault and not r.b.fault),
        language_switches=tuple(r.name for r in rows if r.language),
        cut_a=sum(r.a.finish == cut for r in rows),
        cut_b=sum(r.b.finish == cut for r in rows),
        failed=tuple(r.name for r in rows if r.a.error or r.b.error),
    )


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """One blind question: what is shown first and second, and which is which."""

    case: Case
    first: str
    second: str
    first_is_a: bool


def ballots(
    cases: Sequence[Case], a: Sequence[Answer], b: Sequence[Answer], seed: str
) -> list[Ballot]:
    """Questions in random order, sides at random; equal answers and failures are not asked
    about."""
    rng = random.Random(seed)
    made = []
    for case, x, y in zip(cases, a, b, strict=True):
        if x.text == y.text or x.error or y.error:
            continue
        first_is_a = rng.random() < 0.5
        first, second = (x.text, y.text) if first_is_a else (y.text, x.text)
        made.append(Ballot(case=case, first=first, second=second, first_is_a=first_is_a))
    rng.shuffle(made)
    return made


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How a blind comparison came out."""

    a: int
    b: int
    ties: int
    same: int
    """Answers that were equal and not asked about."""
    failed: int = 0
    """Cases that one side could not answer: not asked about either."""
    left: int = 0
    """Questions that were not answered."""

    @property
    def p_value(self) -> float:
        """Chance of a split at least this uneven if neither were liked better (sign test)."""
        n, k = self.a + self.b, max(self.a, self.b)
        if n == 0:
            return 1.0
        tail = sum(math.comb(n, i) for i in range(k, n + 1))
        return min(1.0, float(Fraction(tail, 2 ** (n - 1))))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of b's share of the decided questions (Wilson)."""
        return wilson(self.b, self.a + self.b)

    def verdict(self, name_a: str, name_b: str) -> str:
        """In words: who was liked better and how sure that is."""
        n = self.a + self.b
        if n == 0 and not self.ties:
            is_equal = self.same and not self.failed and not self.left
            return "all answers were equal" if is_equal else "no question was answered"
        if n == 0:
            return "no question was decided: people could not tell them apart"
        low, high = self.interval
        share = f"B was preferred in {self.b} of {n} ({low:.0%} to {high:.0%})"
        if self.p_value < 0.05:
            better = name_b if self.b > self.a else name_a
            return f"{better} is liked better (p = {self.p_value:.3f}); {share}"
        return f"no difference is proven (p = {self.p_value:.2f}); {share}"


def wilson(k: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of ``k`` in ``n``."""
    if n == 0:
        return 0.0, 1.0
    p = k / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
