"""``edgellm profile``: settings for a class of hardware, or found by tuning."""

from __future__ import annotations

from cyclopts import App

from edgellm.bench.archive import Archive
from edgellm.bench.profiles import rollback as rollback_

app = App(name="profile")


@app.command
def rollback(name: str | None = None, /) -> None:
    """Undo the newest profile that `edgellm tune` wrote: what stood there before is back.

    Example: `edgellm profile rollback`

    Parameters
    ----------
    name
        Which profile; the newest of all when none is named.
    """
    found, path, still_there = rollback_(Archive(), name)
    state = "is as it was before" if still_there else "is gone: there was none before"
    print(f"{found} {state} ({path})")
