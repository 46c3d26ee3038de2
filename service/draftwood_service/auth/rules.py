"""Which role each method requires.

A method with a tenant in its request also checks that, by `Principal.tenant_for`; GetMemoryStatistics without one, and
the methods of StatusService, show what the caller may see.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftwood_service.auth.principal import Role

_RULES: Mapping[str, Mapping[str, Role]] = {
    "draftwood.v1.GenerationService": {
        "Generate": Role.CALLER,
        "Tokenize": Role.CALLER,
        "Detokenize": Role.CALLER,
        "GetModelInfo": Role.CALLER,
    },
    "draftwood.v1.MemoryService": {
        "GetMemoryStatistics": Role.CALLER,
        "WarmMemory": Role.TENANT_ADMIN,
        "ExportMemory": Role.TENANT_ADMIN,
        "ImportMemory": Role.TENANT_ADMIN,
        "PurgeMemory": Role.TENANT_ADMIN,
        "ListOrphanedMemories": Role.OPERATOR,
        "PurgeOrphanedMemories": Role.OPERATOR,
    },
    "draftwood.admin.v1.AuditService": {
        "GetAuditReport": Role.OPERATOR,
    },
    "draftwood.admin.v1.StatusService": dict.fromkeys(("GetStatus", "WatchStatus"), Role.TENANT_ADMIN),
    "draftwood.admin.v1.TenantService": {
        "GetTenant": Role.TENANT_ADMIN,
        **dict.fromkeys(("ListTenants", "CreateTenant", "UpdateTenant", "DeleteTenant"), Role.OPERATOR),
    },
    "draftwood.admin.v1.ExperimentService": dict.fromkeys(
        (
            "GetExperiment",
            "ListExperiments",
            "CreateExperiment",
            "UpdateExperiment",
            "DeleteExperiment",
            "StartExperiment",
            "StopExperiment",
            "ConcludeExperiment",
            "GetExperimentReport",
        ),
        Role.OPERATOR,
    ),
}


def required_role(service: str, method: str) -> Role:
    """The least role for a method of a service, given by its full name.

    Raises:
        KeyError: there is no rule, so that the service cannot be served.
    """
    return _RULES[service][method]
