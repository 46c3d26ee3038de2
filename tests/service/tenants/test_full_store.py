"""A store that memories have filled still takes changes of tenants, purges and the counts of quotas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood.admin.v1 import tenants_pb2_grpc
from draftwood_client import MemoryClient
from tests.memory.servers import Valkey
from tests.service.fakes import serving, until
from tests.service.tenants.test_unknown import ask, catalog, configure, learned, reasons


@pytest.fixture
def full() -> Iterator[Valkey]:
    """Has a memory of the tenant "full", and no more memory to give."""
    with Valkey("--maxmemory-policy", "noeviction") as server:
        yield server


async def test_configuration_purges_and_quotas_in_a_full_store(full: Valkey) -> None:
    async with serving(store=full.url) as served, serving(store=full.url) as second:
        await ask(served, "full")
        await until(lambda: served.memory.counters().pushed > 0)
        full.client.config_set("maxmemory", full.client.info("memory")["used_memory"] // 2)
        await ask(served, "full")
        await until(lambda: served.memory.outbox.pending > 0)  # records are refused
        await configure(served)
        await until(lambda: catalog(second).tenant_message("acme") is not None)
        assert reasons(await ask(served, times=2) + await ask(second, times=2)) == ["", "", "", "QUOTA_EXCEEDED"]
        stub = tenants_pb2_grpc.TenantServiceStub(second.channel)
        change = pb.Tenant(name="tenants/acme", quotas=pb.QuotaConfig(requests_per_minute=4), description="x" * 1000)
        mask = FieldMask(paths=["quotas", "description"])
        await stub.UpdateTenant(pb.UpdateTenantRequest(tenant=change, update_mask=mask))
        await until(lambda: catalog(served).config_of("acme").quotas.requests_per_minute == 4)
        assert reasons(await ask(served, times=2)) == ["", "QUOTA_EXCEEDED"]
        client = MemoryClient(served.server.address, timeout=10)
        await asyncio.to_thread(client.purge, "full")
        client.close()
        assert not full.client.keys("dw:*full*:3:*")
        await stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/acme"))
        await until(lambda: catalog(served).tenant_message("acme") is None)
        assert served.server.limiter.outages == second.server.limiter.outages == 0
        assert learned(second) == 0
