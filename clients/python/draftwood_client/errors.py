"""The errors of the client.

DraftwoodError
├── ArgumentError                  an argument is invalid; nothing was sent
│   ├── ArgumentValueError         also a ValueError
│   └── ArgumentTypeError          also a TypeError
├── ClientClosedError              the client was closed before the request was made
└── StatusError                    the request ended with a status other than OK
    ├── InvalidRequestError        INVALID_ARGUMENT, OUT_OF_RANGE: see `violations`
    ├── UnauthenticatedError       UNAUTHENTICATED
    ├── PermissionDeniedError      PERMISSION_DENIED
    ├── NotFoundError              NOT_FOUND
    ├── AlreadyExistsError         ALREADY_EXISTS
    ├── AbortedError               ABORTED: the resource was changed meanwhile, or the client read too slowly
    ├── FailedPreconditionError    FAILED_PRECONDITION
    ├── ResourceExhaustedError     RESOURCE_EXHAUSTED: a message that is too large, a store that is full
    │   └── QuotaExceededError     a rate limit of the tenant is reached: see `retry_after`
    ├── UnavailableError           UNAVAILABLE: no server reached, or its queue is full; see `retry_after`
    ├── DeadlineError              DEADLINE_EXCEEDED
    ├── RequestCancelledError      CANCELLED
    ├── UnimplementedError         UNIMPLEMENTED: the server is older than the client, or not a Draftwood server
    └── InternalError              INTERNAL, UNKNOWN, DATA_LOSS
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc


class DraftwoodError(Exception):
    """Base class of all errors of this client."""


class ArgumentError(DraftwoodError):
    """An argument that cannot be encoded. Ranges are checked by the server.

    Attributes:
        argument: name of the argument, with the path inside it where there is one, such as "prompt[2].role".
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(argument, problem)
        self.argument = argument

    def __str__(self) -> str:
        return "{}: {}".format(*self.args)


class ArgumentValueError(ArgumentError, ValueError):
    """An argument with a wrong value."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument with a wrong type, or an unknown argument."""


class ClientClosedError(DraftwoodError):
    """The client was closed; create a new one."""

    def __init__(self, client: str) -> None:
        super().__init__(client)

    def __str__(self) -> str:
        return f"{self.args[0]} is closed"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One problem of a request.

    Attributes:
        field: path of the field in the request, such as "sampling.temperature"; for a quota, its subject; for a
            precondition, the resource that does not meet it.
        description: the problem, in words.
    """

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """A failed request; each field is an attribute of `StatusError` too.

    Attributes:
        code: the gRPC status.
        message: for people.
        reason: for programs, such as "QUEUE_FULL"; empty if the error is not from the server.
        metadata: details of the reason, by name.
        violations: problems of the request.
        retry_after: delay before a retry that the server sent, in seconds; None without one.
        retryable: whether the same request may succeed later.
        over_quota: whether `violations` are limits that are reached.
        request_id: as in the server's logs; empty if unknown.
        resource: the resource that the error is about, such as "tenants/acme"; empty if it is about none.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    retry_after: float | None = None
    retryable: bool = False
    over_quota: bool = False
    request_id: str = ""
    resource: str = ""


class StatusError(DraftwoodError):
    """The request ended with a status other than OK. Attributes: see `ErrorDetails`; `__cause__` is gRPC's error."""

    def __init__(self, details: ErrorDetails) -> None:
        super().__init__(details)
        self.code = details.code
        self.reason = details.reason
        self.metadata = details.metadata
        self.violations = details.violations
        self.retry_after = details.retry_after
        self.retryable = details.retryable
        self.over_quota = details.over_quota
        self.request_id = details.request_id
        self.resource = details.resource
        self._message = details.message

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        known = {"reason": self.reason, "request_id": self.request_id, "retry_after": self.retry_after}
        shown = "".join(f", {name}={value!r}" for name, value in known.items() if value not in ("", None))
        return f"{type(self).__name__}({self._message!r}, code={self.code.name}{shown})"


class InvalidRequestError(StatusError):
    """The request is invalid; `violations` contains the fields and the problems."""


class UnauthenticatedError(StatusError):
    """The token is missing or invalid."""


class PermissionDeniedError(StatusError):
    """The caller is known, but lacks the permission."""


class NotFoundError(StatusError):
    """The resource of the request does not exist."""


class AlreadyExistsError(StatusError):
    """The resource to create exists already."""


class AbortedError(StatusError):
    """The server aborted the request: the resource was changed meanwhile, or this client read too slowly."""


class FailedPreconditionError(StatusError):
    """The server is not in the state that the request needs."""


class ResourceExhaustedError(StatusError):
    """A quota is exhausted, or a message is too large."""


class QuotaExceededError(ResourceExhaustedError):
    """A rate limit of the tenant is reached; `violations` names it. Not retried by itself.

    The same request fits `retry_after` seconds later if no other is admitted until then; None if it never fits.
    """


class UnavailableError(StatusError):
    """No server could be reached, or its queue is full, after all retries."""


class DeadlineError(StatusError):
    """The answer was not complete in time, or the server predicted that it would not be."""


class RequestCancelledError(StatusError):
    """The request was cancelled, by `cancel()` or by the server."""


class UnimplementedError(StatusError):
    """The server does not have this method."""


class InternalError(StatusError):
    """The server failed, or broke the protocol."""


_BY_CODE: dict[grpc.StatusCode, type[StatusError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
}


def error_for(details: ErrorDetails) -> StatusError:
    """The error of the type that belongs to `details.code`."""
    kind = _BY_CODE.get(details.code, InternalError)
    return (QuotaExceededError if kind is ResourceExhaustedError and details.over_quota else kind)(details)
