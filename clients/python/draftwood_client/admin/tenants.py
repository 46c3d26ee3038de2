"""The configuration of tenants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Unpack

from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood.admin.v1.tenants_pb2_grpc import TenantServiceStub
from draftwood_client.admin.calls import AsyncCalls, Calls
from draftwood_client.admin.resources import Tenant
from draftwood_client.options import CallOptions
from draftwood_client.protocol.convert import from_message, to_message

if TYPE_CHECKING:
    from draftwood.admin.v1.tenants_pb2_grpc import TenantServiceAsyncStub

PREFIX = "tenants/"
"""Of resource names: the tenant "acme" of requests is the resource "tenants/acme"."""


class Tenants:
    """`AdminClient.tenants`. Every method raises `StatusError`; a tenant is named as in requests."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def get(self, tenant: str, **call: Unpack[CallOptions]) -> Tenant:
        """Raises `NotFoundError`."""
        return _tenant(self._calls.ask(self._stub.GetTenant, pb.GetTenantRequest(name=PREFIX + tenant), call))

    def list(self, *, page_size: int = 0, **call: Unpack[CallOptions]) -> Iterator[Tenant]:
        """All tenants that have a configuration, by name; pages are read during iteration."""
        request = pb.ListTenantsRequest(page_size=page_size)
        for page in self._calls.pages(self._stub.ListTenants, request, call):
            yield from map(_tenant, page.tenants)

    def create(
        self, tenant: str, config: Tenant, *, validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Tenant:
        """Raises `AlreadyExistsError`; with `validate_only` nothing is changed."""
        request = _create(tenant, config, validate_only)
        return _tenant(self._calls.ask(self._stub.CreateTenant, request, call))

    def update(
        self,
        config: Tenant,
        mask: Iterable[str] = (),
        *,
        allow_missing: bool = False,
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> Tenant:
        """Changes the tenant that `config.name` names.

        Args:
            mask: fields to change, such as "drafting.strategy"; none for those that `config` sets, "*" for all.
            allow_missing: create the tenant if there is none.

        Raises:
            AbortedError: `config.etag` is set, and not the current one.
            NotFoundError, FailedPreconditionError: there is no such tenant, or it is in the servers' file.
        """
        return _tenant(
            self._calls.ask(self._stub.UpdateTenant, _update(config, mask, allow_missing, validate_only), call)
        )

    def delete(
        self,
        tenant: str,
        *,
        etag: str = "",
        allow_missing: bool = False,
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> None:
        """The tenant uses the settings of the servers again. Raises as `update`."""
        self._calls.ask(self._stub.DeleteTenant, _delete(tenant, etag, allow_missing, validate_only), call)

    @property
    def _stub(self) -> TenantServiceStub:
        return TenantServiceStub(self._calls.channel)


class AsyncTenants:
    """`AsyncAdminClient.tenants`. See `Tenants`."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls

    async def get(self, tenant: str, **call: Unpack[CallOptions]) -> Tenant:
        return _tenant(await self._calls.ask(self._stub.GetTenant, pb.GetTenantRequest(name=PREFIX + tenant), call))

    async def list(self, *, page_size: int = 0, **call: Unpack[CallOptions]) -> AsyncIterator[Tenant]:
        request = pb.ListTenantsRequest(page_size=page_size)
        async for page in self._calls.pages(self._stub.ListTenants, request, call):
            for one in page.tenants:
                yield _tenant(one)

    async def create(
        self, tenant: str, config: Tenant, *, validate_only: bool = False, **call: Unpack[CallOptions]
    ) -> Tenant:
        request = _create(tenant, config, validate_only)
        return _tenant(await self._calls.ask(self._stub.CreateTenant, request, call))

    async def update(
        self,
        config: Tenant,
        mask: Iterable[str] = (),
        *,
        allow_missing: bool = False,
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> Tenant:
        request = _update(config, mask, allow_missing, validate_only)
        return _tenant(await self._calls.ask(self._stub.UpdateTenant, request, call))

    async def delete(
        self,
        tenant: str,
        *,
        etag: str = "",
        allow_missing: bool = False,
        validate_only: bool = False,
        **call: Unpack[CallOptions],
    ) -> None:
        request = _delete(tenant, etag, allow_missing, validate_only)
        await self._calls.ask(self._stub.DeleteTenant, request, call)

    @property
    def _stub(self) -> TenantServiceAsyncStub:
        return TenantServiceStub(self._calls.channel)


def _tenant(message: pb.Tenant) -> Tenant:
    return from_message(Tenant, message)


def _create(tenant: str, config: Tenant, validate_only: bool) -> pb.CreateTenantRequest:
    message = to_message(config, pb.Tenant)
    return pb.CreateTenantRequest(tenant_id=tenant, tenant=message, validate_only=validate_only)


def _update(config: Tenant, mask: Iterable[str], allow_missing: bool, validate_only: bool) -> pb.UpdateTenantRequest:
    return pb.UpdateTenantRequest(
        tenant=to_message(config, pb.Tenant),
        update_mask=FieldMask(paths=mask),
        allow_missing=allow_missing,
        validate_only=validate_only,
    )


def _delete(tenant: str, etag: str, allow_missing: bool, validate_only: bool) -> pb.DeleteTenantRequest:
    return pb.DeleteTenantRequest(
        name=PREFIX + tenant, etag=etag, allow_missing=allow_missing, validate_only=validate_only
    )
