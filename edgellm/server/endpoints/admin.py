"""Load, unload, cancel, stop: what ``edgellm ps`` and ``edgellm stop`` use."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from edgellm.server.core import Server
from edgellm.server.endpoints.models import describe
from edgellm.server.errors import Problem
from edgellm.server.http import Call, decode
from edgellm.server.wire.native import CancelBody, ModelBody

MODEL: Final = msgspec.json.Decoder(ModelBody)
CANCEL: Final = msgspec.json.Decoder(CancelBody)


async def load(server: Server, call: Call) -> None:
    """Answers when the model is loaded."""
    body = decode(MODEL, await server.body(call))
    await server.runtime.load(body.model)
    await _answer(server, call, body.model)


async def unload(server: Server, call: Call) -> None:
    """Answers when its memory is back. Running requests finish first unless ``force``."""
    body = decode(MODEL, await server.body(call))
    # A client that does not wait must not leave the model half unloaded.
    was_loaded = await asyncio.shield(
        asyncio.create_task(server.runtime.unload(body.model, force=body.force))
    )
    call.log["was_loaded"] = was_loaded
    await _answer(server, call, body.model)


async def _answer(server: Server, call: Call, model: str) -> None:
    name = server.runtime.find(model).name
    status = next(s for s in server.runtime.models() if s.name == name)
    await call.json(describe(server, status))


async def cancel(server: Server, call: Call) -> None:
    """Ends a request wherever it runs; its client gets an error."""
    body = decode(CANCEL, await server.body(call))
    for lease in server.runtime.loaded():
        stats = await lease.engine.stats()
        for request in stats.requests:
            if request.id == body.request_id or request.id.startswith(body.request_id + "-"):
                await lease.engine.cancel(request.id)
                await call.json({"cancelled": request.id})
                return
    raise Problem(
        404, "no such request is running or waiting", code="not_found", param="request_id"
    )


async def stop(server: Server, call: Call) -> None:
    """Begins the drain: running requests finish, then the process exits with 0."""
    if server.on_stop is None:
        raise Problem(400, "this server cannot be stopped over HTTP", code="not_supported")
    await call.json({"status": "stopping", "in_flight": server.in_flight - 1})
    server.on_stop()
