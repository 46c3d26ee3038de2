"""The service's own errors, and the one table from exception to gRPC status.

DraftwoodError
├── ContextLengthError      prompt and answer do not fit the model's context; an InvalidInputError
├── UnsupportedByEngineError  the engine of this server cannot do it; an InvalidInputError
├── QueueFullError          the limit of live requests is reached
├── QuotaExceededError      a tenant's rate limit is reached (draftwood_service.quotas)
├── TooMuchTextError        too many long texts wait to be read
├── TooManyWatchesError     the limit of open WatchStatus calls is reached
├── MemoriesKeptError       an experiment is deleted, and the memories of its arms are not
├── ModelNotServedError     the request names another model
├── LoadingError            the model is not loaded yet
├── ShuttingDownError       the service is stopping
├── DeadlineExceededError   the request's deadline has passed
├── ReaderStalledError      the client stopped reading its answer
└── ClientDisconnectedError the client ended the call
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from draftwood_memory.errors import MemoryPurgedError, StoreFullError, StoreRefusedError, StoreUnavailableError
from draftwood_model_runner.errors import (
    DeadlineError,
    DraftwoodError,
    EngineStoppedError,
    FormatsUnavailableError,
    InvalidInputError,
    InvalidValueError,
    ModelError,
)
from draftwood_service.auth.errors import (
    IssuerUnavailableError,
    OpenServerError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from draftwood_service.quotas import QuotaExceededError
from draftwood_tenants.resources.errors import (
    ConfigurationUnknownError,
    EtagError,
    PreconditionError,
    ResourceError,
    ResourceExistsError,
    ResourceMissingError,
)

ERROR_DOMAIN = "draftwood"
_MAX_BYTES = 500
_MIN_DELAY = 0.01
"""Seconds: gRPC's C core, which Python and others use, loses a call that is to be retried after 0 ms."""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


class ContextLengthError(InvalidInputError):
    """The prompt, or prompt and answer together, do not fit the model's context: a shorter prompt would.

    Callers' libraries, such as LiteLLM, know it by OpenAI's words for the limit, and fall back to another model.
    """

    def __init__(self, field: str, problem: str, max_context: int) -> None:
        super().__init__(field, None, f"{problem}; this model's maximum context length is {max_context} tokens")


class UnsupportedByEngineError(InvalidInputError):
    """A request asks for what the engine of this server cannot do.

    Args:
        field, value: of the request.
        engine: its name.
        allowed: what it can do instead, in words.
    """

    def __init__(self, field: str, value: object, engine: str, allowed: str) -> None:
        super().__init__(field, value, f"engine {engine} does not have it; {allowed}")


class QueueFullError(DraftwoodError):
    """The limit of live requests is reached.

    Attributes:
        retry_seconds: estimate of when a slot is free.
    """

    def __init__(self, limit: int, retry_seconds: float) -> None:
        super().__init__(f"{limit} requests are running or waiting, which is the limit; try again later")
        self.retry_seconds = retry_seconds


class TooMuchTextError(DraftwoodError):
    """Too many long texts wait to be tokenized, or grammars to be compiled."""

    def __init__(self, of_tenant: int) -> None:
        super().__init__(f"too many long texts wait to be read, {of_tenant} of this tenant; try again later")


class TooManyWatchesError(DraftwoodError):
    """The limit of open WatchStatus calls is reached."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} calls of WatchStatus are open for this tenant, which is the limit; end one of them")


class MemoriesKeptError(DraftwoodError):
    """An experiment is deleted, and the memories of its arms could not be purged."""

    def __init__(self, experiment: str, arms: Iterable[str], why: Exception) -> None:
        super().__init__(
            f"{experiment} is deleted, and the memories of its arms {', '.join(arms)} may be kept ({why}): nothing"
            " reads them, and they expire; to purge them, create it again with these arms, and delete it"
        )


class ModelNotServedError(DraftwoodError):
    """The request names another model than the one that is served."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(f"model: {shortened(model)!r} is not served here; this server has {served!r}")


class LoadingError(DraftwoodError):
    """The model is not loaded yet."""

    def __init__(self) -> None:
        super().__init__("the server is loading its model")


class ShuttingDownError(DraftwoodError):
    """The service is stopping; another replica may serve the request."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class DeadlineExceededError(DraftwoodError):
    """The request's deadline has passed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request did not end within its {seconds:.3g} s")


class ReaderStalledError(DraftwoodError):
    """The client stopped reading its answer, or sending its request."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the client read or sent nothing for {seconds:.3g} s")


class ClientDisconnectedError(DraftwoodError):
    """The client ended the call, or its connection broke. No status is sent."""

    def __init__(self) -> None:
        super().__init__("the client ended the call")


@dataclass(frozen=True, slots=True)
class Rule:
    """How an exception type is reported to clients.

    Attributes:
        reason: ErrorInfo.reason, for programs.
        message: for people; None sends the exception's own text.
        subject: what the exception's own text is about; comes before it.
        retry_seconds: RetryInfo's delay unless the error has its own; None sends no RetryInfo.
    """

    code: grpc.StatusCode
    reason: str
    message: str | None = None
    retry_seconds: float | None = None
    subject: str = ""


INTERNAL = Rule(grpc.StatusCode.INTERNAL, "INTERNAL", "internal error; the server logged it under the request id")

RULES: dict[type[BaseException], Rule] = {
    InvalidValueError: Rule(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_VALUE"),
    ContextLengthError: Rule(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED"),
    UnsupportedByEngineError: Rule(grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_BY_ENGINE"),
    UnauthenticatedError: Rule(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    PermissionDeniedError: Rule(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    OpenServerError: Rule(grpc.StatusCode.PERMISSION_DENIED, "AUTHENTICATION_OFF"),
    IssuerUnavailableError: Rule(grpc.StatusCode.UNAVAILABLE, "ISSUER_UNAVAILABLE", retry_seconds=5.0),
    ModelNotServedError: Rule(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    QueueFullError: Rule(grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL", retry_seconds=1.0),
    TooMuchTextError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MUCH_TEXT", retry_seconds=1.0),
    FormatsUnavailableError: Rule(grpc.StatusCode.UNAVAILABLE, "FORMATS_UNAVAILABLE", retry_seconds=1.0),
    TooManyWatchesError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES"),
    QuotaExceededError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", retry_seconds=1.0),
    LoadingError: Rule(grpc.StatusCode.UNAVAILABLE, "LOADING", retry_seconds=1.0),
    ShuttingDownError: Rule(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", retry_seconds=1.0),
    EngineStoppedError: Rule(
        grpc.StatusCode.UNAVAILABLE,
        "ENGINE_STOPPED",
        "the engine of this server has stopped; try again later",
        retry_seconds=5.0,
    ),
    DeadlineExceededError: Rule(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    DeadlineError: Rule(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    ReaderStalledError: Rule(grpc.StatusCode.ABORTED, "READER_STALLED"),
    ClientDisconnectedError: Rule(grpc.StatusCode.CANCELLED, "CANCELLED"),
    StoreUnavailableError: Rule(
        grpc.StatusCode.UNAVAILABLE,
        "STORE_UNAVAILABLE",
        retry_seconds=1.0,
        subject="the server runs, but the store of its memories and tenants is not available",
    ),
    StoreFullError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_FULL", subject="the server's store is full"),
    StoreRefusedError: Rule(
        grpc.StatusCode.FAILED_PRECONDITION, "STORE_REFUSED", subject="the server's store refuses the change"
    ),
    ResourceExistsError: Rule(grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"),
    ResourceMissingError: Rule(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
    EtagError: Rule(grpc.StatusCode.ABORTED, "ETAG_MISMATCH"),
    ConfigurationUnknownError: Rule(grpc.StatusCode.UNAVAILABLE, "CONFIGURATION_UNKNOWN", retry_seconds=1.0),
    PreconditionError: Rule(grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
    MemoriesKeptError: Rule(grpc.StatusCode.ABORTED, "MEMORIES_KEPT"),
    MemoryPurgedError: Rule(grpc.StatusCode.ABORTED, "MEMORY_PURGED"),
    ModelError: Rule(grpc.StatusCode.INTERNAL, "MODEL_FAILED", "the model failed in a step of this request"),
}


def rule_for(error: BaseException) -> Rule:
    """The rule of the error's type, or of its nearest base class with one; `INTERNAL` for all others."""
    return next((RULES[kind] for kind in type(error).__mro__ if kind in RULES), INTERNAL)


def shortened(text: str) -> str:
    """Cut to `_MAX_BYTES` of UTF-8, with "?" for what cannot be encoded. Status and details travel in headers, of which
    clients take up to 8 KiB: the message once, a byte beyond ASCII as three, and twice more in the details, in base64.
    """
    encoded = text.encode(errors="replace")
    whole = len(encoded) <= _MAX_BYTES
    return encoded.decode() if whole else encoded[: _MAX_BYTES - 3].decode(errors="ignore") + "..."


def _pushback(seconds: float, remaining: float | None) -> str:
    """When gRPC itself retries, in milliseconds: up to a quarter later than `seconds`, so that clients refused together
    do not return together; never ("-1") if the deadline comes first, so that the client gets this error.
    """
    delay = random.uniform(1.0, 1.25) * seconds
    return "-1" if remaining is not None and delay >= remaining else str(round(1000 * delay))


def to_status(
    error: BaseException, request_id: str, remaining: float | None = None
) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailing metadata with google.rpc details, as `context.abort` takes them.

    Args:
        remaining: seconds until the client's deadline; None without one.
    """
    rule = rule_for(error)
    own = f"{rule.subject}: {error}" if rule.subject else str(error)
    text = shortened(own) if rule.message is None else rule.message
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=rule.reason, domain=ERROR_DOMAIN, metadata={"request_id": request_id})
    ]
    pushback: Metadata = ()
    if isinstance(error, InvalidValueError):
        wrong = error_details_pb2.BadRequest.FieldViolation(field=shortened(error.field), description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[wrong]))
    if isinstance(error, QuotaExceededError):
        violation = error_details_pb2.QuotaFailure.Violation(subject=error.limit, description=text)
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if isinstance(error, ResourceError):
        name = shortened(error.name)
        details.append(error_details_pb2.ResourceInfo(resource_name=name, description=text))
        if isinstance(error, PreconditionError):
            failure = error_details_pb2.PreconditionFailure.Violation(type=error.kind, subject=name, description=text)
            details.append(error_details_pb2.PreconditionFailure(violations=[failure]))
    delay: float | None = getattr(error, "retry_seconds", rule.retry_seconds)
    if delay is not None:
        seconds = max(delay, _MIN_DELAY)
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(1000 * seconds))
        details.append(retry)
        pushback = (("grpc-retry-pushback-ms", _pushback(seconds, remaining)),)
    status = status_pb2.Status(code=rule.code.value[0], message=text)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailing = rpc_status.to_status(status).trailing_metadata or ()
    return rule.code, text, (*trailing, *pushback)
