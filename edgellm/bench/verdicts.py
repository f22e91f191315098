"""What an evaluation found, in the terminal: right after it, and again from the archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgellm.bench.quality import Divergence, Perplexity
from edgellm.bench.regress import Answer, Row, Summary, Tally
from edgellm.bench.variant import Variant


class Divergences(msgspec.Struct, frozen=True, kw_only=True):
    """Variants beside one reference."""

    reference: Perplexity
    variants: dict[str, Divergence]


class Regression(msgspec.Struct, frozen=True, kw_only=True):
    """Every case and what they come to."""

    summary: Summary
    rows: list[Row]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A document of the archive: schema ``edgellm.eval/1``."""

    schema: str = "edgellm.eval/1"
    what: str
    """perplexity, kl, regress or ab."""
    variants: list[Variant]
    found: Any


def show_evaluation(console: Console, document: bytes) -> None:
    """An archived evaluation as its command showed it; raises msgspec.MsgspecError on another."""
    kept = msgspec.json.decode(document, type=Evaluation)
    names = [variant.name for variant in kept.variants]
    if kept.what == "perplexity":
        show_perplexities(console, msgspec.convert(kept.found, dict[str, Perplexity]))
    elif kept.what == "kl":
        show_divergences(console, names[0], msgspec.convert(kept.found, Divergences))
    elif kept.what == "regress":
        console.print(f"A is {names[0]}, B is {names[1]}")
        show_regression(console, msgspec.convert(kept.found, Regression))
    else:
        show_tally(console, names[0], names[1], msgspec.convert(kept.found, Tally))


def show_perplexities(console: Console, found: Mapping[str, Perplexity]) -> None:
    """One line a configuration."""
    table = _table("configuration", "perplexity", "±", "tokens")
    for name, p in found.items():
        table.add_row(name, f"{p.value:.4f}", f"{p.error:.4f}", str(p.n_tokens))
    console.print(table)


def show_divergences(console: Console, reference: str, found: Divergences) -> None:
    """One line a variant, and the reference's own perplexity above."""
    table = _table("configuration", "KL mean", "±", "p99", "max", "same first choice", "ppl ratio")
    for name, d in found.variants.items():
        table.add_row(
            name,
            f"{d.mean:.5f}",
            f"{d.error:.5f}",
            f"{d.p99:.4f}",
            f"{d.max:.3f}",
            f"{d.same_top:.1%}",
            f"{d.ppl_ratio:.4f}",
        )
    base = found.reference
    console.print(
        f"reference {reference}: perplexity {base.value:.4f} ± {base.error:.4f}, "
        f"{base.n_tokens} tokens"
    )
    console.print(table)


def show_regression(console: Console, found: Regression, *, show_all: bool = False) -> None:
    """The cases that differ or fail (or all), and the summary."""
    for row in found.rows:
        if show_all or not row.is_same or row.a.fault or row.b.fault:
            console.rule(Text(row.name), align="left")
            _show_side(console, "A", row.a)
            _show_side(console, "B", row.b)
            if row.language:
                console.print(Text(f"language: {row.language}", style="yellow"))
    console.rule()
    s = found.summary
    length = f"B's answers {s.length_ratio:.2f} times as long; " if s.length_ratio else ""
    console.print(
        f"{s.n} cases: {s.exact:.0%} equal; {length}"
        f"faults A {s.faults_a}, B {s.faults_b}; cut off A {s.cut_a}, B {s.cut_b}; "
        f"language switches {len(s.language_switches)}"
    )
    _show_names(console, "broken", s.broken, "red")
    _show_names(console, "failed", s.failed, "red")
    _show_names(console, "mended", s.mended, "green")


def show_tally(console: Console, a: str, b: str, tally: Tally) -> None:
    """Who is who, the votes, and what they prove."""
    console.print(f"A is {a}: {tally.a}    B is {b}: {tally.b}")
    more = f", failed {tally.failed}" if tally.failed else ""
    more += f", not asked any more {tally.left}" if tally.left else ""
    console.print(f"ties {tally.ties}, equal answers {tally.same}{more}")
    console.print(tally.verdict(a, b))


def _show_side(console: Console, side: str, answer: Answer) -> None:
    text = Text(f"{side}  ", style="bold")
    text.append(answer.text or answer.error or "(nothing)", style="none")
    if answer.fault:
        text.append(f"  [{answer.fault}]", style="red")
    console.print(text)


def _show_names(console: Console, title: str, names: Sequence[str], style: str) -> None:
    if names:
        console.print(Text(f"{title}: {', '.join(names)}", style=style))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i == 0 else "right", overflow="fold")
    return table
