"""The application without a network: one request as a call. What ``edgellm batch`` runs on."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from edgellm.server.app import App
from edgellm.server.http import Message


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    status: int
    request_id: str
    body: bytes


_PEER: Final = ("batch", 0)


async def post(app: App, path: str, body: bytes) -> Reply:
    """POST ``body`` to ``path``."""
    sent: list[Message] = []
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if given:
            return given.pop()
        # Nobody hangs up in here.
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": _PEER,
    }
    await app(scope, receive, send)
    headers = dict(sent[0]["headers"])
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return Reply(
        status=sent[0]["status"], request_id=headers[b"x-request-id"].decode(), body=content
    )
