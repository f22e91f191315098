"""A configuration written as people type it: ``starter --kv q8_0 --ctx 4096``."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from edgellm import config
from edgellm.chat import ChatModel
from edgellm.engine.client import Engine
from edgellm.errors import ConfigError
from edgellm.runtime import engine_options, plan_model, remember_load


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A model and the settings that make this variant of it."""

    name: str
    model: str
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """Dotted configuration keys."""

    @classmethod
    def parse(cls, text: str) -> Variant:
        """From a model followed by ``--name value`` pairs; raises ConfigError on anything else."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{text!r}: {error}") from error
        if not words or len(words) % 2 == 0:
            raise ConfigError(
                f"{text!r} is not a model followed by --name value pairs",
                hint='"starter --kv q8_0"',
            )
        settings: dict[str, Any] = {}
        for flag, value in zip(words[1::2], words[2::2], strict=True):
            settings |= _setting(flag, value)
        return cls(name=text, model=words[0], settings=settings)


def _setting(flag: str, value: str) -> dict[str, Any]:
    name = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--"):
        raise ConfigError(f"{flag!r} is no flag", hint='"starter --kv q8_0"')
    if name == "kv":
        return {"plan.type_k": value, "plan.type_v": value}
    if name == "profile":
        return {"profile": value}
    known = config.known_keys()
    found = [key for key in (f"plan.{name}", f"engine.{name}") if key in known]
    if not found:
        raise ConfigError(f"no setting {flag}", hint="edgellm config")
    return {found[0]: value}


@asynccontextmanager
async def opened(
    variant: Variant, defaults: Mapping[str, Any] | None = None
) -> AsyncIterator[Engine]:
    """The variant's engine, closed afterwards. ``defaults`` hold where the variant is silent."""
    resolved = config.load({**(defaults or {}), **variant.settings}).settings
    plan = await asyncio.to_thread(plan_model, variant.model, settings=resolved)
    engine = await Engine.load(
        plan, backend=resolved.engine.backend, options=engine_options(resolved)
    )
    try:
        await remember_load(plan, engine)
        yield engine
    finally:
        await engine.close()


def chat_model(engine: Engine) -> ChatModel:
    """What the chat templates need to know of a loaded model."""
    info = engine.info
    return ChatModel(
        arch=info.arch,
        name=info.name,
        templates=info.chat_templates,
        bos_text=info.bos_text,
        eos_text=info.eos_text,
        add_bos=info.add_bos,
    )
