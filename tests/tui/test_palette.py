"""What is written can be read, in either theme and without colour (which keeps the luminance)."""

from __future__ import annotations

import pytest
from textual.color import Color
from textual.theme import Theme

from edgellm.tui.palette import THEMES

WORDS = ("primary", "secondary", "accent", "foreground", "success", "warning", "error")
ENOUGH = 4.5
"""WCAG 2, level AA, for text of this size."""


def contrast(ink: str, ground: str) -> float:
    def luminance(color: str) -> float:
        parts = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
            for c in Color.parse(color).normalized
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(ink), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_every_ink_stands_out_from_its_ground(theme: Theme) -> None:
    inks = {name: str(getattr(theme, name)) for name in WORDS}
    inks |= {name: theme.variables[name] for name in ("muted", "faint")}
    ground = str(theme.background)
    assert {name: round(contrast(ink, ground), 2) for name, ink in inks.items()} == {
        name: pytest.approx(max(contrast(ink, ground), ENOUGH), abs=0.01)
        for name, ink in inks.items()
    }
