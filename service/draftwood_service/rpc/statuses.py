"""The one table from exception to gRPC status."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from draftwood_memory.errors import MemoryPurgedError, StoreFullError, StoreRefusedError, StoreUnavailableError
from draftwood_model_runner.errors import (
    DeadlineError,
    EngineStoppedError,
    FormatsUnavailableError,
    InvalidValueError,
    ModelError,
)
from draftwood_service.auth.principal import (
    IssuerUnavailableError,
    OpenServerError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from draftwood_service.errors import (
    AbortedError,
    ClientDisconnectedError,
    ContextLengthError,
    DeadlineExceededError,
    LoadingError,
    MemoriesKeptError,
    ModelNotServedError,
    NotServedError,
    QueueFullError,
    ReaderStalledError,
    ShuttingDownError,
    TooManyWatchesError,
    TooMuchTextError,
    UnsupportedByEngineError,
    shortened,
)
from draftwood_service.quotas import QuotaExceededError
from draftwood_tenants.resources.store import (
    ConfigurationUnknownError,
    EtagError,
    PreconditionError,
    ResourceError,
    ResourceExistsError,
    ResourceMissingError,
)

ERROR_DOMAIN = "draftwood"
_MIN_DELAY = 0.01
"""Seconds: gRPC's C core, which Python and others use, loses a call that is to be retried after 0 ms."""

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


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
    AbortedError: Rule(grpc.StatusCode.CANCELLED, "CANCELLED"),
    NotServedError: Rule(grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED"),
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
    problem = f"{rule.subject}: {error}" if rule.subject else str(error)
    text = shortened(problem) if rule.message is None else rule.message
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
