from __future__ import annotations

import io
import time

from rich.console import Console

from edgellm.cli import ps


def test_a_long_name_is_printed_in_full_and_as_it_is() -> None:
    name = "[bold]" + "a-very-long-name-" * 6
    model = {
        "name": name, "state": "loaded", "n_bytes": 1 << 30, "in_use": 0, "waiting": 0, "idle_s": 3,
    }  # fmt: skip
    server = {
        "url": "u", "pid": 1, "started_at": time.time(),
        "stats": {"models": [model], "engines": {}},
    }  # fmt: skip
    out = io.StringIO()
    ps._show(Console(file=out, width=80, markup=False), server, with_requests=False)
    first = "".join(line.split("  ")[0].strip() for line in out.getvalue().splitlines()[2:])
    assert first == name
