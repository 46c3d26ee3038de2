"""The encoding of requests as protobuf messages.

Checks here are those that encoding needs; the server checks ranges.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from operator import index
from typing import Any

from draftwood.v1 import generation_pb2 as pb
from draftwood_client.errors import ArgumentTypeError, ArgumentValueError
from draftwood_client.messages import ChatMessage, Messages, Prompt, Tool, ToolCall
from draftwood_client.options import GenerateOptions


def plain_prompt(prompt: object) -> str | list[int]:
    """Text or token ids. Raises `ArgumentTypeError`, for messages too, which `chat` answers."""
    if isinstance(prompt, str):
        return prompt
    items = _items("prompt", prompt, "text or token ids")
    if items and isinstance(items[0], (ChatMessage, Mapping)):
        raise ArgumentTypeError("prompt", "must be text or token ids; `chat` answers messages")
    return items


def conversation(messages: object) -> Messages:
    """Messages; a text is one of the user. Raises `ArgumentTypeError`, also for token ids, which are no messages."""
    if isinstance(messages, str):
        return [ChatMessage("user", messages)]
    items = _items("messages", messages, "chat messages, or the text of one")
    if items and not isinstance(items[0], (ChatMessage, Mapping)):
        raise ArgumentTypeError("messages[0]", f"must be a ChatMessage or a mapping, not {_kind(items[0])}")
    return items


def generate_request(prompt: Prompt, options: GenerateOptions, name: str = "prompt") -> pb.GenerateRequest:
    """Raises `ArgumentTypeError` or `ArgumentValueError` for what cannot be encoded."""
    request = pb.GenerateRequest()
    _set_prompt(request, name, prompt)
    for name, value in options.items():
        if name not in _FIELDS and name not in _OF_CHAT:
            raise ArgumentTypeError(name, f"there is no such option{_nearest(name)}")
        if name in _OF_CHAT and value is not None:
            if not request.HasField("chat"):
                raise ArgumentValueError(name, "needs a prompt of chat messages")
            if name == "tools":
                request.chat.tools.extend(_tools(value))
            else:
                request.chat.template_kwargs = _schema(name, value)
        elif value is not None:
            part, field, check = _FIELDS[name]
            message: Any = getattr(request, part) if part else request
            checked = check(name, value)
            if isinstance(checked, list):
                getattr(message, field).extend(checked)
            elif isinstance(checked, dict):
                getattr(message, field).update(checked)
            else:
                setattr(message, field, checked)
    return request


def tokenize_request(source: str | Messages) -> pb.TokenizeRequest:
    """Raises `ArgumentTypeError` or `ArgumentValueError` for what cannot be encoded."""
    if isinstance(source, str):
        return pb.TokenizeRequest(text=text("input", source))
    return pb.TokenizeRequest(chat=chat("input", source))


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ArgumentTypeError(name, f"must be a str, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ArgumentValueError(
            name, f"character {error.start} is the unpaired surrogate {value[error.start]!r}, which is not text"
        ) from None
    return value


def token_ids(name: str, values: object) -> list[int]:
    items = _items(name, values, "a sequence of token ids")
    if {*map(type, items)} == {int} and min(items) >= 0 and max(items) < 2**31:
        return items
    return [_integer(f"{name}[{i}]", item, 0, 2**31 - 1) for i, item in enumerate(items)]


def chat(name: str, messages: object) -> pb.Chat:
    encoded = [
        _message(f"{name}[{i}]", message) for i, message in enumerate(_items(name, messages, "text or chat messages"))
    ]
    if not encoded:
        raise ArgumentValueError(name, "must hold at least one chat message")
    return pb.Chat(messages=encoded)


def seconds(name: str, value: object) -> float | None:
    """A time limit in seconds; None for no limit, which infinity means too."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(name, f"must be a number of seconds, not {_kind(value)}")
    if not value > 0:
        raise ArgumentValueError(name, f"{value!r} is not allowed; it must be above 0 seconds")
    # gRPC stores deadlines as 64-bit nanoseconds; a century is as good as no limit.
    return None if value > 100 * 365 * 86400 else float(value)


def _set_prompt(request: pb.GenerateRequest, name: str, prompt: object) -> None:
    if isinstance(prompt, str):
        request.text = text(name, prompt)
        return
    items = _items(name, prompt, "text, token ids or chat messages")
    if not items:
        raise ArgumentValueError(name, "must hold at least one token id or chat message")
    if isinstance(items[0], (ChatMessage, Mapping)):
        request.chat.CopyFrom(chat(name, items))
    else:
        request.token_ids.ids.extend(token_ids(name, items))


def _items(name: str, value: object, expected: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ArgumentTypeError(name, f"must be {expected}, not {_kind(value)}")
    return list(value)


def _message(name: str, message: object) -> pb.ChatMessage:
    if isinstance(message, Mapping):
        if not {"role", "content"} <= set(message) <= _MESSAGE_KEYS:
            given = ", ".join(sorted(map(repr, message))) or "none"
            others = ", ".join(sorted(_MESSAGE_KEYS - {"role", "content"}))
            raise ArgumentValueError(name, f"needs the keys 'role' and 'content', may have {others}; it has {given}")
        message = ChatMessage(**message)
    if not isinstance(message, ChatMessage):
        raise ArgumentTypeError(name, f"must be a ChatMessage or a mapping, not {_kind(message)}")
    encoded = pb.ChatMessage(
        role=text(f"{name}.role", message.role),
        content=[pb.ContentPart(text=content)] if (content := text(f"{name}.content", message.content)) else [],
        reasoning=text(f"{name}.reasoning", message.reasoning),
        tool_call_id=text(f"{name}.tool_call_id", message.tool_call_id),
        tool_name=text(f"{name}.tool_name", message.tool_name),
    )
    for i, call in enumerate(_items(f"{name}.tool_calls", message.tool_calls, "calls of tools")):
        field = f"{name}.tool_calls[{i}]"
        if not isinstance(call, ToolCall):
            raise ArgumentTypeError(field, f"must be a ToolCall, not {_kind(call)}")
        encoded.tool_calls.add(
            id=text(f"{field}.id", call.id),
            name=text(f"{field}.name", call.name),
            arguments=text(f"{field}.arguments", call.arguments),
        )
    return encoded


def _tools(value: object) -> list[pb.Tool]:
    tools = []
    for i, tool in enumerate(_items("tools", value, "a sequence of Tool")):
        if not isinstance(tool, Tool):
            raise ArgumentTypeError(f"tools[{i}]", f"must be a Tool, not {_kind(tool)}")
        parts = {part.name: text(f"tools[{i}].{part.name}", getattr(tool, part.name)) for part in fields(Tool)}
        tools.append(pb.Tool(**parts))
    return tools


def _strings(name: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [text(name, value)]
    return [text(f"{name}[{i}]", item) for i, item in enumerate(_items(name, value, "a str or a sequence of them"))]


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(name, f"must be an int, not {_kind(value)}")
    number = index(value)
    if not low <= number <= high:
        raise ArgumentValueError(name, f"{number} is not allowed; it must lie in [{low}, {high}]")
    return number


def _int32(name: str, value: object) -> int:
    return _integer(name, value, -(2**31), 2**31 - 1)


def _uint64(name: str, value: object) -> int:
    return _integer(name, value, 0, 2**64 - 1)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ArgumentTypeError(name, f"must be a number, not {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int, which JSON may have
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        raise ArgumentValueError(name, f"{number} is not allowed; it must be finite")
    return number


def _bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(name, f"must be a mapping of token ids to numbers, not {_kind(value)}")
    return {_integer(name, token, 0, 2**31 - 1): _number(f"{name}[{token!r}]", bias) for token, bias in value.items()}


def _schema(name: str, value: object) -> str:
    if not isinstance(value, Mapping):
        return text(name, value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ArgumentValueError(name, f"is not JSON: {error}") from None
    except RecursionError:
        raise ArgumentValueError(name, "is nested too deeply") from None


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(name, f"must be a bool, not {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, [*_FIELDS, *_OF_CHAT], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


_MESSAGE_KEYS = {field.name for field in fields(ChatMessage)}
_OF_CHAT = {"tools", "template_kwargs"}
_FIELDS: dict[str, tuple[str, str, Callable[[str, object], object]]] = {
    # option: (part of the request, field in it, check)
    "model": ("", "model", text),
    "tenant": ("", "tenant", text),
    "request_id": ("", "request_id", text),
    "session": ("", "session", text),
    "priority": ("", "priority", _int32),
    "temperature": ("sampling", "temperature", _number),
    "top_k": ("sampling", "top_k", _int32),
    "top_p": ("sampling", "top_p", _number),
    "min_p": ("sampling", "min_p", _number),
    "repetition_penalty": ("sampling", "repetition_penalty", _number),
    "presence_penalty": ("sampling", "presence_penalty", _number),
    "frequency_penalty": ("sampling", "frequency_penalty", _number),
    "seed": ("sampling", "seed", _uint64),
    "logit_bias": ("sampling", "logit_bias", _bias),
    "n": ("sampling", "n", _int32),
    "json_schema": ("format", "json_schema", _schema),
    "regex": ("format", "regex", text),
    "lark": ("format", "lark", text),
    "max_tokens": ("stop", "max_tokens", _int32),
    "min_tokens": ("stop", "min_tokens", _int32),
    "stop": ("stop", "strings", _strings),
    "stop_token_ids": ("stop", "token_ids", token_ids),
    "ignore_eos": ("stop", "ignore_eos", _flag),
    "drafting": ("drafting", "enabled", _flag),
    "learn": ("drafting", "learn", _flag),
    "strategy": ("drafting", "strategy", text),
    "max_draft_nodes": ("drafting", "max_nodes", _int32),
    "token_details": ("output", "token_details", _flag),
    "include_special_tokens": ("output", "include_special_tokens", _flag),
    "top_logprobs": ("output", "top_logprobs", _int32),
    "draft_trees": ("output", "draft_trees", _flag),
    "raw_text": ("output", "raw_text", _flag),
}
