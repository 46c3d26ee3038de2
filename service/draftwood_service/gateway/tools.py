"""Tools of OpenAI's API: what may be called, what must be, and how calls are written in answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwood_client import Tool, ToolCall, ToolFormat
from draftwood_service.gateway.errors import InvalidRequestError
from draftwood_service.tools import is_marked, require_shallow

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write JSON, so that a call is what the model is used to."""


@dataclass(frozen=True, slots=True)
class ParsedTools:
    """Tools of a request.

    Attributes:
        forced: names of tools of which one must be called; empty where the model decides.
        strict: the name of one whose arguments must keep to its schema, if there is any.
        parallel: the answer may have several calls.
    """

    tools: tuple[Tool, ...]
    forced: frozenset[str] = frozenset()
    parallel: bool = True
    strict: str = ""


def read_tools(fields: Mapping[str, Any]) -> ParsedTools | None:
    """`tools`, `tool_choice` and `parallel_tool_calls`; None where nothing may be called.

    Raises:
        InvalidRequestError: names the field.
    """
    given, choice = fields.get("tools") or [], fields.get("tool_choice")
    if not isinstance(given, list):
        raise InvalidRequestError("tools", "must be a list")
    tools = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(given)]
    names = [tool.name for tool, _ in tools]
    if repeated := next((name for name, count in Counter(names).items() if count > 1), None):
        raise InvalidRequestError("tools", f"has several functions named {repeated!r}")
    parallel = fields.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequestError("parallel_tool_calls", "must be true or false")
    forced = _forced(choice, names)
    if not tools or choice == "none":
        return None
    strict = next((tool.name for tool, is_strict in tools if is_strict), "")
    single = parallel is False or isinstance(choice, dict)  # a function that is named is called once
    return ParsedTools(tuple(tool for tool, _ in tools), forced, not single, strict)


def _tool(name: str, given: Any) -> tuple[Tool, bool]:
    """A tool, and whether its arguments must keep to its schema."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or given.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequestError(name, 'must have the type "function" and a function')
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(f"{name}.function.parameters", "must be a JSON schema")
    try:
        require_shallow(parameters)
    except ValueError as error:
        raise InvalidRequestError(f"{name}.function.parameters", str(error)) from None
    if not isinstance(function.get("strict") or False, bool):
        raise InvalidRequestError(f"{name}.function.strict", "must be true or false")
    if not (isinstance(function.get("name"), str) and function["name"]):
        raise InvalidRequestError(f"{name}.function.name", "must be a text, and not empty")
    schema = json.dumps(parameters, ensure_ascii=False) if parameters else ""
    return Tool(function["name"], function.get("description") or "", schema), function.get("strict") is True


def _forced(choice: Any, names: list[str]) -> frozenset[str]:
    if choice in (None, "none", "auto"):
        return frozenset()
    if not names:
        raise InvalidRequestError("tool_choice", "needs tools")
    if choice == "required":
        return frozenset(names)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidRequestError("tool_choice", 'must be "none", "auto", "required" or a function')
    if function.get("name") not in names:
        raise InvalidRequestError("tool_choice.function.name", f"must be one of {', '.join(names)}")
    return frozenset([function["name"]])


def read_calls(name: str, given: Any) -> list[ToolCall]:
    """`tool_calls` of a message, whose texts the client checks. Raises InvalidRequestError."""
    if not isinstance(given, list):
        raise InvalidRequestError(name, "must be a list")
    calls = []
    for at, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise InvalidRequestError(f"{name}[{at}]", "must have a function")
        arguments = function.get("arguments")
        texts: list[Any] = [function.get("name"), "{}" if arguments in (None, "") else arguments, call.get("id") or ""]
        calls.append(ToolCall(*texts))
    return calls


def options_for(parsed: ParsedTools, form: ToolFormat, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the request must ask of the service besides the tools.

    Args:
        schema: of an answer without calls; None leaves it free.

    Raises:
        InvalidRequestError: names the field.
    """
    if parsed.forced:
        return {"lark": grammar(parsed, form)}
    options: dict[str, Any] = {}
    if parsed.strict and schema is None and not is_marked(form.begin):
        problem = f"cannot be kept for {parsed.strict}: the model's calls begin as any JSON does; set tool_choice"
        raise InvalidRequestError("tools", f"strict {problem}")
    if parsed.strict or schema is not None:
        options["lark"] = grammar(parsed, form, schema)
    if not parsed.parallel and any(character.isalnum() for character in form.end):
        options["stop"] = [form.end.strip()]  # a bracket alone would end any text, and lists among the arguments
    return options


def grammar(parsed: ParsedTools, form: ToolFormat, schema: Mapping[str, Any] | None = None) -> str:
    """A Lark grammar, in llguidance's syntax, of answers whose calls are of these tools with valid arguments: where
    tools are forced calls and nothing else; with a schema, calls or JSON of that schema; otherwise any text besides,
    for models that begin a call with a marker.
    """
    tools = [tool for tool in parsed.tools if not parsed.forced or tool.name in parsed.forced]
    begin, end = form.begin, _text(form.end)
    more = f"({_text(form.between)} call)*" if parsed.parallel and form.HasField("between") else ""
    if parsed.forced:
        lines = [f"start: {_text(begin)} call {more} {end}"]
    elif schema is not None:
        lines = [f"start: {_text(begin.lstrip())} call {more} {end} | answer"]
        lines.append(f"answer: %json {json.dumps({'x-guidance': _SPACING, **schema}, ensure_ascii=False)}")
    else:
        begin = begin.lstrip()
        marker = begin.rstrip()
        lines = [
            "start: marked_call* text",
            f"marked_call: marker {_text(begin[len(marker) :])} call {end}",
            f"marker[lazy]: TEXT {_text(marker)}",
            "text: TEXT",
            r"TEXT: /(.|\n)*/",
        ]
    lines.append(f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}")
    lines += [f"call_{at}: %json {_schema(tool, form)}" for at, tool in enumerate(tools)]
    return "\n".join(lines)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema(tool: Tool, form: ToolFormat) -> str:
    arguments = json.loads(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}
    arguments.setdefault("type", "object")
    schema = {
        "x-guidance": _SPACING,
        "type": "object",
        "properties": {form.name_key: {"const": tool.name}, form.arguments_key: _moved(arguments, form.arguments_key)},
        "required": [form.name_key, form.arguments_key],
        "additionalProperties": False,
    }
    return json.dumps(schema, ensure_ascii=False)


def _moved(schema: Any, key: str) -> Any:
    """A schema with its references changed for being the property `key` of another one, whose root they count from."""
    if isinstance(schema, list):
        return [_moved(part, key) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, key) for name, part in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = f"#/properties/{key}{target[1:]}"
    return moved
