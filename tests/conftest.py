"""What every test stands on: a home of its own, and no settings from the person who runs it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No example may fail because the machine is slow, nor because chance found another one.
settings.register_profile(
    "any-machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any-machine")

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every program
# that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Iterations that OpenMP's threads spin at a barrier before they sleep. Test runs share few cores:
# a thread that spins there keeps the one it waits for from running, 100 times slower at worst.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


@pytest.fixture(autouse=True)
def edgellm_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """EDGELLM_HOME in a temporary folder; every other EDGELLM_ variable unset."""
    for name in [name for name in os.environ if name.startswith("EDGELLM_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "edgellm-home"
    monkeypatch.setenv("EDGELLM_HOME", str(home))
    return home
