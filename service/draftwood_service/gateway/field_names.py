"""Names of fields: those of our own requests as callers of OpenAI's API know them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAMES = {
    # ours, or the client's argument: theirs
    "text": "prompt",
    "token_ids.ids": "prompt",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat": "messages",
    "sampling": "",
    "stop.strings": "stop",
    "stop.token_ids": "stop_token_ids",
    "stop.max_tokens": "max_tokens",
    "stop.min_tokens": "min_tokens",
    "stop.ignore_eos": "ignore_eos",
    "format.json_schema": "response_format.json_schema",
    "format.regex": "response_format.pattern",
    "format.lark": "response_format.grammar",
    "format": "response_format",
    "json_schema": "response_format.json_schema",
    "regex": "response_format.pattern",
    "lark": "response_format.grammar",
    "output.top_logprobs": "top_logprobs",
    "output": "draftwood",
    "drafting.max_nodes": "draftwood.max_draft_nodes",
    "drafting.enabled": "draftwood.drafting",
    "drafting.": "draftwood.",
} | {name: f"draftwood.{name}" for name in ("drafting", "learn", "strategy", "max_draft_nodes", "tenant", "session")}
_INSIDE = re.compile(r"\b(?:sampling|stop|format|output|drafting|chat)\.[a-z_]+")
"""A field in the middle of a text."""


_OF_FUNCTION = re.compile(r"\b(tools|tool_calls)(\[\d+\]\.)(?=name|description|parameters|arguments)")
"""Fields that callers of OpenAI's API nest under `function`."""


def name_for_caller(field: str, caller_names: Mapping[str, str]) -> str:
    """A field as callers know it.

    Args:
        caller_names: names that this caller uses for other ones.
    """
    field = _OF_FUNCTION.sub(r"\1\2function.", field).replace(".tool_name", ".name")
    for ours, theirs in _NAMES.items():
        rest = field[len(ours) :]
        if field.startswith(ours) and (not rest or ours.endswith(".") or rest[0] in ".["):
            field = theirs + rest if theirs else rest.removeprefix(".")
            break
    for usual, used in caller_names.items():
        rest = field[len(usual) :]
        if field.startswith(usual) and (not rest or rest[0] in ".["):
            return used + rest
    return field


def in_callers_names(text: str, field: str, caller_names: Mapping[str, str]) -> str:
    """The text of an error with fields as callers know them; it begins with `field`, if with any."""
    begin = ""
    if field and text.startswith(field):
        begin, text = name_for_caller(field, caller_names), text[len(field) :]
    return begin + _INSIDE.sub(lambda found: name_for_caller(found[0], caller_names), text)
