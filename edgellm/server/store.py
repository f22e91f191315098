"""Stored responses, for ``previous_response_id``: in memory, the oldest dropped first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import msgspec

from edgellm.units import MiB

MAX_RESPONSES: Final = 1000
MAX_BYTES: Final = 64 * MiB


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response and the conversation that led to it, its own output included."""

    body: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    owner: str
    """The key that made it; another key does not see it."""
    n_bytes: int


class ResponseStore:
    """Responses by id, bounded in number and bytes."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._items: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0
        self._max = max_responses
        self._max_bytes = max_bytes

    def put(
        self,
        body: dict[str, Any],
        *,
        input_items: list[dict[str, Any]],
        messages: list[dict[str, Any]],
        owner: str,
    ) -> None:
        """Keep a response under its id."""
        n_bytes = len(msgspec.json.encode((body, input_items, messages)))
        stored = Stored(
            body=body, input_items=input_items, messages=messages, owner=owner, n_bytes=n_bytes
        )
        self._items[body["id"]] = stored
        self._bytes += n_bytes
        while len(self._items) > self._max or self._bytes > self._max_bytes:
            _, dropped = self._items.popitem(last=False)
            self._bytes -= dropped.n_bytes

    def get(self, id: str, owner: str) -> Stored | None:
        """The response, or None when it is not (or no longer) here, or another key's."""
        found = self._items.get(id)
        return found if found is not None and found.owner == owner else None

    def delete(self, id: str, owner: str) -> bool:
        """Forget a response; False when there was none."""
        found = self.get(id, owner)
        if found is None:
            return False
        del self._items[id]
        self._bytes -= found.n_bytes
        return True
