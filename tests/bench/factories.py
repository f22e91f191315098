"""Runs with known figures, measured on the simulated clock."""

from __future__ import annotations

from typing import Any

from edgellm.bench.client import Endpoint
from edgellm.bench.results import BenchConfig, BenchRun
from edgellm.bench.runner import Runner
from edgellm.bench.scenarios import scenario_from
from edgellm.bench.target import Target

from .sim import Answer, SimServer, simulate

ENDPOINT = Endpoint.parse("http://192.0.2.1:8080")
"""A documentation address: nothing local listens there."""


def make_run(server: SimServer | None = None, *, label: str = "", **config: Any) -> BenchRun:
    """A run of the ``batch`` scenario at 1 and 4 streams, unless ``config`` says otherwise."""
    given = {"scenario": scenario_from("batch"), "concurrency": (1, 4), "repeats": 2, **config}
    target = Target(name="sim", endpoint=ENDPOINT, model="m")
    return simulate(
        server or SimServer(), lambda: Runner(target, BenchConfig(**given)).run(label=label)
    )


def slower(factor: float) -> SimServer:
    """A server whose every latency is ``factor`` times the default one's."""
    answer = Answer(ttft=0.2 * factor, gaps=(0.02 * factor,) * 63)
    return SimServer(lambda i, body: answer)
