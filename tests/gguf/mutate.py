"""Ways to break a header: flipped bits, interesting numbers, cuts, repeats, swaps."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

INTERESTING = (
    *(0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 33, 63, 64, 65, 255, 256, 4096, 65_535, 65_536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
Mutation = Callable[[bytearray, random.Random], None]


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 4, 16))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def number(data: bytearray, rng: random.Random) -> None:
    form = rng.choice("BHIQ")
    size = struct.calcsize("<" + form)
    at = rng.randrange(max(1, len(data) - size))
    value = rng.choice(INTERESTING) % (1 << (8 * size))
    data[at : at + size] = struct.pack("<" + form, value)


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def remove(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 4, 8, 32))]


def repeat(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    piece = data[at : at + rng.choice((1, 8, 33, 200))]
    data[at:at] = piece * rng.choice((1, 1, 2, 50))


def swap(data: bytearray, rng: random.Random) -> None:
    a, b = rng.randrange(len(data)), rng.randrange(len(data))
    data[a : a + 8], data[b : b + 8] = data[b : b + 8], data[a : a + 8]


def noise(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at : at + 16] = rng.randbytes(16)


MUTATIONS: tuple[Mutation, ...] = (
    flip,
    flip,
    number,
    number,
    number,
    cut,
    remove,
    repeat,
    swap,
    noise,
)


def mutations(
    seed: bytes, rng: random.Random, count: int, head: int | None = None
) -> Iterator[bytes]:
    """``count`` mutants of ``seed``; ``head`` keeps the changes within the first bytes."""
    for _ in range(count):
        start = bytearray(seed[:head])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if start:
                rng.choice(MUTATIONS)(start, rng)
        yield bytes(start) + (b"" if head is None else seed[head:])
