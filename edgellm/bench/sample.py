"""One measured request: when its tokens came, how many there were, and how we know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Any, Final

import msgspec

from edgellm.bench.client import Arrival, Endpoint, Reply, post_json
from edgellm.bench.events import MAX_COUNT
from edgellm.metrics import RequestTimings, request_timings

MAX_SCATTER: Final = 0.95


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request to send. ``group`` tells the kinds of traffic of one run apart."""

    path: str
    body: dict[str, Any]
    max_tokens: int | None = None
    group: str = "main"
    disconnect_after: int | None = None


class Sample(msgspec.Struct, kw_only=True):
    """One request as it was seen from the client. Times are seconds of one monotonic clock.

    ``intended`` is when it should have been sent: latency counts from there, so that a client or
    a server that falls behind cannot hide it (coordinated omission).
    """

    group: str
    intended: float
    sent: float
    end: float
    token_times: list[float] = msgspec.field(default_factory=list)
    """One entry an output token; tokens of one event are spread over the gap before it."""
    arrival_times: list[float] = msgspec.field(default_factory=list)
    """One entry an event with output: what a reader sees, stalls included."""
    n_prompt: int | None = None
    n_cached: int | None = None
    n_output: int = 0
    counted_by: str = "usage"
    """usage, timings, tokens (ids in the events), length, tokenize, or events (a guess)."""
    finish: str | None = None
    error: str | None = None
    message: str = ""
    timings: RequestTimings = RequestTimings()
    server_prefill_tps: float | None = None
    server_decode_tps: float | None = None

    def token_gaps(self) -> list[float]:
        """The gaps between tokens; those that came with the first event have none to know of."""
        return [b - a for a, b in pairwise(self.token_times) if b > a]

    @property
    def is_ok(self) -> bool:
        """It ended as it should and produced something."""
        return self.error is None


def spread_tokens(arrivals: Sequence[float], counts: Sequence[int]) -> list[float]:
    """A time for every token: those of one event share the gap that ended with it evenly.

    Tokens of the first event all carry its time: nothing is known of what came before it.
    """
    if not arrivals:
        return []
    times = [arrivals[0]] * counts[0]
    for (before, now), n in zip(pairwise(arrivals), counts[1:], strict=True):
        times += [before + (now - before) * (i + 1) / n for i in range(n)]
    return times


def merge_events(times: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[int]]:
    """Events that one read of the network brought, as one arrival: a gap of 0 between two of them
    is the network's packing, and the gap before them would seem twice too long.
    """
    together: dict[float, int] = {}
    for at, n in zip(times, counts, strict=True):
        together[at] = together.get(at, 0) + n
    return list(together), list(together.values())


def share_out(total: int, texts: Sequence[str]) -> list[int]:
    """How many of ``total`` tokens each event carried, when the server does not say.

    One each when the numbers agree; else a fixed number an event with a shorter last one (or a
    single first token), as servers that batch their events send, unless the texts' lengths speak
    against it; else one each and the rest by the length of the text, as when a character's bytes or
    a possible stop string were held back.
    """
    lengths = [len(text.encode()) for text in texts]
    if total < len(texts):
        return _by_length(total, lengths)
    free = _one_and_more(total, lengths)
    is_exact = len({n / k for n, k in zip(lengths, free, strict=True)}) == 1
    return free if is_exact else _fixed(total, lengths) or free


def _fixed(total: int, lengths: Sequence[int]) -> list[int] | None:
    """The same number an event, but for the first and the last; None where that cannot be."""
    n = len(lengths)
    for first in (0, 1):
        rest, slots = total - first, n - first
        if slots < 1 or rest < slots:
            continue
        size = -(-rest // slots)
        last = rest - size * (slots - 1)
        if last >= 1 and _are_even(lengths[first : n - 1], size):
            return [first] * first + [size] * (slots - 1) + [last]
    return None


def _are_even(lengths: Sequence[int], size: int) -> bool:
    """Whether texts can be of ``size`` tokens each: their scatter is that of the tokens' own.

    Tokens of English differ in length by about 0.75 of their mean (the starter's vocabulary),
    groups of ``size`` by that over its root; in groups of 1 to 5 at random the scatter times the
    root is about 1.2. At the limit nine in ten of either kind are told apart.
    """
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    if size == 1 or not mean:
        return True
    variance = sum((n - mean) ** 2 for n in lengths) / len(lengths)
    return math.sqrt(variance * size) <= MAX_SCATTER * mean


def _by_length(total: int, lengths: Sequence[int]) -> list[int]:
    """Proportional to text, in whole numbers that sum to ``total``; the first gets at least one."""
    whole = sum(lengths) or 1
    edges = [min(total, max(1, round(total * n / whole))) for n in accumulate(lengths)]
    return [b - a for a, b in pairwise([0, *edges])]


def _one_and_more(total: int, lengths: Sequence[int]) -> list[int]:
    """One each; every further token goes where the most text stands for a token."""
    counts = [1] * len(lengths)
    most = [(-float(n), i) for i, n in enumerate(lengths)]
    heapify(most)
    for _ in range(total - len(lengths)):
        i = most[0][1]
        counts[i] += 1
        heapreplace(most, (-lengths[i] / counts[i], i))
    return counts


async def make_sample(endpoint: Endpoint, job: Job, intended: float, reply: Reply) -> Sample:
    """Count a reply's tokens and work out its timings."""
    n_output, counted_by = await _count(endpoint, job, reply)
    events = [a.time for a in reply.arrivals]
    times, counts = merge_events(events, _per_event(reply.arrivals, n_output))
    token_times = spread_tokens(times, counts)
    end = reply.end if reply.error or not times else times[-1]
    sample = Sample(
        group=job.group,
        intended=intended,
        sent=reply.sent,
        end=reply.end,
        token_times=token_times,
        arrival_times=times,
        n_prompt=reply.n_prompt,
        n_cached=reply.n_cached,
        n_output=n_output,
        counted_by=counted_by,
        finish=reply.finish,
        error=reply.error if reply.error or times else "empty",
        message=reply.message or ("" if times else _shown(reply.body)),
    )
    sample.timings = request_timings(
        arrival=intended,
        scheduled=reply.sent,
        token_times=token_times,
        end=end,
        n_computed=max(0, (reply.n_prompt or 0) - (reply.n_cached or 0)),
    )
    if counts and 1 < counts[0] < n_output:
        sample.timings = _paced(sample.timings, times[-1] - times[0], n_output - counts[0])
    _take_server_rates(sample, reply.timings)
    return sample


def _paced(timings: RequestTimings, took: float, n_after: int) -> RequestTimings:
    """TPOT where the first event held several tokens: they came before the clock of the others
    began, and counting them would make it the faster the larger a server's events are.
    """
    if took <= 0:
        return timings
    return msgspec.structs.replace(timings, tpot_s=took / n_after, decode_tps=n_after / took)


def _shown(body: bytes) -> str:
    return body.decode(errors="replace")[:200] or "the stream held no text"


def _per_event(arrivals: Sequence[Arrival], total: int) -> list[int]:
    known = [a.n_tokens for a in arrivals]
    exact = [n for n in known if n is not None]
    if len(exact) == len(known) and sum(exact) == total:
        return exact
    return share_out(total, [a.text for a in arrivals]) if arrivals else []


async def _count(endpoint: Endpoint, job: Job, reply: Reply) -> tuple[int, str]:
    """Output tokens and where the number is from, the surest source first."""
    if reply.n_output or (reply.n_output == 0 and not reply.arrivals):
        return reply.n_output, "usage"
    told = (reply.timings or {}).get("predicted_n")
    if isinstance(told, int) and 0 < told <= MAX_COUNT:
        return told, "timings"
    known = [a.n_tokens for a in reply.arrivals]
    if known and all(n is not None for n in known):
        return sum(n or 0 for n in known), "tokens"
    if reply.finish == "length" and len(known) <= (job.max_tokens or 0):
        return job.max_tokens or 0, "length"
    if not reply.arrivals:
        return 0, "events"
    return await _tokenize(endpoint, reply)


async def _tokenize(endpoint: Endpoint, reply: Reply) -> tuple[int, str]:
    text = "".join(a.text for a in reply.arrivals)
    answer = await post_json(endpoint, "/tokenize", {"content": text, "prompt": text})
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if isinstance(tokens, list) and tokens:
        return len(tokens), "tokenize"
    return len(reply.arrivals), "events"


_RATES: Final = {
    "prompt_per_second": "server_prefill_tps",
    "predicted_per_second": "server_decode_tps",
}


def _take_server_rates(sample: Sample, timings: dict[str, Any] | None) -> None:
    for key, name in _RATES.items():
        value = (timings or {}).get(key)
        if isinstance(value, (int, float)):
            setattr(sample, name, float(value))
