"""``edgellm ps``: running servers, their models and requests."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from edgellm.engine.info import load_words
from edgellm.server.client import RemoteError, ask
from edgellm.server.statefile import ServerState, running
from edgellm.units import format_bytes


def ps(*, json: bool = False, requests: bool = False) -> None:
    """Running servers of this user, their models and what they do.

    Example: `edgellm ps --requests`

    Parameters
    ----------
    json
        Print everything the servers say (edgellm.ps/1).
    requests
        List running and waiting requests, too.
    """
    servers = [_describe(state) for state in running()]
    if json:
        document = {"schema": "edgellm.ps/1", "servers": servers}
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return
    if not servers:
        print("no server runs; start one with: edgellm serve MODEL")
        return
    console = Console(markup=False)
    for server in servers:
        _show(console, server, with_requests=requests)


def _describe(state: ServerState) -> dict[str, Any]:
    known: dict[str, Any] = {"pid": state.pid, "url": state.url, "started_at": state.started_at}
    try:
        known["stats"] = ask(state, "GET", "/v1/edgellm/stats", timeout=10)
    except RemoteError as error:
        known["error"] = error.message
    return known


def _show(console: Console, server: dict[str, Any], *, with_requests: bool) -> None:
    up = time.time() - server["started_at"]
    console.print(f"{server['url']}  pid {server['pid']}  up {_duration(up)}", highlight=False)
    if "error" in server:
        console.print(f"  {server['error']}", highlight=False)
        return
    stats = server["stats"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("model", "state", "memory", "in use", "waiting", "tok/s", "idle"):
        table.add_column(heading, overflow="fold")
    for model in stats["models"]:
        table.add_row(*_row(model, stats["engines"].get(model["name"])))
    console.print(table)
    if with_requests:
        _show_requests(console, stats["engines"])


def _row(model: dict[str, Any], engine: dict[str, Any] | None) -> tuple[str, ...]:
    state = model["state"]
    if state == "loading":
        state = f"loading: {load_words(model['stage'], model['fraction'])}"
    idle = "" if model["idle_s"] is None else _duration(model["idle_s"])
    waiting = model["waiting"] + (engine["waiting"] if engine else 0)
    return (
        model["name"],
        state,
        format_bytes(model["n_bytes"]) if model["n_bytes"] else "",
        str(model["in_use"]),
        str(waiting),
        f"{engine['decode_tps']:.0f}" if engine else "",
        idle,
    )


def _show_requests(console: Console, engines: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("request", "model", "client", "state", "prompt", "output", "age"):
        table.add_column(heading, overflow="fold")
    for name, engine in engines.items():
        for request in engine["requests"]:
            table.add_row(
                request["id"],
                name,
                request["client"],
                request["state"],
                str(request["n_prompt"]),
                str(request["n_output"]),
                _duration(request["age_s"]),
            )
    if table.row_count:
        console.print(table)


def _duration(seconds: float) -> str:
    """``3 s``, ``5 min``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
