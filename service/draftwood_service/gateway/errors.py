"""Errors as OpenAI's API shows them."""

from __future__ import annotations

from typing import Any

import grpc

from draftwood_client import ArgumentError, DraftwoodError, StatusError
from draftwood_model_runner.errors import DraftwoodError as OwnError

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {413: "invalid_request_error", 429: "rate_limit_error"}
_FIELDS = {
    "sampling.": "", "stop.max_tokens": "max_tokens", "stop.strings": "stop", "stop.min_tokens": "min_tokens",
    "format.json_schema": "response_format.json_schema", "output.top_logprobs": "top_logprobs", "chat.": "",
    "drafting.": "draftwood.",
}  # fmt: skip
"""Names of our request as those of OpenAI's."""


class InvalidRequestError(OwnError):
    """A field is missing, wrong or not served."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class UnknownModelError(InvalidRequestError):
    """A model that is not served."""

    def __init__(self, model: str) -> None:
        super().__init__("model", f"there is no model {model[:200]!r}")


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, UnknownModelError):
        return 404
    if isinstance(error, InvalidRequestError | ArgumentError):
        return 400
    if isinstance(error, StatusError):
        return _STATUS.get(error.code, 500)
    return 500


def headers_of(error: Exception) -> dict[str, str]:
    """Retry-After, in whole seconds, where the server said when."""
    after = error.retry_after if isinstance(error, StatusError) else None
    return {} if after is None else {"retry-after": str(max(1, round(after)))}


def body_of(error: Exception) -> dict[str, Any]:
    """`{"error": ...}` for an error."""
    status, field, code, text = status_of(error), None, None, str(error)
    if isinstance(error, InvalidRequestError):
        field = error.field
    elif isinstance(error, ArgumentError):
        field = error.argument
    elif isinstance(error, StatusError):
        code = error.reason.lower() or error.code.name.lower()
        if error.violations and status == 400:
            field = _named(error.violations[0].field)
    elif not isinstance(error, DraftwoodError):
        text = "internal error"
    return {"error": {"message": text, "type": _TYPES.get(status, "server_error"), "param": field, "code": code}}


def of_tools(error: Exception) -> Exception:
    """The error of a request with tools: what is wrong with the grammar that was made of them is wrong with them."""
    wrong = error.violations[0] if isinstance(error, StatusError) and error.violations else None
    if wrong is not None and wrong.field.startswith("format."):
        return InvalidRequestError("tools", f"have a schema that calls cannot be kept to: {wrong.description}")
    return error


def _named(field: str) -> str:
    for ours, theirs in _FIELDS.items():
        if field.startswith(ours):
            return theirs + field[len(ours) :]
    return field
