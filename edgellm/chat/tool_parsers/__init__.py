"""Tool calls as each model family writes them; :func:`choose` knows a family by its template."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

from edgellm.chat.tool_parsers import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    invoke,
    json_lists,
    kimi,
    llama,
    mistral,
    pythonic,
    qwen_coder,
)
from edgellm.chat.tool_parsers.family import Family, Tool, Tools
from edgellm.chat.tool_parsers.stream import Steps, Stream

__all__ = ["FAMILIES", "GENERIC", "Family", "Tool", "Tools", "choose", "generic"]

QWEN_CODER: Final = Family(
    name="qwen-coder",
    begins=(qwen_coder.BEGIN, qwen_coder.FUNCTION),
    read=hermes.read,
    rules=qwen_coder.rules,
)
GLM: Final = Family(name="glm", begins=(glm.BEGIN,), read=hermes.read, rules=glm.rules)
GENERIC: Final = hermes.FAMILY

# What a template must contain, the most telling first: many contain several.
_SIGNS: Final[tuple[tuple[tuple[str, ...], Family], ...]] = (
    (("<|channel|>", "<|message|>"), harmony.FAMILY),
    (("<|tool_calls_section_begin|>",), kimi.FAMILY),
    (("｜DSML｜",), invoke.DSML),
    (("<｜tool▁calls▁begin｜>", "```json"), deepseek.V3),
    (("<｜tool▁calls▁begin｜>",), deepseek.V31),
    (("<minimax:tool_call>",), invoke.MINIMAX),
    (("<|tool_call>", "<tool_call|>"), gemma.GEMMA4),
    (("<start_function_call>",), gemma.FUNCTION_GEMMA),
    (("<|START_ACTION|>",), json_lists.COMMAND),
    (("[TOOL_CALLS]", "[ARGS]"), mistral.NAMED),
    (("[TOOL_CALLS]",), mistral.LIST),
    (("<|tool_call_start|>",), pythonic.FAMILY),
    (("<TOOLCALL>",), json_lists.NEMOTRON),
    (("<|tool_call|>", "<|/tool_call|>"), json_lists.PHI),
    (("<|tool_call|>",), json_lists.GRANITE),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<function=", "<parameter="), QWEN_CODER),
    (("<tool_call>",), hermes.FAMILY),
    (("<|python_tag|>",), llama.FAMILY),
    (("<|start_header_id|>", '"parameters": '), llama.FAMILY),
)
FAMILIES: Final = tuple(dict.fromkeys(family for _, family in _SIGNS))


@lru_cache(maxsize=64)
def choose(template: str, arch: str = "") -> Family | None:
    """The family whose calls this template knows; None when it knows none."""
    for signs, family in _SIGNS:
        if all(sign in template for sign in signs):
            return family
    # LFM2's template leaves the format to the model's training.
    return pythonic.FAMILY if arch.startswith("lfm2") else None


def generic(native: Family | None) -> Family:
    """The format of :data:`GENERIC`, reading the model's ``native`` one as well: earlier calls in
    the prompt are written so, and the model may go on that way."""
    if native is None or native.parse is not None or native.begins[0] in GENERIC.begins:
        return GENERIC

    def read(s: Stream, tag: str, tools: Tools) -> Steps[bool]:
        family = GENERIC if tag in GENERIC.begins else native
        return (yield from family.read(s, tag, tools))

    return replace(GENERIC, begins=(*GENERIC.begins, *native.begins), read=read)
