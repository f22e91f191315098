"""Which server gets a request: replicas of a model, the one with the fewest open requests first.

Requests beyond what the replicas take at once wait here, the more urgent ones in front.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from edgellm.errors import ConfigError, QueueFullError
from edgellm.request import Priority
from edgellm.server.errors import Problem
from edgellm.server.upstream.http1 import Origin, UpstreamError

CHECK_TIMEOUT_S: Final = 3.0
_REMEMBERED: Final = 10_000
_STARTS: Final = (2048, 512, 128)
"""Bytes of a prompt that count as a start two requests have in common."""


class UpstreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One ``--upstream``: ``URL``, ``NAME=URL`` or ``NAME=URL#MODEL``."""

    url: str
    name: str | None = None
    """What clients ask for; None: what the server there calls its models."""
    model: str | None = None
    """The model's name there; None: the only (or first) one."""

    @classmethod
    def parse(cls, text: str) -> UpstreamSpec:
        """Raises ConfigError."""
        before, equals, after = text.partition("=")
        named = bool(equals) and "/" not in before and ":" not in before
        name, rest = (before.strip(), after) if named else (None, text)
        url, _, model = rest.strip().partition("#")
        if name == "" or not url:
            raise ConfigError(f"{text!r} is no upstream", hint="--upstream big=http://host:8000")
        Origin(url)
        return cls(url=url, name=name, model=model or None)


class _Models(msgspec.Struct):
    class Entry(msgspec.Struct):
        id: str
        owned_by: str = ""
        max_model_len: int | None = None

    data: list[Entry]


class _Props(msgspec.Struct):
    total_slots: int | None = None


class Replica:
    """One server, and what is known of it."""

    def __init__(self, spec: UpstreamSpec, key: str | None, limit: int | None) -> None:
        self.spec = spec
        self.origin = Origin(spec.url)
        self.key = key
        self.limit = limit
        """Requests at once; None: as many as come."""
        self.is_up = False
        self.error = "not asked yet"
        self.models: tuple[str, ...] = ()
        self.contexts: dict[str, int] = {}
        self.takes_priority = False
        """It is an edgellm: others refuse a priority, or take another kind."""
        self.in_flight = 0
        self.n_requests = 0
        self.n_failed = 0
        self._asks_props = limit is None

    @property
    def has_room(self) -> bool:
        return self.is_up and (self.limit is None or self.in_flight < self.limit)

    def credentials(self) -> list[tuple[bytes, bytes]]:
        """Headers with this server's own key; both names, for both APIs."""
        if self.key is None:
            return []
        key = self.key.encode()
        return [(b"authorization", b"Bearer " + key), (b"x-api-key", key)]

    def failed(self, error: UpstreamError) -> None:
        """It broke: no more requests until a check finds it again."""
        self.is_up = False
        self.error = error.message
        self.n_failed += 1

    async def check(self) -> None:
        """Ask for its models; sets ``is_up``."""
        try:
            await asyncio.wait_for(self._check(), CHECK_TIMEOUT_S)
        except UpstreamError as error:
            self.is_up, self.error = False, error.message
        except asyncio.TimeoutError:
            self.is_up, self.error = False, f"{self.origin.url} does not answer"
        except (msgspec.DecodeError, ValueError) as error:
            self.is_up, self.error = False, f"{self.origin.url} lists no models: {error}"

    async def _check(self) -> None:
        status, body = await self._get("/v1/models")
        if status != 200:
            raise UpstreamError(f"{self.origin.url} answers {status}", has_answered=True)
        found = msgspec.json.decode(body, type=_Models).data
        self.models = tuple(entry.id for entry in found)
        self.takes_priority = any(entry.owned_by == "edgellm" for entry in found)
        self.contexts = {e.id: e.max_model_len for e in found if e.max_model_len}
        if self._asks_props:
            # llama-server and edgellm tell how many sequences they run; others answer 404.
            self._asks_props = False
            status, body = await self._get("/props")
            if status == 200:
                self.limit = msgspec.json.decode(body, type=_Props).total_slots
        # A server that loads its model answers requests with 503: not up yet.
        status, _ = await self._get("/health")
        self.is_up = status != 503
        self.error = "" if self.is_up else f"{self.origin.url} is not ready"

    async def _get(self, path: str) -> tuple[int, bytes]:
        answer = await self.origin.send("GET", path, self.credentials())
        try:
            return answer.status, await answer.body()
        finally:
            answer.close()


def starts(prompt: bytes) -> tuple[int, ...]:
    """Numbers for the starts of a prompt (its JSON), the longest first; the end does not count,
    since the next turn of a conversation goes on there."""
    return tuple(hash(prompt[:n]) for n in _STARTS if n <= len(prompt) - 2)


class Group:
    """A model by the name clients use, and the replicas that have it."""

    def __init__(self, name: str, max_waiting: int) -> None:
        self.name = name
        self.members: list[tuple[Replica, str]] = []
        """Each replica, and the model's name there."""
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._warm: OrderedDict[int, Replica] = OrderedDict()
        """Who last answered a prompt with this start: it holds the cache of it."""

    @property
    def is_up(self) -> bool:
        return any(replica.is_up for replica, _ in self.members)

    @property
    def n_waiting(self) -> int:
        return sum(not future.done() for *_, future in self._waiting)

    @property
    def in_flight(self) -> int:
        return sum(replica.in_flight for replica, _ in self.members)

    async def take(
        self,
        priority: Priority,
        tried: Sequence[Replica],
        only: Replica | None = None,
        begins: Sequence[int] = (),
    ) -> tuple[Replica, str]:
        """The replica for a request (``only`` that one), counted as one more open there; waits for
        room. ``begins``: what :func:`starts` says of its prompt.

        Raises Problem 503 when every replica that was not tried is down, QueueFullError.
        """
        while True:
            usable = [
                m for m in self.members if m[0].is_up and m[0] not in tried and only in (None, m[0])
            ]
            if not usable:
                raise self._down()
            free = [m for m in usable if m[0].has_room]
            if free:
                # The fewest open requests; among equals the one that has the prompt's start in its
                # cache, else the one that had the fewest so far.
                warm = next((self._warm[start] for start in begins if start in self._warm), None)
                chosen = min(
                    free, key=lambda m: (m[0].in_flight, m[0] is not warm, m[0].n_requests)
                )
                chosen[0].in_flight += 1
                chosen[0].n_requests += 1
                return chosen
            await self._wait(priority)

    def answered(self, replica: Replica, begins: Sequence[int]) -> None:
        """``replica`` has a prompt with these starts in its cache now."""
        for start in begins:
            self._warm[start] = replica
            self._warm.move_to_end(start)
        while len(self._warm) > _REMEMBERED:
            self._warm.popitem(last=False)

    def _down(self) -> Problem:
        said = "; ".join(r.error for r, _ in self.members if r.error) or "all of them failed"
        return Problem(
            503,
            f"no server for {self.name!r} is up: {said}",
            type="server_error",
            code="upstream_down",
            headers=((b"retry-after", b"2"),),
        )

    async def _wait(self, priority: Priority) -> None:
        if self.n_waiting >= self._max_waiting:
            raise QueueFullError(f"{self.n_waiting} requests wait for {self.name} already")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (int(priority), next(self._order), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.wake()  # it was this one's turn: the next one's now
            raise

    def release(self, replica: Replica) -> None:
        """A request that ``take`` counted is over."""
        replica.in_flight -= 1
        self.wake()

    def wake(self) -> None:
        """Let the most urgent waiting request look again."""
        while self._waiting:
            *_, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return

    def wake_all(self) -> None:
        """Let all look again: what is up has changed."""
        waiting, self._waiting = self._waiting, []
        for *_, future in waiting:
            if not future.done():
                future.set_result(None)


class Upstreams:
    """Every upstream server, grouped by the models clients see."""

    def __init__(
        self,
        specs: Sequence[UpstreamSpec],
        *,
        key: str | None = None,
        limit: int | None = None,
        max_waiting: int = 512,
        aliases: Sequence[tuple[str, str]] = (),
        check_s: float = 2.0,
    ) -> None:
        self.replicas = [Replica(spec, key, limit) for spec in specs]
        self.groups: dict[str, Group] = {}
        self.aliases = dict(aliases)
        """Other names -> models' names."""
        self.check_s = check_s
        self.n_retries = 0
        self._made: OrderedDict[str, Replica] = OrderedDict()
        self._max_waiting = max_waiting

    def find(self, name: str | None) -> Group | None:
        """The group of a name or alias; of None the first; None when it is nobody's here."""
        if name is None:
            return next(iter(self.groups.values()), None)
        found = self.groups.get(name) or self.groups.get(self.aliases.get(name, ""))
        return found or self.groups.get(self.aliases.get("*", ""))

    def remember(self, response_id: str, replica: Replica) -> None:
        """A stored response can only be read, or continued, where it was made."""
        self._made[response_id] = replica
        while len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)

    def maker(self, response_id: str) -> Replica | None:
        """Who made a stored response."""
        return self._made.get(response_id)

    async def check(self) -> None:
        """Ask every server now and sort its models into groups."""
        await asyncio.gather(*(replica.check() for replica in self.replicas))
        for replica in self.replicas:
            self._sort(replica)
        for group in self.groups.values():
            group.wake_all()

    async def watch(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await asyncio.sleep(self.check_s)
            await self.check()

    def _sort(self, replica: Replica) -> None:
        spec = replica.spec
        if spec.name is not None:
            there = spec.model or next(iter(replica.models), None)
            pairs = [(spec.name, there)] if there else []
            self.groups.setdefault(spec.name, Group(spec.name, self._max_waiting))
        else:
            pairs = [(model, model) for model in replica.models]
        for name, there in pairs:
            group = self.groups.setdefault(name, Group(name, self._max_waiting))
            if there and all(member is not replica for member, _ in group.members):
                group.members.append((replica, there))

    def close(self) -> None:
        """Close the connections that wait."""
        for replica in self.replicas:
            replica.origin.close()
