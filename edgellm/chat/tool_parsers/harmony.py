"""gpt-oss: every message names its channel.

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}
    <|call|>

analysis is thinking, final is the answer, commentary to a function is a call, and commentary to
nobody is said to the user before a call.
"""

from __future__ import annotations

import re
from typing import Final

from edgellm.chat.tool_parsers.family import Family, Tools, choice, json_schema, literal
from edgellm.chat.tool_parsers.stream import Steps, Stream, stream_value
from edgellm.request import control, until

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
START: Final = "<|start|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
CONSTRAIN: Final = "<|constrain|>"
_ENDS: Final = (END, CALL, RETURN, START)
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def parse(s: Stream) -> Steps[None]:
    """The whole answer, from behind ``<|start|>assistant``."""
    while True:
        lead = yield from s.starts(CHANNEL, START, " to=", "assistant")
        if lead is not None:
            header, tag = yield from s.collect(MESSAGE, END, CALL, RETURN)
            if tag == MESSAGE:
                yield from _body(s, lead + header)
        elif s.text:  # text without a channel is an answer all the same
            yield from s.until(_ENDS, s.content)
        if s.ended and not s.text:
            return


def _body(s: Stream, header: str) -> Steps[None]:
    recipient = _RECIPIENT.search(header)
    if recipient and "functions." in header:
        s.start_call(recipient[1])
        yield from s.skip_space()
        if not s.text.startswith("<") and (yield from stream_value(s, s.arguments)):
            s.end_call()
        yield from s.collect(*_ENDS)
    elif "analysis" in header:
        s.in_reasoning = True
        ended = yield from s.until(_ENDS, s.reasoning())
        s.in_reasoning = ended is None
    else:
        yield from s.until(_ENDS, s.content)


def analysis() -> str:
    """LARK ``think``: a stretch of thinking, then the start of the next message."""
    head = f'{control(CHANNEL)} "analysis" {control(MESSAGE)}'
    return f'think: {head} thought {control(START)} "assistant"\n{until("thought", END)}'


def rules(tools: Tools, parallel: bool) -> str:
    """``calls``: what follows `` to=functions.``."""
    form = f'({control(CHANNEL)} "commentary")? (" "? {control(CONSTRAIN)} "json" | " json")?'
    out = [f"calls: {choice(tools)}"]
    for i, tool in enumerate(tools):
        schema = json_schema(tool.parameters)
        out.append(f"call_{i}: {literal(tool.name)} {form} {control(MESSAGE)} {schema}")
    return "\n".join(out)


def _never(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
    yield from ()
    return False


FAMILY = Family(
    name="harmony",
    begins=(),
    read=_never,
    rules=rules,
    trigger=" to=functions.",
    lead=f'{control(CHANNEL)} "commentary to=functions."',
    parse=parse,
)
