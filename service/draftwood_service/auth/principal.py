"""Who calls, what each role may call, and why a call is refused.

DraftwoodError
├── UnauthenticatedError      the call has no valid credential
│   └── NoCredentialError     it has none
├── PermissionDeniedError     its credential does not allow what it asks for
│   └── OpenServerError       there are no credentials, and the call comes from another machine
└── IssuerUnavailableError    tokens cannot be verified, since the issuer's keys were never read
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from draftwood_model_runner.errors import DraftwoodError, InvalidInputError
from draftwood_tenants.reading import check_tenant

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


DEFAULT_TENANT = "default"
"""The tenant of calls that name none, of callers who have none."""


class Role(IntEnum):
    """What a caller may do; each role may do all that those before it may."""

    CALLER = 1
    """Generate, and read the statistics of its own tenant."""
    TENANT_ADMIN = 2
    """Also fill, export, import and purge the memory of its own tenant."""
    OPERATOR = 3
    """Everything, for every tenant."""

    @property
    def label(self) -> str:
        """As settings, key files and tokens name it: "caller", "tenant-admin" or "operator"."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def of(cls, label: str) -> Role | None:
        """The role of this label; None if there is none."""
        return _BY_LABEL.get(label)


_BY_LABEL = {role.label: role for role in Role}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: made once for each call, from its credential alone.

    Attributes:
        name: for logs: "key:ID", "token:SUBJECT", "certificate:NAME", or "anyone" in open mode.
        tenant: None only for operators.
    """

    name: str
    role: Role
    tenant: str | None = None

    def __post_init__(self) -> None:
        if self.tenant is None and self.role is not Role.OPERATOR:
            raise InvalidInputError("tenant", None, f"must be set for the role {self.role.label}")
        if self.tenant is not None:
            check_tenant("tenant", self.tenant)

    def require(self, role: Role, method: str) -> None:
        """Raises PermissionDeniedError without this role."""
        if self.role < role:
            raise PermissionDeniedError(f"{method} requires the role {role.label}", self.name)

    def tenant_for(self, named: str) -> str:
        """The tenant of a call whose message names `named`; "" means the caller's own.

        Raises:
            InvalidInputError: it is not the id of a tenant.
            PermissionDeniedError: it is another than the caller's, who is no operator.
        """
        if not named:
            return self.tenant or DEFAULT_TENANT
        check_tenant("tenant", named)
        if named != self.tenant and self.role is not Role.OPERATOR:
            raise PermissionDeniedError("the credential is for another tenant than the request", self.name, named)
        return named


ANYONE = Principal("anyone", Role.OPERATOR)
"""Every caller in open mode."""


_METHODS: Mapping[str, Mapping[Role, str]] = {
    "draftwood.v1.GenerationService": {Role.CALLER: "Generate GenerateStream Tokenize Detokenize GetModelInfo"},
    "vllm.grpc.engine.VllmEngine": {
        Role.CALLER: "Generate Abort HealthCheck GetModelInfo GetServerInfo GetTokenizer Embed",
        Role.OPERATOR: "GetLoads FlushCache StartProfile StopProfile SubscribeKvEvents",
    },
    "draftwood.v1.MemoryService": {
        Role.CALLER: "GetMemoryStatistics",
        Role.TENANT_ADMIN: "WarmMemory ExportMemory ImportMemory PurgeMemory",
        Role.OPERATOR: "ListOrphanedMemories PurgeOrphanedMemories",
    },
    "draftwood.admin.v1.AuditService": {Role.OPERATOR: "GetAuditReport"},
    "draftwood.admin.v1.StatusService": {Role.TENANT_ADMIN: "GetStatus WatchStatus"},
    "draftwood.admin.v1.TenantService": {
        Role.TENANT_ADMIN: "GetTenant",
        Role.OPERATOR: "ListTenants CreateTenant UpdateTenant DeleteTenant",
    },
    "draftwood.admin.v1.ExperimentService": {
        Role.OPERATOR: "GetExperiment ListExperiments CreateExperiment UpdateExperiment DeleteExperiment"
        " StartExperiment StopExperiment ConcludeExperiment GetExperimentReport",
    },
}
_RULES = {
    (service, method): role
    for service, by_role in _METHODS.items()
    for role, methods in by_role.items()
    for method in methods.split()
}


def required_role(service: str, method: str) -> Role:
    """The least role for a method of a service, given by its full name.

    Raises:
        KeyError: there is no rule, so that the service cannot be served.
    """
    return _RULES[service, method]
