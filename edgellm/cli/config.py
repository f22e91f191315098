"""``edgellm config``: every setting, its value and where it came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from edgellm import config as config_
from edgellm import paths
from edgellm.config import Config, Known
from edgellm.errors import ConfigError
from edgellm.request import SamplingParams
from edgellm.units import format_bytes
from edgellm.workers import Pool

app = App(name="config")


@app.default
def show(*, json: bool = False) -> None:
    """Print every setting, its value and where it came from.

    Flags win over EDGELLM_* variables, those over config.toml, that over the profile, that over
    the defaults.

    Example: `EDGELLM_PLAN_CTX=8192 edgellm config`

    Parameters
    ----------
    json
        Print JSON.
    """
    loaded = config_.load()
    if json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(loaded)), indent=2).decode())
        return
    _print_table(loaded)


@app.command(name="set")
def set_(key: str, value: Annotated[str, Parameter(allow_leading_hyphen=True)], /) -> None:
    """Write one setting to config.toml, leaving its other lines as they are.

    Example: `edgellm config set plan.ctx 8192`

    Parameters
    ----------
    key
        A name that `edgellm config` prints, such as plan.ctx.
    value
        Its new value.
    """
    _judge(key, value)
    path = config_.set_in_file(key, value)
    print(f"{key} = {value}  in {path}")


def _judge(key: str, value: str) -> None:
    """Refuse here what a setting's type cannot say and every command after it would refuse.

    The value is judged alone: another one that is wrong already must not be in its way.
    """
    known = config_.known_keys().get(key)
    section = key.partition(".")[0]
    if known is None or section not in ("plan", "chat"):
        return  # `set_in_file` has the better words for an unknown key
    try:
        settings = config_.load(environ={known.variable: value}, file=Path(os.devnull)).settings
    except ConfigError as error:
        error.message = error.message.replace(f" (variable {known.variable})", "")
        raise
    if section == "chat":
        from edgellm.cli.answer import sampling

        sampling(settings.chat)
        return
    from edgellm.runtime import opening

    opening.plan_request(settings)
    opening.vram_of(settings.plan)
    opening.backend_of(settings.plan)
    Pool(settings.plan.worker)


@app.command
def unset(key: str, /) -> None:
    """Remove one setting from config.toml, so that its default holds again.

    Example: `edgellm config unset plan.ctx`

    Parameters
    ----------
    key
        A name that `edgellm config` prints.
    """
    print(f"{key} removed from {config_.set_in_file(key, None)}")


@app.command
def path() -> None:
    """Print where config.toml is (or would be).

    Example: `$EDITOR "$(edgellm config path)"`
    """
    print(paths.config_file())


def _as_json(loaded: Config) -> dict[str, Any]:
    return {
        key: {
            "value": _shown(known, loaded.value(key), raw=True),
            "origin": msgspec.to_builtins(loaded.origins[key]),
            "default": known.default,
            "variable": known.variable,
            "description": known.description,
        }
        for key, known in config_.known_keys().items()
    }


def _print_table(loaded: Config) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("setting", "value", "from", "what it does"):
        table.add_column(title, overflow="fold")
    for key, known in config_.known_keys().items():
        origin = loaded.origins[key]
        style = "dim" if origin.kind == "default" else "bold"
        value = _shown(known, _in_force(key, loaded.value(key)))
        about = origin.why or known.description
        table.add_row(key, f"[{style}]{value}[/]", str(origin), f"[dim]{about}[/]")
    console = Console()
    console.print(table)
    console.print(f"\n[dim]file: {paths.config_file()}[/]", soft_wrap=True)


def _in_force(key: str, value: Any) -> Any:
    """The value, or the default that a sampling setting without one stands for."""
    section, _, name = key.partition(".")
    return getattr(SamplingParams(), name, None) if value is None and section == "chat" else value


def _shown(known: Known, value: Any, *, raw: bool = False) -> Any:
    """A value for people, or for JSON (``raw``); a key that opens the server is never shown."""
    if known.key in config_.SECRET_KEYS and value:
        return ["(set)"] if raw else "(set)"
    if raw:
        return value
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(str(part) for part in value) or "-"
    return format_bytes(value) if known.is_size else str(value)
