"""Blocks of Markdown as lines: one renderer for all of them, which remembers nothing."""

from __future__ import annotations

import pytest

from edgellm.tui.blocks import Block
from edgellm.tui.markdown import BlockRenderer, Ink
from edgellm.tui.palette import THEMES

TEXTS = (
    "A paragraph with **bold**, `code` and a [link](https://example.org).",
    "[known]: https://example.org/known\n\nSee [known] here.",
    "See [known] here, which nothing before this block explains.",
    "1. one\n2. *two*\n   - nested",
    "| a | b |\n|---|---|\n| 1 | ~~2~~ |",
)


@pytest.fixture
def ink() -> Ink:
    variables = THEMES[0].to_color_system().generate() | THEMES[0].variables
    return Ink(variables, dark=True)


def test_a_block_looks_the_same_whatever_was_rendered_before_it(ink: Ink) -> None:
    shared = BlockRenderer(ink)
    for text in TEXTS:
        assert shared.render(Block(text), 60) == BlockRenderer(ink).render(Block(text), 60)
