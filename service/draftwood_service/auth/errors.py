"""Why a call is refused.

DraftwoodError
├── UnauthenticatedError      the call has no valid credential
│   └── NoCredentialError     it has none
├── PermissionDeniedError     its credential does not allow what it asks for
│   └── OpenServerError       there are no credentials, and the call comes from another machine
└── IssuerUnavailableError    tokens cannot be verified, since the issuer's keys were never read
"""

from __future__ import annotations

from draftwood_model_runner.errors import DraftwoodError

_NOT_VALID = (
    "the call has no valid credential: its API key or token (as 'authorization: Bearer ...'), or client certificate, is"
    " unknown, revoked or expired"
)
_NONE = "the call has no credential: send an API key or a token as 'authorization: Bearer ...', or a client certificate"


class UnauthenticatedError(DraftwoodError):
    """The call has no valid credential. The text says whether it has one at all, and is the same for all other causes:
    it is no hint to who guesses one.

    Attributes:
        cause: for the server's log.
    """

    def __init__(self, cause: str, text: str = _NOT_VALID) -> None:
        super().__init__(text)
        self.cause = cause


class NoCredentialError(UnauthenticatedError):
    """The call has no credential."""

    def __init__(self) -> None:
        super().__init__("no credential", _NONE)


class PermissionDeniedError(DraftwoodError):
    """The credential is valid, and does not allow the call.

    Attributes:
        principal: name of the caller, for the server's log.
        tenant: that the caller named; None if the method is refused whatever the tenant.
    """

    def __init__(self, problem: str, principal: str, tenant: str | None = None) -> None:
        super().__init__(problem)
        self.principal = principal
        self.tenant = tenant


class OpenServerError(PermissionDeniedError):
    """The server has no credentials, since only its machine reaches it, and a gateway lets other machines call."""

    def __init__(self, gateway_host: str) -> None:
        super().__init__(
            "the server asks nobody for a credential, and whoever reaches the gateway on"
            f" {gateway_host[:100]} would call as its operator: give the server credentials (--auth-file, --jwt-jwks),"
            " allow it there with --auth open, or let the gateway listen on 127.0.0.1",
            "anyone",
        )


class IssuerUnavailableError(DraftwoodError):
    """Tokens cannot be verified, since no current keys of the issuer could be read."""

    def __init__(self) -> None:
        super().__init__("tokens cannot be verified at the moment; try again later")
