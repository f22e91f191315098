"""``edgellm stop``: unload a model of a running server, or stop the server."""

from __future__ import annotations

import sys
import time

import msgspec
import psutil

from edgellm.cli.errors import UsageError
from edgellm.server.client import RemoteError, ask, find
from edgellm.server.statefile import ServerState, running


def stop(
    model: str | None = None,
    /,
    *,
    all: bool = False,
    port: int | None = None,
    force: bool = False,
    timeout: float = 60,
    json: bool = False,
) -> None:
    """Unload a model, or stop a server when no model is named.

    Running requests finish first. The command returns when the memory is back.

    Examples, one a line:

    * `edgellm stop starter`
    * `edgellm stop`
    * `edgellm stop --all`

    Parameters
    ----------
    model
        A model by name or alias; the server goes on without it.
    all
        Stop every server of this user.
    port
        Which server, when several run; the newest otherwise.
    force
        Do not wait for running requests of the model.
    timeout
        Seconds to wait.
    json
        Print what was done (edgellm.stop/1).
    """
    if all and (model is not None or port is not None):
        raise UsageError("--all goes with no model and no port")
    if model is not None:
        body = {"model": model, "force": force}
        answer = ask(find(port), "POST", "/v1/edgellm/unload", body, timeout=timeout)
        _say(json, {"unloaded": answer["id"]}, f"{answer['id']} is unloaded")
        return
    servers = running() if all else [find(port)]
    for server in servers:
        _stop(server, timeout)
    urls = [server.url for server in servers]
    _say(json, {"stopped": urls}, "\n".join(f"{url} is stopped" for url in urls))


def _stop(server: ServerState, timeout: float) -> None:
    """Ask for the drain and wait for the process to be gone."""
    ask(server, "POST", "/v1/edgellm/stop", timeout=timeout)
    deadline = time.monotonic() + timeout
    while psutil.pid_exists(server.pid) and any(s.pid == server.pid for s in running()):
        if time.monotonic() > deadline:
            raise RemoteError(
                f"the server at {server.url} still finishes requests after {timeout:g} s",
                hint=f"kill {server.pid}",
            )
        time.sleep(0.05)


def _say(as_json: bool, what: dict[str, object], text: str) -> None:
    if as_json:
        document = {"schema": "edgellm.stop/1", **what}
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    elif text:
        print(text)
