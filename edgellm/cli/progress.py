"""Progress of downloads and copies: a line on stderr for people, JSON events for programs."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

import msgspec

from edgellm.store.transfer import Listener
from edgellm.units import format_bytes

_EVERY_S = 0.2
_RATE_WINDOW_S = 10.0


class Progress(Listener):
    """A line that is drawn again several times a second; nothing unless stderr is a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.rate = Rate()
        self.drawn_at = 0.0
        self.is_drawn = False

    def progress(self, name: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        self.rate.add(name, now, done)
        last = total is not None and done >= total
        if last or now - self.drawn_at >= _EVERY_S:
            self.draw(line(name, done, total, self.rate.per_second()))
        if last:
            self.end()

    def draw(self, text: str) -> None:
        """Replace the drawn line."""
        if self.out.isatty():
            self.drawn_at = time.monotonic()
            self.out.write(f"\r\x1b[K{text}")
            self.out.flush()
            self.is_drawn = True

    def note(self, message: str) -> None:
        self.end()
        self.out.write(f"{message}\n")
        self.out.flush()

    def end(self) -> None:
        """Leave the drawn line and start a new one."""
        if self.is_drawn:
            self.out.write("\n")
            self.out.flush()
            self.is_drawn = False


class JsonEvents(Listener):
    """One JSON object a line on stdout: ``{"event": "progress", ...}``."""

    def __init__(self) -> None:
        self.sent_at = 0.0

    def progress(self, name: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now - self.sent_at >= _EVERY_S or done == total:
            self.sent_at = now
            emit("progress", file=name, done=done, total=total)

    def note(self, message: str) -> None:
        emit("note", message=message)


class Rate:
    """Bytes a second over the last ten seconds of one file."""

    def __init__(self) -> None:
        self.name = ""
        self.points: list[tuple[float, int]] = []

    def add(self, name: str, now: float, done: int) -> None:
        if name != self.name or (self.points and done < self.points[-1][1]):
            self.name, self.points = name, []
        self.points.append((now, done))
        while now - self.points[0][0] > _RATE_WINDOW_S:
            self.points.pop(0)

    def per_second(self) -> float:
        (start, first), (end, last) = self.points[0], self.points[-1]
        return (last - first) / (end - start) if end > start else 0.0


def line(name: str, done: int, total: int | None, rate: float) -> str:
    """``tiny.gguf  512 MiB of 4.58 GiB (11 %)  23.1 MiB/s  3 min left``."""
    text = f"{name}  {format_bytes(done)}"
    if total:
        text += f" of {format_bytes(total)} ({100 * done // total} %)"
    if rate > 0:
        text += f"  {format_bytes(round(rate))}/s"
        if total and done < total:
            text += f"  {duration((total - done) / rate)} left"
    return text


def duration(seconds: float) -> str:
    """Rounded as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def emit(event: str, **values: Any) -> None:
    """One JSON event on stdout."""
    sys.stdout.write(msgspec.json.encode({"event": event, **values}).decode() + "\n")
    sys.stdout.flush()


def listener(as_json: bool) -> Listener:
    return JsonEvents() if as_json else Progress()
