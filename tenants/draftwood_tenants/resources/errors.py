"""Why a resource cannot be read or changed. The service maps each to one gRPC status."""

from __future__ import annotations

from draftwood_errors import DraftwoodError


class ResourceError(DraftwoodError):
    """A resource cannot be read or changed.

    Attributes:
        name: of the resource, such as "tenants/acme".
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name[:100]}: {problem}")
        self.name = name


class ResourceExistsError(ResourceError):
    """There is a resource of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "exists already")


class ResourceMissingError(ResourceError):
    """There is no resource of this name."""

    def __init__(self, name: str, problem: str = "does not exist") -> None:
        super().__init__(name, problem)


class EtagError(ResourceError):
    """The resource has changed since the caller read it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "was changed by another call; read it again")


class PreconditionError(ResourceError):
    """The state of the resource, or of another, does not allow this.

    Attributes:
        kind: of the obstacle, for programs: "FILE", "STATE" or "TENANTS".
    """

    def __init__(self, name: str, kind: str, problem: str) -> None:
        super().__init__(name, problem)
        self.kind = kind


class DefinedInFileError(PreconditionError):
    """The servers' file defines the resource."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "FILE", "is defined in the servers' tenants file, and can only be changed there")


class ConfigurationUnknownError(ResourceError):
    """A tenant's configuration could not be read yet: what it allows is not known."""

    def __init__(self, tenant: str) -> None:
        super().__init__(f"tenants/{tenant}", "its configuration could not be read from the store yet; try again later")
