"""Cutting Markdown into blocks while it arrives: what is finished never changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.tui.blocks import MAX_CODE_LINES, MAX_TEXT_CHARS, Block, BlockSplitter, split_blocks

TEXT = """# Title

A paragraph
on two lines.

- one

  more of one
- two

After the list.

```python
def f():

    return 1
```
1. first
2. second
"""


def test_paragraphs_lists_and_code_are_blocks() -> None:
    assert split_blocks(TEXT) == [
        Block("# Title"),
        Block("A paragraph\non two lines."),
        Block("- one\n\n  more of one\n- two"),
        Block("After the list."),
        Block("def f():\n\n    return 1", True, "python"),
        Block("1. first\n2. second"),
    ]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_however_the_text_arrives_the_blocks_are_the_same(sizes: list[int]) -> None:
    splitter, blocks, at = BlockSplitter(), [], 0
    for size in sizes:
        blocks += splitter.feed(TEXT[at : at + size])
        at += size
    blocks += splitter.feed(TEXT[at:]) + splitter.finish()
    assert blocks == split_blocks(TEXT)


def test_the_tail_shows_what_is_not_finished() -> None:
    splitter = BlockSplitter()
    assert splitter.tail is None
    splitter.feed("Hello **wor")
    assert splitter.tail == Block("Hello **wor")
    splitter.feed("ld**\n\n```py\nx =")
    assert splitter.tail == Block("x =", True, "py", True, False)


def test_long_code_is_cut_at_a_line_and_only_its_ends_are_edges() -> None:
    code = "\n".join(f"line {i}" for i in range(MAX_CODE_LINES * 2 + 3))
    blocks = split_blocks(f"```c\n{code}\n```\n")
    assert "\n".join(block.text for block in blocks) == code
    assert [(b.opens, b.closes) for b in blocks] == [(True, False), (False, False), (False, True)]
    assert {b.info for b in blocks} == {"c"}


def test_a_paragraph_without_an_end_is_cut_at_a_space() -> None:
    splitter = BlockSplitter()
    blocks = [block for _ in range(3000) for block in splitter.feed(" word")]
    tail = splitter.tail
    assert tail is not None
    assert all(len(block.text) <= MAX_TEXT_CHARS for block in [*blocks, tail])
    words = " ".join([*(b.text for b in blocks), tail.text]).split()
    assert words == ["word"] * 3000


@pytest.mark.parametrize("fence", ["````", "~~~"])
def test_a_longer_fence_holds_a_shorter_one(fence: str) -> None:
    text = f"{fence}md\n```py\nx\n```\n{fence}\n"
    assert split_blocks(text) == [Block("```py\nx\n```", True, "md")]
