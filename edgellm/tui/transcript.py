"""The conversation as one widget of lines: a frame lays out its last block and nothing else.

A widget a paragraph (Textual's Markdown) took 40 to 80 % of a core at 200 tokens a second on two
cores, growing with the answer. Here a message is a list of chunks; a chunk's lines are made when
they are first needed for a width and a theme, and only the last chunk of a streaming message is
made again. Messages above the window are not laid out until somebody scrolls up to them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from edgellm.tui.blocks import Block, BlockSplitter, split_blocks
from edgellm.tui.markdown import BlockRenderer, Ink
from edgellm.tui.paint import bar_rows, is_clear, paint

GUTTER: Final = 2
MAX_WIDTH: Final = 100
"""Longer lines are tiring to read; the rest of a wide terminal stays empty."""
WINDOW_LINES: Final = 400
"""Lines laid out at once when a conversation opens or when somebody scrolls up."""
FOLDED_LINES: Final = 16
"""A user message longer than this is folded."""
BAR_EVERY: Final = 10
"""Painted frames until the scroll bar is drawn again: its thumb hardly moves in one."""

Line = list[Segment]


@dataclass
class Turn:
    """What is shown of one message."""

    id: str
    role: str
    text: str = ""
    reasoning: str = ""
    name: str = ""
    facts: str = ""
    """Dim words after the name: speed, branch."""
    note: str = ""
    """A warning under the message: stopped, interrupted, an error."""
    streaming: bool = False
    thinking_open: bool = False
    unfolded: bool = False
    splitter: BlockSplitter = field(default_factory=BlockSplitter)
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Chunk:
    """Lines that change together. ``kind``: head, thought, block, plain, note or gap."""

    turn: Turn
    kind: str
    block: Block | None = None
    lines: list[Line] | None = None
    strips: dict[tuple[int, bool], Strip] = field(default_factory=dict)

    def forget(self) -> None:
        self.lines = None
        self.strips.clear()


class Transcript(ScrollView, can_focus=True):
    """Shows :class:`Turn` objects; follows the end while text streams unless scrolled away."""

    DEFAULT_CSS = """
    Transcript {
        background: $background; height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden;
        overflow-y: scroll;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k,up", "select(-1)", "Previous", show=False, id="transcript.previous"),
        Binding("j,down", "select(1)", "Next", show=False, id="transcript.next"),
        Binding("space", "fold", "Fold", show=False, id="transcript.fold"),
        Binding("end,G", "scroll_end", "End", show=False),
    ]
    selected: reactive[int | None] = reactive(None)

    class Selected(Message):
        """Another message is selected (or none)."""

        def __init__(self, turn: Turn | None) -> None:
            super().__init__()
            self.turn = turn

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.turns: list[Turn] = []
        self._chunks: list[Chunk] = []
        self._ends: list[int] = []
        self._first = 0
        self._renderer: BlockRenderer | None = None
        self._base: Style | None = None
        self._width = 0
        self._n_painted = 0
        self._follow = True
        """The end is shown, and what comes moves it; False while somebody reads further up."""

    # -- what the screen calls -------------------------------------------------------------------

    def show(self, turns: list[Turn]) -> None:
        """Replace the conversation and go to its end."""
        self.turns = turns
        self.selected = None
        for turn in turns:
            self._build(turn)
        self._relayout()
        self.scroll_end(animate=False, immediate=True)

    def add(self, turn: Turn) -> None:
        """Append a message and go to the end."""
        self.turns.append(turn)
        self._build(turn)
        self._chunks.extend(turn.chunks)
        self._measure()
        self.scroll_end(animate=False, immediate=True)

    def stream(self, text: str, reasoning: str = "") -> bool:
        """Add text to the last message. Lines above its open block are not touched.

        Returns whether the frame is on the terminal already; else Textual draws it when idle.
        """
        turn = self.turns[-1]
        y = self._height(len(self._chunks) - self._open_count(turn))
        before = self._drop_open(turn)
        keep = max(len(self._chunks) - self._first, 0)
        if reasoning:
            turn.reasoning += reasoning
            turn.chunks[1].forget()
            y = keep = 0
        turn.text += text
        new = [Chunk(turn, "block", block) for block in turn.splitter.feed(text)]
        if (tail := turn.splitter.tail) is not None:
            new.append(Chunk(turn, "block", tail))
        new.append(Chunk(turn, "gap"))
        turn.chunks.extend(new)
        self._chunks.extend(new)
        if y and before is not None:
            y += self._keep_lines(before, new[0])
        if self._follow and self._paint(y, keep):
            return True
        self._measure(refresh_from=y, keep=keep)
        if self._follow:
            self._to_end()
        return False

    def _to_end(self) -> None:
        self.scroll_end(animate=False, immediate=True)
        # Painted frames left it behind, and sizes that they set are no change any more.
        bar = self.vertical_scrollbar
        bar.window_virtual_size = self.virtual_size.height
        bar.position = self.scroll_y

    def _paint(self, changed_from: int, keep: int) -> bool:
        """The end of the text straight onto the terminal, where nothing is in the way."""
        if not self._width or not is_clear(self):
            self._n_painted = 0
            return False
        total = self._count_lines(keep)
        top = max(total - self.size.height, 0)
        if top != self.scroll_offset.y:
            changed_from = 0
        self.set_reactive(Transcript.virtual_size, Size(self.size.width, total))
        self.set_reactive(Transcript.scroll_y, top)
        self.set_reactive(Transcript.scroll_target_y, top)
        is_bar_due = self._n_painted % BAR_EVERY == 0
        self._n_painted += 1
        bar = [bar_rows(self.vertical_scrollbar, total, top)] if is_bar_due else []
        first = max(changed_from, top)
        paint(self, first - top, self._rows(first, top + self.size.height), *bar)
        return True

    def finish(self, *, facts: str = "", note: str = "") -> None:
        """The last message is complete: lay it out as a whole once more."""
        if not self.turns:
            return
        turn = self.turns[-1]
        turn.streaming, turn.facts, turn.note = False, facts or turn.facts, note
        self._rebuild(turn)

    def selected_turn(self) -> Turn | None:
        """The message that commands act on: the selected one, or None."""
        if self.selected is None or not 0 <= self.selected < len(self.turns):
            return None
        return self.turns[self.selected]

    def toggle_thinking(self, turn: Turn) -> None:
        turn.thinking_open = not turn.thinking_open
        self._rebuild(turn)

    # -- building --------------------------------------------------------------------------------

    def _build(self, turn: Turn) -> None:
        turn.chunks = [Chunk(turn, "head")]
        if turn.role == "assistant":
            turn.chunks.append(Chunk(turn, "thought"))
            turn.splitter = BlockSplitter()
            blocks = turn.splitter.feed(turn.text) if turn.streaming else split_blocks(turn.text)
            turn.chunks.extend(Chunk(turn, "block", block) for block in blocks)
        elif turn.text:
            turn.chunks.append(Chunk(turn, "plain"))
        if turn.note:
            turn.chunks.append(Chunk(turn, "note"))
        turn.chunks.append(Chunk(turn, "gap"))

    def _rebuild(self, turn: Turn) -> None:
        follow = self._follow
        self._build(turn)
        first = self._chunks[self._first] if self._first < len(self._chunks) else None
        self._chunks = [chunk for other in self.turns for chunk in other.chunks]
        if first is not None and first in self._chunks:
            self._first = self._chunks.index(first)
        else:
            self._first = 0
        self._measure()
        if follow:
            self._to_end()

    @staticmethod
    def _open_count(turn: Turn) -> int:
        """How many chunks at the end of a streaming message are provisional."""
        last = turn.chunks[-2] if len(turn.chunks) > 1 else None
        is_tail = last is not None and last.kind == "block" and last.block == turn.splitter.tail
        return 2 if is_tail else 1

    def _drop_open(self, turn: Turn) -> Chunk | None:
        """Take the provisional chunks away; return the open block's, where there was one."""
        n = self._open_count(turn)
        before = turn.chunks[-2] if n > 1 else None
        del turn.chunks[-n:]
        del self._chunks[-n:]
        return before

    def _keep_lines(self, before: Chunk, after: Chunk) -> int:
        """How many lines of the open block more text left as they were; they stay drawn."""
        if before.lines is None or after.kind != before.kind:
            return 0
        pairs = zip(before.lines, self._lines(after), strict=False)
        n = next((i for i, (old, new) in enumerate(pairs) if old != new), len(before.lines))
        after.strips = {key: strip for key, strip in before.strips.items() if key[0] < n}
        return n

    # -- measuring -------------------------------------------------------------------------------

    def _text_width(self) -> int:
        """Cells for words; 0 as long as the widget has no place on the screen."""
        if not self.size.width:
            return 0
        return min(max(self.size.width - GUTTER - 2, 10), MAX_WIDTH)

    def _relayout(self) -> None:
        """Everything may have changed: lay out a window at the end."""
        self._width = self._text_width()
        self._chunks = [chunk for turn in self.turns for chunk in turn.chunks]
        for chunk in self._chunks:
            chunk.forget()
        self._first = len(self._chunks)
        self._extend_up(WINDOW_LINES)
        self._measure()

    def _extend_up(self, n_lines: int) -> int:
        """Lay out messages above the window, ``n_lines`` or a little more; return the lines."""
        added = 0
        while self._first > 0 and (added < n_lines or self._chunks[self._first].kind != "head"):
            self._first -= 1
            added += len(self._lines(self._chunks[self._first]))
        return added

    def _measure(self, refresh_from: int = 0, keep: int = 0) -> None:
        """Heights of the window's chunks, but the first ``keep`` that are as they were."""
        total = self._count_lines(keep)
        if total != self.virtual_size.height or self.size.width != self.virtual_size.width:
            self._resize_virtual(Size(self.size.width, total))
        top = max(refresh_from, self.scroll_offset.y)
        self.refresh_lines(top, max(self.size.height - (top - self.scroll_offset.y), 0))

    def _count_lines(self, keep: int) -> int:
        """Where each chunk of the window ends, from chunk ``keep`` on; return all its lines."""
        del self._ends[keep:]
        below = self._ends[-1] if self._ends else 0
        for chunk in self._chunks[self._first + len(self._ends) :]:
            below += len(self._lines(chunk))
            self._ends.append(below)
        return below

    def _resize_virtual(self, size: Size) -> None:
        """A new height, without the layout of the whole screen that ``virtual_size = `` starts.

        Only this widget's scroll bar depends on it; the layout was two thirds of a frame.
        """
        self.set_reactive(Transcript.virtual_size, size)
        self._scroll_update(size)

    def _height(self, n_chunks: int) -> int:
        """Lines of the window above its chunk number ``n_chunks`` (counted over all chunks)."""
        at = n_chunks - self._first
        return self._ends[min(at, len(self._ends)) - 1] if at > 0 and self._ends else 0

    # -- events ----------------------------------------------------------------------------------

    def on_resize(self) -> None:
        if self._text_width() != self._width:
            self._relayout()
        # What was at the end before stays at the end: a lower widget has another last line.
        if self._follow:
            self.scroll_end(animate=False, immediate=True)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._renderer = self._base = None
        for chunk in self._chunks:
            chunk.forget()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._follow = new_value >= self.max_scroll_y
        if new_value < self.size.height and self._first > 0 and new_value < old_value:
            added = self._extend_up(WINDOW_LINES)
            self._measure()
            self.scroll_to(y=new_value + added, animate=False, immediate=True)

    def watch_selected(self) -> None:
        self.refresh()
        self.post_message(self.Selected(self.selected_turn()))

    def on_click(self, event: events.Click) -> None:
        chunk, _ = self._at(self.scroll_offset.y + event.y)
        if chunk is None:
            return
        self.selected = self.turns.index(chunk.turn)
        if chunk.kind == "thought":
            self.toggle_thinking(chunk.turn)

    def action_select(self, step: int) -> None:
        if not self.turns:
            return
        at = len(self.turns) if self.selected is None else self.selected
        self.selected = min(max(at + step, 0), len(self.turns) - 1)
        self._scroll_to_turn(self.turns[self.selected])

    def action_fold(self) -> None:
        turn = self.selected_turn()
        if turn is None:
            return
        if turn.role == "user":
            turn.unfolded = not turn.unfolded
            self._rebuild(turn)
        else:
            self.toggle_thinking(turn)

    def action_scroll_end(self) -> None:
        self.selected = None
        self.scroll_end(animate=False)

    def _scroll_to_turn(self, turn: Turn) -> None:
        index = self._chunks.index(turn.chunks[0])
        if index < self._first:
            self._extend_up(sum(len(self._lines(c)) for c in self._chunks[index : self._first]))
            self._measure()
        y = self._height(index)
        if not self.scroll_offset.y <= y < self.scroll_offset.y + self.size.height - 2:
            self.scroll_to(y=max(y - 1, 0), animate=False, immediate=True)

    # -- lines -----------------------------------------------------------------------------------

    def _render_with(self) -> BlockRenderer:
        if self._renderer is None:
            theme = self.app.current_theme
            self._renderer = BlockRenderer(Ink(self.app.theme_variables, dark=theme.dark))
        return self._renderer

    def _lines(self, chunk: Chunk) -> list[Line]:
        if chunk.lines is None:
            if not self.size.width:
                # Laid out by a guess, the first message stood in a column of ten for a frame.
                return []
            chunk.lines = self._make(chunk)
        return chunk.lines

    def _make(self, chunk: Chunk) -> list[Line]:
        renderer, turn = self._render_with(), chunk.turn
        ink = renderer.ink
        width = self._width or self._text_width()
        if chunk.kind == "head":
            return [_head(turn, ink)]
        if chunk.kind == "thought":
            return _thought(turn, renderer, width)
        if chunk.kind == "plain":
            return _plain(turn, renderer, width)
        if chunk.kind == "note":
            return [[], *renderer.plain(f"▲ {turn.note}", width, ink.warning)]
        if chunk.kind == "block" and chunk.block is not None:
            lines = renderer.render(chunk.block, width)
            return [[], *lines] if chunk.block.opens and not _is_first(chunk) else lines
        return [[]]

    def _at(self, y: int) -> tuple[Chunk | None, int]:
        """The chunk at a line of the window, and which of its lines it is."""
        index = bisect_right(self._ends, y)
        if index >= len(self._ends):
            return None, 0
        return self._chunks[self._first + index], y - (self._ends[index - 1] if index else 0)

    def render_line(self, y: int) -> Strip:
        at = self.scroll_offset.y + y
        (strip,) = self._rows(at, at + 1)
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(at)) is not None:
            strip = self._marked(strip, span)
        return strip.apply_offsets(0, at)

    def _rows(self, first: int, end: int) -> list[Strip]:
        """These lines of the window as they stand on the screen; blank ones below its last."""
        width, selected = self.size.width, self.selected_turn()
        strips: list[Strip] = []
        for index in range(bisect_right(self._ends, first), len(self._ends)):
            chunk, begins = self._chunks[self._first + index], self._ends[index - 1] if index else 0
            rows = range(max(first, begins), min(self._ends[index], end))
            is_selected = chunk.turn is selected
            strips += [self._strip(chunk, at - begins, is_selected, width) for at in rows]
            if self._ends[index] >= end:
                return strips
        blank = Strip.blank(width, self._base_style())
        return strips + [blank] * (end - first - len(strips))

    def _base_style(self) -> Style:
        """Textual adds it up from every ancestor, each time: a sixth of a frame."""
        if self._base is None:
            self._base = self.rich_style
        return self._base

    def _strip(self, chunk: Chunk, row: int, is_selected: bool, width: int) -> Strip:
        strip = chunk.strips.get((row, is_selected))
        if strip is None or strip.cell_length != width:
            strip = self._make_strip(chunk, row, is_selected, width)
            chunk.strips[row, is_selected] = strip
        return strip

    def _make_strip(self, chunk: Chunk, row: int, is_selected: bool, width: int) -> Strip:
        ink = self._render_with().ink
        lines = self._lines(chunk)
        bar = "┃ " if is_selected else ("│ " if chunk.kind != "gap" else "  ")
        style = ink.primary if is_selected else _bar_style(chunk.turn, ink)
        if chunk.kind == "gap":
            bar = "  "
        segments = [Segment(bar, style), *(lines[row] if row < len(lines) else [])]
        base = self._base_style()
        painted = [Segment(text, base + (style or Style.null())) for text, style, _ in segments]
        return Strip(painted).adjust_cell_length(width, base)

    def _marked(self, strip: Strip, span: tuple[int, int]) -> Strip:
        start, end = span
        end = strip.cell_length if end == -1 else end
        style = self.screen.get_component_rich_style("screen--selection")
        before, inside, after = strip.crop(0, start), strip.crop(start, end), strip.crop(end)
        return Strip.join([before, inside.apply_style(style), after])

    @property
    def allow_select(self) -> bool:
        return True

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        lines = []
        for chunk in self._chunks[self._first :]:
            lines += [" " * GUTTER + _text_of(line) for line in self._lines(chunk)]
        text = selection.extract("\n".join(lines))
        # The gutter is this widget's, not the message's.
        return "\n".join(line.removeprefix(" " * GUTTER) for line in text.split("\n")), "\n"

    def selection_updated(self, selection: Selection | None) -> None:  # noqa: ARG002
        self.refresh()


def _is_first(chunk: Chunk) -> bool:
    turn = chunk.turn
    first = next((other for other in turn.chunks if other.kind == "block"), None)
    return (first is chunk or first is None) and not turn.reasoning


def _text_of(line: Line) -> str:
    return "".join(segment.text for segment in line).rstrip()


def _bar_style(turn: Turn, ink: Ink) -> Style:
    if turn.note:
        return ink.warning
    return ink.secondary if turn.role == "user" else ink.faint


def _head(turn: Turn, ink: Ink) -> Line:
    if turn.role == "user":
        line = [Segment("You", ink.secondary)]
    else:
        line = [Segment(turn.name or "Assistant", ink.primary)]
    if turn.facts:
        line.append(Segment(f"  {turn.facts}", ink.faint))
    return line


def _thought(turn: Turn, renderer: BlockRenderer, width: int) -> list[Line]:
    if not turn.reasoning:
        return []
    ink = renderer.ink
    n_words = len(turn.reasoning.split())
    verb = "thinking" if turn.streaming and not turn.text else "thought"
    arrow = "▾" if turn.thinking_open else "▸"
    head: Line = [Segment(f"{arrow} {verb} · {n_words} words", ink.muted + Style(italic=True))]
    if not turn.thinking_open:
        return [head]
    return [head, *renderer.plain(turn.reasoning.strip(), width, ink.muted + Style(italic=True))]


def _plain(turn: Turn, renderer: BlockRenderer, width: int) -> list[Line]:
    """What a person wrote, as it is; long texts folded, and laid out only as far as they show."""
    if turn.unfolded:
        return renderer.plain(turn.text, width, renderer.ink.text)
    start = turn.text[: width * FOLDED_LINES * 2]
    lines = renderer.plain(start, width, renderer.ink.text)
    if len(start) == len(turn.text) and len(lines) <= FOLDED_LINES:
        return lines
    kept = lines[: FOLDED_LINES // 2]
    n_rest = len(turn.text) - sum(len(_text_of(line)) for line in kept)
    more = Segment(f"▸ {n_rest:,} more characters (space unfolds)", renderer.ink.muted)
    return [*kept, [more]]
