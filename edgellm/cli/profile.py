"""``edgellm profile``: settings for a class of hardware, or found by tuning."""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec
from cyclopts import App

from edgellm import config, paths
from edgellm.bench.archive import Archive
from edgellm.bench.profiles import rollback as rollback_
from edgellm.config import ProfileFile
from edgellm.errors import ConfigError

app = App(
    name="profile",
    help="Settings for a class of hardware, each value with its reason.\n\n"
    "Examples, one a line:\n\n* `edgellm profile ls`\n* `edgellm profile use 6gb`",
)


@app.command
def ls(*, json: bool = False) -> None:
    """List the profiles: those that come with edgellm, and your own.

    Example: `edgellm profile ls`

    Parameters
    ----------
    json
        Print JSON.
    """
    in_use = _in_use()
    found = [config.read_profile(name) for name in sorted(config.list_profiles(), key=_by_size)]
    if json:
        _print_json([_as_json(profile, in_use) for profile in found])
        return
    width = max((len(profile.name) for profile in found), default=0)
    for profile in found:
        mark = "*" if profile.name == in_use else " "
        about = " - ".join(str(profile.about[k]) for k in ("title", "for") if k in profile.about)
        own = "" if profile.path.parent == paths.shipped("profiles") else "  (yours)"
        print(f"{mark} {profile.name:<{width}}  {about}{own}")


@app.command
def show(name: str, /, *, json: bool = False) -> None:
    """Print what a profile sets, and why.

    Example: `edgellm profile show 6gb`

    Parameters
    ----------
    name
        A name that `edgellm profile ls` prints.
    json
        Print JSON.
    """
    profile = config.read_profile(name)
    if json:
        _print_json(_as_json(profile, config.load().settings.profile))
        return
    print(f"{profile.about.get('title', name)}  ({profile.path})")
    if "for" in profile.about:
        print(profile.about["for"])
    for key, value in profile.values.items():
        print(f"{key} = {value}")
        if key in profile.reasons:
            print(f"    {profile.reasons[key]}")


@app.command
def use(name: str, /) -> None:
    """Use a profile from now on; none takes it away. Flags and config.toml still win over it.

    Example: `edgellm profile use 6gb`

    Parameters
    ----------
    name
        A name that `edgellm profile ls` prints, or none.
    """
    if name == "none":
        print(f"no profile any more  in {config.set_in_file('profile', None)}")
        return
    profile = config.read_profile(name)
    config.load({"profile": name})
    path = config.set_in_file("profile", profile.name)
    print(f"profile = {name}  in {path}")


@app.command
def rollback(name: str | None = None, /) -> None:
    """Undo the newest profile that `edgellm tune` wrote: what stood there before is back.

    Example: `edgellm profile rollback`

    Parameters
    ----------
    name
        Which profile; the newest of all when none is named.
    """
    undone = rollback_(Archive(), name)
    state = "is as it was before" if undone.is_there else "is gone: there was none before"
    print(f"{undone.name} {state} ({undone.path})")
    if undone.kept is not None:
        print(f"it had been changed by hand: that text is kept in {undone.kept}")
    if not undone.is_there and config.value_in_file("profile") == undone.name:
        print(f"it was in use, and is no more  in {config.set_in_file('profile', None)}")


def _in_use() -> str | None:
    """The profile in use; when it is gone that is said, and the list is shown all the same."""
    try:
        return config.load().settings.profile
    except ConfigError as error:
        print(f"edgellm: warning: {error.message}", file=sys.stderr)
        return None


def _by_size(name: str) -> tuple[str, int, str]:
    """4gb before 12gb."""
    head = re.match(r"(\D*)(\d*)", name)
    number = head[2] if head else ""
    return head[1] if head else "", int(number or 0), name


def _as_json(profile: ProfileFile, in_use: str | None) -> dict[str, Any]:
    return {
        "name": profile.name,
        "path": str(profile.path),
        "in_use": profile.name == in_use,
        "about": profile.about,
        "values": profile.values,
        "reasons": profile.reasons,
    }


def _print_json(data: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n")
