"""A plan in words and bars, for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Final

from edgellm.gguf.shape import ModelShape
from edgellm.planner.estimate import settled_cache
from edgellm.planner.plan import DeviceLedger, HostLedger, Plan
from edgellm.planner.speed import rate
from edgellm.planner.types import row_bytes
from edgellm.units import MiB, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ENTRIES: Final = (
    ("weights", "weights", "blue"),
    ("repacked", "repacked copies", "bright_blue"),
    ("kv_cache", "KV cache", "green"),
    ("recurrent_state", "state", "cyan"),
    ("compute", "compute", "yellow"),
    ("output", "output", "red"),
    ("extra", "draft, vision", "white"),
    ("process", "engine", "magenta"),
    ("overhead", "overhead", "magenta"),
)
_WIDTH: Final = 48


def render(plan: Plan, shape: ModelShape | None = None) -> None:
    """Print ``plan`` with rich; with ``shape`` how the numbers come about too."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    model = plan.model
    console.print(
        f"[bold]{model.name}[/bold]  {model.arch} {model.quant}  "
        f"{format_bytes(model.file_bytes)}  {model.n_layer} layers"
    )
    _print_bars(console, plan)
    console.print(_ledger(plan))
    _print_summary(console, plan)
    if beside := _beside(plan.host):
        console.print(f"  {beside}", style="dim")
    _print_reasons(console, plan)
    if shape is not None:
        for line in arithmetic(shape, plan):
            console.print(f"  {line}", style="dim")
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _print_bars(console: Console, plan: Plan) -> None:
    from rich.text import Text

    shown: list[tuple[str, DeviceLedger | HostLedger, int]]
    shown = [(d.id, d, d.free) for d in plan.devices]
    for name, ledger, room in (*shown, ("host", plan.host, plan.host.available)):
        margin = ledger.margin if isinstance(ledger, DeviceLedger) else 0
        text = f" {format_bytes(ledger.used)} of {format_bytes(room)}"
        console.print(Text.assemble(f"{name:<6} ", *_bar(ledger, room, margin), text))


def _bar(ledger: DeviceLedger | HostLedger, room: int, margin: int) -> list[tuple[str, str]]:
    """Cells in proportion, rounded so that their sum is that of the bytes."""
    parts, filled, done = [], 0, -getattr(ledger, "idle", 0)
    for name, _, color in _ENTRIES:
        done += getattr(ledger, name, 0)
        until = min(round(_WIDTH * done / room), _WIDTH) if room else 0
        parts.append(("█" * (until - filled), color))
        filled = until
    kept = min(round(_WIDTH * margin / room), _WIDTH - filled) if room else 0
    parts.append(("·" * (_WIDTH - filled - kept), "dim"))
    parts.append(("░" * kept, "dim"))
    return parts


def _ledger(plan: Plan) -> Table:
    """MiB by entry, a column a device."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("MiB", style="dim")
    ledgers: list[DeviceLedger | HostLedger] = [*plan.devices, plan.host]
    for name in (*(d.id for d in plan.devices), "host"):
        table.add_column(name, justify="right")
    for name, label, color in _ENTRIES:
        sizes = [getattr(ledger, name, 0) for ledger in ledgers]
        if any(sizes):
            table.add_row(Text(f"█ {label}", style=color), *map(_mib, sizes))
    if plan.host.idle:
        table.add_row("  idle pages", *[""] * len(plan.devices), f"-{_mib(plan.host.idle)}")
    table.add_row("  used", *(_mib(ledger.used) for ledger in ledgers))
    if plan.devices:
        table.add_row("░ margin", *(_mib(d.margin) for d in plan.devices), "")
        table.add_row("· left", *(_mib(d.headroom) for d in plan.devices), "")
    return table


def _beside(host: HostLedger) -> str:
    """What RAM is also used for, and given back."""
    parts = [
        ("while loading", host.load_peak if host.load_peak > host.used else 0),
        ("for prompts seen before, at most", host.prompt_cache),
        ("of the file in the page cache", host.page_cache),
    ]
    said = ", ".join(f"{format_bytes(size)} {what}" for what, size in parts if size)
    return f"RAM beside that: {said}" if said else ""


def _mib(size: int) -> str:
    return f"{size / MiB:,.1f}" if size else "-"


def _print_summary(console: Console, plan: Plan) -> None:
    params, speed = plan.params, plan.speed
    console.print(
        f"[bold]{plan.verdict}[/bold]: {params.n_ctx} cells of context, about "
        f"{rate(speed.decode_tps)} tok/s decode and {rate(speed.prefill_tps)} prefill "
        f"({speed.basis}; memory {plan.proof}); bound by {speed.bottleneck}"
    )
    console.print(f"binding constraint: {plan.binding}")


def _print_reasons(console: Console, plan: Plan) -> None:
    from rich.table import Table

    why = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for reason in plan.reasons:
        why.add_row(f"  {reason.param}", reason.value, f"[dim]{reason.why}[/dim]")
    console.print(why)
    for other in plan.alternatives:
        console.print(f"or {other.title}: {other.gain}; {other.cost}")


# --- how the numbers come about ----------------------------------------------------------------


def arithmetic(shape: ModelShape, plan: Plan) -> Iterator[str]:
    """The sums behind the ledger, a line each."""
    p = plan.params
    tensors = sum(len(x.tensors) for x in shape.layers)
    held = sum(d.weights for d in plan.devices) + plan.host.weights
    tied = ", the token table a second time as the output" if shape.tied_output else ""
    yield (
        f"weights: {tensors} tensors in {len(shape.layers)} layers and the ones around them, by "
        f"their types in the file{tied}: {_mib(held)} MiB"
    )
    cache = settled_cache(shape, p)
    cached = sorted((x.is_swa, x.k_width, x.v_width) for x in shape.layers)
    for (swa, k, v), group in groupby(cached):
        n, cells = len(list(group)), cache.swa_cells if swa else cache.cells
        if k:
            k_bytes, v_bytes = row_bytes(p.type_k, k), row_bytes(p.type_v, v) if v else 0
            size = n * cells * cache.n_stream * (k_bytes + v_bytes)
            yield (
                f"KV: {n} layers x {cells} cells x {cache.n_stream} streams x ({k_bytes} + "
                f"{v_bytes} bytes) = {_mib(size)} MiB{' (sliding window)' * swa}"
            )
    rows = min(p.n_ubatch, p.n_outputs_max or p.n_ubatch)
    yield (
        f"compute: the step of {p.n_ubatch} tokens and {rows} rows of {shape.n_vocab} logits, "
        "allocated as ggml does"
    )
