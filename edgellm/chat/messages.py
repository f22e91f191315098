"""OpenAI-shaped messages, checked and brought into the shape templates expect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from edgellm.errors import InvalidRequestError

ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal", "thinking")
IMAGE_PARTS: Final = ("image_url", "input_image", "image")
MAX_MESSAGES: Final = 100_000

Message = dict[str, Any]


def read_messages(messages: Any, *, can_see: bool = False) -> list[Message]:
    """Checked copies with plain roles, text contents, and tool calls that have ids and parsed
    arguments. InvalidRequestError names the place."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError("messages must be a list of at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"at most {MAX_MESSAGES} messages", param="messages")
    out = [_read(message, f"messages[{i}]", can_see) for i, message in enumerate(messages)]
    _fill_ids(out)
    return out


def _read(message: Any, path: str, can_see: bool) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{path} must be an object", param=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}",
            param=f"{path}.role",
        )
    out: Message = {"role": ROLES[role]}
    if role == "developer":
        out["developer"] = True
    out["content"] = _content(message.get("content"), f"{path}.content", can_see)
    if role == "assistant":
        _read_assistant(out, message, path)
    elif out["content"] is None:
        if role not in ("tool", "function"):
            raise InvalidRequestError(f"{path}.content is missing", param=f"{path}.content")
        out["content"] = ""
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            out[key] = message[key]
    return out


def _content(content: Any, path: str, can_see: bool) -> str | list[Any] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{path} must be text or a list of parts", param=path)
    parts = [_part(part, f"{path}[{i}]", can_see) for i, part in enumerate(content)]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    return [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]


def _part(part: Any, path: str, can_see: bool) -> Any:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{path} must be a content part", param=path)
    kind = part.get("type")
    if kind in TEXT_PARTS:
        text = part.get("text", part.get(str(kind)))
        if not isinstance(text, str):
            raise InvalidRequestError(f"{path}.text must be text", param=f"{path}.text")
        return text
    if kind in IMAGE_PARTS:
        if can_see:
            return dict(part)
        raise InvalidRequestError(
            f"{path} is an image, and this model was loaded without a projector",
            param=path,
            hint="load a vision model with its mmproj file",
        )
    raise InvalidRequestError(
        f"{path}.type {str(kind)[:40]!r} is not supported; text is", param=f"{path}.type"
    )


def _read_assistant(out: Message, message: Mapping[str, Any], path: str) -> None:
    thinking = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(thinking, str) and thinking:
        out["reasoning_content"] = thinking
    calls = message.get("tool_calls")
    if calls is None and isinstance(message.get("function_call"), Mapping):
        calls = [{"function": message["function_call"]}]
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise InvalidRequestError(f"{path}.tool_calls is a list", param=f"{path}.tool_calls")
        out["tool_calls"] = [_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls)]
    elif out["content"] is None:
        out["content"] = ""


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{path}.function.name is missing", param=f"{path}.function.name")
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) and call_id else None,
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(given: Any) -> Any:
    """Arguments as an object. A client may replay what a model wrote wrongly: kept as text."""
    if isinstance(given, Mapping):
        return dict(given)
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            return {"input": given}
        return value if isinstance(value, dict) else {"input": value}
    return {"input": given}


def _fill_ids(messages: list[Message]) -> None:
    """Give calls without an id one, and results the id and name of the call they answer."""
    waiting: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{i}_{j}"
            names[call["id"]] = call["function"]["name"]
            waiting.append(call)
        if message["role"] != "tool":
            continue
        if "tool_call_id" not in message and waiting:
            message["tool_call_id"] = waiting[0]["id"]
        waiting = [call for call in waiting if call["id"] != message.get("tool_call_id")]
        if "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


# Changes for templates that cannot take a conversation as it is


def with_roles(messages: list[Message], *, keeps_developer: bool) -> list[Message]:
    """``developer`` where the template knows that role, ``system`` elsewhere."""
    out = []
    for message in messages:
        copy = dict(message)
        if copy.pop("developer", False) and keeps_developer:
            copy["role"] = "developer"
        out.append(copy)
    return out


def with_short_ids(messages: list[Message]) -> list[Message]:
    """Tool-call ids of nine letters and digits, which Mistral's templates insist on."""

    def short(call_id: str) -> str:
        if len(call_id) == 9 and call_id.isalnum():
            return call_id
        return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]

    return _map_calls(messages, lambda call: {**call, "id": short(call["id"])}, short)


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Arguments as JSON text, for templates that only join texts."""

    def change(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return _map_calls(messages, change, lambda call_id: call_id)


def _map_calls(
    messages: list[Message],
    change: Callable[[dict[str, Any]], dict[str, Any]],
    rename: Callable[[str], str],
) -> list[Message]:
    out = []
    for message in messages:
        copy = dict(message)
        if copy.get("tool_calls"):
            copy["tool_calls"] = [change(call) for call in copy["tool_calls"]]
        if "tool_call_id" in copy:
            copy["tool_call_id"] = rename(copy["tool_call_id"])
        out.append(copy)
    return out


def as_plain_text(messages: list[Message]) -> list[Message]:
    """Calls and results written into the texts, for templates that know no tools."""
    out = []
    for message in messages:
        copy = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
        if message.get("tool_calls"):
            calls = [f"<tool_call>\n{_call_text(c)}\n</tool_call>" for c in message["tool_calls"]]
            copy["content"] = "\n".join(
                [*([message["content"]] if message["content"] else []), *calls]
            )
        if message["role"] == "tool":
            copy = {
                "role": "user",
                "content": f"<tool_response>\n{message['content']}\n</tool_response>",
            }
        out.append(copy)
    return merged(out)


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    return json.dumps(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )


def merged(messages: list[Message]) -> list[Message]:
    """Neighbours of one role as one message, for templates whose roles must alternate."""
    out: list[Message] = []
    for message in messages:
        last = out[-1] if out else None
        plain = not message.get("tool_calls") and message["role"] in ("user", "assistant", "system")
        joinable = (
            last is not None
            and plain
            and last["role"] == message["role"]
            and not last.get("tool_calls")
            and isinstance(last["content"], str)
            and isinstance(message["content"], str)
        )
        if last is not None and joinable:
            out[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            out.append(message)
    return out


def has_system(messages: list[Message]) -> bool:
    return any(message["role"] in ("system", "developer") for message in messages)


def system_in_user(messages: list[Message]) -> list[Message]:
    """System texts at the head of the first user message, for templates without that role."""
    system = [m["content"] for m in messages if m["role"] in ("system", "developer")]
    rest = [dict(m) for m in messages if m["role"] not in ("system", "developer")]
    text = "\n\n".join(part for part in system if isinstance(part, str))
    if not text:
        return rest
    for message in rest:
        if message["role"] == "user" and isinstance(message["content"], str):
            message["content"] = f"{text}\n\n{message['content']}"
            return rest
    return [{"role": "user", "content": text}, *rest]


def with_system(messages: list[Message], text: str) -> list[Message]:
    """``text`` behind the system prompt, or as one."""
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}".strip()}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def as_parts(messages: list[Message]) -> list[Message]:
    """Contents as lists of parts, for templates that only walk through those."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if isinstance(m["content"], str)
        else m
        for m in messages
    ]
