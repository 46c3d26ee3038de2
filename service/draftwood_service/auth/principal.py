"""The caller of a call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.auth.errors import PermissionDeniedError
from draftwood_tenants.identifiers import check_identifier

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
            check_identifier("tenant", self.tenant)
            if not self.tenant:
                raise InvalidInputError("tenant", "", "must not be empty")

    def require(self, role: Role, method: str) -> None:
        """Raises PermissionDeniedError without this role."""
        if self.role < role:
            raise PermissionDeniedError(f"{method} requires the role {role.label}", self.name)

    def tenant_for(self, named: str) -> str:
        """The tenant of a call whose message names `named`; "" means the caller's own.

        Raises:
            InvalidInputError: it is not a valid identifier.
            PermissionDeniedError: it is another than the caller's, who is no operator.
        """
        if not named:
            return self.tenant or DEFAULT_TENANT
        check_identifier("tenant", named)
        if named != self.tenant and self.role is not Role.OPERATOR:
            raise PermissionDeniedError("the credential is for another tenant than the request", self.name, named)
        return named


ANYONE = Principal("anyone", Role.OPERATOR)
"""Every caller in open mode."""
