"""``GET /v1/models``: every model, in OpenAI's shape with Anthropic's fields beside it."""

from __future__ import annotations

import time
from typing import Any

from edgellm.errors import ModelNotFoundError
from edgellm.runtime import ModelStatus
from edgellm.server.core import Server
from edgellm.server.http import Call
from edgellm.server.upstream.replicas import Group


async def list_models(server: Server, call: Call) -> None:
    """The list; both APIs' clients read it."""
    data = [describe(server, status) for status in server.runtime.models()]
    if server.upstreams is not None:
        data += [_describe_group(server, g) for g in server.upstreams.groups.values()]
    await call.json(
        {
            "object": "list",
            "data": data,
            # llama-server's second list; its page looks for what a model can do here.
            "models": [_as_llama_server(server, item) for item in data],
            "has_more": False,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
        }
    )


async def get_model(server: Server, call: Call) -> None:
    """One model, by name or alias."""
    name = call.path.removeprefix("/v1/models/")
    group = server.upstreams.find(name) if server.upstreams is not None else None
    if group is not None:
        await call.json(_describe_group(server, group))
        return
    wanted = server.runtime.find(name)
    for status in server.runtime.models():
        if status.name == wanted.name:
            await call.json(describe(server, status))
            return
    raise ModelNotFoundError(f"the model {name[:200]!r} does not exist here")


def _describe_group(server: Server, group: Group) -> dict[str, Any]:
    """A model of other servers, in the shape of one of this server's."""
    aliases = server.upstreams.aliases if server.upstreams is not None else {}
    names = tuple(a for a, target in aliases.items() if target == group.name)
    state = ModelStatus(
        name=group.name,
        ref="upstream",
        aliases=names,
        tags=("upstream",),
        state="loaded" if group.is_up else "failed",
        fraction=1.0,
        in_use=group.in_flight,
        waiting=group.n_waiting,
        error=None if group.is_up else "; ".join(r.error for r, _ in group.members),
    )
    body = describe(server, state)
    lengths = [r.contexts[there] for r, there in group.members if there in r.contexts]
    if lengths:
        body["max_model_len"] = body["context_length"] = min(lengths)
    return body


def _as_llama_server(server: Server, item: dict[str, Any]) -> dict[str, Any]:
    meta = item.get("meta") or {}
    lease = next((x for x in server.runtime.loaded() if x.name == item["id"]), None)
    can = "embedding" if lease is not None and lease.engine.info.is_encoder else "completion"
    return {
        "name": item["id"],
        "model": item["id"],
        "modified_at": item["created_at"],
        "size": meta.get("size", ""),
        "digest": "",
        "type": "model",
        "description": "",
        "tags": item["tags"],
        "capabilities": [can],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": meta.get("arch", ""),
            "families": [meta["arch"]] if meta else [],
            "parameter_size": "",
            "quantization_level": meta.get("quant", ""),
        },
    }


def describe(server: Server, status: ModelStatus) -> dict[str, Any]:
    """One model: what it is once loaded, and how far loading has come."""
    created = int(server.started_at)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
    body: dict[str, Any] = {
        "id": status.name,
        "object": "model",
        "created": created,
        "owned_by": "edgellm",
        "type": "model",
        "display_name": status.name,
        "created_at": stamp,
        "aliases": [a for a in status.aliases if a != "*"],
        "tags": list(status.tags),
        "status": {
            "value": status.state,
            "stage": status.stage,
            "progress": status.fraction,
            "in_use": status.in_use,
            "waiting": status.waiting,
        },
    }
    if status.error is not None:
        body["status"]["error"] = status.error
    lease = next((x for x in server.runtime.loaded() if x.name == status.name), None)
    if lease is not None:
        info, model = lease.engine.info, lease.engine.plan.model
        body["max_model_len"] = info.n_ctx_seq
        body["context_length"] = info.n_ctx_seq
        body["meta"] = {
            "n_ctx": info.n_ctx_seq,
            "n_ctx_total": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_seq_max": info.n_seq_max,
            "n_vocab": info.n_vocab,
            "n_embd": info.n_embd,
            "n_params": model.n_params,
            "size": model.file_bytes,
            "quant": model.quant,
            "arch": info.arch,
        }
    return body
