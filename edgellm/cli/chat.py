"""``edgellm chat``: one prompt answered, or a conversation at the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from edgellm import config, runtime
from edgellm.cli.answer import (
    Answer,
    Message,
    PlainScreen,
    SilentScreen,
    answer,
    chat_model,
    figures,
    sampling,
)
from edgellm.cli.errors import UsageError
from edgellm.cli.flags import PlanFlags, SamplingFlags
from edgellm.config import Settings
from edgellm.engine.client import Engine
from edgellm.engine.info import LoadProgress, load_words

_DEFAULT_MODEL = "starter"


def chat(
    model: str | None = None,
    /,
    *,
    prompt: Annotated[str | None, Parameter(name=("--prompt", "-p"))] = None,
    system: Annotated[str | None, Parameter(name=("--system", "-s"))] = None,
    stats: bool = False,
    overflow: Literal["error", "slide"] | None = None,
    json: bool = False,
    sampling_flags: SamplingFlags = SamplingFlags(),  # noqa: B008 (frozen)
    plan_flags: PlanFlags = PlanFlags(),  # noqa: B008 (frozen)
) -> None:
    """Chat in the terminal, or answer one prompt.

    Without --prompt and at a terminal this is a conversation: /help lists its commands, Ctrl-C
    stops an answer, Ctrl-D leaves. What is piped in becomes the prompt, after --prompt if both
    are given.

    Examples, one a line:

    * `edgellm chat starter`
    * `edgellm chat starter -p "Say hello"`
    * `git diff | edgellm chat starter -p "Explain this change:"`

    Parameters
    ----------
    model
        A path, a name in the store, or starter. Without it: chat.model of the settings.
    prompt
        Answer this and leave.
    system
        The system prompt.
    stats
        Print tokens, TTFT, prefill_tps and decode_tps after each answer.
    overflow
        At the end of the context: stop with an error, or slide over the oldest turns.
    json
        Print the answer, its usage and timings as JSON (edgellm.chat/1).
    """
    flags = {
        **plan_flags.settings(),
        **sampling_flags.settings(),
        "chat.system": system,
        "chat.overflow": overflow,
    }
    settings = config.load(flags).settings
    sampling(settings.chat)
    name = model or settings.chat.model or _DEFAULT_MODEL
    text = _prompt(prompt)
    if text is not None:
        asyncio.run(_one_shot(name, text, settings, stats=stats, as_json=json))
    elif json:
        raise UsageError("--json needs a prompt", hint="edgellm chat MODEL --json -p TEXT")
    else:
        _converse(name, settings, stats=stats)


def _prompt(given: str | None) -> str | None:
    """The prompt from --prompt and from a pipe; None when this is a conversation."""
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    piped = "" if sys.stdin is None or at_terminal else sys.stdin.read()
    if given is None and at_terminal:
        return None
    text = "\n\n".join(part for part in (given or "", piped) if part.strip())
    if not text.strip():
        raise UsageError("the prompt is empty", hint='edgellm chat MODEL -p "Say hello"')
    return text


async def _one_shot(
    model: str, prompt: str, settings: Settings, *, stats: bool, as_json: bool
) -> None:
    messages: list[Message] = [{"role": "user", "content": prompt}]
    if settings.chat.system:
        messages.insert(0, {"role": "system", "content": settings.chat.system})
    engine = await _load(model, settings)
    try:
        result = await _show_answer(engine, model, messages, settings, as_json=as_json)
    finally:
        await engine.close()
    for warning in result.warnings:
        print(f"edgellm: warning: {warning}", file=sys.stderr)
    if stats:
        print(figures(result), file=sys.stderr)


async def _show_answer(
    engine: Engine, model: str, messages: list[Message], settings: Settings, *, as_json: bool
) -> Answer:
    described = chat_model(engine.info, model)
    if as_json:
        result = await answer(
            engine, described, messages, chat=settings.chat, screen=SilentScreen()
        )
        sys.stdout.write(msgspec.json.encode(result.to_json(model)).decode() + "\n")
        return result
    screen = PlainScreen(shows_reasoning=sys.stdout.isatty())
    try:
        return await answer(engine, described, messages, chat=settings.chat, screen=screen)
    finally:
        screen.close()


def _converse(model: str, settings: Settings, *, stats: bool) -> None:
    from edgellm.cli.repl import Repl

    loop = asyncio.new_event_loop()
    try:
        engine = loop.run_until_complete(_load(model, settings))
        try:
            described = chat_model(engine.info, model)
            Repl(engine, described, settings.chat, loop=loop, stats=stats).run()
        finally:
            loop.run_until_complete(engine.close())
    finally:
        loop.close()


async def _load(model: str, settings: Settings) -> Engine:
    show = _progress if sys.stderr.isatty() else None
    try:
        return await runtime.open_engine(model, settings=settings, on_progress=show)
    finally:
        if show is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write("\r\x1b[K")


def _progress(at: LoadProgress) -> None:
    sys.stderr.write(f"\r\x1b[Kloading: {load_words(at.stage, at.fraction)}")
    sys.stderr.flush()
