"""Who calls, and what they may do: API keys, JSON web tokens and client certificates, each to one `Principal`.

Knows no gRPC: `draftwood_service.rpc.access` takes credentials from calls and asks here.
"""

from draftwood_service.auth.authenticator import Authenticator, CertificateNames
from draftwood_service.auth.errors import (
    IssuerUnavailableError,
    OpenServerError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from draftwood_service.auth.principal import DEFAULT_TENANT, Principal, Role
from draftwood_service.auth.rules import required_role

__all__ = [
    "DEFAULT_TENANT",
    "Authenticator",
    "CertificateNames",
    "IssuerUnavailableError",
    "OpenServerError",
    "PermissionDeniedError",
    "Principal",
    "Role",
    "UnauthenticatedError",
    "required_role",
]
