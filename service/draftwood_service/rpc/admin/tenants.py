"""TenantService."""

from __future__ import annotations

from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.rpc.admin.resources import Resources, apply_mask, change_audited
from draftwood_service.rpc.calls import Call
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.identifiers import check_identifier
from draftwood_tenants.reading import PREFIX, ServerLimits, read_tenant, tenant_of, under
from draftwood_tenants.resources.base import TENANTS
from draftwood_tenants.resources.follower import ResourceFollower


class TenantServicer:
    """The methods of TenantService."""

    def __init__(self, stored: ResourceFollower, catalog: Catalog, limits: ServerLimits) -> None:
        missing = "has no configuration; the servers' settings apply"
        self._tenants = Resources(TENANTS, pb.Tenant, stored, catalog, catalog.tenant_message, missing)
        self._limits = limits

    async def get_tenant(self, request: pb.GetTenantRequest, call: Call) -> pb.Tenant:
        return await self._tenants.get(call.principal.tenant_for(tenant_of("name", request.name)))

    async def list_tenants(self, request: pb.ListTenantsRequest, call: Call) -> pb.ListTenantsResponse:
        page, following = await self._tenants.page(request.page_size, request.page_token)
        return pb.ListTenantsResponse(tenants=page, next_page_token=following)

    async def create_tenant(self, request: pb.CreateTenantRequest, call: Call) -> pb.Tenant:
        tenant = check_identifier("tenant_id", request.tenant_id)
        if not tenant:
            raise InvalidInputError("tenant_id", None, "must be set")
        if request.tenant.name not in ("", PREFIX + tenant):
            raise InvalidInputError("tenant.name", request.tenant.name, "must be empty or that of tenant_id")
        with change_audited("create", PREFIX + tenant, call):
            return await self._tenants.create(
                tenant, lambda made: self._apply(made, request.tenant, FieldMask()), request.validate_only
            )

    async def update_tenant(self, request: pb.UpdateTenantRequest, call: Call) -> pb.Tenant:
        given = request.tenant
        tenant = tenant_of("tenant.name", given.name)
        with change_audited("update", given.name, call):
            return await self._tenants.change(
                tenant,
                given.etag,
                request.validate_only,
                lambda changed: self._apply(changed, given, request.update_mask),
                allow_missing=request.allow_missing,
            )

    async def delete_tenant(self, request: pb.DeleteTenantRequest, call: Call) -> Empty:
        tenant = tenant_of("name", request.name)
        with change_audited("delete", request.name, call):
            current = await self._tenants.changeable(tenant, request.etag, request.allow_missing)
            if current is not None and not request.validate_only:
                await self._tenants.delete(current)
            return Empty()

    def _apply(self, changed: pb.Tenant, given: pb.Tenant, mask: FieldMask) -> None:
        """Raises InvalidValueError."""
        apply_mask(changed, given, mask)
        with under("tenant"):
            read_tenant(changed, self._limits)
