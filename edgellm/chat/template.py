"""Chat templates: the model's own Jinja text, found, compiled and rendered.

The same names and filters are offered as by transformers (``apply_chat_template``,
utils/chat_template_utils.py), because templates are written against those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import jinja2
import msgspec

from edgellm.chat.sandbox import MAX_SOURCE_CHARS, BoundedEnvironment, Budget, plain, spending
from edgellm.errors import ConfigError, InvalidRequestError

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What templates and the interpreter raise: a stranger's template can raise nearly anything, but
# nothing of ours is in between.
RENDER_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class ChatModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the chat code must know of a model; built from EngineInfo by the caller."""

    arch: str = ""
    name: str = ""
    templates: dict[str, str] = msgspec.field(default_factory=dict)
    """Jinja texts: ``default`` and the named ones (``tool_use``, ``rag``)."""
    bos_text: str = ""
    eos_text: str = ""
    add_bos: bool = False
    can_see: bool = False
    """A projector is loaded: image parts are accepted."""


class TemplateRefusedError(InvalidRequestError):
    """The template itself called raise_exception: it cannot express these messages."""


class _RefusalError(jinja2.TemplateError):
    pass


def _raise_exception(message: Any) -> None:
    raise _RefusalError(str(plain(message))[:500])


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_environment: Final = BoundedEnvironment()
_environment.globals["raise_exception"] = _raise_exception
_environment.globals["strftime_now"] = _strftime_now


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    with spending(Budget()):
        return _environment.from_string(source)


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render ``source``. InvalidRequestError says in which line it failed and why."""
    if len(source) > MAX_SOURCE_CHARS:
        raise InvalidRequestError(
            f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read",
            param="template",
        )
    try:
        template = _compile(source)
        with spending(Budget()):
            return template.render(variables)
    except _RefusalError as error:
        raise TemplateRefusedError(
            f"the chat template refuses these messages{_where(error)}: {error}", param="messages"
        ) from error
    except RENDER_ERRORS as error:
        what = str(error) or type(error).__name__
        raise InvalidRequestError(
            f"the chat template fails{_where(error)}: {what[:500]}",
            param="messages",
            hint="give another template with --chat-template FILE",
        ) from error


def _where(error: BaseException) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f" in line {error.lineno}"
    line = _template_line(error.__traceback__)
    return "" if line is None else f" in line {line}"


def _template_line(trace: TracebackType | None) -> int | None:
    """The template line deepest in the traceback; Jinja names templates without a file so."""
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def read_template(path: str | Path) -> str:
    """The text of an override file; ConfigError when it cannot be one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}") from error
    try:
        if len(text) <= MAX_SOURCE_CHARS:
            _compile(text)
            return text
    except RENDER_ERRORS as error:
        raise ConfigError(f"{path} is not a Jinja template{_where(error)}: {error}") from error
    raise ConfigError(f"{path} is longer than {MAX_SOURCE_CHARS} characters")


def choose(model: ChatModel, override: str | None, *, with_tools: bool) -> str:
    """The template text to use: an override (a name of the model's, or Jinja text), the model's
    ``tool_use`` when there are tools, its default, or ChatML when it has none."""
    if override is not None:
        if override in model.templates:
            return model.templates[override]
        if "{{" in override or "{%" in override:
            return override
        known = ", ".join(sorted(model.templates)) or "none"
        raise InvalidRequestError(
            f"no chat template named {override!r}; the model has: {known}", param="template"
        )
    if with_tools and "tool_use" in model.templates:
        return model.templates["tool_use"]
    return model.templates.get("default") or next(iter(model.templates.values()), CHATML)


def variables(
    model: ChatModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The names a template sees; ``extra`` (chat_template_kwargs) cannot hide the messages."""
    return {
        "bos_token": model.bos_text,
        "eos_token": model.eos_text,
        "documents": None,
        **extra,
        "messages": list(messages),
        "tools": list(tools) if tools else None,
        "add_generation_prompt": add_generation_prompt,
    }


def settle_bos(model: ChatModel, prompt: str) -> tuple[str, bool]:
    """The prompt with at most one BOS written in it, and whether the tokenizer shall add one."""
    bos = model.bos_text
    if not bos or not prompt.startswith(bos):
        return prompt, model.add_bos
    while prompt.startswith(bos, len(bos)):
        prompt = prompt[len(bos) :]
    return prompt, False
