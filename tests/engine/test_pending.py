"""Events on their way to a consumer: in order, at once where somebody takes them at once."""

from __future__ import annotations

import asyncio

import pytest

from edgellm.engine.pending import Pending
from edgellm.errors import EngineError
from edgellm.request import Request, TokenEvent
from tests.engine.factories import request


def event(text: str) -> TokenEvent:
    return TokenEvent(request_id="r", text=text)


def asked() -> Request:
    return request("hello", max_tokens=4)


async def read(pending: Pending, n: int) -> list[str]:
    items = [await asyncio.wait_for(pending.get(), 60) for _ in range(n)]
    return [item.text if isinstance(item, TokenEvent) else str(item) for item in items]


async def test_events_are_read_in_the_order_they_came() -> None:
    pending = Pending(asked())
    for text in "abc":
        pending.put(event(text))
    assert await read(pending, 3) == ["a", "b", "c"]


async def test_a_reader_that_waits_is_woken() -> None:
    pending = Pending(asked())
    reading = asyncio.create_task(read(pending, 1))
    await asyncio.sleep(0)
    pending.put(event("a"))
    assert await reading == ["a"]


async def test_what_is_taken_directly_is_not_read_again() -> None:
    taken: list[str] = []

    def take(e: TokenEvent) -> bool:
        taken.append(e.text)
        return e.text != "b"

    pending = Pending(asked(), take)
    pending.put(event("a"))
    pending.put(event("b"))
    assert taken == ["a", "b"]
    assert await read(pending, 1) == ["b"]
    assert pending.n_sent == 2


async def test_nothing_is_taken_directly_while_an_earlier_event_waits() -> None:
    taken: list[str] = []

    def take(e: TokenEvent) -> bool:
        taken.append(e.text)
        return False

    pending = Pending(asked(), take)
    for text in "abc":
        pending.put(event(text))
    assert taken == ["a"]
    assert await read(pending, 3) == ["a", "b", "c"]


async def test_what_the_taker_raises_reaches_the_reader_and_nobody_else() -> None:
    def take(_: TokenEvent) -> bool:
        raise RuntimeError("a bug in a renderer")

    pending = Pending(asked(), take)
    pending.put(event("a"))
    pending.put(event("b"))
    found = await pending.get()
    assert isinstance(found, RuntimeError)


async def test_an_error_comes_after_the_events_before_it() -> None:
    pending = Pending(asked(), None)
    pending.put(event("a"))
    pending.fail(EngineError("the end"))
    assert await read(pending, 1) == ["a"]
    with pytest.raises(EngineError, match="the end"):
        raise_if_error(await pending.get())


def raise_if_error(item: TokenEvent | Exception) -> None:
    if isinstance(item, Exception):
        raise item
