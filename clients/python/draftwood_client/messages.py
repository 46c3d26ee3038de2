"""Prompts: conversations, and the tools and calls in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema of its arguments, an object, as JSON; "" if it has none.
    """

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written.

    Attributes:
        arguments: a JSON object, as JSON: the text that the model wrote. It is cut off if the answer ends within it.
        id: by which the result refers to it.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: one of the model's chat template: "system", "user", "assistant", or "tool" for the result of a call.
        reasoning: of an answer of the model, which templates that know it show.
        tool_calls: of an answer of the model.
        tool_call_id, tool_name: of a result: the call that it belongs to, and the name of its tool.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    tool_name: str = ""
    reasoning: str = ""


Messages: TypeAlias = Sequence[ChatMessage | Mapping[str, Any]]
"""A conversation; a mapping has the keys "role" and "content", and those of `ChatMessage` that it needs."""

Prompt: TypeAlias = str | Sequence[int] | Messages
"""Text or token ids, which are continued as they are, or a conversation, which is answered."""
