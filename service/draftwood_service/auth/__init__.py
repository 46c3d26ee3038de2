"""Who calls, and what they may do: API keys, JSON web tokens and client certificates, each to one `Principal`.

Knows no gRPC: `draftwood_service.rpc.calls` takes credentials from calls and asks here.
"""

from draftwood_service.auth.authenticator import Authenticator, CertificateNames
from draftwood_service.auth.principal import (
    DEFAULT_TENANT,
    IssuerUnavailableError,
    OpenServerError,
    PermissionDeniedError,
    Principal,
    Role,
    UnauthenticatedError,
    required_role,
)

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
