"""The cache: which cells a sequence holds, and its state as bytes."""

from __future__ import annotations

import ctypes
from typing import Any

from edgellm.engine.backend import State
from edgellm.engine.llama.library import lib


class Memory:
    """llama_memory of a context; an encoder has none."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._memory = lib.llama_get_memory(ctx)

    @property
    def can_shift(self) -> bool:
        """Whether positions may be moved."""
        return bool(self._memory) and bool(lib.llama_memory_can_shift(self._memory))

    def clear(self) -> None:
        """Forget every sequence."""
        if self._memory:
            lib.llama_memory_clear(self._memory, False)

    def remove(self, seq_id: int, start: int) -> bool:
        """Forget positions from ``start`` on; False when the cache cannot forget a part."""
        return bool(lib.llama_memory_seq_rm(self._memory, seq_id, start if start else -1, -1))

    def copy(self, source: int, target: int, n: int) -> None:
        """Let ``target`` hold the first n cells of ``source`` too."""
        lib.llama_memory_seq_cp(self._memory, source, target, 0, n)

    def shift(self, seq_id: int, start: int, n_drop: int) -> None:
        """Forget ``n_drop`` positions from ``start`` on and move the later ones down."""
        lib.llama_memory_seq_rm(self._memory, seq_id, start, start + n_drop)
        lib.llama_memory_seq_add(self._memory, seq_id, start + n_drop, -1, -n_drop)

    def state(self, seq_id: int) -> State:
        """All that is held for a sequence, copied once: 180 MB of it take a twelfth of a second."""
        n = lib.llama_state_seq_get_size_ext(self._ctx, seq_id, 0)
        state = bytearray(n)
        written = lib.llama_state_seq_get_data_ext(self._ctx, _address(state), n, seq_id, 0)
        del state[written:]
        return state

    def restore(self, seq_id: int, state: State) -> bool:
        """Put a state back; False when it does not fit."""
        held = state if isinstance(state, bytearray) else bytearray(state)
        return bool(
            lib.llama_state_seq_set_data_ext(self._ctx, _address(held), len(held), seq_id, 0)
        )


def _address(data: bytearray) -> Any:
    return (ctypes.c_uint8 * len(data)).from_buffer(data)
