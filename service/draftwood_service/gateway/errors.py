"""Errors as OpenAI's API shows them, with fields as its callers know them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import grpc

from draftwood_client import ArgumentError, DraftwoodError, StatusError

_NAMES = {
    # ours, or the client's argument: theirs
    "text": "prompt",
    "token_ids.ids": "prompt",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_kwargs": "chat_template_kwargs",
    "template_kwargs": "chat_template_kwargs",
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
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_OF_GRPC = {
    grpc.StatusCode.UNAVAILABLE: "the service cannot be reached; try again later",
    grpc.StatusCode.DEADLINE_EXCEEDED: "there was no complete answer in time",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the request is larger than the service accepts",
    grpc.StatusCode.CANCELLED: "the request was cancelled",
}
"""Messages for callers of gRPC's own errors, whose texts contain the service's address."""
_TOO_MANY_CALLS = "Concurrent RPC limit exceeded"
"""In gRPC's text of another RESOURCE_EXHAUSTED than for a message that is too large."""


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
    return begin + _INSIDE.sub(lambda field_inside: name_for_caller(field_inside[0], caller_names), text)


class InvalidRequestError(Exception):
    """A field is missing, wrong or not served."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


class UnknownModelError(Exception):
    """A model that is not served here.

    Args:
        models: those that are.
    """

    def __init__(self, model: str, models: Iterable[str]) -> None:
        super().__init__(f"model: there is no model {model[:200]!r}; there are {', '.join(models)}")


class InvalidCredentialError(Exception):
    """The authorization header is none of a key or token. The text says why, without its value."""


class ClientDisconnectedError(Exception):
    """The client closed its connection. Nobody gets this answer."""

    def __init__(self) -> None:
        super().__init__("the client left")


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, InvalidRequestError | ArgumentError):
        return 400
    if isinstance(error, InvalidCredentialError):
        return 401
    if isinstance(error, UnknownModelError):
        return 404
    if isinstance(error, ClientDisconnectedError):
        return 499
    if isinstance(error, StatusError):
        of_grpc = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not error.reason
        too_large = of_grpc and _TOO_MANY_CALLS not in str(error)
        return 413 if too_large else _STATUS.get(error.code, 500)
    return 500


def is_of_grpc(error: Exception) -> bool:
    """Whether it does not come from the service: its text is for operators."""
    return isinstance(error, StatusError) and not error.reason


def headers_of(error: Exception) -> dict[str, str]:
    """Retry-After, in whole seconds, where the server said when."""
    after = error.retry_after if isinstance(error, StatusError) else None
    return {} if after is None else {"retry-after": str(max(1, round(after)))}


def body_of(
    error: Exception, caller_names: Mapping[str, str] = MappingProxyType({}), model: str = ""
) -> dict[str, Any]:
    """`{"error": ...}` for an error.

    Args:
        caller_names: fields that the caller named in another way, see `ParsedRequest.caller_names`.
        model: whose service failed, if there are several.
    """
    status, field, code, text = status_of(error), None, None, str(error)
    if isinstance(error, InvalidRequestError):
        field = error.field
    elif isinstance(error, UnknownModelError):
        field, code = "model", "model_not_found"
    elif isinstance(error, ArgumentError):
        field = name_for_caller(error.argument, caller_names)
        text = in_callers_names(text, error.argument, caller_names)
    elif isinstance(error, StatusError):
        code = error.reason.lower() or error.code.name.lower()
        ours = error.violations[0].field if error.violations and status == 400 else ""
        field, text = name_for_caller(ours, caller_names) if ours else None, in_callers_names(text, ours, caller_names)
        if ours == "chat":
            text = "messages: the model has no chat template; use /v1/completions"
        if is_of_grpc(error):
            of_client = str(error).rpartition(": ")[2]  # the client's text, after the address
            text = _OF_GRPC.get(error.code, "the service failed")
            if of_client.startswith("no complete answer within"):
                text = of_client
            elif status == 429:
                text = "the service answers too many calls; try again later"
            text = f"model {model!r}: {text}" if model else text
    elif not isinstance(error, DraftwoodError | InvalidCredentialError):
        text = "internal error"
    return error_body(status, text, field, code)


def error_body(status: int, text: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`{"error": ...}`."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 499 else "server_error")
    return {"error": {"message": text, "type": kind, "param": field, "code": code}}


def of_tools(error: Exception, has_format: bool) -> Exception:
    """The error of a request with tools: what is wrong with the grammar that was made of them, as it is compiled or
    while an answer is held to it, is wrong with them, or with the schema in `response_format`."""
    wrong = error.violations[0] if isinstance(error, StatusError) and error.violations else None
    if wrong is not None and wrong.field.partition(".")[0] == "format":
        which = "or response_format have" if has_format else "have"
        problem = wrong.description.removeprefix(f"{wrong.field}: ")  # no field of the caller's
        return InvalidRequestError("tools", f"{which} a schema that answers cannot be kept to: {problem}")
    return error
