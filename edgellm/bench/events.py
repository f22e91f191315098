"""What one event of a streamed answer says, in every form that servers send it."""

from __future__ import annotations

from typing import Any, Final

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One ``data:`` line, decoded."""

    text: str = ""
    """Everything a reader would get to see, thoughts and tool calls included."""
    token_ids: tuple[int, ...] = ()
    finish: str | None = None
    n_prompt: int | None = None
    n_output: int | None = None
    n_cached: int | None = None
    timings: dict[str, Any] | None = None
    error: str = ""

    @property
    def n_so_far(self) -> int | None:
        """Output tokens up to this event, where the server counts along (usage in every chunk, or
        llama-server's timings_per_token)."""
        told = (
            self.n_output if self.n_output is not None else (self.timings or {}).get("predicted_n")
        )
        return told if isinstance(told, int) and 0 <= told <= MAX_COUNT else None


class _Details(msgspec.Struct):
    cached_tokens: int | float | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | float | None = None
    completion_tokens: int | float | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    object: str | None = None
    message: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: dict[str, Any] | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


MAX_COUNT: Final = 1 << 24
"""More tokens than any answer or prompt has."""
_decode_chunk: Final = msgspec.json.Decoder(_Chunk).decode
_NOTHING: Final = (b"", b"null", b"[]", b"{}", b'""', b"false")


def read_event(data: bytes) -> Event:
    """An event's content; raises msgspec.MsgspecError when it is no chunk of an answer."""
    chunk = _decode_chunk(data)
    if (error := _error_of(chunk)) is not None:
        return Event(error=error)
    usage = chunk.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    choices = chunk.choices or []
    return Event(
        text="".join(map(_text_of, choices)),
        token_ids=tuple(i for choice in choices for i in choice.token_ids or ()),
        finish=next((c.finish_reason for c in choices if c.finish_reason), None),
        n_prompt=_whole(usage.prompt_tokens),
        n_output=_whole(usage.completion_tokens),
        n_cached=_whole(details.cached_tokens),
        timings=chunk.timings,
    )


def _error_of(chunk: _Chunk) -> str | None:
    """The error that a stream ends with: OpenAI's form, or the older ``"object": "error"``."""
    if bytes(chunk.error) not in _NOTHING:
        return bytes(chunk.error).decode(errors="replace")[:500]
    return (chunk.message or "error") if chunk.object == "error" else None


def _whole(value: float | None) -> int | None:
    """A count of tokens; what can be none (below 0, 1e308) is as good as not told."""
    return None if value is None or not 0 <= value <= MAX_COUNT else int(value)


def _text_of(choice: _Choice) -> str:
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    # Newer servers send a thought under both names, the older one for old clients.
    thought = delta.reasoning_content or delta.reasoning or ""
    text = f"{choice.text or ''}{thought}{_plain(delta.content)}{delta.refusal or ''}"
    calls = bytes(delta.tool_calls)
    return text if calls in _NOTHING else text + calls.decode()


def _plain(content: str | list[Any] | None) -> str:
    """Content as text; some servers stream it in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""
