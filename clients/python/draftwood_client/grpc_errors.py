"""Converts gRPC's errors, blocking or asyncio, to this client's. Decodes the google.rpc details of the server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from draftwood_client.errors import ErrorDetails, FieldViolation, StatusError, error_for
from draftwood_client.target import unreachable

DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"

_TOO_LARGE = re.compile(r"(SERVER|CLIENT): Received message larger than max \((\d+) vs\. (\d+)\)\)?$")
_RAISE = "raise it by channel_options={'grpc.max_receive_message_length': ...}"

Trailer = Iterable[tuple[str, str | bytes]]


def status_error(
    error: grpc.RpcError, *, target: str, tls: bool = False, timeout: float | None = None, request_id: str = ""
) -> StatusError:
    """The typed form of `error`, with `error` as its cause.

    Args:
        error: as raised by a stub, sync or async.
        target: address of the server; added to messages of gRPC itself, which lack it.
        tls: whether the client uses TLS.
        timeout: deadline set by the caller, in seconds.
        request_id: used if the server's details contain none.
    """
    trailer: Trailer = tuple(error.trailing_metadata() or ())  # type: ignore[arg-type]  # typed as unnamed pairs
    details = _details(error.code(), error.details() or "", trailer)
    if not details.reason:
        details = replace(details, message=_message_of_grpc(details, target, tls, timeout))
    if not details.request_id:
        details = replace(details, request_id=request_id)
    typed = error_for(details)
    typed.__cause__ = error
    return typed


def protocol_error(message: str, request_id: str = "") -> StatusError:
    """The response violates the protocol."""
    return error_for(ErrorDetails(grpc.StatusCode.INTERNAL, message, request_id=request_id))


def cancelled_error(request_id: str = "") -> StatusError:
    """The client cancelled the request while no RPC was under way."""
    return error_for(ErrorDetails(grpc.StatusCode.CANCELLED, "the request was cancelled", request_id=request_id))


def not_ready_error(target: str, timeout: float | None, last: StatusError) -> StatusError:
    """The server was not reachable or not ready within `timeout` seconds; `last` is the error of the last attempt."""
    limit = "in time" if timeout is None else f"within {timeout:g} s"
    error = error_for(ErrorDetails(grpc.StatusCode.DEADLINE_EXCEEDED, f"{target} was not ready {limit}: {last}"))
    error.__cause__ = last
    return error


def _message_of_grpc(details: ErrorDetails, target: str, tls: bool, timeout: float | None) -> str:
    if details.code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout is not None:
        return f"{target}: no complete answer within {timeout:g} s"
    if details.code is grpc.StatusCode.CANCELLED and details.message.startswith("Locally cancelled"):
        return "the request was cancelled"
    if details.message == "Method not found!":
        return f"{target} is no Draftwood server, or an older one that lacks this method (gRPC: {details.message})"
    if too_large := _TOO_LARGE.search(details.message):
        side, size, limit = too_large.groups()
        if side == "SERVER":
            return f"{target}: the request has {size} bytes, and the server takes at most {limit}"
        return f"{target}: the answer has {size} bytes, and this client takes at most {limit}; {_RAISE}"
    if details.code is grpc.StatusCode.UNAVAILABLE and "backend unhealthy" in details.message:
        return f"no server of {target} is ready"
    if details.code is grpc.StatusCode.UNAVAILABLE:
        return unreachable(target, tls, details.message)
    return f"{target}: {details.message or details.code.name}"


def _details(code: grpc.StatusCode, message: str, trailer: Trailer) -> ErrorDetails:
    values = dict(trailer)
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    quota = error_details_pb2.QuotaFailure()
    request = error_details_pb2.RequestInfo()
    precondition = error_details_pb2.PreconditionFailure()
    resource = error_details_pb2.ResourceInfo()
    _unpack(values.get(DETAILS_KEY), info, retry, bad_request, quota, request, precondition, resource)
    pushback, may_retry = _pushback(values.get(PUSHBACK_KEY))
    retry_info = retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None
    return ErrorDetails(
        code=code,
        message=message,
        reason=info.reason,
        metadata=dict(info.metadata),
        violations=tuple(
            [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
            + [FieldViolation(v.subject, v.description) for v in (*quota.violations, *precondition.violations)]
        ),
        retry_after=retry_info if pushback is None else pushback,
        retryable=(code is grpc.StatusCode.UNAVAILABLE and (may_retry or retry_info is not None))
        or bool(quota.violations and retry_info is not None),
        over_quota=bool(quota.violations),
        request_id=request.request_id or info.metadata.get("request_id", ""),
        resource=resource.resource_name,
    )


def _unpack(encoded: str | bytes | None, *messages: Message) -> None:
    """Fills each of `messages` from the detail of its type. Details that cannot be decoded are ignored."""
    status = status_pb2.Status()
    try:
        status.ParseFromString(encoded if isinstance(encoded, bytes) else b"")
        for detail in status.details:
            for message in messages:
                detail.Unpack(message)
    except DecodeError:
        return


def _pushback(value: str | bytes | None) -> tuple[float | None, bool]:
    """Seconds to wait before a retry, and whether to retry at all: a negative or unreadable value forbids it."""
    if value is None:
        return None, True
    try:
        milliseconds = int(value)
    except ValueError:
        return None, False
    return (milliseconds / 1000, True) if milliseconds >= 0 else (None, False)
