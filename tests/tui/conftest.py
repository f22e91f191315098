"""A demo machine under the real application: same constructor, deterministic everything."""

from __future__ import annotations

import pytest

from edgellm.tui.app import EdgeApp
from edgellm.tui.demo import DemoServices


@pytest.fixture(autouse=True)
def _quick_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's pilot looks whether the program rests every 20 ms, twice a key: half the time of
    these tests. What they wait for they name (:func:`tests.tui.driving.settle`)."""
    monkeypatch.setattr("textual._wait.SLEEP_GRANULARITY", 0.005)
    monkeypatch.setattr("textual._wait.SLEEP_IDLE", 0.0005)


@pytest.fixture(autouse=True)
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def services(tmp_path) -> DemoServices:
    return DemoServices(str(tmp_path), models=6)


@pytest.fixture
def app(services: DemoServices) -> EdgeApp:
    return EdgeApp(services)
