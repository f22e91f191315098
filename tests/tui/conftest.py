"""A demo machine under the real application: same constructor, deterministic everything."""

from __future__ import annotations

import pytest

from edgellm.tui.app import EdgeApp
from edgellm.tui.demo import DemoServices


@pytest.fixture(autouse=True)
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def services(tmp_path) -> DemoServices:
    return DemoServices(str(tmp_path), models=6)


@pytest.fixture
def app(services: DemoServices) -> EdgeApp:
    return EdgeApp(services)
