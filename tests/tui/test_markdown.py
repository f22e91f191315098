"""Blocks of Markdown as lines: one renderer for all of them, which remembers nothing."""

from __future__ import annotations

import pytest

from edgellm.tui.blocks import Block
from edgellm.tui.markdown import BlockRenderer, EdgeMarkdown, Ink
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


ITEMS = (
    "plain words that go on for longer than one line of the narrow screen that is used here",
    "**Bold:** and `code`, then *more*",
    "two\n    - nested\n    - nested, **too**",
    "with a paragraph\n\n    that is its own",
    "code\n\n    ```python\n    x = 1\n    ```",
    "a [link](https://example.org) and ~~this~~",
    "one",
    "",
    "- looks nested",
    "* does too",
    "> quoted",
    "# a title",
)
WHOLE = [
    "".join(f"{sign} {item}\n" for item in ITEMS) for sign in ("-", "*", "+")
] + [
    "".join(f"{i}{end} {item}{gap}" for i, item in enumerate(ITEMS * 2, first))
    for first, end, gap in ((1, ".", "\n"), (7, ")", "\n\n"), (93, ".", "\n"))
]  # fmt: skip
OTHERS = (
    "- a\n* b\n- c",
    "- a\n * b\n- c\n- d",
    "1. a\n1. b\n1. c",
    "1. a\n2. b\n4. c",
    "1. a\n  - b\n2. c",
    "- a\n# title\n- b\n- c",
    "- a\n- - -\n- b",
    "* a\n* * *\n* b\n* c",
    "- a\n***\n- b\n- c",
    "- a\nlazy\n- b",
    "- [x]\n- b\n\n  [x]: https://example.org",
    "0. a\n1. b\n2. c",
)


@pytest.mark.parametrize("text", [*WHOLE, *OTHERS])
def test_a_list_that_grows_looks_as_the_same_list_at_once(ink: Ink, text: str) -> None:
    growing = BlockRenderer(ink)
    step = 1 if text in OTHERS else 9
    for end in range(4, len(text) + step, step):
        part = text[:end]
        lines = growing.render(Block(part), 40)
        assert lines == BlockRenderer._trim(growing._lines(EdgeMarkdown().of(part), 40)), part


def test_the_items_above_the_last_are_rendered_once(
    ink: Ink, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = BlockRenderer(ink)
    text = "".join(f"- **item** {i} of a list that goes on\n" for i in range(50))
    renderer.render(Block(text), 80)
    parsed: list[str] = []
    of = EdgeMarkdown.of
    monkeypatch.setattr(
        EdgeMarkdown, "of", lambda self, part: parsed.append(part) or of(self, part)
    )
    renderer.render(Block(text + "- the *last*"), 80)
    renderer.render(Block(text + "- the *last* one"), 80)
    assert sum(map(len, parsed)) < 200
