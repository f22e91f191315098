"""From chat messages to a prompt, and from generated text back to content, thinking and calls."""

from edgellm.chat.deltas import (
    ContentDelta,
    Delta,
    OutputParser,
    ReasoningDelta,
    ToolArgsDelta,
    ToolCallStart,
)
from edgellm.chat.prepare import PreparedChat, prepare_chat
from edgellm.chat.template import ChatModel, read_template

__all__ = [
    "ChatModel",
    "ContentDelta",
    "Delta",
    "OutputParser",
    "PreparedChat",
    "ReasoningDelta",
    "ToolArgsDelta",
    "ToolCallStart",
    "prepare_chat",
    "read_template",
]
