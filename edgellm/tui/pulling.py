"""A download through the store, with progress and a way to stop it."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgellm.config import Settings
from edgellm.devices import Devices
from edgellm.errors import StoreError
from edgellm.gguf.reader import check_file
from edgellm.library import advise
from edgellm.store import catalog, hub
from edgellm.store.catalog import HubRef
from edgellm.store.pull import Order, pull, url_order
from edgellm.store.records import Record
from edgellm.store.transfer import Listener
from edgellm.tui.ports import Progress

TELL_S = 0.1
CHECKING = "checking "
"""What the store's transfer puts before the name of a file whose digest it computes."""


class StoppedError(StoreError):
    """Somebody paused or cancelled; what has arrived is kept."""


class _Teller(Listener):
    """Bytes of all files of an order, and their speed over the last seconds."""

    def __init__(
        self, total: int, tell: Callable[[Progress], None], stopped: Callable[[], bool]
    ) -> None:
        self._total, self._tell, self._stopped = total, tell, stopped
        self._done: dict[str, int] = {}
        self._marks: list[tuple[float, int]] = []
        self._said = 0.0

    def progress(self, name: str, done: int, total: int | None) -> None:
        if self._stopped():
            raise StoppedError("stopped")
        if name.startswith(CHECKING):
            # Reading what arrived once more is no download: it would count to 200 %.
            self._tell(Progress(phase="checking", n_done=done, n_total=total or done))
            return
        self._done[name] = done
        now, n_done = time.monotonic(), sum(self._done.values())
        if now - self._said < TELL_S and done != total:
            return
        self._said = now
        self._marks = [(at, n) for at, n in self._marks if now - at < 5.0] + [(now, n_done)]
        first_at, first_n = self._marks[0]
        rate = (n_done - first_n) / (now - first_at) if now > first_at else 0.0
        total_bytes = self._total or (total or 0)
        self._tell(Progress(phase="downloading", n_done=n_done, n_total=total_bytes, rate=rate))


def pull_model(
    ref: str,
    settings: Settings,
    devices: Devices,
    tell: Callable[[Progress], None],
    stopped: Callable[[], bool],
) -> str:
    """Fetch what ``edgellm pull`` would; return the path. Raises StoppedError and the store's."""
    resolved = catalog.resolve(ref, settings.store)
    if resolved.path is not None:
        return str(resolved.path)
    if resolved.url is not None:
        order = url_order(resolved.url, settings=settings.store)
        record = pull(
            order, check=check_file, listener=_Teller(order.size or 0, tell, stopped),
            settings=settings.store,
        )  # fmt: skip
    elif resolved.hub is not None:
        order = _hub_order(resolved.hub, settings, devices)
        listener = _Teller(order.size or 0, tell, stopped)
        record = hub.fetch(order, check=check_file, listener=listener, settings=settings.store)
    else:
        raise StoreError(f"{ref}: no address is known for it", hint=f"edgellm search {ref}")
    return _path(record)


def _hub_order(ref: HubRef, settings: Settings, devices: Devices) -> Order:
    found = hub.listing(ref, settings.store)
    choice = hub.choose(found, ref)
    return hub.order(found, choice if choice is not None else advise(found, devices)[0])


def _path(record: Record) -> str:
    return str(record.files[0].path)
