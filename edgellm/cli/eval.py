"""``edgellm eval``: is it as good as before? Perplexity, divergence, own prompts, blind choice."""

from __future__ import annotations

import asyncio
import datetime
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.markdown import Markdown
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from edgellm.bench import quality, regress, verdicts
from edgellm.bench.archive import Archive
from edgellm.bench.quality import Divergence, Perplexity
from edgellm.bench.regress import Answer, Ballot, Case, Tally
from edgellm.bench.variant import Variant, opened
from edgellm.bench.verdicts import Divergences, Evaluation, Regression
from edgellm.cli.errors import UsageError, kept_if_possible
from edgellm.cli.flags import AT_LEAST_1, AT_LEAST_16
from edgellm.errors import DiskFullError
from edgellm.units import format_bytes

app = App(
    name="eval",
    help="Check answer quality: perplexity, divergence, and fixed tasks.\n\n"
    'Example: `edgellm eval perplexity starter "starter --kv q8_0"`',
)

_TEXT = "A text, or a .jsonl of prompts; Python's own language reference otherwise."


@app.command
def perplexity(
    *variants: str,
    text: str | None = None,
    chunks: Annotated[int | None, AT_LEAST_1] = 16,
    piece: Annotated[int, AT_LEAST_16] = quality.N_CTX,
    json: bool = False,
) -> None:
    """Perplexity of a text: how surprised a model is by it. Lower is better; compare only within
    one vocabulary.

    Example: `edgellm eval perplexity "starter" "starter --kv q8_0" --chunks 8`

    Parameters
    ----------
    variants
        Models, each with its flags in one string.
    text
        A text, or a .jsonl of prompts; Python's own language reference otherwise.
    chunks
        Pieces of the text to use.
    piece
        Tokens a piece; the second half of each counts.
    json
        Print JSON.
    """
    chosen = _variants(variants, at_least=1)
    found = asyncio.run(_perplexities(chosen, quality.read_text(text), piece, chunks))
    named = {v.name: p for v, p in zip(chosen, found, strict=True)}
    _keep("perplexity", chosen, named, f"{found[0].value:.4f}")
    if json:
        _print_json(named)
        return
    verdicts.show_perplexities(Console(), named)


@app.command
def kl(
    reference: str,
    *variants: str,
    text: str | None = None,
    chunks: Annotated[int | None, AT_LEAST_1] = 8,
    piece: Annotated[int, AT_LEAST_16] = quality.N_CTX,
    json: bool = False,
) -> None:
    """Kullback-Leibler divergence from a reference: what a smaller quantisation or cache changes.

    0 is the same distribution; the share of equal first choices is what greedy answers feel.

    Example: `edgellm eval kl "starter --kv f16" "starter --kv q8_0" "starter --kv q4_0"`

    Parameters
    ----------
    reference
        The configuration to be faithful to, with its flags in one string.
    variants
        Configurations of the same vocabulary to compare with it.
    text
        A text, or a .jsonl of prompts; Python's own language reference otherwise.
    chunks
        Pieces of the text to use.
    piece
        Tokens a piece; the second half of each counts.
    json
        Print JSON.
    """
    first, *others = _variants((reference, *variants), at_least=2)
    base, found = asyncio.run(_divergences(first, others, quality.read_text(text), piece, chunks))
    named = {v.name: d for v, (d, _) in zip(others, found, strict=True)}
    both = Divergences(reference=base, variants=named)
    worst = max(d.mean for d in named.values())
    _keep("kl", [first, *others], both, f"KL {worst:.5f} from {first.name}")
    if json:
        _print_json(both)
        return
    verdicts.show_divergences(Console(), first.name, both)


@app.command(name="regress")
def regress_(
    cases: str,
    a: str,
    b: str,
    *,
    all: Annotated[bool, Parameter(negative=())] = False,
    json: bool = False,
) -> int:
    """Answer a set of prompts with two configurations and compare: same text, length, faults,
    language.

    The exit code is 1 when the second breaks a case that the first passes, or a case fails.

    Example: `edgellm eval regress prompts.jsonl "starter" "starter --kv q8_0"`

    Parameters
    ----------
    cases
        A .jsonl; each line {"prompt"} or {"messages"} and optionally "name", "expect" (a regular
        expression), "equals", "schema" (JSON Schema), "max_tokens".
    a
        The configuration it should be as good as, with its flags in one string.
    b
        The configuration to judge.
    all
        Show every case, not only those that differ.
    json
        Print JSON.
    """
    given = regress.read_cases(cases)
    pair = _variants((a, b), at_least=2)
    said_a, said_b = asyncio.run(_answers(pair, given))
    rows = regress.compare(given, said_a, said_b)
    summary = regress.summarise(rows)
    found = Regression(summary=summary, rows=rows)
    _keep("regress", pair, found, f"{summary.exact:.0%} equal, {len(summary.broken)} broken")
    if json:
        _print_json(found)
    else:
        verdicts.show_regression(Console(), found, show_all=all)
    return 1 if summary.broken or summary.failed else 0


@app.command
def ab(
    cases: str,
    a: str,
    b: str,
    *,
    seed: str = "",
    json: bool = False,
) -> None:
    """Choose blindly between two configurations' answers; the tally with its confidence at the end.

    Example: `edgellm eval ab prompts.jsonl "starter" "starter --kv q4_0 --flash-attn on"`

    Parameters
    ----------
    cases
        A .jsonl; each line {"prompt"} or {"messages"}, and optionally "max_tokens".
    a
        One configuration, with its flags in one string.
    b
        The other.
    seed
        Fixes the order of questions and sides.
    json
        Print the tally as JSON.
    """
    if not sys.stdin.isatty() and not seed:
        raise UsageError("choosing needs a terminal (or --seed and answers on standard input)")
    given = regress.read_cases(cases)
    pair = _variants((a, b), at_least=2)
    said_a, said_b = asyncio.run(_answers(pair, given))
    asked = regress.ballots(given, said_a, said_b, seed=seed or _now())
    n_failed = sum(bool(x.error or y.error) for x, y in zip(said_a, said_b, strict=True))
    n_same = len(given) - len(asked) - n_failed
    tally = vote(asked, n_same, _ask, n_failed=n_failed)
    _keep("ab", pair, tally, f"{tally.a} : {tally.b}")
    if json:
        _print_json(tally)
        return
    verdicts.show_tally(Console(), pair[0].name, pair[1].name, tally)


def vote(
    asked: Sequence[Ballot],
    n_same: int,
    ask: Callable[[Ballot, int, int], str],
    *,
    n_failed: int = 0,
) -> Tally:
    """Ask about every ballot: ``1``, ``2``, ``=`` or ``q`` (stop and count what there is)."""
    a = b = ties = 0
    for number, ballot in enumerate(asked, 1):
        choice = ask(ballot, number, len(asked))
        if choice == "q":
            break
        if choice == "=":
            ties += 1
        elif (choice == "1") == ballot.first_is_a:
            a += 1
        else:
            b += 1
    left = len(asked) - a - b - ties
    return Tally(a=a, b=b, ties=ties, same=n_same, failed=n_failed, left=left)


def _ask(ballot: Ballot, number: int, of: int) -> str:
    console = Console(stderr=True)
    console.rule(f"{number} of {of}")
    console.print(Text(str(ballot.case.turns()[-1].get("content", "")), style="bold"))
    for title, text in (("1", ballot.first), ("2", ballot.second)):
        console.print(Panel(Markdown(text or "(nothing)"), title=title, title_align="left"))
    while True:
        print("1, 2, = (no difference) or q: ", end="", file=sys.stderr, flush=True)
        choice = _typed().lower()
        if choice in ("1", "2", "=", "q"):
            return choice


def _typed() -> str:
    """A line; ``q`` at the end of the input and at Ctrl-C: what was answered counts."""
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return "q"
    if line:
        return line.strip()
    print(file=sys.stderr)
    return "q"


async def _perplexities(
    variants: Sequence[Variant], text: str, piece: int, chunks: int | None
) -> list[Perplexity]:
    out = []
    with tempfile.TemporaryDirectory(prefix="edgellm-eval-") as folder, _bar() as bar:
        for variant in variants:
            async with opened(variant, _defaults(piece)) as engine:
                cut = await quality.cut(engine, text, n_ctx=piece, n_chunks=chunks)
                on = _on_progress(bar, variant.name)
                out.append(await quality.perplexity(engine, cut, Path(folder), on))
    return out


async def _divergences(
    reference: Variant,
    variants: Sequence[Variant],
    text: str,
    piece: int,
    chunks: int | None,
) -> tuple[Perplexity, list[tuple[Divergence, Perplexity]]]:
    with tempfile.TemporaryDirectory(prefix="edgellm-eval-") as name, _bar() as bar:
        folder = Path(name)
        async with opened(reference, _defaults(piece)) as engine:
            cut = await quality.cut(engine, text, n_ctx=piece, n_chunks=chunks)
            _check_room(folder, quality.bytes_needed(cut, engine.info.n_vocab))
            n_vocab = engine.info.n_vocab
            on = _on_progress(bar, reference.name)
            base = await quality.keep_reference(engine, cut, folder, on)
        found = []
        for variant in variants:
            async with opened(variant, _defaults(piece)) as engine:
                if engine.info.n_vocab != n_vocab:
                    raise UsageError(
                        f"{variant.name} has {engine.info.n_vocab} tokens, the reference "
                        f"{n_vocab}: only models of one vocabulary can be compared"
                    )
                on = _on_progress(bar, variant.name)
                found.append(await quality.divergence(engine, cut, folder, on))
    return base, found


async def _answers(pair: Sequence[Variant], cases: Sequence[Case]) -> list[list[Answer]]:
    out = []
    with _bar() as bar:
        for variant in pair:
            task = bar.add_task(variant.name, total=len(cases))
            async with opened(variant, {"plan.parallel": 1}) as engine:

                def on_done(n: int, task: Any = task) -> None:
                    bar.update(task, completed=n)

                out.append(await regress.answer_all(engine, cases, on_done))
    return out


def _defaults(piece: int) -> dict[str, Any]:
    """One sequence of a piece's length, and logits of many positions in one step."""
    cells = max(256, -(-piece // 256) * 256)
    return {"plan.parallel": 1, "plan.ctx": cells, "plan.outputs": min(cells, 512)}


def _check_room(folder: Path, required: int) -> None:
    import shutil

    available = shutil.disk_usage(folder).free
    if required > available:
        raise DiskFullError(
            f"the reference takes {format_bytes(required)} in {folder}, "
            f"{format_bytes(available)} are free",
            required=required,
            available=available,
            hint="fewer --chunks, or another TMPDIR",
        )


def _variants(texts: Sequence[str], *, at_least: int) -> list[Variant]:
    if len(texts) < at_least:
        raise UsageError(
            f"at least {at_least} configuration{'s' * (at_least > 1)} needed",
            hint='edgellm eval kl "starter" "starter --kv q8_0"',
        )
    return [Variant.parse(text) for text in texts]


def _bar() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _on_progress(bar: Progress, name: str) -> quality.Progress:
    task = bar.add_task(name)

    def show(done: int, of: int, so_far: float) -> None:
        bar.update(task, completed=done, total=of, description=f"{name}: {so_far:.3f}")

    return show


def _keep(what: str, variants: Sequence[Variant], found: Any, headline: str) -> None:
    document = Evaluation(what=what, variants=list(variants), found=found)
    with kept_if_possible():
        Archive().add_document(
            kind="eval",
            started=_now(),
            label="",
            target="engine",
            model=variants[0].model,
            digest=None,
            scenario=what,
            headline=headline,
            document=msgspec.json.encode(document),
        )


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
