"""Small questions: a name, a yes or no, a choice from a list, settings of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from edgellm.errors import InvalidRequestError
from edgellm.request import SamplingParams

ESCAPE = Binding("escape", "dismiss(None)", "Cancel")


class AskScreen(ModalScreen[str | None]):
    """One line of text; None when it was cancelled."""

    BINDINGS: ClassVar[list[BindingType]] = [ESCAPE]

    def __init__(self, title: str, placeholder: str, value: str) -> None:
        super().__init__()
        self._title, self._placeholder, self._value = title, placeholder, value

    def compose(self) -> ComposeResult:
        box = Vertical(Input(self._value, placeholder=self._placeholder), classes="dialog")
        box.border_title = self._title
        box.border_subtitle = "enter keeps · esc cancels"
        yield box

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())


class ConfirmScreen(ModalScreen[bool]):
    """A question with two answers; escape is no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "dismiss(False)", "No"),
        Binding("y", "dismiss(True)", "Yes"),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, text: str, yes: str, no: str = "Cancel") -> None:
        super().__init__()
        self._title, self._text, self._yes, self._no = title, text, yes, no

    def compose(self) -> ComposeResult:
        buttons = Horizontal(Button(self._yes, id="yes"), Button(self._no, id="no"))
        buttons.styles.height = 3
        box = Vertical(Static(self._text, markup=False), Label(), buttons, classes="dialog")
        box.border_title = self._title
        yield box

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class PickScreen(ModalScreen[str | None]):
    """One of several; (key, title, words beside it) each. Typing narrows the list."""

    CSS = """
    PickScreen OptionList { height: auto; max-height: 16; border: none; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ESCAPE,
        Binding("down", "cursor_down", show=False),
        Binding("up", "cursor_up", show=False),
    ]

    def __init__(self, title: str, choices: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self._title, self._choices = title, list(choices)

    def compose(self) -> ComposeResult:
        box = Vertical(
            Input(placeholder="type to narrow", compact=True), OptionList(), classes="dialog"
        )
        box.border_title = self._title
        box.border_subtitle = "enter chooses · esc cancels"
        yield box

    def on_mount(self) -> None:
        self._fill("")

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def _fill(self, words: str) -> None:
        ink = self.app.theme_variables
        options = self.query_one(OptionList)
        options.clear_options()
        for key, title, about in self._choices:
            if all(word in f"{title} {about}".lower() for word in words.lower().split()):
                text = Text(title, style=ink["foreground"]).append(f"  {about}", ink["muted"])
                options.add_option(Option(text, id=key))
        options.highlighted = 0 if options.option_count else None

    def action_cursor_down(self) -> None:
        self.query_one(OptionList).action_cursor_down()

    def action_cursor_up(self) -> None:
        self.query_one(OptionList).action_cursor_up()

    @on(Input.Submitted)
    def _submitted(self) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            self.dismiss(options.get_option_at_index(options.highlighted).id)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What :class:`SettingsScreen` returns."""

    system: str
    sampling: dict[str, float | int | None]


FIELDS = (
    ("temperature", "temperature", float),
    ("top_k", "top k", int),
    ("top_p", "top p", float),
    ("min_p", "min p", float),
    ("repeat_penalty", "repeat penalty", float),
    ("max_tokens", "max tokens", int),
    ("seed", "seed", int),
)


class SettingsScreen(ModalScreen[Settings | None]):
    """System prompt and sampling of one conversation, checked by the one place with the limits."""

    CSS = """
    SettingsScreen TextArea { height: 6; border: none; background: $panel; padding: 0 1; }
    SettingsScreen TextArea:focus { border: none; background-tint: $primary 8%; }
    SettingsScreen .row { height: 1; margin-bottom: 1; }
    SettingsScreen .row Label { width: 17; color: $muted; }
    SettingsScreen .row Input { width: 14; margin-right: 2; }
    SettingsScreen Input:focus { background-tint: $primary 8%; }
    SettingsScreen #wrong { color: $error; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [ESCAPE, Binding("ctrl+s", "keep", "Keep")]

    def __init__(self, system: str, sampling: dict[str, float | int | None]) -> None:
        super().__init__()
        self._system, self._sampling = system, sampling

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog") as box:
            yield Label("System prompt", classes="muted")
            yield TextArea(self._system, id="system", tab_behavior="focus")
            yield Label()
            for pair in (FIELDS[0:2], FIELDS[2:4], FIELDS[4:6], FIELDS[6:7]):
                with Horizontal(classes="row"):
                    for name, label, _ in pair:
                        yield Label(label)
                        yield self._input(name)
            yield Static(id="wrong")
        box.border_title = "This conversation"
        box.border_subtitle = "ctrl+s keeps · esc cancels · an empty field is the default"

    def _input(self, name: str) -> Input:
        value = self._sampling.get(name)
        default = getattr(SamplingParams(), name)
        return Input(
            "" if value is None else f"{value:g}", id=name, compact=True,
            placeholder="automatic" if default is None else f"{default:g}",
        )  # fmt: skip

    @on(Input.Submitted)
    def action_keep(self) -> None:
        wrong = self.query_one("#wrong", Static)
        sampling: dict[str, float | int | None] = {}
        try:
            for name, label, kind in FIELDS:
                text = self.query_one(f"#{name}", Input).value.strip()
                if text:
                    sampling[name] = _number(text, label, kind)
            SamplingParams(**sampling).validate()  # type: ignore[arg-type]
        except InvalidRequestError as error:
            wrong.update(f"✗ {error.message}")
            return
        self.dismiss(
            Settings(system=self.query_one("#system", TextArea).text.strip(), sampling=sampling)
        )


def _number(text: str, label: str, kind: type[int] | type[float]) -> float | int:
    try:
        return kind(text)
    except ValueError:
        raise InvalidRequestError(f"{label} must be a number, got {text!r}") from None
