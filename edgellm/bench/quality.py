"""Answer quality in numbers: perplexity of a text, and how far one configuration's distributions
are from another's.

The text is cut as llama.cpp's own tool does it (tools/perplexity/perplexity.cpp, ``perplexity`` and
``kl_divergence``): pieces of ``n_ctx`` tokens, the first token of each replaced by BOS where the
model wants one, and only the second half of each piece counts, so that every counted token has at
least half a piece before it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from edgellm.bench.jsonl import read_rows
from edgellm.engine.client import Engine
from edgellm.errors import ConfigError

N_CTX: Final = 512
Progress = Callable[[int, int, float], None]
"""(pieces done, pieces in all, perplexity so far)."""


class Perplexity(msgspec.Struct, frozen=True, kw_only=True):
    """exp of the mean negative log-likelihood, and its standard error."""

    value: float
    error: float
    n_tokens: int
    """Tokens that counted."""
    n_chunks: int
    n_ctx: int


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Kullback-Leibler divergence of a candidate from a reference, in nats a token."""

    mean: float
    error: float
    median: float
    p90: float
    p99: float
    max: float
    same_top: float
    """Share of tokens where both find the same token likeliest."""
    ppl_ratio: float
    """Candidate's perplexity over the reference's."""
    n_tokens: int


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text as token ids, cut into pieces."""

    pieces: tuple[tuple[int, ...], ...]
    n_ctx: int

    @property
    def first(self) -> int:
        """The first position whose prediction counts."""
        return self.n_ctx // 2


async def cut(engine: Engine, text: str, *, n_ctx: int, n_chunks: int | None) -> Text:
    """Tokenise and cut. Raises ConfigError when there are fewer than two pieces of text."""
    ids = await engine.tokenize(text, add_special=True, parse_special=False)
    if len(ids) < 2 * n_ctx:
        raise ConfigError(
            f"the text has {len(ids)} tokens; at least {2 * n_ctx} are needed",
            hint="a longer --text, or a smaller --piece",
        )
    n = len(ids) // n_ctx if n_chunks is None else min(n_chunks, len(ids) // n_ctx)
    bos = engine.info.bos_id if engine.info.add_bos else None
    pieces = []
    for i in range(n):
        piece = ids[i * n_ctx : (i + 1) * n_ctx]
        if bos is not None:
            piece[0] = bos
        pieces.append(tuple(piece))
    return Text(pieces=tuple(pieces), n_ctx=n_ctx)


class Scorer:
    """Runs pieces through an engine; the rows of logits go through one file and are gone."""

    def __init__(self, engine: Engine, text: Text, folder: Path) -> None:
        self._engine = engine
        self._text = text
        self._out = folder / "logits.f32"

    async def pieces(self) -> AsyncIterator[tuple[Any, Any]]:
        """For every piece: log-probabilities (rows x vocabulary) and the token each row predicts.

        One row a counted token: n_ctx - 1 - first of them.
        """
        first = self._text.first
        for piece in self._text.pieces:
            # The last token predicts what is in no piece.
            n = await self._engine.score(list(piece[:-1]), first=first, out=str(self._out))
            rows = np.fromfile(self._out, "<f4").reshape(n, -1)
            yield log_softmax(rows), np.array(piece[first + 1 :], np.int64)
        self._out.unlink(missing_ok=True)


def log_softmax(rows: Any) -> Any:
    """Log-probabilities of rows of logits, in float32; the sums are made in float64."""
    top = rows.max(axis=1, keepdims=True)
    shifted = rows - top
    total = np.log(np.exp(shifted).sum(axis=1, dtype=np.float64, keepdims=True))
    return shifted - total.astype(np.float32)


async def perplexity(
    engine: Engine, text: Text, folder: Path, on_progress: Progress = lambda *_: None
) -> Perplexity:
    """Perplexity of ``text`` under the engine's model and cache."""
    losses: list[Any] = []
    async for logp, targets in Scorer(engine, text, folder).pieces():
        losses.append(-logp[np.arange(len(targets)), targets].astype(np.float64))
        on_progress(len(losses), len(text.pieces), math.exp(np.concatenate(losses).mean()))
    return perplexity_of(np.concatenate(losses), text)


def perplexity_of(losses: Any, text: Text) -> Perplexity:
    """From negative log-likelihoods; the error is that of the mean, carried through exp."""
    value = math.exp(losses.mean())
    error = value * losses.std() / math.sqrt(max(1, len(losses) - 1))
    return Perplexity(
        value=value,
        error=float(error),
        n_tokens=len(losses),
        n_chunks=len(text.pieces),
        n_ctx=text.n_ctx,
    )


async def keep_reference(
    engine: Engine, text: Text, folder: Path, on_progress: Progress = lambda *_: None
) -> Perplexity:
    """Write the reference's log-probabilities to ``folder``, a file a piece; its perplexity."""
    losses: list[Any] = []
    async for logp, targets in Scorer(engine, text, folder).pieces():
        logp.tofile(_reference_file(folder, len(losses)))
        losses.append(-logp[np.arange(len(targets)), targets].astype(np.float64))
        on_progress(len(losses), len(text.pieces), math.exp(np.concatenate(losses).mean()))
    return perplexity_of(np.concatenate(losses), text)


async def divergence(
    engine: Engine, text: Text, folder: Path, on_progress: Progress = lambda *_: None
) -> tuple[Divergence, Perplexity]:
    """How far the engine is from the reference that :func:`keep_reference` left in ``folder``."""
    kls: list[Any] = []
    same: list[Any] = []
    losses: list[Any] = []
    reference_losses: list[Any] = []
    async for logp, targets in Scorer(engine, text, folder).pieces():
        reference = np.fromfile(_reference_file(folder, len(kls)), "<f4").reshape(logp.shape)
        kls.append(kl_rows(reference, logp))
        same.append(reference.argmax(axis=1) == logp.argmax(axis=1))
        at = np.arange(len(targets))
        losses.append(-logp[at, targets].astype(np.float64))
        reference_losses.append(-reference[at, targets].astype(np.float64))
        on_progress(len(kls), len(text.pieces), math.exp(np.concatenate(losses).mean()))
    mine = perplexity_of(np.concatenate(losses), text)
    theirs = perplexity_of(np.concatenate(reference_losses), text)
    found = summarise(np.concatenate(kls), np.concatenate(same), mine.value / theirs.value)
    return found, mine


def kl_rows(reference: Any, candidate: Any) -> Any:
    """KL(reference || candidate) of each row of log-probabilities, in float64."""
    difference = (reference - candidate).astype(np.float64)
    return (np.exp(reference.astype(np.float64)) * difference).sum(axis=1)


def summarise(kls: Any, same: Any, ppl_ratio: float) -> Divergence:
    """Figures of the rows' divergences."""
    return Divergence(
        mean=float(kls.mean()),
        error=float(kls.std() / math.sqrt(max(1, len(kls) - 1))),
        median=float(np.median(kls)),
        p90=float(np.quantile(kls, 0.9)),
        p99=float(np.quantile(kls, 0.99)),
        max=float(kls.max()),
        same_top=float(same.mean()),
        ppl_ratio=ppl_ratio,
        n_tokens=len(kls),
    )


def bytes_needed(text: Text, n_vocab: int) -> int:
    """What a reference takes on disk."""
    return len(text.pieces) * (text.n_ctx - 1 - text.first) * n_vocab * 4


def _reference_file(folder: Path, i: int) -> Path:
    return folder / f"reference-{i}.f32"


def default_text() -> str:
    """English prose and code that every Python has: its own language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: str | None) -> str:
    """A file's text, its prompts when it is JSONL, or :func:`default_text`."""
    if path is None:
        return default_text()
    if path.endswith(".jsonl"):
        return "\n\n".join(_prompts(path))
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"{path}: {what}") from error


class _Line(msgspec.Struct):
    prompt: str = ""
    messages: list[dict[str, Any]] = []


def _prompts(path: str) -> Iterator[str]:
    for _, row in read_rows(path, _Line):
        if not row.messages:
            yield row.prompt
        yield from (str(turn.get("content") or "") for turn in row.messages)
