"""OpenAI's Responses: their requests as ours, and answers as their items and events. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftwood_client import ChatMessage, Completion, Delta, FinishReason, ToolCall
from draftwood_service.gateway.answers import totals
from draftwood_service.gateway.errors import InvalidRequestError, name_for_caller
from draftwood_service.gateway.reading import ParsedRequest, list_of, object_of, of_chat, text_of, unknown_fields

_SAME = {"model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "draftwood", "chat_template_kwargs"}
_SAME |= {"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop", "seed", "logit_bias"}
_SAME |= {"min_tokens", "ignore_eos", "priority", "stop_token_ids"}
"""Fields that a chat has too."""
_FIELDS = {
    "": _SAME
    | {"input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "metadata", "store"}
    | {"service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream_options"}
    | {"max_tool_calls", "include", "truncation"},
    "tools": {"type", "name", "description", "parameters", "strict"},
    "text": {"format", "verbosity"},
    "text.format": {"type", "name", "description", "schema", "strict", "pattern", "grammar"},
    "reasoning": {"effort", "summary", "generate_summary"},
    "stream_options": {"include_obfuscation"},
    "input": {"type", "role", "content", "id", "status", "call_id", "name", "arguments", "output", "summary"}
    | {"encrypted_content", "phase"},
    "input.content": {"type", "text", "refusal", "annotations", "logprobs"},
    "input.output": {"type", "text"},
    "input.summary": {"type", "text"},
}
_REFUSED: dict[str, tuple[object, ...]] = {"background": (False,), "prompt": (), "top_logprobs": (0,)}
_STORED = {
    "previous_response_id": "answers are not stored; send the conversation in input",
    "conversation": "conversations are not stored; send it in input",
}
_INCLUDED = "reasoning.encrypted_content"
"""What is not encrypted is in the answer anyway."""
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("output_text", {"annotations": [], "logprobs": []}),
    "reasoning": ("reasoning_text", {}),
}
"""By the type of an item, the type of the part that it has, and its other fields."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_STATUSES = {FinishReason.LENGTH: "incomplete", FinishReason.CANCELLED: "failed"}


def read_response(body: Any) -> ParsedRequest:
    """`POST /v1/responses`. Raises InvalidRequestError."""
    fields = object_of("body", body)
    for name, why in _STORED.items():
        if fields.get(name) is not None:
            raise InvalidRequestError(name, why)
    ignored = unknown_fields(fields, _FIELDS, _REFUSED)
    if fields.get("truncation") not in (None, "disabled"):
        raise InvalidRequestError("truncation", "must be disabled: nothing is left out of a conversation")
    tools, include = (list_of(name, fields.get(name)) for name in ("tools", "include"))
    for at, included in enumerate(include):
        if included != _INCLUDED:
            raise InvalidRequestError(f"include[{at}]", f"must be {_INCLUDED}: nothing else is there to include")
    messages, names = _conversation(fields)
    names |= {f"tools[{at}].function": f"tools[{at}]" for at in range(len(tools))}
    names |= {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.json_schema": "text.format.schema",
        "response_format": "text.format",
        "tool_choice.function": "tool_choice",
        "reasoning_effort": "reasoning.effort",
    }
    if object_of("draftwood", fields.get("draftwood") or {}).get("session") is None:
        names["draftwood.session"] = "user"
    try:
        parsed = of_chat(_of_chat(fields, tools), messages, ignored)
    except InvalidRequestError as error:
        raise InvalidRequestError(name_for_caller(error.field, names), error.problem) from None
    for name in ("token_details", "draft_trees"):
        if name in parsed.options:
            raise InvalidRequestError(f"draftwood.{name}", "is served by /v1/chat/completions alone")
    return replace(parsed, caller_names=names, echo=_echo(fields))


def _of_chat(fields: Mapping[str, Any], tools: list[Any]) -> dict[str, Any]:
    """The fields of a chat. Raises InvalidRequestError."""
    asked = {name: fields[name] for name in _SAME & fields.keys()}
    for at, tool in enumerate(tools):
        if (kind := object_of(f"tools[{at}]", tool).get("type")) != "function":
            raise InvalidRequestError(f"tools[{at}].type", f"must be function: {str(kind)[:100]} is not served")
    asked["tools"] = [{"type": "function", "function": tool} for tool in tools]
    choice = fields.get("tool_choice")
    named = isinstance(choice, dict) and choice.get("type") == "function"
    asked["tool_choice"] = {"type": "function", "function": choice} if named else choice
    asked["max_completion_tokens"] = fields.get("max_output_tokens")
    form = object_of("text", fields.get("text") or {}).get("format")
    if form is not None and object_of("text.format", form).get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    asked["response_format"] = form
    asked["reasoning_effort"] = object_of("reasoning", fields.get("reasoning") or {}).get("effort")
    return asked


def _conversation(fields: Mapping[str, Any]) -> tuple[list[ChatMessage], dict[str, str]]:
    """The messages, and by their names those of the items that they were made of. Raises InvalidRequestError."""
    messages: list[ChatMessage] = []
    names: dict[str, str] = {}
    calls: dict[str, str] = {}

    def add(name: str, message: ChatMessage) -> None:
        names[f"messages[{len(messages)}]"] = name
        messages.append(message)

    if instructions := fields.get("instructions"):
        add("instructions", ChatMessage("system", _text("instructions", instructions)))
    given = fields.get("input")
    if not (isinstance(given, str | list) and given):
        raise InvalidRequestError("input", "must be a text, or a list with at least one item")
    if isinstance(given, str):
        add("input", ChatMessage("user", given))
        return messages, names
    for at, item in enumerate(given):
        name = f"input[{at}]"
        item = object_of(name, item)
        answer = messages[-1] if messages and messages[-1].role == "assistant" else None
        match item.get("type") or "message":
            case "message":
                role, content = (
                    _text(f"{name}.role", item.get("role")),
                    _content(f"{name}.content", item.get("content")),
                )
                if role == "assistant" and answer is not None and not (answer.content or answer.tool_calls):
                    messages[-1] = replace(answer, content=content)
                else:
                    add(name, ChatMessage("system" if role == "developer" else role, content))
            case "reasoning":
                if thoughts := "".join(_texts(name, item.get("content") or item.get("summary") or [])):
                    add(name, ChatMessage("assistant", "", reasoning=thoughts))
            case "function_call":
                call = ToolCall(*(_text(f"{name}.{key}", item.get(key)) for key in ("name", "arguments", "call_id")))
                if answer is None:
                    add(name, answer := ChatMessage("assistant", ""))
                calls[f"messages[{len(messages) - 1}].tool_calls[{len(answer.tool_calls)}].function"] = name
                messages[-1] = replace(
                    answer, tool_calls=[*answer.tool_calls, replace(call, arguments=call.arguments or "{}")]
                )
            case "function_call_output":
                called = _text(f"{name}.call_id", item.get("call_id"))
                add(name, ChatMessage("tool", _content(f"{name}.output", item.get("output")), tool_call_id=called))
            case "item_reference":
                raise InvalidRequestError(f"{name}.type", "item_reference is not served: answers are not stored")
            case kind:
                raise InvalidRequestError(f"{name}.type", f"{str(kind)[:100]} is not served")
    return messages, calls | names


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(name, "must be a text")
    return value


def _content(name: str, content: Any) -> str:
    return text_of(name, content, {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"})


def _texts(name: str, parts: Any) -> list[str]:
    """Of the parts of an item's reasoning."""
    name = f"{name}.content"
    return [
        _text(f"{name}[{at}].text", object_of(name, part).get("text")) for at, part in enumerate(list_of(name, parts))
    ]


def _echo(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer repeats of its request, with OpenAI's defaults."""
    names = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "previous_response_id")
    reasoning = fields.get("reasoning") or {}
    return {
        **{name: fields.get(name) for name in names},
        "metadata": fields.get("metadata") or {},
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": False,
        "text": {"format": (fields.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "truncation": "disabled",
    }


class ResponseAnswers:
    """A `Shape` of Responses.

    Args:
        model: as the answer names it.
    """

    done = ""

    def __init__(self, parsed: ParsedRequest, model: str) -> None:
        self._parallel = parsed.tools is None or parsed.tools.parallel
        self.id = f"resp_{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._echo = parsed.echo
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._open: tuple[str, int] | None = None
        self._item: dict[str, Any] = {}
        self._pieces: list[str] = []

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer."""
        [answer] = completions
        for kind, text in (("reasoning", answer.reasoning), ("message", answer.text)):
            if text:
                self._write(kind, 0, text)
        for index, call in enumerate(answer.tool_calls if self._parallel else answer.tool_calls[:1]):
            self._write("function_call", index, call.arguments, call_id=call.id, name=call.name)
        self._end(answer)
        return self._response(answer)

    def first(self) -> list[dict[str, Any]]:
        """Events before the first tokens."""
        return [self._event(f"response.{name}", response=self._response()) for name in ("created", "in_progress")]

    def delta(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """The events of some tokens; none if they complete no character or piece of a call."""
        events: list[dict[str, Any]] = []
        for part in delta.message.parts:
            if part.HasField("tool_call"):
                call = part.tool_call
                if self._parallel or not call.index:
                    events += self._write("function_call", call.index, call.arguments, call_id=call.id, name=call.name)
            elif part.HasField("reasoning"):
                events += self._write("reasoning", 0, part.reasoning)
            else:
                events += self._write("message", 0, part.text)
        return events

    def finished(self, prompt: int, sample: int, reason: FinishReason) -> list[dict[str, Any]]:
        """None: the last event says how the answer ended."""
        return []

    def last(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """The end of the last item, and the whole answer."""
        [answer] = completions
        events = self._end(answer)
        response = self._response(answer)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """What ends a stream with an error, given as `body_of` has it."""
        error = body["error"]
        told = {"code": error["code"] or error["type"], "message": error["message"]}
        response = {**self._response(), "status": "failed", "error": told}
        return [self._event("error", **told, param=error["param"]), self._event("response.failed", response=response)]

    def _write(self, kind: str, index: int, text: str, **begin: str) -> list[dict[str, Any]]:
        """The events of a piece of an item. An item ends where another one begins.

        Args:
            index: of a call.
            begin: fields of a new item.
        """
        events: list[dict[str, Any]] = []
        if self._open != (kind, index):
            events += self._close("completed")
            self._open, self._pieces = (kind, index), []
            fields: dict[str, Any] = {**begin, "arguments": ""}
            if kind == "message":
                fields = {"role": "assistant", "content": []}
            elif kind == "reasoning":
                fields = {"summary": [], "content": []}
            self._item = {
                "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}",
                "type": kind,
                "status": "in_progress",
                **fields,
            }
            events.append(self._event("response.output_item.added", output_index=len(self._items), item=self._item))
            if kind in _PARTS:
                events.append(self._of_item("response.content_part.added", part=_part(kind, "")))
        self._pieces.append(text)
        if text:
            of_text: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append(self._of_item(f"response.{_text_event(kind)}.delta", delta=text, **of_text))
        return events

    def _end(self, answer: Completion) -> list[dict[str, Any]]:
        """The events of the end of the last item. An answer has at least one."""
        events = [] if self._items or self._open else self._write("message", 0, "")
        return events + self._close("completed" if answer.finish_reason not in _STATUSES else "incomplete")

    def _close(self, status: str) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        (kind, _), text = self._open, "".join(self._pieces)
        if kind in _PARTS:
            part = _part(kind, text)
            of_text: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events = [self._of_item(f"response.{_text_event(kind)}.done", text=text, **of_text)]
            events.append(self._of_item("response.content_part.done", part=part))
            item = {**self._item, "status": status, "content": [part]}
        else:
            name = self._item["name"]
            events = [self._of_item("response.function_call_arguments.done", name=name, arguments=text)]
            item = {**self._item, "status": status, "arguments": text}
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=item))
        self._items.append(item)
        self._open = None
        return events

    def _of_item(self, event: str, **fields: Any) -> dict[str, Any]:
        """An event of the item that is being written, or of its only part."""
        part = {"content_index": 0} if self._item["type"] in _PARTS else {}
        return self._event(event, item_id=self._item["id"], output_index=len(self._items), **part, **fields)

    def _event(self, event: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": event, "sequence_number": self._events - 1, **fields}

    def _response(self, answer: Completion | None = None) -> dict[str, Any]:
        """The answer as far as it is written; complete with its completion."""
        response = {**self._head, **self._echo, "status": "in_progress", "error": None, "incomplete_details": None}
        response |= {"output": [*self._items], "usage": None}
        if answer is None:
            return response
        response["status"] = status = _STATUSES.get(answer.finish_reason, "completed")
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "failed":
            response["error"] = {"code": "server_error", "message": "the server ended the answer"}
        found = totals([answer])
        usage = found["usage"]
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }
        return {**response, "metrics": found["metrics"]}


def _part(kind: str, text: str) -> dict[str, Any]:
    name, more = _PARTS[kind]
    return {"type": name, "text": text, **more}


def _text_event(kind: str) -> str:
    return _PARTS[kind][0] if kind in _PARTS else "function_call_arguments"
