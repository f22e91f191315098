"""One reading of the machine's meters: CPU and RAM from psutil, cards from the device probe."""

from __future__ import annotations

import psutil

from edgellm.devices import Devices, activity
from edgellm.tui.ports import Gauge


def read_gauge(devices: Devices) -> Gauge:
    """The CPU's share is over the time since the last reading."""
    memory = psutil.virtual_memory()
    gpu = devices.gpus[0] if devices.gpus else None
    active = {each.uuid: each for each in activity()} if gpu is not None else {}
    now = active.get(gpu.uuid or "") if gpu is not None else None
    return Gauge(
        gpu_percent=None if now is None else now.percent,
        gpu_celsius=None if now is None else now.celsius,
        gpu_watts=None if now is None else now.watts,
        cpu_percent=psutil.cpu_percent(interval=None),
        ram_used=memory.total - memory.available,
        ram_total=memory.total,
        gpu_used=None if gpu is None else gpu.total - gpu.free,
        gpu_total=None if gpu is None else gpu.total,
    )
