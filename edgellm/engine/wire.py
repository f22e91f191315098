"""Frames between an engine's parent and its child: four bytes of length, then MessagePack.

An error crosses as ErrorInfo and comes back as the class it was.
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeAlias

import msgspec

from edgellm import errors
from edgellm.engine.info import EngineInfo, EngineOptions, LoadProgress
from edgellm.planner.plan import LoadReport, Plan
from edgellm.request import EmbedRequest, ErrorInfo, Request, TokenEvent

LENGTH: Final = struct.Struct("<I")
MAX_FRAME: Final = 1 << 30


class Load(msgspec.Struct, tag="load"):
    """Load the plan's model; answered by Progress, then Loaded or Failed with call 0."""

    plan: Plan
    backend: str
    options: EngineOptions


class DryRun(msgspec.Struct, tag="dry_run"):
    """Measure the plan's buffers without allocating them; answered by Loaded or Failed."""

    plan: Plan
    backend: str
    options: EngineOptions


class Generate(msgspec.Struct, tag="generate"):
    request: Request


class Embed(msgspec.Struct, tag="embed"):
    call: int
    request: EmbedRequest


class Score(msgspec.Struct, tag="score"):
    """Write the logits of positions ``first`` on to the file ``out``; answered by their number."""

    call: int
    ids: list[int]
    first: int
    out: str


class Tokenize(msgspec.Struct, tag="tokenize"):
    call: int
    text: str
    add_special: bool
    parse_special: bool


class Detokenize(msgspec.Struct, tag="detokenize"):
    call: int
    ids: list[int]


class Pieces(msgspec.Struct, tag="pieces"):
    """Each token's own bytes, which may be a part of a character."""

    call: int
    ids: list[int]


class Cancel(msgspec.Struct, tag="cancel"):
    request_id: str


class Stats(msgspec.Struct, tag="stats"):
    call: int


class Ping(msgspec.Struct, tag="ping"):
    call: int


class Close(msgspec.Struct, tag="close"):
    pass


ToChild: TypeAlias = (
    Load
    | DryRun
    | Generate
    | Embed
    | Score
    | Tokenize
    | Detokenize
    | Pieces
    | Cancel
    | Stats
    | Ping
    | Close
)


class Progress(msgspec.Struct, tag="progress"):
    value: LoadProgress


class Loaded(msgspec.Struct, tag="loaded"):
    info: EngineInfo | None
    report: LoadReport


class Events(msgspec.Struct, tag="events"):
    """Everything one step has to say; ``started`` names requests whose first step began."""

    events: list[TokenEvent]
    started: list[str] = []


class Reply(msgspec.Struct, tag="reply"):
    call: int
    value: Any


class Failed(msgspec.Struct, tag="failed"):
    call: int
    error: ErrorInfo


FromChild: TypeAlias = Progress | Loaded | Events | Reply | Failed

_ENCODER: Final = msgspec.msgpack.Encoder()
to_child_decoder: Final = msgspec.msgpack.Decoder(ToChild)
from_child_decoder: Final = msgspec.msgpack.Decoder(FromChild)


def pack(message: ToChild | FromChild) -> bytearray:
    """One frame, length first."""
    frame = bytearray(4)
    _ENCODER.encode_into(message, frame, 4)
    LENGTH.pack_into(frame, 0, len(frame) - 4)
    return frame


class Unframer:
    """Bytes in as they arrive, whole frames' bodies out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames completed by ``data``; raises ValueError on an impossible length."""
        buffer = self._buffer
        if not buffer and len(data) >= 4 and LENGTH.unpack_from(data)[0] == len(data) - 4:
            return [data[4:]]  # one frame, whole: what nearly every step of the loop sends
        buffer += data
        frames = []
        start = 0
        while len(buffer) - start >= 4:
            (n,) = LENGTH.unpack_from(buffer, start)
            if n > MAX_FRAME:
                raise ValueError(f"a frame of {n} bytes")
            if len(buffer) - start - 4 < n:
                break
            frames.append(bytes(buffer[start + 4 : start + 4 + n]))
            start += 4 + n
        if start:
            del buffer[:start]
        return frames


def _tree(cls: type[errors.EdgeLLMError]) -> dict[str, type[errors.EdgeLLMError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


ERROR_CLASSES: Final = _tree(errors.EdgeLLMError)


def error_info(error: BaseException) -> ErrorInfo:
    """Any exception as it crosses the border; a foreign one becomes an EngineError."""
    if not isinstance(error, errors.EdgeLLMError):
        return ErrorInfo(type="EngineError", message=f"{type(error).__name__}: {error}")
    attributes = {k: v for k, v in vars(error).items() if k not in ("message", "hint")}
    return ErrorInfo(
        type=type(error).__name__,
        message=error.message,
        hint=error.hint,
        attributes=attributes,
    )


def rebuild_error(info: ErrorInfo) -> errors.EdgeLLMError:
    """The exception that ``error_info`` described: same class, same attributes."""
    cls = ERROR_CLASSES.get(info.type, errors.EngineError)
    error = cls.__new__(cls, info.message)
    errors.EdgeLLMError.__init__(error, info.message, hint=info.hint)
    vars(error).update(info.attributes)
    return error
