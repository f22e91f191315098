"""One line of JSON a request on stderr: who, what, how long; never a word of a prompt."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec

from edgellm.server.http import Call


def log_request(call: Call, seconds: float) -> None:
    """The line of a finished request."""
    write(
        "request",
        id=call.request_id,
        method=call.method,
        path=call.path[:200],
        status=call.status,
        ms=round(seconds * 1e3, 1),
        client=call.client,
        **({"key": call.key} if call.key else {}),
        **call.log,
    )


def write(event: str, **fields: Any) -> None:
    """One line: the time (UTC), the event's name, its fields."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    line = msgspec.json.encode({"ts": stamp, "event": event, **fields})
    print(line.decode(), file=sys.stderr, flush=True)
