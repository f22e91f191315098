"""A model's vocabulary: text to tokens and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.engine.info import Infill
from edgellm.engine.llama.library import lib
from edgellm.engine.llama.log import eog_named


class Vocab:
    """llama_vocab of a model. Any thread; ``log`` is what llama.cpp said while it loaded."""

    def __init__(self, model: Any, log: Sequence[str]) -> None:
        self._vocab = lib.llama_model_get_vocab(model)
        self.n: int = lib.llama_vocab_n_tokens(self._vocab)
        self.bos_id: int = lib.llama_vocab_bos(self._vocab)
        self.eos_id: int = lib.llama_vocab_eos(self._vocab)
        self.add_bos = bool(lib.llama_vocab_get_add_bos(self._vocab))
        ends = eog_named(log) | {self.eos_id, lib.llama_vocab_eot(self._vocab)}
        self.eog_ids = tuple(sorted(token for token in ends if token >= 0))
        self._pieces: list[bytes] | None = None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids; a BOS that the text brings along is not doubled."""
        data = text.encode("utf-8", "replace")
        call, n_max = lib.llama_tokenize, len(data) + 2
        buffer = (ctypes.c_int32 * n_max)()
        n = call(self._vocab, data, len(data), buffer, n_max, add_special, parse_special)
        if n < 0:
            buffer = (ctypes.c_int32 * -n)()
            n = call(self._vocab, data, len(data), buffer, -n, add_special, parse_special)
        ids: list[int] = buffer[:n]
        if add_special and parse_special and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]  # a rendered template brings its own
        return ids

    def piece(self, token: int) -> bytes:
        """The token's bytes; control tokens are spelled out."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_token_to_piece(self._vocab, token, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def pieces(self) -> Sequence[bytes]:
        """Every token's bytes, by id; slow the first time."""
        if self._pieces is None:
            self._pieces = [self.piece(token) for token in range(self.n)]
        return self._pieces

    def special(self) -> frozenset[int]:
        """Control tokens."""
        control = lib.llama_vocab_is_control
        return frozenset(t for t in range(self.n) if control(self._vocab, t))

    def text_of(self, token: int) -> str:
        """A special token's text; empty for -1."""
        return "" if token < 0 else self.piece(token).decode("utf-8", "replace")

    def infill(self) -> Infill | None:
        """The tokens for fill-in-the-middle, when the model has all three."""
        ids = (
            lib.llama_vocab_fim_pre(self._vocab),
            lib.llama_vocab_fim_suf(self._vocab),
            lib.llama_vocab_fim_mid(self._vocab),
        )
        if min(ids) < 0:
            return None
        prefix, suffix, middle = map(self.text_of, ids)
        return Infill(
            prefix=prefix,
            suffix=suffix,
            middle=middle,
            prefix_id=ids[0],
            suffix_id=ids[1],
            middle_id=ids[2],
        )
