"""What a caller gets while a tenant's configuration is not known, after a store lost it, and in a full store: never the
default one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import ParseDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood.admin.v1 import status_pb2, status_pb2_grpc, tenants_pb2_grpc
from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood.v1 import generation_pb2
from draftwood_client import MemoryClient
from draftwood_tenants.catalog import Catalog
from draftwood_tenants.config import LearningScope
from draftwood_tenants.resources.store import TENANTS, Write
from tests.memory.servers import Valkey
from tests.service.fakes import Answer, Served, answer, serving, until
from tests.service.rpc.test_endings import reason

CONFIGURED = {"learning": {"scope": "LEARNING_SCOPE_NOTHING"}, "quotas": {"requestsPerMinute": 3}}
NAMES = f"names={'C' * 42}A="
OLD, NEW = f"old={'A' * 43}=", f"new={'B' * 42}A="
HEALTH = health_pb2.HealthCheckResponse


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    with Valkey(persistent=True) as server:
        yield server


async def configure(served: Served, tenant: str = "acme", fields: dict[str, Any] = CONFIGURED) -> None:
    stub = tenants_pb2_grpc.TenantServiceStub(served.channel)
    await stub.CreateTenant(pb.CreateTenantRequest(tenant_id=tenant, tenant=ParseDict(fields, pb.Tenant())))


async def ask(served: Served, tenant: str = "acme", times: int = 1) -> list[Answer]:
    request = generation_pb2.GenerateRequest(text="x", tenant=tenant)
    request.drafting.strategy = "trie"
    request.stop.max_tokens = 30
    return [await answer(served.stub.GenerateStream(request)) for _ in range(times)]


def catalog(served: Served) -> Catalog:
    return served.server.tenants.catalog


def reasons(answers: list[Answer]) -> list[str]:
    """Of refusals; "" for what was admitted."""
    return ["" if one.error is None else reason(one.error) for one in answers]


def learned(served: Served) -> int:
    return served.memory.outbox.pending + served.memory.counters().pushed


async def states(served: Served) -> tuple[int, int]:
    """Of health, and of the status for operators."""
    health = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest())
    status = await status_pb2_grpc.StatusServiceStub(served.channel).GetStatus(status_pb2.GetStatusRequest())
    return health.status, status.status.state


async def test_a_server_that_starts_while_its_store_is_away_refuses_until_it_was_read(
    valkey: Valkey, tmp_path: Path
) -> None:
    """But for the tenants of its file."""
    file = tmp_path / "tenants.yaml"
    limited = "quotas: {requestsPerMinute: 2}, learning: {scope: LEARNING_SCOPE_NOTHING}"
    file.write_text(f"tenants: [{{name: tenants/of-file, {limited}}}]")
    async with serving(store=valkey.url) as before:
        await configure(before)
    valkey.kill()
    async with serving(store=valkey.url, store_timeout=0.5, tenants_file=file) as served:
        assert await states(served) == (HEALTH.NOT_SERVING, status_pb2.SERVING_STATE_CONFIGURATION_UNKNOWN)
        refused = await ask(served, times=10)
        assert reasons(refused) == ["CONFIGURATION_UNKNOWN"] * 10
        assert refused[0].status.code() is grpc.StatusCode.UNAVAILABLE
        assert not learned(served)
        assert reasons(await ask(served, "of-file", 3)) == ["", "", "QUOTA_EXCEEDED"]
        assert reasons(await ask(served, "other")) == ["CONFIGURATION_UNKNOWN"]
        valkey.start()
        await until(lambda: served.server.serving)
        assert await states(served) == (HEALTH.SERVING, status_pb2.SERVING_STATE_SERVING)
        assert reasons(await ask(served, times=10)).count("") == 3
        await served.assert_idle()
        assert not learned(served)


async def test_a_server_without_tenants_serves_while_its_store_is_away(valkey: Valkey, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"store": valkey.url, "store_timeout": 0.5, "model_cache": True}
    async with serving(**kept, model_cache_folder=tmp_path) as before:
        assert reasons(await ask(before)) == [""]
    valkey.kill()
    async with serving(**kept, model_cache_folder=tmp_path) as served:
        assert (await states(served))[0] == HEALTH.SERVING
        assert reasons(await ask(served, times=5)) == [""] * 5
        await served.assert_idle()
        assert not learned(served)  # someone may have configured the tenant meanwhile
        valkey.start()
        await until(lambda: catalog(served).config_of("acme").learning.scope is LearningScope.OUTPUTS)
        await ask(served)
        await until(lambda: learned(served) > 0)


async def test_a_running_server_keeps_what_a_wiped_store_had(valkey: Valkey) -> None:
    async with serving(store=valkey.url) as served, serving(store=valkey.url) as second:
        await configure(served)
        valkey.client.flushall()
        async with serving(store=valkey.url) as late:  # may read the store before it was restored
            await until(lambda: all(one.server.tenants.catalog.tenant_message("acme") for one in (second, late)))
            assert reasons(await ask(late, times=4)) == [""] * 3 + ["QUOTA_EXCEEDED"]
        assert reasons(await ask(served)) == ["QUOTA_EXCEEDED"]
        assert not learned(served) + learned(second)
        stub = tenants_pb2_grpc.TenantServiceStub(served.channel)
        await stub.DeleteTenant(pb.DeleteTenantRequest(name="tenants/acme"))
        await until(lambda: catalog(second).tenant_message("acme") is None)
        assert reasons(await ask(second)) == [""]


async def test_a_tenant_that_cannot_be_decrypted_is_refused_and_no_other(valkey: Valkey) -> None:
    async with serving(store=valkey.url, store_keys=f"{OLD},{NAMES}") as served:
        await configure(served)
        async with serving(store=valkey.url, store_keys=f"{NEW},{OLD},{NAMES}") as newer:
            await configure(newer, "rotated")
        await until(lambda: served.server.tenants.stored.is_unknown(TENANTS, "rotated"))
        assert reasons(await ask(served, times=4)) == [""] * 3 + ["QUOTA_EXCEEDED"]
        assert reasons(await ask(served, "rotated")) == ["CONFIGURATION_UNKNOWN"]
        assert reasons(await ask(served, "never-configured")) == [""]


@pytest.mark.parametrize(
    ("part", "outcome"),
    [
        ({"drafting": {"strategy": "of-a-newer-version"}}, "without it"),
        ({"quotas": {"requestsPerMinute": 0}}, "refused"),
    ],
)
async def test_a_part_that_is_not_valid_here_never_sets_a_tenant_free(valkey: Valkey, part: Any, outcome: str) -> None:
    """A server that allows less than the one that wrote the tenant."""
    value = ParseDict({**CONFIGURED, **part}, pb.Tenant()).SerializeToString()
    async with serving(store=valkey.url) as served:
        stored = served.server.tenants.stored
        await stored.write([Write(TENANTS, "acme", value, 0)])
        if outcome == "refused":
            assert reasons(await ask(served)) == ["CONFIGURATION_UNKNOWN"]
        else:
            assert catalog(served).config_of("acme").learning.scope is LearningScope.NOTHING
            assert reasons(await ask(served, times=4)) == [""] * 3 + ["QUOTA_EXCEEDED"]


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
