"""``edgellm doctor``: what this machine has, what is wrong, and the command that mends it."""

from __future__ import annotations

from typing import Any

import msgspec

from edgellm.cli import checks
from edgellm.cli.bandwidth import measure_bandwidth
from edgellm.cli.checks import Check, Facts
from edgellm.planner import observed
from edgellm.planner.plan import Observation
from edgellm.units import format_bytes

SCHEMA = "edgellm.doctor/1"
_MARKS = {"ok": "[green]✓[/]", "warning": "[yellow]![/]", "problem": "[red]✗[/]"}


def doctor(*, measure: bool = False, json: bool = False) -> int:
    """What this machine has, what is wrong, and the exact command that mends it.

    The exit code is 1 when there is a problem, 0 with warnings only.

    Examples, one a line:

    * `edgellm doctor`
    * `edgellm doctor --measure --json`

    Parameters
    ----------
    measure
        Also measure the memory bandwidth, which bounds decoding on the CPU (2 seconds);
        later plans use it.
    json
        Print JSON (edgellm.doctor/1).
    """
    facts = checks.examine()
    judged = checks.judge(facts)
    bandwidth = measure_bandwidth(facts.devices.host.n_physical) if measure else None
    if bandwidth is not None:
        observed.remember([Observation(device="host", bandwidth=bandwidth)])
    if json:
        print(msgspec.json.encode(_as_json(facts, judged, bandwidth)).decode())
    else:
        _print(facts, judged, bandwidth)
    return int(any(check.status == "problem" for check in judged))


def _as_json(facts: Facts, judged: list[Check], bandwidth: float | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        **msgspec.to_builtins(facts),
        "checks": msgspec.to_builtins(judged),
        "memory_bandwidth": bandwidth,
    }


def _print(facts: Facts, judged: list[Check], bandwidth: float | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for title, text in _rows(facts, bandwidth):
        table.add_row(title, escape(text))
    console = Console(highlight=False)
    console.print(table)
    console.print()
    for check in judged:
        console.print(
            f"{_MARKS[check.status]} {check.name}: {escape(check.detail)}", soft_wrap=True
        )
        if check.fix is not None:
            console.print(f"    [bold]{escape(check.fix)}[/]", soft_wrap=True)


def _rows(facts: Facts, bandwidth: float | None) -> list[tuple[str, str]]:
    host, store = facts.devices.host, facts.store
    rows = [
        ("edgellm", f"{facts.version}, Python {facts.python}, {host.os}"),
        ("CPU", f"{host.cpu}, {host.n_physical} cores, {host.n_logical} threads"),
        ("RAM", f"{format_bytes(host.total)}, {format_bytes(host.available)} free"),
    ]
    if bandwidth is not None:
        # Bandwidths are sold and compared in decimal GB/s; bytes elsewhere stay binary.
        rows.append(("", f"{bandwidth / 1e9:.1f} GB/s copied by {host.n_physical} threads"))
    rows += _gpu_rows(facts) or [("GPU", "none")]
    rows.append(("engine", _engine_text(facts)))
    models = f"{store.n_models} models, {format_bytes(store.used)}"
    rows.append(("store", f"{store.folder}: {models}, {format_bytes(store.free)} free"))
    rows.append(("starter", "installed" if facts.has_starter else "edgellm pull starter"))
    rows.append(("settings", facts.config_file))
    return rows


def _gpu_rows(facts: Facts) -> list[tuple[str, str]]:
    rows = []
    for gpu in facts.devices.gpus:
        memory = f"{format_bytes(gpu.total)}, {format_bytes(gpu.free)} free"
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        rows.append((gpu.id, f"{gpu.name}, {memory}{driver}"))
    return rows


def _engine_text(facts: Facts) -> str:
    build = facts.report.build
    if build is None:
        return "not installed" if facts.report.problem == "missing" else "does not load"
    to = ", ".join(f"{d.name} ({d.description})" for d in build.gpus) or "no GPU"
    source = f"llama.cpp {build.commit}" if build.commit else f"ggml {build.ggml}"
    return (
        f"llama-cpp-python {build.version}, {source} "
        f"({', '.join(build.backends)}); offloads to {to}"
    )
