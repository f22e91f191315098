"""The report of pairs.py: tables, and each thing that is judged with its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgellm.units import MiB

ENTRIES = ("weights", "kv_cache", "recurrent_state", "compute")
SHARE, LEAST = 0.01, 16 * MiB
"""An entry may be off by 1 % of what was measured, or by 16 MiB."""
WITHIN = 0.95
AGAIN = "edgellm again"
"""The trial that loads edgellm's own plan a second time."""
Row = dict[str, Any]


def markdown(rows: Sequence[Row], extra: dict[str, Any]) -> str:
    done = [row for row in rows if row["trials"]]
    parts = [
        "## What is judged\n\n" + "\n".join(f"* {line}" for line in judged(done)),
        "## Speed\n\n" + speed_table(done),
        "## Memory, card by card (MiB, planned less measured)\n\n" + memory_table(done),
        "## Every trial\n\n" + trial_table(done),
    ]
    if extra:
        lines = "\n".join(f"* {name}: {value}" for name, value in extra.items())
        parts.append("## Order and loss of cards\n\n" + lines)
    left = [f"* {label(row)}: {', '.join(row['skipped'])}" for row in rows if row.get("skipped")]
    left += [f"* {label(row)}: not begun" for row in rows if not row["trials"]]
    left += [f"* {label(row)}: {e}" for row in rows for e in row.get("errors", ())]
    if left:
        parts.append("## Not run\n\n" + "\n".join(left))
    return "\n\n".join(parts) + "\n"


def label(row: Row) -> str:
    sizes = "+".join(f"{size:g}" for size in row["pair"])
    return f"{sizes} GiB, {row['model']}, {row['n_ctx']} cells"


def named(row: Row, name: str) -> Row | None:
    return next((t for t in row["trials"] if t["name"] == name), None)


def layer_splits(row: Row) -> list[Row]:
    """edgellm's own trial and those of the sweep that split by layers."""
    out = ("llama-server", "larger alone", "tensor", "row", "reversed", AGAIN)
    return [t for t in row["trials"] if t["name"] not in out and t["decode_tps"]]


def judged(rows: Sequence[Row]) -> Iterator[str]:
    entries = [entry for row in rows for entry in entry_errors(row)]
    bad = [text for text, is_ok in entries if not is_ok]
    yield f"{len(entries) - len(bad)} of {len(entries)} ledger entries within 1 % or 16 MiB" + (
        f"; outside: {'; '.join(bad)}" if bad else ""
    )
    own = [(row, t) for row in rows if (t := named(row, "edgellm"))]
    failed = [label(row) for row, t in own if t["error"] or t["fallbacks"]]
    yield (
        f"{len(own) - len(failed)} of {len(own)} plans held with {4} sequences at their context"
        + (f"; not: {'; '.join(failed)}" if failed else "")
    )
    alone = [t for row in rows for t in row["trials"] if t.get("elsewhere")]
    yield f"{len(alone)} trials held memory on a card that their plan leaves out" + (
        f": {', '.join(str(t['elsewhere'] >> 20) + ' MiB' for t in alone)}" if alone else ""
    )
    yield from compared(own, "best split of the sweep", best_split)
    yield from noise(own)
    yield from compared(own, "larger card alone", lambda row: named(row, "larger alone"))
    yield from compared(own, "llama-server's own fit", lambda row: named(row, "llama-server"))


def noise(own: Sequence[tuple[Row, Row]]) -> Iterator[str]:
    """How far two loads of the same plan differ: less than that says nothing."""
    pairs = [(row, t, named(row, AGAIN)) for row, t in own]
    ratios = [
        f"{again['decode_tps'] / t['decode_tps']:.2f} {label(row)}"
        for row, t, again in pairs
        if again and again["decode_tps"] and t["decode_tps"]
    ]
    if ratios:
        yield f"the same plan loaded again after the sweep, over the first: {'; '.join(ratios)}"


def best_split(row: Row) -> Row | None:
    return max(layer_splits(row), key=lambda t: float(t["decode_tps"]), default=None)


def compared(own: Sequence[tuple[Row, Row]], what: str, find: Any) -> Iterator[str]:
    """How many pairs reach 0.95 of something else, and the ratio of each."""
    ratios = []
    for row, trial in own:
        other = find(row)
        if other and other["decode_tps"] and trial["decode_tps"]:
            ratios.append((trial["decode_tps"] / other["decode_tps"], label(row)))
    reached = sum(1 for ratio, _ in ratios if ratio >= WITHIN)
    each = "; ".join(f"{ratio:.2f} {name}" for ratio, name in ratios)
    yield f"decode at {WITHIN} of the {what} or better: {reached} of {len(ratios)} ({each})"


def entry_errors(row: Row) -> Iterator[tuple[str, bool]]:
    """Each ledger entry of the plan's own load, in words, and whether it is close enough."""
    trial = named(row, "edgellm")
    for card in trial["cards"] if trial else ():
        for name, planned, measured in figures(card):
            off = planned - measured
            is_ok = abs(off) <= max(SHARE * measured, LEAST)
            yield f"{label(row)} {card['id']} {name} {off / MiB:+.1f} MiB", is_ok


def figures(card: Row) -> Iterator[tuple[str, int, int]]:
    """(entry, planned, measured) of a card; overhead and the whole where the driver told."""
    planned, measured = card["planned"], card["measured"]
    for entry in ENTRIES:
        yield entry, planned[entry], measured.get(entry, 0)
    if card["process"] is not None:
        buffers = sum(measured.get(entry, 0) for entry in (*ENTRIES, "output"))
        yield "overhead", planned["overhead"], card["process"] - buffers
        yield "used", planned["used"], card["process"]


def speed_table(rows: Sequence[Row]) -> str:
    head = (
        "pair", "split", "decode", "predicted", "prefill", "llama-server's split", "decode",
        "prefill", "larger alone", "best of the sweep", "tensor", "row",
    )  # fmt: skip
    return table(head, (speed_cells(row) for row in rows))


def speed_cells(row: Row) -> list[str]:
    own, peer = named(row, "edgellm"), named(row, "llama-server")
    best = best_split(row)
    plan = (own or {}).get("plan") or {"speed": {}}
    modes = (named(row, name) for name in ("larger alone", "tensor", "row"))
    alone, *others = (tps(t, "decode_tps") for t in modes)
    return [
        label(row), (own or {}).get("split", ""), tps(own, "decode_tps"),
        f"{plan['speed'].get('decode_tps', 0):.0f}", tps(own, "prefill_tps"),
        (peer or {}).get("split", ""), tps(peer, "decode_tps"), tps(peer, "prefill_tps"), alone,
        f"{best['name']} {tps(best, 'decode_tps')}" if best else "", *others,
    ]  # fmt: skip


def memory_table(rows: Sequence[Row]) -> str:
    head = ("pair", "card", "layers", *ENTRIES, "overhead", "used", "overhead measured")
    return table(head, (cells for row in rows for cells in memory_cells(row)))


def memory_cells(row: Row) -> Iterator[list[str]]:
    for name in ("edgellm", "larger alone", "reversed"):
        trial = named(row, name)
        for card in trial["cards"] if trial else ():
            found = {entry: (p, m) for entry, p, m in figures(card)}
            off = [f"{(p - m) / MiB:+.1f}" for p, m in found.values()]
            off += [""] * (len(ENTRIES) + 2 - len(off))
            over = f"{found['overhead'][1] / MiB:.0f}" if "overhead" in found else ""
            what = card["id"] if name == "edgellm" else f"{card['id']} ({name})"
            yield [label(row), what, str(card["planned"]["n_layers"]), *off, over]


def trial_table(rows: Sequence[Row]) -> str:
    head = ("pair", "trial", "split", "decode", "prefill", "seconds", "what happened")
    return table(
        head,
        (
            [
                label(row), t["name"], t["split"], tps(t, "decode_tps"), tps(t, "prefill_tps"),
                f"{t['seconds']:.0f}", "; ".join([*t["fallbacks"], t["error"]]).strip("; "),
            ]
            for row in rows
            for t in row["trials"]
        ),
    )  # fmt: skip


def table(head: Sequence[str], rows: Any) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(c).replace("|", "/") for c in row) + " |" for row in rows]
    return "\n".join(lines)


def tps(trial: Row | None, name: str) -> str:
    if trial is None:
        return ""
    value = trial[name]
    return f"{value:.1f}" if value else ("failed" if trial["error"] else "")
