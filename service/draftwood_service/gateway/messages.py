"""Anthropic's Messages: their requests as ours, and answers as their content blocks and events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftwood_client import ChatMessage, Completion, Delta, FinishReason, ToolCall
from draftwood_service.gateway.answers import totals
from draftwood_service.gateway.errors import InvalidRequestError, name_for_caller
from draftwood_service.gateway.reading import (
    THINKING,
    ParsedRequest,
    list_of,
    object_of,
    of_chat,
    text_of,
    unknown_fields,
)

_SAME = {"model", "max_tokens", "temperature", "top_p", "top_k", "stream", "draftwood", "chat_template_kwargs"}
"""Fields that a chat has too."""
_FIELDS = {
    "": _SAME
    | {"messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "metadata", "service_tier"},
    "system": {"type", "text", "cache_control", "citations"},
    "messages": {"role", "content"},
    "messages.content": {"type", "text", "thinking", "signature", "id", "name", "input", "tool_use_id", "content"}
    | {"is_error", "cache_control", "citations"},
    "tools": {"type", "name", "description", "input_schema", "strict", "cache_control"},
    "tool_choice": {"type", "name", "disable_parallel_tool_use"},
    "thinking": {"type", "budget_tokens", "display"},
    "metadata": {"user_id"},
}
_REFUSED: dict[str, tuple[object, ...]] = {"container": (), "mcp_servers": ([],), "output_format": ()}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TEXT = {"text": "text"}
_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CANCELLED: "max_tokens",  # their API has no answers that the server ended
}
_FIELD_OF = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
"""By the type of a block, the field of its pieces."""


def read_message(body: Any) -> ParsedRequest:
    """`POST /v1/messages`. Raises InvalidRequestError."""
    fields = object_of("body", body)
    ignored = unknown_fields(fields, _FIELDS, _REFUSED)
    if fields.get("max_tokens") is None:
        raise InvalidRequestError("max_tokens", "must be set")
    messages, names = _conversation(fields)
    tools = list_of("tools", fields.get("tools"))
    for at in range(len(tools)):
        names[f"tools[{at}].function.parameters"] = f"tools[{at}].input_schema"
        names[f"tools[{at}].function"] = f"tools[{at}]"
    names |= {"prompt": "messages", "stop": "stop_sequences", "tool_choice.function": "tool_choice"}
    user = object_of("metadata", fields.get("metadata") or {}).get("user_id")
    if object_of("draftwood", fields.get("draftwood") or {}).get("session") is None:
        names["draftwood.session"] = "metadata.user_id"
    try:
        parsed = of_chat({**_of_chat(fields, tools), "user": user}, messages, ignored)
    except InvalidRequestError as error:
        raise InvalidRequestError(name_for_caller(error.field, names), error.problem) from None
    for name in ("token_details", "draft_trees"):
        if name in parsed.options:
            raise InvalidRequestError(f"draftwood.{name}", "is served by /v1/chat/completions alone")
    thinking = object_of("thinking", fields.get("thinking") or {})
    switched = {name: (thinking["type"] != "disabled", "thinking") for name in THINKING if thinking.get("type")}
    return replace(parsed, caller_names=names, variables={**switched, **parsed.variables})


def _of_chat(fields: Mapping[str, Any], tools: list[Any]) -> dict[str, Any]:
    """The fields of a chat. Raises InvalidRequestError."""
    asked = {name: fields[name] for name in _SAME & fields.keys()}
    asked["stop"] = fields.get("stop_sequences")
    asked["tools"] = []
    for at, tool in enumerate(tools):
        given = object_of(f"tools[{at}]", tool)
        if (kind := given.get("type")) not in (None, "custom"):
            raise InvalidRequestError(f"tools[{at}].type", f"must be custom: {str(kind)[:100]} is not served")
        function = {name: given.get(name) for name in ("name", "description", "strict")}
        function["parameters"] = given.get("input_schema")
        asked["tools"].append({"type": "function", "function": function})
    choice = object_of("tool_choice", fields.get("tool_choice") or {})
    if choice.get("type") == "tool":
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice:
        if str(choice.get("type")) not in _CHOICES:
            raise InvalidRequestError("tool_choice.type", "must be auto, any, tool or none")
        asked["tool_choice"] = _CHOICES[choice["type"]]
    if choice.get("disable_parallel_tool_use") is True:
        asked["parallel_tool_calls"] = False
    return asked


def _conversation(fields: Mapping[str, Any]) -> tuple[list[ChatMessage], dict[str, str]]:
    """The messages, and by their names those of the caller's. Raises InvalidRequestError."""
    messages: list[ChatMessage] = []
    names: dict[str, str] = {}
    if (system := text_of("system", fields.get("system"), _TEXT)) != "":
        names["messages[0]"] = "system"
        messages.append(ChatMessage("system", system))
    given = list_of("messages", fields.get("messages"))
    if not given:
        raise InvalidRequestError("messages", "must be a list with at least one message")
    for at, message in enumerate(given):
        name = f"messages[{at}]"
        role, content = (object_of(name, message).get(key) for key in ("role", "content"))
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(f"{name}.role", "must be user or assistant")
        for read in _messages(name, role, content):
            names[f"messages[{len(messages)}]"] = name
            messages.append(read)
    return messages, names


def _messages(name: str, role: str, content: Any) -> list[ChatMessage]:
    """A message of the caller's as ours: results of tools are messages of their own, before the text."""
    if not isinstance(content, list):
        return [ChatMessage(role, text_of(f"{name}.content", content, _TEXT))]
    results: list[ChatMessage] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at, block in enumerate(content):
        inner = f"{name}.content[{at}]"
        block = object_of(inner, block)
        match block.get("type"):
            case "thinking" if role == "assistant":
                thoughts.append(_text(f"{inner}.thinking", block.get("thinking")))
            case "tool_use" if role == "assistant":
                called = (_text(f"{inner}.{key}", block.get(key)) for key in ("name", "id"))
                arguments = json.dumps(object_of(f"{inner}.input", block.get("input")), ensure_ascii=False)
                calls.append(ToolCall(next(called), arguments, next(called)))
            case "tool_result" if role == "user":
                key = _text(f"{inner}.tool_use_id", block.get("tool_use_id"))
                results.append(ChatMessage("tool", text_of(f"{inner}.content", block.get("content"), _TEXT), (), key))
            case "text":
                texts.append(_text(f"{inner}.text", block.get("text")))
            case kind:
                raise InvalidRequestError(f"{inner}.type", f"{str(kind)[:100]} is not served in a message of this role")
    if not (texts or thoughts or calls) and results:
        return results
    return [*results, ChatMessage(role, "".join(texts), calls, reasoning="".join(thoughts))]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(name, "must be a text")
    return value


class MessageAnswers:
    """A `Shape` of Messages.

    Args:
        model: as the answer names it.
    """

    done = ""

    def __init__(self, parsed: ParsedRequest, model: str) -> None:
        self._parallel = parsed.tools is None or parsed.tools.parallel
        self.id = f"msg_{uuid.uuid4().hex}"
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": model}
        self._open: tuple[str, int] | None = None
        self._blocks = 0

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer."""
        [answer] = completions
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for call in answer.tool_calls if self._parallel else answer.tool_calls[:1]:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
        return {**self._head, "content": content, **self._end(answer), **_usage(answer)}

    def first(self) -> list[dict[str, Any]]:
        """The event before the first tokens. The usage is known at the end."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        begun: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [{"type": "message_start", "message": begun}]

    def delta(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """The events of some tokens; none if they complete no character or piece of a call."""
        events: list[dict[str, Any]] = []
        for part in delta.message.parts:
            if part.HasField("tool_call"):
                call = part.tool_call
                if self._parallel or not call.index:
                    begin = {"id": call.id, "name": call.name, "input": {}}
                    events += self._write("tool_use", call.index, call.arguments, "input_json_delta", begin)
            elif part.HasField("reasoning"):
                begin = {"thinking": "", "signature": ""}
                events += self._write("thinking", 0, part.reasoning, "thinking_delta", begin)
            else:
                events += self._write("text", 0, part.text, "text_delta", {"text": ""})
        return events

    def finished(self, prompt: int, sample: int, reason: FinishReason) -> list[dict[str, Any]]:
        """None: the last events say how the answer ended."""
        return []

    def last(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """The end of the last block, why the answer ended, and the usage."""
        [answer] = completions
        ended = {"type": "message_delta", "delta": self._end(answer), **_usage(answer)}
        return [*self._close(), ended, {"type": "message_stop"}]

    def failed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """What ends a stream with an error, given as `body_of` has it."""
        return [{"type": "error", **body}]

    def _write(self, kind: str, index: int, text: str, delta: str, begin: dict[str, Any]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if self._open != (kind, index):
            events += self._close()
            self._open = kind, index
            block = {"type": kind, **begin}
            events.append({"type": "content_block_start", "index": self._blocks, "content_block": block})
        if text:
            piece = {"type": delta, _FIELD_OF[kind]: text}
            events.append({"type": "content_block_delta", "index": self._blocks, "delta": piece})
        return events

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        self._blocks += 1
        return [{"type": "content_block_stop", "index": self._blocks - 1}]

    @staticmethod
    def _end(answer: Completion) -> dict[str, Any]:
        reason, stop = _REASONS.get(answer.finish_reason, "end_turn"), None
        if reason == "end_turn" and isinstance(answer.matched_stop, str):
            reason, stop = "stop_sequence", answer.matched_stop
        return {"stop_reason": reason, "stop_sequence": stop}


def _input(arguments: str) -> Any:
    """The arguments of a call; none of one that is cut off, which is no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _usage(answer: Completion) -> dict[str, Any]:
    found = totals([answer])
    cached = answer.usage.cached_prompt_tokens
    usage = {
        "input_tokens": answer.usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.usage.completion_tokens,
    }
    return {"usage": usage, "metrics": found["metrics"]}
