"""TenantService."""

from __future__ import annotations

from google.protobuf.empty_pb2 import Empty

from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.rpc.admin.messages import apply_mask, change_audited, page_of, require_etag
from draftwood_service.rpc.calls import Call
from draftwood_tenants.catalog import Catalog, write_of
from draftwood_tenants.identifiers import check_identifier
from draftwood_tenants.reading import PREFIX, ServerLimits, read_tenant, tenant_of, under
from draftwood_tenants.resources.base import TENANTS, ConflictError, Write
from draftwood_tenants.resources.errors import EtagError, OfFileError, ResourceExistsError, ResourceMissingError
from draftwood_tenants.resources.follower import ResourceFollower

_TRIES = 8
_NOT_CONFIGURED = "has no configuration; the servers' settings apply"


class TenantServicer:
    """The methods of TenantService, for `calls.handlers`."""

    def __init__(self, stored: ResourceFollower, catalog: Catalog, limits: ServerLimits) -> None:
        self._stored = stored
        self._catalog = catalog
        self._limits = limits

    async def get_tenant(self, request: pb.GetTenantRequest, call: Call) -> pb.Tenant:
        tenant = call.principal.tenant_for(tenant_of("name", request.name))
        await self._stored.refresh()
        found = self._catalog.tenant_message(tenant)
        if found is None:
            raise ResourceMissingError(request.name, _NOT_CONFIGURED)
        return found

    async def list_tenants(self, request: pb.ListTenantsRequest, call: Call) -> pb.ListTenantsResponse:
        await self._stored.refresh()
        page, following = page_of(self._catalog.names(TENANTS), request.page_size, request.page_token)
        found = filter(None, map(self._catalog.tenant_message, page))
        return pb.ListTenantsResponse(tenants=found, next_page_token=following)

    async def create_tenant(self, request: pb.CreateTenantRequest, call: Call) -> pb.Tenant:
        tenant = check_identifier("tenant_id", request.tenant_id)
        if not tenant:
            raise InvalidInputError("tenant_id", None, "must be set")
        if request.tenant.name not in ("", PREFIX + tenant):
            raise InvalidInputError("tenant.name", request.tenant.name, "must be empty or that of tenant_id")
        with change_audited("create", PREFIX + tenant, call):
            await self._stored.refresh()
            if self._catalog.tenant_message(tenant) is not None:
                raise ResourceExistsError(PREFIX + tenant)
            try:
                return await self._put(tenant, request.tenant, None, request.validate_only)
            except ConflictError:
                raise ResourceExistsError(PREFIX + tenant) from None

    async def update_tenant(self, request: pb.UpdateTenantRequest, call: Call) -> pb.Tenant:
        given, name = request.tenant, request.tenant.name
        tenant = tenant_of("tenant.name", name)
        with change_audited("update", name, call):
            for _ in range(_TRIES):
                current = await self._changeable(tenant)
                if current is None and not request.allow_missing:
                    raise ResourceMissingError(name, _NOT_CONFIGURED)
                require_etag(name, given.etag, current.etag if current else "")
                changed = pb.Tenant()
                if current is not None:
                    changed.CopyFrom(current)
                apply_mask(changed, given, request.update_mask)
                try:
                    return await self._put(tenant, changed, current, request.validate_only)
                except ConflictError:
                    continue  # without an etag the fields of the mask are written over whatever is there
            raise EtagError(name)

    async def delete_tenant(self, request: pb.DeleteTenantRequest, call: Call) -> Empty:
        tenant = tenant_of("name", request.name)
        with change_audited("delete", request.name, call):
            current = await self._changeable(tenant)
            if current is None:
                if request.allow_missing:
                    return Empty()
                raise ResourceMissingError(request.name, _NOT_CONFIGURED)
            require_etag(request.name, request.etag, current.etag)
            if not request.validate_only:
                try:
                    await self._stored.write([Write(TENANTS, tenant, None, int(current.etag, 16))])
                except ConflictError:
                    raise EtagError(request.name) from None
            return Empty()

    async def _changeable(self, tenant: str) -> pb.Tenant | None:
        """The stored tenant; None if there is none. Raises OfFileError."""
        await self._stored.refresh()
        current = self._catalog.tenant_message(tenant)
        if current is not None and current.origin == pb.RESOURCE_ORIGIN_FILE:
            raise OfFileError(PREFIX + tenant)
        return current

    async def _put(self, tenant: str, given: pb.Tenant, current: pb.Tenant | None, validate_only: bool) -> pb.Tenant:
        """Raises InvalidValueError, ConflictError."""
        with under("tenant"):
            read_tenant(given, self._limits)
        message = pb.Tenant()
        message.CopyFrom(given)
        message.name, message.origin = PREFIX + tenant, pb.RESOURCE_ORIGIN_API
        message.etag = "" if current is None else current.etag
        if current is None:
            message.create_time.GetCurrentTime()
        else:
            message.create_time.CopyFrom(current.create_time)
        write = write_of(message)
        if not validate_only:
            [revision] = await self._stored.write([write])
            message.etag = f"{revision:x}"
        return message
