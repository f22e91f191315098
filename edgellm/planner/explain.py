"""A plan in words and bars, for people."""

from __future__ import annotations

from edgellm.planner.plan import DeviceLedger, HostLedger, Plan
from edgellm.units import format_bytes

_ENTRIES = ("weights", "kv_cache", "recurrent_state", "compute", "overhead", "output")
_COLORS = {
    "weights": "blue",
    "kv_cache": "green",
    "recurrent_state": "cyan",
    "compute": "yellow",
    "overhead": "magenta",
    "output": "red",
}


def render(plan: Plan, *, explain: bool = False) -> None:
    """Print ``plan`` with rich."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    model = plan.model
    console.print(
        f"[bold]{model.name}[/bold]  {model.arch} {model.quant}  "
        f"{format_bytes(model.file_bytes)}  {model.n_layer} layers"
    )
    for ledger in plan.devices:
        console.print(Text.assemble(f"{ledger.id:<6} ", *_bar(ledger, ledger.free)))
        console.print(f"       {_line(ledger)}", style="dim")
    console.print(Text.assemble("host   ", *_bar(plan.host, plan.host.available)))
    console.print(f"       {_line(plan.host)}", style="dim")
    params = plan.params
    console.print(
        f"{plan.verdict}: {params.n_gpu_layers} of {model.n_layer + 1} layers on the GPU, "
        f"n_ctx {params.n_ctx}, n_ubatch {params.n_ubatch}, KV {params.type_k}/{params.type_v}"
    )
    console.print(
        f"about {plan.speed.decode_tps:.0f} tok/s decode, "
        f"{plan.speed.prefill_tps:.0f} tok/s prefill ({plan.speed.basis})"
    )
    for reason in plan.reasons if explain else ():
        console.print(f"  {reason.param} = {reason.value}: {reason.why}")
    for alternative in plan.alternatives:
        console.print(f"  or {alternative.title}: {alternative.gain}; {alternative.cost}")
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow")


def _bar(ledger: DeviceLedger | HostLedger, room: int, width: int = 48) -> list[tuple[str, str]]:
    parts = []
    for name in _ENTRIES:
        size = getattr(ledger, name, 0)
        cells = round(width * size / room) if room else 0
        parts.append(("█" * min(cells, width), _COLORS[name]))
    filled = sum(len(text) for text, _ in parts)
    parts.append(("·" * max(width - filled, 0), "dim"))
    return parts


def _line(ledger: DeviceLedger | HostLedger) -> str:
    entries = [
        f"{name} {format_bytes(getattr(ledger, name))}"
        for name in _ENTRIES
        if getattr(ledger, name, 0)
    ]
    room = ledger.free if isinstance(ledger, DeviceLedger) else ledger.available
    return f"{', '.join(entries)}; {format_bytes(ledger.used)} of {format_bytes(room)}"
