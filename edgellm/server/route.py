"""One endpoint: what the table of routes holds and the OpenAPI document is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from edgellm.server.core import Server
from edgellm.server.http import Call

Handler = Callable[[Server, Call], Awaitable[None]]


class Route(msgspec.Struct, frozen=True):
    """One endpoint. ``{name}`` in a path takes one or more segments."""

    method: str
    path: str
    handler: Handler
    about: str
    body: Any = None
    tag: str = "OpenAI"
    answer: str = "application/json"

    def matches(self, path: str) -> bool:
        """Whether a path with a parameter is this route's."""
        before, after = _ends(self.path)
        return (
            path.startswith(before)
            and path.endswith(after)
            and len(path) > len(before) + len(after)
        )


def _ends(path: str) -> tuple[str, str]:
    before, _, rest = path.partition("{")
    return before, rest.partition("}")[2]
