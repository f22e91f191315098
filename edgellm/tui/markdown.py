"""One Markdown block as terminal lines, in the theme's colours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Final

from markdown_it import MarkdownIt
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import BlockQuote, Heading, Markdown, MarkdownElement
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from rich.theme import Theme

from edgellm.tui.blocks import Block

CODE_MARGIN: Final = 1
_MARKUP: Final = re.compile(r"[*_`#\[\]<>|\\~&]|^[^A-Za-z\"'(]|  | $|^$")
"""What Markdown might read as more than words, at the start or anywhere."""
_ITEM: Final = re.compile(
    r"(?!(?:\*[ \t]*){3,}$|(?:-[ \t]*){3,}$)(?:([-*+])|(\d{1,9})([.)])) (?! )\S"
)
"""A list's item at the margin, one space after its marker; ``- - -`` is a line across the page."""
LONG_TEXT: Final = 50_000
"""Characters of a plain text from which it is cut instead of wrapped."""


class _Heading(Heading):
    """Left-aligned, and only as loud as its level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text.copy()
        text.justify = "left"
        yield text


class _Quote(BlockQuote):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(width=max(options.max_width - 2, 1))
        bar = Segment("▎ ", console.get_style("markdown.block_quote_border"))
        for line in console.render_lines(self.elements, inner, style=self.style):
            yield bar
            yield from line
            yield Segment("\n")


class EdgeMarkdown(Markdown):
    """Rich's Markdown in this program's look; one for many texts, with one parser for all.

    Rich makes a parser for every text; half of the time for a paragraph was the parser's making.
    """

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "blockquote_open": _Quote,
    }

    def __init__(self) -> None:
        super().__init__("", hyperlinks=False)
        self._parser = MarkdownIt().enable("strikethrough").enable("table")

    def of(self, text: str) -> EdgeMarkdown:
        """This, showing another text."""
        self.markup, self.parsed = text, self._parser.parse(text)
        return self


class Ink:
    """The styles of a transcript, made once a theme from Textual's variables."""

    def __init__(self, variables: Mapping[str, str], *, dark: bool) -> None:

        def color(name: str) -> Style:
            return Style(color=variables[name])

        self.dark = dark
        self.text = color("foreground")
        self.muted = color("muted")
        self.faint = color("faint")
        self.primary = color("primary") + Style(bold=True)
        self.secondary = color("secondary") + Style(bold=True)
        self.error = color("error")
        self.warning = color("warning")
        self.code = Style(bgcolor=variables["code-background"], color=variables["foreground"])
        self.code_faint = Style(bgcolor=variables["code-background"], color=variables["faint"])
        self.rich_theme = Theme(self._markdown(variables))
        self.token_styles = _token_styles(variables)

    @staticmethod
    def _markdown(variables: Mapping[str, str]) -> dict[str, Style | str]:
        primary, secondary = variables["primary"], variables["secondary"]
        accent, muted = variables["accent"], variables["muted"]
        code = Style(color=accent, bgcolor=variables["code-background"])
        heading = Style(color=primary, bold=True)
        return {
            "markdown.h1": heading + Style(underline=True),
            "markdown.h2": heading,
            "markdown.h3": Style(color=secondary, bold=True),
            "markdown.h4": Style(bold=True),
            "markdown.h5": Style(bold=True),
            "markdown.h6": Style(italic=True),
            "markdown.code": code,
            "markdown.block_quote": Style(color=muted, italic=True),
            "markdown.block_quote_border": Style(color=primary),
            "markdown.item.bullet": Style(color=primary, bold=True),
            "markdown.item.number": Style(color=primary),
            "markdown.hr": Style(color=variables["border"]),
            "markdown.link": Style(color=secondary, underline=True),
            "markdown.link_url": Style(color=secondary, underline=True),
            "markdown.table.border": Style(color=variables["border"]),
            "markdown.table.header": Style(color=muted, bold=True),
        }


def _token_styles(variables: Mapping[str, str]) -> dict[str, Style]:
    """Pygments token names (their first words) to styles; the longest match wins."""
    on = variables["code-background"]

    def style(name: str, *, bold: bool = False, italic: bool = False) -> Style:
        return Style(color=variables[name], bgcolor=on, bold=bold, italic=italic)

    return {
        "Token": style("foreground"),
        "Token.Keyword": style("secondary", bold=True),
        "Token.Name.Function": style("primary"),
        "Token.Name.Class": style("primary", bold=True),
        "Token.Name.Decorator": style("accent"),
        "Token.Name.Builtin": style("secondary"),
        "Token.Literal.String": style("success"),
        "Token.Literal.Number": style("accent"),
        "Token.Comment": style("faint", italic=True),
        "Token.Operator": style("muted"),
        "Token.Punctuation": style("muted"),
        "Token.Generic.Deleted": style("error"),
        "Token.Generic.Inserted": style("success"),
    }


class BlockRenderer:
    """Blocks to lines of segments, for one theme and any width."""

    def __init__(self, ink: Ink) -> None:
        self.ink = ink
        self._markdown = EdgeMarkdown()
        self._items: tuple[tuple[str, int], list[list[Segment]]] = (("", 0), [])
        """The items above the last of the list that grows, and their lines."""
        self._console = Console(
            force_terminal=True,
            color_system="truecolor",
            theme=ink.rich_theme,
            legacy_windows=False,
        )

    def render(self, block: Block, width: int) -> list[list[Segment]]:
        """Lines no wider than ``width``, without blank lines around them."""
        if block.is_code:
            return self._code(block, width)
        if (prose := prose_lines(block.text, width)) is not None:
            return [[Segment(line, self.ink.text)] for line in prose]
        lines = self._list(block.text, width) or self._marked_up(block.text, width)
        return self._trim(lines)

    def _marked_up(self, text: str, width: int) -> list[list[Segment]]:
        lines = self._lines(self._markdown.of(text), width)
        return lines[1:] if lines and not lines[0] else lines  # Rich begins with an empty line

    def _list(self, text: str, width: int) -> list[list[Segment]] | None:
        """A list whose last item grows: only that is rendered again. None: it is no plain list.

        4,000 characters of a list are 7 ms for Rich, in every frame; one item of it 0.3.
        """
        at = last_item(text)
        if at is None:
            return None
        if self._items[0] != (text[:at], width):
            self._items = ((text[:at], width), self._above(text[:at].rstrip("\n"), width))
        return self._items[1] + self._marked_up(text[at:], width)

    def _above(self, text: str, width: int) -> list[list[Segment]]:
        """The items above a new last one: those that were above the last before are known."""
        known, lines = self._items
        at = last_item(text)
        if at is None or known != (text[:at], width):
            return self._marked_up(text, width)
        return lines + self._marked_up(text[at:], width)

    def plain(self, text: str, width: int, style: Style) -> list[list[Segment]]:
        """Text as it is, wrapped; cut at the width where wrapping at words would take seconds."""
        if len(text) > LONG_TEXT:
            step = width if text.isascii() else width // 2  # wide characters take two cells
            pieces = (
                line[at : at + step]
                for line in text.expandtabs(4).split("\n")
                for at in range(0, max(len(line), 1), step)
            )
            return [[Segment(piece, style)] for piece in pieces]
        return self._lines(Text(text, style=style, overflow="fold"), width)

    def _lines(self, renderable: Markdown | Text, width: int) -> list[list[Segment]]:
        options = self._console.options.update(width=max(width, 8), highlight=False)
        return self._console.render_lines(renderable, options, style=self.ink.text, pad=False)

    @staticmethod
    def _trim(lines: list[list[Segment]]) -> list[list[Segment]]:
        def is_blank(line: list[Segment]) -> bool:
            return not "".join(segment.text for segment in line).strip()

        while lines and is_blank(lines[0]):
            lines = lines[1:]
        while lines and is_blank(lines[-1]):
            lines = lines[:-1]
        return lines

    def _code(self, block: Block, width: int) -> list[list[Segment]]:
        inner = max(width - 2 * CODE_MARGIN, 8)
        lines = [self._code_edge(block.info.split(" ")[0] or "text", width)] if block.opens else []
        pad = Segment(" " * CODE_MARGIN, self.ink.code)
        options = self._console.options.update(width=inner)
        code = self._console.render_lines(self._highlight(block), options, style=self.ink.code)
        lines.extend([pad, *line, pad] for line in code)
        if block.closes:
            lines.append([Segment(" " * width, self.ink.code)])
        return lines

    def _code_edge(self, name: str, width: int) -> list[Segment]:
        label = f" {name[:20]}"
        return [Segment(label.ljust(width), self.ink.code_faint)]

    def _highlight(self, block: Block) -> Text:
        text = Text(style=self.ink.code, no_wrap=False, overflow="fold", tab_size=4)
        lexer = _lexer(block.info.split(" ")[0].lower())
        if lexer is None:
            return text.append(block.text)
        for token, value in lexer.get_tokens(block.text):
            text.append(value, self._token_style(str(token)))
        text.rstrip()
        return text

    def _token_style(self, name: str) -> Style:
        styles = self.ink.token_styles
        while name not in styles:
            name = name.rpartition(".")[0] or "Token"
        return styles[name]


def prose_lines(text: str, width: int) -> list[str] | None:
    """A paragraph without any markup, wrapped as Rich wraps it; None where it may have some.

    Most of what a model writes is such text; through the parser and the console it was 2 ms of a
    frame, each frame again.
    """
    text = text.rstrip(" ")
    if not text.isascii() or any(_MARKUP.search(each) for each in text.split("\n")):
        return None
    text = text.replace("\n", " ")
    if not text.isprintable():
        return None
    words = text.split(" ")
    lines, line = [], words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) <= width:
            line += f" {word}"
        else:
            lines.append(line)
            line = word
    lines.append(line)
    return None if max(map(len, lines)) > width else lines


def last_item(text: str) -> int | None:
    """Where the last item of a list begins, if its items may be rendered one by one.

    Items at the margin, all with the same marker, whatever else further in; numbers that count, and
    whose width the last one does not change (Rich sets them flush right); nothing that a later line
    could change above it.
    """
    starts: list[int] = []
    marker, number, at = "", 0, 0
    for line in text.split("\n"):
        found = _ITEM.match(line)
        if found is not None:
            mine = found[1] or found[3]
            if starts and (mine != marker or (found[2] and int(found[2]) != number + 1)):
                return None
            marker, number = mine, int(found[2] or 0)
            starts.append(at)
        elif line.strip() and not (starts and line.startswith("    " if number else "  ")):
            return None
        at += len(line) + 1
    if len(starts) < 2 or len(str(number)) != len(str(number + 1)) or "]:" in text:
        return None
    return starts[-1]


@lru_cache(maxsize=64)
def _lexer(name: str) -> Any:
    """The Pygments lexer of a language name, or None when it knows none."""
    try:
        return get_lexer_by_name(name, stripnl=False) if name else None
    except ClassNotFound:
        return None
