"""A model of this machine, answering through its engine's child process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from edgellm.chat import ChatModel, ContentDelta, OutputParser, ReasoningDelta, prepare_chat
from edgellm.engine.client import Engine
from edgellm.engine.wire import rebuild_error
from edgellm.metrics import EngineStats
from edgellm.planner.plan import LoadReport, Plan
from edgellm.request import Overflow, Priority, Request, SamplingParams, TokenEvent
from edgellm.tui.details import shown_name
from edgellm.tui.live import share_of
from edgellm.tui.pacing import event_interval_s
from edgellm.tui.ports import HERE, Delta, Json


class LocalEndpoint:
    """Implements :class:`edgellm.tui.ports.Endpoint` over an Engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        info = engine.info
        self.name = shown_name(engine.plan.model.path)
        self.where = HERE
        self._model = ChatModel(
            arch=info.arch, name=self.name, templates=info.chat_templates,
            bos_text=info.bos_text, eos_text=info.eos_text, add_bos=info.add_bos,
        )  # fmt: skip

    @property
    def n_ctx(self) -> int:
        return self._engine.info.n_ctx_seq

    @property
    def plan(self) -> Plan | None:
        return self._engine.plan

    @property
    def report(self) -> LoadReport | None:
        return self._engine.report

    @property
    def is_alive(self) -> bool:
        return self._engine.is_alive

    async def chat(
        self, messages: Sequence[Json], sampling: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        prepared = prepare_chat(self._model, messages)
        head = prepared.prompt[: prepared.n_keep_chars]
        kept = await self._engine.tokenize(head, add_special=prepared.add_special)
        request = Request(
            id=request_id,
            prompt=prepared.prompt,
            add_special=prepared.add_special,
            sampling=msgspec.structs.replace(
                sampling, stop=(*sampling.stop, *prepared.stop), grammar=prepared.grammar
            ),
            priority=Priority.INTERACTIVE,
            overflow=Overflow.SLIDE,
            n_keep=len(kept),
            turn_starts=prepared.turn_starts,
            event_interval_s=event_interval_s(share_of(self._engine.plan)),
            client="terminal",
        )
        parser = prepared.parser
        events = self._engine.generate(request)
        async with aclosing(events):
            async for event in events:
                yield _delta(event, parser)

    async def count(self, messages: Sequence[Json]) -> int:
        if not messages:
            return 0
        prompt = "\n".join(str(message.get("content", "")) for message in messages)
        # A template wraps every message into a few tokens more (ChatML: role and two markers).
        return len(await self._engine.tokenize(prompt, parse_special=False)) + 5 * len(messages)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    async def cancel(self, request_id: str) -> None:
        await self._engine.cancel(request_id)

    async def close(self) -> None:
        await self._engine.close()


def _delta(event: TokenEvent, parser: OutputParser) -> Delta:
    if event.error is not None:
        raise rebuild_error(event.error)
    pieces = parser.feed(event.text)
    if event.finish_reason is not None:
        pieces += parser.finish()
    return Delta(
        text="".join(piece.text for piece in pieces if isinstance(piece, ContentDelta)),
        reasoning="".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta)),
        n_tokens=len(event.token_ids),
        finish=None if event.finish_reason is None else event.finish_reason.value,
        usage=event.usage,
        timings=event.timings,
        warning=event.warning,
    )
