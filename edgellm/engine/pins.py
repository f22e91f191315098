"""Pinned prefixes on disk: a system prompt that is computed once, and not again after a restart."""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from edgellm.engine.backend import State
from edgellm.engine.info import EngineInfo

VERSION: Final = 1


class _Pin(msgspec.Struct, array_like=True):
    version: int
    model: str
    tokens: bytes
    state: bytes


class PinStore:
    """Files of one folder that belong to one model and one build; unreadable ones are passed over.

    The cache's types are checked by llama.cpp when a state is put back.
    """

    def __init__(self, folder: str | None, info: EngineInfo) -> None:
        self._folder = Path(folder) if folder else None
        facts = (info.name, info.arch, info.n_vocab, info.build, sorted(info.metadata.items()))
        self._model = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def load(self) -> Iterator[tuple[array[int], bytes]]:
        """Tokens and saved state of every pin of this model."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob(f"{self._model}-*.pin")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                pin = msgspec.msgpack.decode(path.read_bytes(), type=_Pin)
                if pin.version == VERSION and pin.model == self._model:
                    tokens = array("i")
                    tokens.frombytes(pin.tokens)
                    yield tokens, pin.state

    def save(self, tokens: array[int], state: State) -> None:
        """Write a pin; a full disk loses the pin and nothing else."""
        if self._folder is None:
            return
        raw = tokens.tobytes()
        path = self._folder / f"{self._model}-{hashlib.sha256(raw).hexdigest()[:16]}.pin"
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            pin = _Pin(VERSION, self._model, raw, bytes(state))
            part.write_bytes(msgspec.msgpack.encode(pin))
            os.replace(part, path)
