"""TenantService."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.rpc.calls import Call, Run
from draftwood_service.rpc.request_log import audited
from draftwood_tenants.catalog import Catalog, write_of
from draftwood_tenants.experiments.definition import StateError
from draftwood_tenants.reading import TENANT_PREFIX, ServerLimits, check_tenant, read_tenant, tenant_of, under
from draftwood_tenants.resources.follower import ResourceFollower
from draftwood_tenants.resources.store import (
    TENANTS,
    ConflictError,
    DefinedInFileError,
    EtagError,
    PreconditionError,
    ResourceExistsError,
    ResourceMissingError,
    Write,
)

MAX_PAGE = 1000
_TRIES = 8
_OUTPUT_ONLY = frozenset({"name", "etag", "create_time", "update_time", "origin"})


class TenantServicer:
    """The methods of TenantService."""

    def __init__(self, stored: ResourceFollower, catalog: Catalog, limits: ServerLimits) -> None:
        missing = "has no configuration; the servers' settings apply"
        self._tenants = Resources(TENANTS, pb.Tenant, stored, catalog, catalog.tenant_message, missing)
        self._limits = limits

    @property
    def methods(self) -> dict[str, Run]:
        """What answers each method of the service."""
        return {
            "GetTenant": self.get_tenant,
            "ListTenants": self.list_tenants,
            "CreateTenant": self.create_tenant,
            "UpdateTenant": self.update_tenant,
            "DeleteTenant": self.delete_tenant,
        }

    async def get_tenant(self, request: pb.GetTenantRequest, call: Call) -> pb.Tenant:
        return await self._tenants.get(call.principal.tenant_for(tenant_of("name", request.name)))

    async def list_tenants(self, request: pb.ListTenantsRequest, call: Call) -> pb.ListTenantsResponse:
        page, following = await self._tenants.page(request.page_size, request.page_token)
        return pb.ListTenantsResponse(tenants=page, next_page_token=following)

    async def create_tenant(self, request: pb.CreateTenantRequest, call: Call) -> pb.Tenant:
        tenant = check_tenant("tenant_id", request.tenant_id)
        if request.tenant.name not in ("", TENANT_PREFIX + tenant):
            raise InvalidInputError("tenant.name", request.tenant.name, "must be empty or that of tenant_id")
        with change_audited("create", TENANT_PREFIX + tenant, call):
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


ResourceT = TypeVar("ResourceT", tenants_pb2.Tenant, experiments_pb2.Experiment)


class Resources(Generic[ResourceT]):
    """The resources of one kind, which are known here by the ids in their names.

    Args:
        message_of: the message of an id, with etag and origin; None if there is none.
        missing: what is said of one that does not exist.
    """

    def __init__(
        self,
        kind: str,
        message_type: type[ResourceT],
        stored: ResourceFollower,
        catalog: Catalog,
        message_of: Callable[[str], ResourceT | None],
        missing: str = "does not exist",
    ) -> None:
        self._kind = kind
        self._type: type[ResourceT] = message_type
        self._stored = stored
        self._catalog = catalog
        self._message_of: Callable[[str], ResourceT | None] = message_of
        self._missing = missing

    async def get(self, id_: str) -> ResourceT:
        """Raises ResourceMissingError."""
        await self._stored.refresh()
        if (message := self._message_of(id_)) is None:
            raise ResourceMissingError(f"{self._kind}/{id_}", self._missing)
        return message

    async def page(self, size: int, token: str) -> tuple[list[ResourceT], str]:
        """A page of all of them, and the next page's token, which is the last id of the page.

        Raises:
            InvalidInputError: size or token is wrong.
        """
        if size < 0:
            raise InvalidInputError("page_size", size, "must not be negative")
        try:
            last = base64.urlsafe_b64decode(token.encode()).decode()
        except (binascii.Error, ValueError):
            problem = "must be empty or the next_page_token of another page"
            raise InvalidInputError("page_token", token, problem) from None
        await self._stored.refresh()
        size = min(size or MAX_PAGE, MAX_PAGE)
        rest: list[str] = [id_ for id_ in self._catalog.names(self._kind) if not token or id_ > last]
        page: list[ResourceT] = [message for id_ in rest[:size] if (message := self._message_of(id_)) is not None]
        return page, base64.urlsafe_b64encode(rest[size - 1].encode()).decode() if len(rest) > size else ""

    async def create(self, id_: str, set_up: Callable[[ResourceT], None], validate_only: bool) -> ResourceT:
        """Raises ResourceExistsError, and what `set_up` raises."""
        made = self._new(id_)
        try:
            await self._stored.refresh()
            if self._message_of(id_) is not None:
                raise ConflictError(0)
            set_up(made)
            return await self._put(made, validate_only)
        except ConflictError:
            raise ResourceExistsError(made.name) from None

    async def change(
        self,
        id_: str,
        etag: str,
        validate_only: bool,
        change: Callable[[ResourceT], None],
        *,
        allow_missing: bool = False,
        alone: bool = False,
        writes: SequenceOf[Write] = (),
    ) -> ResourceT:
        """Applies `change` to the stored resource, again if it was changed meanwhile.

        Args:
            allow_missing: one that does not exist is made.
            alone: nothing else in the store may change between what `change` sees and the write.
            writes: to be written with it.

        Raises:
            ResourceMissingError, PreconditionError, EtagError: it cannot be changed.
            Exception: what `change` raises.
        """
        for _ in range(_TRIES):
            current = await self.changeable(id_, etag, allow_missing)
            if current is None and etag:
                break
            revision, changed = self._stored.revision, self._new(id_)
            if current is not None:
                changed.CopyFrom(current)
            try:
                change(changed)
                return await self._put(changed, validate_only, revision if alone else None, writes)
            except ConflictError:
                continue  # without an etag a change is made to whatever is there
            except StateError as error:
                raise PreconditionError(changed.name, "STATE", str(error)) from None
        raise EtagError(f"{self._kind}/{id_}")

    async def changeable(self, id_: str, etag: str, allow_missing: bool) -> ResourceT | None:
        """The stored resource; None if it is missing and may be. Raises as `change`."""
        try:
            current = await self.get(id_)
        except ResourceMissingError:
            if not allow_missing:
                raise
            return None
        if current.origin == tenants_pb2.RESOURCE_ORIGIN_FILE:
            raise DefinedInFileError(current.name)
        if etag not in ("", current.etag):
            raise EtagError(current.name)
        return current

    async def delete(self, current: ResourceT) -> None:
        """Raises EtagError."""
        kind, _, id_ = current.name.partition("/")
        try:
            await self._stored.write([Write(kind, id_, None, int(current.etag, 16))])
        except ConflictError:
            raise EtagError(current.name) from None

    def _new(self, id_: str) -> ResourceT:
        made = self._type(name=f"{self._kind}/{id_}", origin=tenants_pb2.RESOURCE_ORIGIN_API)
        made.create_time.GetCurrentTime()
        return made

    async def _put(
        self, message: ResourceT, validate_only: bool, since: int | None = None, writes: SequenceOf[Write] = ()
    ) -> ResourceT:
        """Raises ConflictError."""
        write = write_of(message)
        if not validate_only:
            revision, *_ = await self._stored.write([write, *writes], since)
            message.etag = f"{revision:x}"
        return message


def apply_mask(current: Any, given: Any, mask: FieldMask, output_only: frozenset[str] = frozenset()) -> None:
    """Copies fields of `given` into `current`: those of the mask; without one those that are set; all for "*".

    Raises:
        InvalidInputError: a path of the mask is no field, or one that cannot be set.
    """
    fixed = _OUTPUT_ONLY | output_only
    paths = list(mask.paths) or [field.name for field, _ in given.ListFields() if field.name not in fixed]
    if paths == ["*"]:
        paths = [field.name for field in given.DESCRIPTOR.fields if field.name not in fixed]
    for path in paths:
        if path.partition(".")[0] in fixed:
            raise InvalidInputError("update_mask", path, "cannot be changed")
        _copy(current, given, path, path)


def _copy(current: Any, given: Any, path: str, whole: str) -> None:
    name, _, rest = path.partition(".")
    field = current.DESCRIPTOR.fields_by_name.get(name)
    if field is None or (rest and (field.is_repeated or field.message_type is None)):
        raise InvalidInputError("update_mask", whole, "is not a field that can be changed")
    if rest and field.message_type.file.name.startswith("google/protobuf/"):
        raise InvalidInputError("update_mask", whole, f"the parts of {name} can only be changed together")
    if rest:
        _copy(getattr(current, name), getattr(given, name), rest, whole)
        return
    current.ClearField(name)
    if field.is_repeated:
        getattr(current, name).MergeFrom(getattr(given, name))
    elif field.message_type is not None:
        if given.HasField(name):
            getattr(current, name).CopyFrom(getattr(given, name))
    elif not field.has_presence or given.HasField(name):
        setattr(current, name, getattr(given, name))


def change_audited(action: str, name: str, call: Call) -> AbstractContextManager[object]:
    """Around a change of a resource: a line in the audit log."""
    return audited(call, "resource", action=action, resource=name[:300])
