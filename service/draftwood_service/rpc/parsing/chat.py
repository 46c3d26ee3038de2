"""Chat messages and tools of a request, as chat templates take them. Sizes are checked before anything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.errors import ContextLengthError
from draftwood_service.rpc.parsing.bounds import require_at_most, require_length
from draftwood_service.rpc.parsing.json_objects import indentation, read_object
from draftwood_service.rpc.parsing.tool_format import NoToolFormatError
from draftwood_service.serving import Serving

MAX_ROLE_CHARACTERS = 64
MAX_TOOLS = 128
"""Maximum number of tools of a chat, and of calls of a message."""
_MAX_NAME_CHARACTERS = 256
_SYSTEM_END = "\n\n"
"""Between a system message and the user's, for templates without the role."""


class Conversation(NamedTuple):
    """Messages and tools as chat templates take them.

    Attributes:
        characters: of all texts with JSON indented, and at least one for each message, call and tool.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    characters: int


def read_chat(chat: pb.Chat, serving: Serving) -> Conversation:
    """Raises InvalidValueError: a message, a call or a tool is wrong, or the model's template cannot show it."""
    count = len(chat.messages)
    if not count:
        raise InvalidInputError("chat.messages", None, "must not be empty")
    require_at_most("chat.messages", count, serving.settings.max_chat_messages, "messages")
    require_at_most("chat.tools", len(chat.tools), MAX_TOOLS, "tools")
    for index, message in enumerate(chat.messages):
        require_length(f"chat.messages[{index}].role", message.role, MAX_ROLE_CHARACTERS)
        calls = len(message.tool_calls)
        require_at_most(f"chat.messages[{index}].tool_calls", calls, MAX_TOOLS, "calls")
    characters = sum(_size_of_message(message) for message in chat.messages) + sum(map(_size_of_tool, chat.tools))
    _require_characters(characters, serving)
    tokenizer = serving.model.tokenizer
    if not tokenizer.has_chat_template:
        raise InvalidInputError("chat", None, "the model has no chat template; send text, as `draftwood complete` does")
    with_tools = next(_with_tools(chat), None)
    if with_tools is not None and isinstance(serving.model.tool_format, NoToolFormatError):
        raise InvalidInputError(with_tools, None, f"the model takes no tools: {serving.model.tool_format}")
    called = {call.id: call.name for message in chat.messages for call in message.tool_calls if call.id}
    messages = [_message(f"chat.messages[{index}]", message, called) for index, message in enumerate(chat.messages)]
    if not tokenizer.takes_system:
        messages = _with_system_in_user(messages)
    tools = [_tool(f"chat.tools[{index}]", tool) for index, tool in enumerate(chat.tools)]
    of_calls = [one["tool_calls"] for one in messages if "tool_calls" in one]
    characters += sum(map(indentation, [*tools, *of_calls]))
    _require_characters(characters, serving)
    return Conversation(messages, tools or None, characters)


def _with_tools(chat: pb.Chat) -> Iterator[str]:
    """Names of the fields that need a template with tools."""
    if chat.tools:
        yield "chat.tools"
    for index, message in enumerate(chat.messages):
        for name in ("tool_calls", "tool_call_id", "tool_name"):
            if getattr(message, name):
                yield f"chat.messages[{index}].{name}"
        if message.role == "tool":
            yield f"chat.messages[{index}].role"


def _size_of_message(message: pb.ChatMessage) -> int:
    size = 1 + len(message.content) + len(message.tool_call_id) + len(message.tool_name)
    return size + sum(1 + len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)


def _size_of_tool(tool: pb.Tool) -> int:
    return 1 + len(tool.name) + len(tool.description) + len(tool.parameters)


def _message(field: str, message: pb.ChatMessage, called: Mapping[str, str]) -> dict[str, Any]:
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        read["tool_calls"] = [
            _call(f"{field}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        read["tool_call_id"] = message.tool_call_id
    if name := message.tool_name or called.get(message.tool_call_id):
        read["name"] = name
    return read


def _with_system_in_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a chat template without the role system: the text of a system message goes before that of the
    next message of the user, an empty line apart; without one, it is a message of the user."""
    moved: list[dict[str, Any]] = []
    pending: list[str] = []
    for message in messages:
        if message["role"] == "system":
            pending.append(message["content"])
        elif message["role"] == "user":
            moved.append({**message, "content": _SYSTEM_END.join([*pending, message["content"]])})
            pending = []
        else:
            moved.append(message)
    return [*moved, {"role": "user", "content": _SYSTEM_END.join(pending)}] if pending else moved


def _call(field: str, call: pb.ToolCall) -> dict[str, Any]:
    require_length(f"{field}.name", call.name, _MAX_NAME_CHARACTERS)
    arguments = _object(f"{field}.arguments", call.arguments) if call.arguments else {}
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "id": call.id, "function": function}


def _tool(field: str, tool: pb.Tool) -> dict[str, Any]:
    require_length(f"{field}.name", tool.name, _MAX_NAME_CHARACTERS)
    no_parameters = {"type": "object", "properties": {}}
    parameters = _object(f"{field}.parameters", tool.parameters) if tool.parameters else no_parameters
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _object(field: str, text: str) -> dict[str, Any]:
    try:
        return read_object(text)
    except ValueError as error:
        raise InvalidInputError(field, None, str(error)) from None


def _require_characters(characters: int, serving: Serving) -> None:
    if characters > (most := serving.max_prompt_characters):
        problem = f"must have at most {most} characters with tools as indented JSON; it has {characters}"
        raise ContextLengthError("chat.messages", problem, serving.model.max_context)
