"""A TCP link with delay and a limited rate, for kernels whose tc has no netem.

    python benchmarks/slow_link.py 10.0.0.2:50052 127.0.0.1:50052 --delay 2ms [--rate 1gbit]

Bytes that arrive on either side leave on the other after the delay (one way), at most at the rate.
What is under way when one side closes still arrives, then the other side is closed.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import re
import socket
import threading
import time

_CHUNK = 64 * 1024
_WINDOW_S = 0.25
"""Bytes under way may be so many seconds old before the sender is held back."""


def seconds(text: str) -> float:
    """0.25ms, 20ms, 1s."""
    number, unit = re.fullmatch(r"([\d.]+)\s*(us|ms|s)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def bytes_a_second(text: str) -> float:
    """200mbit, 1gbit, as tc takes them."""
    number, unit = re.fullmatch(r"([\d.]+)\s*(kbit|mbit|gbit)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit] / 8


class OneWay:
    """Bytes from one socket to another, later. Two threads: sleeping in one is exact to 0.1 ms,
    where an event loop's timers are late by a millisecond."""

    def __init__(self, source: socket.socket, target: socket.socket, args: Link) -> None:
        self.source, self.target = source, target
        self.delay, self.rate = args.delay, args.rate
        self.way: queue.Queue[tuple[float, bytes]] = queue.Queue()
        for work in (self.take, self.give):
            threading.Thread(target=work, daemon=True).start()

    def take(self) -> None:
        """Note when each piece that comes in is due."""
        free_at, data = 0.0, b"-"
        while data:
            data = b""
            with contextlib.suppress(OSError):
                data = self.source.recv(_CHUNK)
            now = time.monotonic()
            free_at = max(free_at, now) + len(data) / self.rate
            self.way.put((free_at + self.delay, data))
            time.sleep(max(0.0, free_at - now - _WINDOW_S))

    def give(self) -> None:
        """Write each piece when it is due; nothing more to come closes the other side."""
        with contextlib.suppress(OSError):
            while True:
                due, data = self.way.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    break
                self.target.sendall(data)
        with contextlib.suppress(OSError):
            self.target.shutdown(socket.SHUT_WR)


class Link(argparse.Namespace):
    """What was asked for."""

    listen: str
    target: str
    delay: float
    rate: float


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def join(client: socket.socket, args: Link) -> None:
    """One client's connection, both ways."""
    try:
        there = socket.create_connection(address(args.target), 5)
    except OSError:
        client.close()
        return
    there.settimeout(None)
    for side in (client, there):
        side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    OneWay(client, there, args)
    OneWay(there, client, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("listen", help="HOST:PORT")
    parser.add_argument("target", help="HOST:PORT")
    parser.add_argument("--delay", type=seconds, default=0.0, help="one way, such as 2ms")
    parser.add_argument("--rate", type=bytes_a_second, default=1e12, help="such as 1gbit")
    args = parser.parse_args(namespace=Link())
    with socket.create_server(address(args.listen)) as server:
        print(f"listening on {args.listen}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                join(server.accept()[0], args)


if __name__ == "__main__":
    main()
