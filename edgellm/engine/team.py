"""A few threads that share a step's work out among them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Done(NamedTuple, Generic[T]):
    """How a job ended."""

    number: int
    result: T | None
    error: BaseException | None


class Team:
    """Runs jobs at the same time, the first of them in the caller's thread.

    A queue a thread and one for the answers: 10 us a job, where a ThreadPoolExecutor's futures
    take 40, as long as a job itself.
    """

    def __init__(self, n_threads: int, name: str) -> None:
        self._answers: queue.SimpleQueue[_Done[object]] = queue.SimpleQueue()
        self._inboxes: list[queue.SimpleQueue[tuple[int, Callable[[], object]] | None]] = []
        self._threads: list[threading.Thread] = []
        for i in range(1, n_threads):
            inbox: queue.SimpleQueue[tuple[int, Callable[[], object]] | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._work, args=(inbox,), name=f"{name}-{i}", daemon=True
            )
            thread.start()
            self._inboxes.append(inbox)
            self._threads.append(thread)

    @property
    def size(self) -> int:
        """Jobs that may run at the same time."""
        return 1 + len(self._threads)

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Every job's result, in order; at most :attr:`size` jobs.

        Raises what the first job to fail raised, once all have ended.
        """
        for i, inbox in enumerate(self._inboxes[: len(jobs) - 1], start=1):
            inbox.put((i, jobs[i]))
        done = [_run(i, job) for i, job in enumerate(jobs[:1])]
        done += [self._answers.get() for _ in jobs[1:]]
        results: list[T] = []
        for end in sorted(done, key=lambda d: d.number):
            if end.error is not None:
                raise end.error
            results.append(end.result)  # type: ignore[arg-type]
        return results

    def close(self) -> None:
        """End the threads."""
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, inbox: queue.SimpleQueue[tuple[int, Callable[[], object]] | None]) -> None:
        while (job := inbox.get()) is not None:
            self._answers.put(_run(*job))


def _run(number: int, job: Callable[[], object]) -> _Done[object]:
    try:
        return _Done(number, job(), None)
    except Exception as error:  # noqa: BLE001  (raised again by run)
        return _Done(number, None, error)
