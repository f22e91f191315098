"""Drive a server: closed loop (so many at once) or open loop (so many a second, whatever happens).

Counting tokens and computing times happens after a phase has ended, so that the client's own work
does not share the cores with what is measured.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

import msgspec

from edgellm.bench.client import Endpoint, Reply, clock, exchange
from edgellm.bench.sample import Job, Sample, make_sample

DEFAULT_TIMEOUT_S: Final = 600.0
PAUSE_S: Final = 0.1
"""After a failure a closed loop's client waits, or it would use up a run's requests (and the
server's time) in a hail of refusals."""
MAX_PAUSE_S: Final = 30.0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a phase has done so far."""

    n_started: int
    n_done: int
    n_events: int
    elapsed_s: float


OnProgress = Callable[[Progress], None]


class Phase(msgspec.Struct, kw_only=True):
    """A finished stretch of load and how it was made."""

    samples: list[Sample]
    begin: float
    end: float
    lags: list[float] = msgspec.field(default_factory=list)
    """How late this client's own loop was, sampled every 20 ms, in seconds."""


class Driver:
    """Sends jobs to one endpoint and keeps what came back, in the order of completion."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._replies: list[tuple[Job, float, Reply]] = []
        self._n_started = 0
        self._n_done = 0
        self._n_events = 0
        self._open: list[Reply] = []
        self._begin = clock()

    async def send(
        self,
        job: Job,
        intended: float | None = None,
        *,
        leave: asyncio.Future[None] | None = None,
    ) -> Reply:
        """One request, recorded; latency counts from ``intended`` (now, when None).

        When ``leave`` is done the client goes away in mid-stream.
        """
        at = clock() if intended is None else intended
        self._n_started += 1
        reply = await exchange(
            self.endpoint,
            job.path,
            job.body,
            timeout_s=self._timeout_s,
            disconnect_after=job.disconnect_after,
            leave=leave,
            on_open=self._open.append,
        )
        self._replies.append((job, at, reply))
        self._n_done += 1
        self._n_events += len(reply.arrivals)
        self._report()
        return reply

    def n_producing(self) -> int:
        """How many requests have shown output and not ended."""
        return sum(1 for reply in self._open if reply.arrivals and not reply.end)

    def n_arrivals(self) -> int:
        """Events with output so far, those of requests under way included."""
        return sum(len(reply.arrivals) for reply in self._open)

    def fewest_arrivals(self) -> int:
        """The same of the request that has shown the least."""
        return min((len(reply.arrivals) for reply in self._open), default=0)

    async def closed_loop(
        self, jobs: Iterator[Job], concurrency: int, *, n: int, seconds: float = 0.0
    ) -> None:
        """``concurrency`` requests at once until ``n`` were sent and ``seconds`` have passed."""
        begin, taken = clock(), 0

        def goes_on() -> bool:
            return taken < n or clock() - begin < seconds

        async def client() -> None:
            nonlocal taken
            while goes_on():
                taken += 1
                reply = await self.send(next(jobs))
                if reply.error is not None and goes_on():
                    await asyncio.sleep(_pause(reply))

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def open_loop(self, jobs: Iterable[Job], times: Iterable[float]) -> None:
        """Send each job at its time (seconds from now), never waiting for an answer to do so."""
        begin = clock()
        tasks = []
        for job, at in zip(jobs, times, strict=False):
            delay = begin + at - clock()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(self.send(job, begin + at)))
        await asyncio.gather(*tasks)

    async def finish(self, begin: float, lags: list[float]) -> Phase:
        """Every recorded request as a sample; the record is empty afterwards.

        The wall clock runs from when the first request was due: the time before it is nobody's.
        """
        begin = min((due for _, due, _ in self._replies), default=begin)
        end = max((reply.end for _, _, reply in self._replies), default=clock())
        taken, self._replies = self._replies, []
        samples = [await make_sample(self.endpoint, *item) for item in taken]
        return Phase(samples=samples, begin=begin, end=end, lags=lags)

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    n_started=self._n_started,
                    n_done=self._n_done,
                    n_events=self._n_events,
                    elapsed_s=clock() - self._begin,
                )
            )


def _pause(reply: Reply) -> float:
    """What the server asked for with Retry-After, within reason."""
    return min(MAX_PAUSE_S, max(PAUSE_S, reply.retry_after_s or 0.0))


def poisson_times(rate: float, n: int, seed: str) -> list[float]:
    """``n`` arrival times in seconds with exponential gaps of mean 1/``rate``."""
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(n):
        at += rng.expovariate(rate)
        times.append(at)
    return times


async def _watch_lag(lags: list[float]) -> None:
    """A loop that wakes late stamps late: the client itself was then the bottleneck."""
    while True:
        due = clock() + 0.02
        await asyncio.sleep(0.02)
        lags.append(max(0.0, clock() - due))


async def run_phase(driver: Driver, load: Callable[[Driver], Awaitable[None]]) -> Phase:
    """Run ``load`` on the driver, watching this client's own lateness."""
    lags: list[float] = []
    watcher = asyncio.create_task(_watch_lag(lags))
    begin = clock()
    try:
        with _no_collections():
            await load(driver)
    finally:
        watcher.cancel()
    return await driver.finish(begin, lags)


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collection meanwhile: one of all that a client remembers takes 10 ms, as long as
    a token, and every stream's next event would seem late by it."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def closed_phase(
    endpoint: Endpoint,
    jobs: Iterator[Job],
    concurrency: int,
    *,
    n: int,
    seconds: float = 0.0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress | None = None,
) -> Phase:
    """A closed-loop phase: as many requests at once as ``concurrency``, at least ``n`` in all."""
    driver = Driver(endpoint, timeout_s=timeout_s, on_progress=on_progress)
    return await run_phase(
        driver,
        lambda d: d.closed_loop(jobs, concurrency, n=n, seconds=seconds),
    )


async def open_phase(
    endpoint: Endpoint,
    jobs: Iterator[Job],
    rate: float,
    *,
    n: int,
    seed: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: OnProgress | None = None,
) -> Phase:
    """An open-loop phase: ``n`` requests at Poisson times of mean rate ``rate`` a second."""
    driver = Driver(endpoint, timeout_s=timeout_s, on_progress=on_progress)
    times = poisson_times(rate, n, seed)
    return await run_phase(
        driver,
        lambda d: d.open_loop(islice(jobs, n), times),
    )
