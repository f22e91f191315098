"""A demo machine under the real application: same constructor, deterministic everything."""

from __future__ import annotations

import pytest
from textual.notifications import Notification

from edgellm.tui.app import EdgeApp
from edgellm.tui.demo import DemoServices
from tests.tui.driving import at_rest


@pytest.fixture(autouse=True)
def _at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that was pressed has been handled, however busy the machine is."""
    for module in ("textual.app", "textual.pilot"):
        monkeypatch.setattr(f"{module}.wait_for_idle", at_rest)


@pytest.fixture(autouse=True)
def _notes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was notified can be looked up; in the program it is forgotten after five seconds."""
    monkeypatch.setattr(Notification, "has_expired", False)


@pytest.fixture(autouse=True)
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def services(tmp_path) -> DemoServices:
    return DemoServices(str(tmp_path), models=6)


@pytest.fixture
def app(services: DemoServices) -> EdgeApp:
    return EdgeApp(services)
