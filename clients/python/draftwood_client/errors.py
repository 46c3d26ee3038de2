"""What can go wrong, as types. Knows gRPC statuses; nothing of channels or retries.

DraftwoodError
├── ArgumentError                  an argument that cannot be sent; raised before anything is
│   ├── ArgumentValueError         also a ValueError
│   └── ArgumentTypeError          also a TypeError
├── ClientClosedError              the client was closed before the request was made
└── StatusError                    the request ended with a status other than OK
    ├── InvalidRequestError        INVALID_ARGUMENT, OUT_OF_RANGE: see `violations`
    ├── UnauthenticatedError       UNAUTHENTICATED
    ├── PermissionDeniedError      PERMISSION_DENIED
    ├── NotFoundError              NOT_FOUND
    ├── AlreadyExistsError         ALREADY_EXISTS
    ├── AbortedError               ABORTED: somebody else changed it meanwhile, or the reader was too slow
    ├── FailedPreconditionError    FAILED_PRECONDITION
    ├── ResourceExhaustedError     RESOURCE_EXHAUSTED: a quota, or a message that is too large
    ├── UnavailableError           UNAVAILABLE: no server there, or one that is full; see `retry_after`
    ├── DeadlineError              DEADLINE_EXCEEDED
    ├── RequestCancelledError      CANCELLED
    ├── UnimplementedError         UNIMPLEMENTED: the server is older than the client, or another service
    └── InternalError              INTERNAL, UNKNOWN, DATA_LOSS
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc


class DraftwoodError(Exception):
    """Any error that this client raises on purpose."""


class ArgumentError(DraftwoodError):
    """An argument that cannot be sent. The server checks ranges; the client checks what it could not even encode.

    Attributes:
        argument: its name, with the place inside it where that helps, such as "prompt[2].role".
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(argument, problem)
        self.argument = argument

    def __str__(self) -> str:
        return "{}: {}".format(*self.args)


class ArgumentValueError(ArgumentError, ValueError):
    """The type is right and the value is not."""


class ArgumentTypeError(ArgumentError, TypeError):
    """The type is wrong, or no argument has this name."""


class ClientClosedError(DraftwoodError):
    """The client was closed; make a new one."""

    def __init__(self, client: str) -> None:
        super().__init__(client)

    def __str__(self) -> str:
        return f"{self.args[0]} is closed"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One thing that is wrong with a request.

    Attributes:
        field: the field's path in the request, such as "sampling.temperature"; the subject where a quota is exceeded.
        description: what is wrong with it.
    """

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """All that is known of a request that failed; each is an attribute of `StatusError` too.

    Attributes:
        code: the gRPC status.
        message: for people.
        reason: for programs, such as "QUEUE_FULL"; empty where the server gave none, as when there is no server.
        metadata: what belongs to the reason, by name.
        violations: what is wrong with the request.
        retry_after: seconds after which the server wants to see the request again, where it said so.
        retryable: whether the same request may well succeed later.
        request_id: as the server's logs have it; empty where neither side named the request.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    retry_after: float | None = None
    retryable: bool = False
    request_id: str = ""


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
        self.request_id = details.request_id
        self._message = details.message

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        known = {"reason": self.reason, "request_id": self.request_id, "retry_after": self.retry_after}
        shown = "".join(f", {name}={value!r}" for name, value in known.items() if value not in ("", None))
        return f"{type(self).__name__}({self._message!r}, code={self.code.name}{shown})"


class InvalidRequestError(StatusError):
    """The server does not accept the request as it is; `violations` says which fields and why."""


class UnauthenticatedError(StatusError):
    """The token is missing, or not valid."""


class PermissionDeniedError(StatusError):
    """The caller is known and may not do this."""


class NotFoundError(StatusError):
    """What the request names does not exist."""


class AlreadyExistsError(StatusError):
    """What the request wants to create exists."""


class AbortedError(StatusError):
    """The server gave the request up: somebody else changed the resource, or this client read too slowly."""


class FailedPreconditionError(StatusError):
    """The server is not in the state that the request needs."""


class ResourceExhaustedError(StatusError):
    """A quota is used up, or a message is too large."""


class UnavailableError(StatusError):
    """No server could be reached, or it takes no more requests now; the retries are spent."""


class DeadlineError(StatusError):
    """The answer was not complete in time, or the server saw that it would not be."""


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
    return _BY_CODE.get(details.code, InternalError)(details)
