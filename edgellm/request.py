"""What a client asks of an engine and what comes back: the one value each hop hands over.

Defaults and limits of every sampling parameter live here and nowhere else. The server, the
terminal and the engine all call :func:`SamplingParams.validate`.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Final

import msgspec

from edgellm.errors import InvalidRequestError
from edgellm.metrics import RequestTimings

MAX_STOP_STRINGS: Final = 128
"""Chat front ends send one for each name in the conversation."""
MAX_LOGPROBS: Final = 20
MAX_CHOICES: Final = 128
SEED_RANDOM: Final = None


class Priority(enum.IntEnum):
    """How urgent a request is; lower runs first, and waiting raises it (aging)."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2


class FinishReason(str, enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """The model ended its turn, or a stop string matched."""
    LENGTH = "length"
    """max_tokens or the context's end was reached."""
    CANCELLED = "cancelled"
    """The client went away or asked to stop."""
    ERROR = "error"
    """The event's ``error`` says what happened."""


class GrammarKind(str, enum.Enum):
    """The language of :attr:`Grammar.text`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    GBNF = "gbnf"


CONTROL_OPEN: Final = "\ue000"
CONTROL_CLOSE: Final = "\ue001"


def control(text: str) -> str:
    """How a LARK grammar writes a marker (``[TOOL_CALLS]``) that is one control token in some
    vocabularies and spelled out in others: the engine knows which."""
    return f"{CONTROL_OPEN}{text}{CONTROL_CLOSE}"


UNTIL_OPEN: Final = "\ue002"


def until(rule: str, text: str) -> str:
    """How a LARK grammar writes the rule ``rule``: any text up to the marker ``text`` and the
    marker itself, be it a control token or spelled out."""
    return f"{UNTIL_OPEN}{rule}={text}{CONTROL_CLOSE}"


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of a sequence must match."""

    kind: GrammarKind
    text: str
    trigger: str | None = None
    """When set, the grammar sleeps until the generated text contains this string, and constrains
    what follows it (a tool call's opening tag under ``tool_choice: auto``)."""
    after: str | None = None
    """When set, the grammar sleeps until this string was generated (the end of thinking)."""
    trigger_at_start: bool = False
    """The trigger counts only where the answer begins (white space apart); else the grammar never
    wakes."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Defaults are llama.cpp's own (common/common.h)."""

    temperature: float = 0.8
    top_k: int = 40
    """0 means the whole vocabulary."""
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    """How many tokens back the three penalties look; -1 is the whole context."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Token id -> added to its logit; -100 forbids it."""
    seed: int | None = None
    """None draws one; the same seed and parameters give the same text."""
    max_tokens: int | None = None
    """None generates to the end of the context."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    """None: off; k: the chosen token's log-probability and the k most likely beside it."""
    prompt_logprobs: bool = False
    """Also return the prompt's own log-probabilities (completions with ``echo``)."""
    grammar: Grammar | None = None

    def validate(self) -> SamplingParams:
        """Return self; raise InvalidRequestError(param) with the accepted range otherwise."""
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens exceeds max_tokens", param="min_tokens")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError("best_of must be at least n", param="best_of")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop"
            )
        if any(not text for text in self.stop):
            raise InvalidRequestError("a stop string is empty", param="stop")
        return self


_INF: Final = math.inf
_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("temperature", 0.0, 10.0),
    ("top_k", 0, 1_000_000),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("typical_p", 0.0, 1.0),
    ("repeat_penalty", 0.01, 10.0),
    ("repeat_last_n", -1, 1_000_000),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", -(2**63), 2**64 - 1),
    ("max_tokens", 1, _INF),
    ("min_tokens", 0, _INF),
    ("n", 1, MAX_CHOICES),
    ("best_of", 1, MAX_CHOICES),
    ("logprobs", 0, MAX_LOGPROBS),
)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high:
        upper = "" if high == _INF else f" and at most {high:g}"
        raise InvalidRequestError(
            f"{name} must be at least {low:g}{upper}, got {value!r}",
            param=name.split("[", maxsplit=1)[0],
        )


class Overflow(str, enum.Enum):
    """What happens when a sequence reaches the end of its context."""

    ERROR = "error"
    SLIDE = "slide"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation: a prompt (text or token ids) and how to continue it."""

    id: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: Priority = Priority.NORMAL
    add_special: bool = True
    """Tokenise a text prompt with BOS where the model wants one. A rendered chat template that
    already begins with BOS is not given a second."""
    parse_special: bool = True
    """Special tokens written in the text become those tokens."""
    overflow: Overflow = Overflow.ERROR
    n_keep: int = 0
    """Tokens at the start (the system prompt) that sliding never drops."""
    turn_starts: tuple[int, ...] = ()
    """Character offsets in a text prompt where whole turns begin; sliding drops whole turns."""
    cache_prompt: bool = True
    """Share the longest cached prefix, and leave this one behind for the next request."""
    pin_prefix: bool = False
    wants_progress: bool = False
    """Send events while the prompt is read."""
    event_interval_s: float = 0.0
    """Join a choice's tokens into one event until so long after the last: for who shows text some
    times a second, and would be woken for each token. The first token and the end never wait."""
    model: str = ""
    client: str = ""
    """Who asked, for the list of running requests (a key's name or an address)."""


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate: token id, its bytes as text (may be partial UTF-8: bytes), log-probability."""

    token_id: int
    token_bytes: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token and the most likely ones beside it."""

    token_id: int
    token_bytes: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request; ``n_cached`` is what was really not recomputed."""

    n_prompt: int = 0
    n_output: int = 0
    n_cached: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_slid: int = 0
    """Tokens dropped by a sliding context."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a prompt has been read."""

    n_prompt: int
    n_cached: int
    n_computed: int
    """Cached ones included; the first event has just those."""
    seconds: float
    """Since its first step began."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it crosses the process boundary: the class's name and its attributes."""

    type: str
    message: str
    hint: str | None = None
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one choice of one request.

    ``text`` is whole UTF-8 characters only, never a part of a stop string; it may be empty when a
    token ended inside a character. The last event of each choice carries ``finish_reason``; the
    last event of the request also carries ``usage`` and ``timings`` (``is_last``).
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    """On the first event when the prompt was text and ``prompt_logprobs`` was asked for."""
    finish_reason: FinishReason | None = None
    stop: str | None = None
    """The stop string that matched."""
    is_last: bool = False
    usage: Usage | None = None
    timings: RequestTimings | None = None
    error: ErrorInfo | None = None
    warning: str | None = None
    progress: Progress | None = None
    """Alone in its event, before the first token, when the request wants progress."""


class Pooling(str, enum.Enum):
    """How an embedding is read from a sequence; NONE gives one vector a token."""

    NONE = "none"
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Embed each input (text or token ids), or score each with a reranker's head (RANK)."""

    id: str
    inputs: tuple[str | tuple[int, ...], ...]
    normalize: bool = True
    priority: Priority = Priority.NORMAL
    model: str = ""
    client: str = ""


class EmbedResult(msgspec.Struct, frozen=True, kw_only=True):
    """One vector an input, in the inputs' order; for RANK a score, as a vector of length 1."""

    request_id: str
    vectors: tuple[tuple[float, ...], ...]
    n_tokens: tuple[int, ...]
