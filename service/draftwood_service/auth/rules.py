"""Which role each method requires.

A method with a tenant in its request also checks that, by `Principal.tenant_for`; GetMemoryStatistics without one, and
the methods of StatusService, show what the caller may see.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftwood_service.auth.principal import Role

_METHODS: Mapping[str, Mapping[Role, str]] = {
    "draftwood.v1.GenerationService": {Role.CALLER: "Generate Tokenize Detokenize GetModelInfo"},
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
