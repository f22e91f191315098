"""An engine loop without threads or processes, turned by hand and checked as it runs.

Over the scripted backend, or over a model: what comes when is then the test's choice, however fast
the machine is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edgellm.engine import wire
from edgellm.engine.info import EngineOptions, Script
from edgellm.engine.loop import Arrived, Loop
from edgellm.engine.scripted import ScriptedBackend
from edgellm.engine.worker import open_backend, turn_tokens
from edgellm.planner.plan import Plan
from edgellm.request import Request, TokenEvent
from tests.engine.factories import plan


class Simulation:
    """Feed requests, turn the loop by hand, collect events, and check every invariant.

    A backend that is given is its giver's to close.
    """

    def __init__(
        self,
        options: EngineOptions | None = None,
        script: Script | None = None,
        *,
        backend: Any = None,
        **params: Any,
    ) -> None:
        options = options or EngineOptions(seed=1, script=script or Script())
        self.backend = backend or ScriptedBackend(plan(**params), options, lambda progress: None)
        self.events: dict[str, list[TokenEvent]] = {}
        # Steps take what they do, not what the machine takes for them: that decides about guesses.
        self.now = 0.0
        self.loop = Loop(self.backend, options, self._collect, clock=self.clock)

    def clock(self) -> float:
        """Seconds; a millisecond has gone by whenever somebody looks."""
        self.now += 0.001
        return self.now

    def _collect(self, message: wire.FromChild) -> None:
        if isinstance(message, wire.Events):
            for event in message.events:
                self.events.setdefault(event.request_id, []).append(event)

    def add(self, request: Request, constraint: Any = None) -> None:
        ids = request.prompt
        if isinstance(ids, str):
            ids = self.backend.tokenize(ids, add_special=True, parse_special=True)
        prompt = array("i", ids)
        turns = turn_tokens(self.backend, request, prompt)
        self.loop.inbox.put(Arrived(request, prompt, self.clock(), turns, constraint))

    def cancel(self, request_id: str) -> None:
        self.loop.inbox.put(wire.Cancel(request_id))

    def turn(self) -> None:
        """Take in what is there, and one step."""
        if self.loop.scheduler.has_work or not self.loop.inbox.empty():
            self.loop._take_in()
        self.loop.turn()
        self.check()

    def turn_until(self, holds: Callable[[], Any], limit: int = 1000) -> None:
        for _ in range(limit):
            if holds():
                return
            self.turn()
        raise AssertionError("it did not come to hold")

    def run(self, limit: int = 100_000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            self.turn()
            if not self.loop.scheduler.has_work and self.loop.inbox.empty():
                self.turn()
                return
        raise AssertionError("the loop does not come to an end")

    def check(self) -> None:
        """The scheduler agrees with itself and with the cache it believes in."""
        scheduler = self.loop.scheduler
        scheduler.check()
        if not isinstance(self.backend, ScriptedBackend):
            return  # only a simulated cache can be looked into
        live = {seq.sampler for seq in [*scheduler.running, *scheduler.waiting]}
        assert self.backend.n_samplers == len(live)
        if scheduler._ops:
            return  # the cache follows with the next step
        if self.backend.limits.sharing == "cells":
            assert self.backend.n_cells_used == scheduler.cells.tree.n_cells
        for seq in scheduler.running:
            assert len(self.backend.cells.get(seq.slot, ())) == seq.n_computed, seq

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(e.text for e in self.events.get(request_id, ()) if e.index == index)

    def ids(self, request_id: str, index: int = 0) -> list[int]:
        events = self.events.get(request_id, ())
        return [t for e in events if e.index == index for t in e.token_ids]

    def ids_of(self, *requests: Request) -> list[tuple[int, ...]]:
        """What these give when they come at once."""
        for request in requests:
            self.add(request)
        self.run()
        return [tuple(self.ids(request.id)) for request in requests]

    def preempted(self, slow: Request, urgent: Request) -> list[tuple[int, ...]]:
        """What both give when ``urgent`` comes after ``slow`` has said a few tokens."""
        self.add(slow)
        self.turn_until(lambda: len(self.ids(slow.id)) >= 3)
        self.ids_of(urgent)
        return [tuple(self.ids(request.id)) for request in (slow, urgent)]

    def last(self, request_id: str) -> TokenEvent:
        return self.events[request_id][-1]


@contextmanager
def over_model(plan: Plan, options: EngineOptions | None = None) -> Iterator[Simulation]:
    """A simulation over the plan's model, loaded into this process."""
    options = options or EngineOptions(seed=1, warmup=False)
    backend: Any = open_backend("llama")(plan, options, lambda progress: None)
    try:
        yield Simulation(options, backend=backend)
    finally:
        backend.close()


def alone(request: Request, **params: Any) -> str:
    """The text a request gets when nobody else is there and nothing is shared."""
    options = EngineOptions(seed=1, retain_prefixes=False)
    simulation = Simulation(options, **{"n_ctx": 8192, "n_ctx_seq": 8192, **params})
    simulation.add(request)
    simulation.run()
    return simulation.text(request.id)
