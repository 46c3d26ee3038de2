"""From a gRPC call to its principal; and the log of calls that are refused."""

from __future__ import annotations

import time
from typing import Any

import grpc
import structlog

from draftwood_service.auth import (
    Authenticator,
    CertificateNames,
    OpenServerError,
    PermissionDeniedError,
    Principal,
    Role,
    UnauthenticatedError,
)
from draftwood_service.authorization import GATEWAY_HOST, bearer_of

_audit = structlog.get_logger("draftwood.audit")

_LINES_A_SECOND = 10
"""Log lines for each kind of refusal, so that nobody fills the log."""


class Gate:
    """Admits calls whose caller may make them.

    Attributes:
        unauthenticated, denied: the calls that were refused for their credential, and for what it does not allow.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self.unauthenticated = _Refusals("authentication failed")
        self.denied = _Refusals("permission denied")

    async def admit(self, context: grpc.aio.ServicerContext[Any, Any], method: str, role: Role) -> Principal:
        """The caller of a call.

        Raises:
            UnauthenticatedError: the call has no valid credential.
            PermissionDeniedError: the caller lacks the role, or the call comes from another machine than those that the
                server is for.
            IssuerUnavailableError: its token cannot be verified now.
        """
        authenticator = self._authenticator
        if authenticator.is_for_this_machine and (gateways := _headers(context, GATEWAY_HOST)):
            raise OpenServerError(gateways[0])
        bearer = None if authenticator.is_open else _bearer(context)
        certificate = _certificate(context) if bearer is None and authenticator.uses_certificates else None
        principal = await authenticator.principal(bearer, certificate)
        principal.require(role, method)
        return principal

    def note(self, error: Exception, context: grpc.aio.ServicerContext[Any, Any], method: str, request_id: str) -> None:
        """Counts and logs the error of a call if it is a refusal."""
        call = {"method": method, "peer": context.peer(), "request_id": request_id}
        if isinstance(error, UnauthenticatedError):
            self.unauthenticated.add(cause=error.cause, **call)
        elif isinstance(error, PermissionDeniedError):
            self.denied.add(principal=error.principal, tenant=error.tenant, **call)


class _Refusals:
    """A counter of refused calls that logs some of them."""

    def __init__(self, event: str) -> None:
        self.total = 0
        self._event = event
        self._second = 0
        self._logged_in_second = 0
        self._unlogged = 0

    def add(self, **fields: str | None) -> None:
        self.total += 1
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._logged_in_second = second, 0
        if self._logged_in_second == _LINES_A_SECOND:
            self._unlogged += 1
            return
        self._logged_in_second += 1
        _audit.warning(self._event, **fields, total=self.total, unlogged_before=self._unlogged)
        self._unlogged = 0


def _bearer(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """The API key or token of a call; None without an authorization header.

    Raises:
        UnauthenticatedError: there are several headers, or one of another scheme.
    """
    try:
        return bearer_of(_headers(context, "authorization"))
    except ValueError as error:
        raise UnauthenticatedError("not one authorization header of the scheme Bearer", str(error)) from None


def _headers(context: grpc.aio.ServicerContext[Any, Any], name: str) -> list[str]:
    return [str(value) for key, value in context.invocation_metadata() or () if key == name]


def _certificate(context: grpc.aio.ServicerContext[Any, Any]) -> CertificateNames | None:
    """The names of the client's certificate; None without one."""
    names = context.auth_context()
    alternative = names.get("x509_subject_alternative_name", ())
    common = names.get("x509_common_name", ())
    if not (alternative or common):
        return None
    return CertificateNames(*(tuple(name.decode(errors="replace") for name in some) for some in (alternative, common)))
