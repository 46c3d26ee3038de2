"""What concluding an experiment does to the tenants in scope."""

from __future__ import annotations

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood.admin.v1 import tenants_pb2
from draftwood_model_runner.errors import InvalidInputError
from draftwood_tenants.catalog import Catalog, write_of
from draftwood_tenants.reading import PREFIX
from draftwood_tenants.resources.base import Write
from draftwood_tenants.resources.errors import PreconditionError

_NAMED = 5
"""Tenants that an error names."""


def tenant_writes(experiment: pb.Experiment, winner: str, keep_tenants: bool, catalog: Catalog) -> list[Write]:
    """The writes that make the winner's drafting that of the tenants in scope.

    Raises:
        InvalidInputError: there is no such arm.
        PreconditionError: a tenant is of the file, or the experiment is for all tenants.
    """
    arm = next((arm for arm in experiment.arms if arm.id == winner), None)
    if arm is None:
        known = ", ".join(arm.id for arm in experiment.arms)
        raise InvalidInputError("winner", winner, f"there is no such arm; there are: {known}")
    if keep_tenants:
        return []
    if not experiment.tenants:
        problem = "is for all tenants: set the servers' default (--strategy), and conclude with keep_tenants"
        raise PreconditionError(experiment.name, "TENANTS", problem)
    of_file = [tenant for tenant in experiment.tenants if tenant in catalog.file.tenants]
    if of_file:
        named = ", ".join(sorted(of_file)[:_NAMED]) + (", ..." if len(of_file) > _NAMED else "")
        problem = f"the tenants file defines {named}: change them there, and conclude with keep_tenants"
        raise PreconditionError(experiment.name, "TENANTS", problem)
    return [_write(tenant, arm.drafting, catalog.tenant_message(tenant)) for tenant in sorted({*experiment.tenants})]


def _write(tenant: str, drafting: tenants_pb2.DraftConfig, current: tenants_pb2.Tenant | None) -> Write:
    changed = tenants_pb2.Tenant(name=PREFIX + tenant, origin=tenants_pb2.RESOURCE_ORIGIN_API)
    changed.create_time.GetCurrentTime()
    if current is not None:
        changed.CopyFrom(current)
    changed.drafting.CopyFrom(drafting)
    return write_of(changed)
