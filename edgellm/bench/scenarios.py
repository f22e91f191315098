"""What is sent: prompts of known length, distinct unless a scenario is about sharing.

Words are common English words of one token each, so that word counts are close to token counts
in every vocabulary. The same seed gives the same jobs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from edgellm.bench.jsonl import FORM, read_rows
from edgellm.bench.sample import Job
from edgellm.errors import ConfigError

_TEXT: Final = (
    "time person year way day thing man world life hand part child eye woman place work week case "
    "point company number group problem fact water money story month right study book word "
    "business issue side kind head house service friend father power hour game line end member "
    "law car city name team minute idea body back parent face level office door health art war "
    "history party result change morning reason research girl guy moment air teacher force"
)
WORDS: Final = tuple(_TEXT.split())


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of traffic. Lengths are words in and tokens out."""

    name: str
    about: str
    prompt_words: int
    max_tokens: int
    shared_words: int = 0
    is_chat: bool = False
    spread: float = 0.0
    """Sigma of the logarithm of both lengths; 0 keeps them fixed."""
    file: str | None = None
    """JSONL of real prompts: {"prompt"} or {"messages"}, and optionally {"max_tokens"}."""
    temperature: float = 0.8
    ignore_eos: bool = True
    """Every answer has the asked length, so that servers and settings do equal work."""


SCENARIOS: Final[dict[str, Scenario]] = {
    s.name: s
    for s in (
        Scenario(
            name="chat",
            about="short turns through the chat endpoint",
            prompt_words=60,
            max_tokens=128,
            is_chat=True,
        ),
        Scenario(
            name="long", about="long prompts, short answers", prompt_words=2000, max_tokens=64
        ),
        Scenario(
            name="shared",
            about="one long prefix (a system prompt, a document), a short own part",
            prompt_words=25,
            max_tokens=64,
            shared_words=1200,
        ),
        Scenario(
            name="batch",
            about="completions of equal length, as fast as possible",
            prompt_words=100,
            max_tokens=128,
        ),
        Scenario(
            name="mixed",
            about="lengths from a log-normal distribution, as real traffic has",
            prompt_words=150,
            max_tokens=96,
            spread=0.8,
        ),
    )
}


def scenario_from(name: str, **changes: Any) -> Scenario:
    """A known scenario, or a JSONL file of prompts, with what is not None in ``changes``."""
    known = SCENARIOS.get(name)
    if known is None:
        if not Path(name).is_file():
            raise ConfigError(
                f"no scenario {name!r} and no such file",
                hint=f"one of {', '.join(SCENARIOS)}, or a .jsonl of prompts",
            )
        known = Scenario(
            name=Path(name).stem,
            about=f"real prompts from {name}",
            prompt_words=0,
            max_tokens=256,
            file=name,
            ignore_eos=False,
        )
    given = {k: v for k, v in changes.items() if v is not None}
    return msgspec.structs.replace(known, **given)


def make_jobs(
    scenario: Scenario, model: str, seed: str, *, shared_seed: str = "shared"
) -> Iterator[Job]:
    """Jobs without end. Two seeds give prompts with no common beginning but the shared one, which
    is ``shared_seed``'s.

    A file is read now, not when the first job is taken: the clock of a run stands still for it.
    """
    if scenario.file is not None:
        return cycle(_file_jobs(scenario, model))
    return _drawn_jobs(scenario, model, seed, shared_seed)


def _drawn_jobs(scenario: Scenario, model: str, seed: str, shared_seed: str) -> Iterator[Job]:
    rng = random.Random(f"{seed}/{scenario.name}")
    shared = words(random.Random(shared_seed), scenario.shared_words)
    while True:
        n_words, n_tokens = _lengths(scenario, rng)
        text = " ".join(filter(None, (shared, words(rng, n_words))))
        yield make_job(scenario, model, text, n_tokens)


def words(rng: random.Random, n: int) -> str:
    """``n`` words."""
    return " ".join(rng.choice(WORDS) for _ in range(n))


def make_job(
    scenario: Scenario,
    model: str,
    content: str | Sequence[dict[str, Any]],
    max_tokens: int,
    *,
    group: str = "main",
    extra: Mapping[str, Any] | None = None,
    disconnect_after: int | None = None,
) -> Job:
    """One job: text goes to /v1/completions, or as a user turn to /v1/chat/completions; ``extra``:
    further fields of its body."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": scenario.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if scenario.ignore_eos:
        body["ignore_eos"] = True
    body |= extra or {}
    is_chat = scenario.is_chat or not isinstance(content, str)
    if not is_chat:
        body["prompt"] = content
    else:
        turn = [{"role": "user", "content": content}]
        body["messages"] = turn if isinstance(content, str) else list(content)
    return Job(
        path="/v1/chat/completions" if is_chat else "/v1/completions",
        body=body,
        max_tokens=max_tokens,
        group=group,
        disconnect_after=disconnect_after,
    )


def _lengths(scenario: Scenario, rng: random.Random) -> tuple[int, int]:
    if not scenario.spread:
        return scenario.prompt_words, scenario.max_tokens
    return (
        _log_normal(rng, scenario.prompt_words, scenario.spread),
        _log_normal(rng, scenario.max_tokens, scenario.spread),
    )


def _log_normal(rng: random.Random, median: int, sigma: float) -> int:
    """Cut at a quarter and at four times the median, so that one draw cannot decide a run."""
    drawn = median * math.exp(rng.gauss(0.0, sigma))
    return max(1, round(min(max(drawn, median / 4), median * 4)))


class _Line(msgspec.Struct):
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


def _file_jobs(scenario: Scenario, model: str) -> list[Job]:
    jobs = []
    path = scenario.file or ""
    for number, row in read_rows(path, _Line):
        content = row.messages if row.messages is not None else row.prompt
        if content is None:
            raise ConfigError(f"{path}:{number}: neither prompt nor messages", hint=FORM)
        jobs.append(make_job(scenario, model, content, row.max_tokens or scenario.max_tokens))
    return jobs
