"""Memories of other models and of other keys for names: purged with their tenant, listed, and deleted after a while."""

from __future__ import annotations

from typing import Any

import pytest

from tests.memory.helpers import agreed, learn_output, log_of, numbers, perform, replicas
from tests.memory.servers import Valkey
from tests.memory.test_sharing import KEY_A, KEY_B
from tests.service.fakes import until

OLD = "e" * 16
KEYS = read_keys(f"names={KEY_B}\nk1={KEY_A}", "keys")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories are orphaned as soon as no process uses them."""
    monkeypatch.setattr("draftwood_service.memory.operations.ORPHANED_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_service.memory.presence.ORPHANED_SECONDS", 0.0)


async def leave(server: Valkey, tenant: str, tokens: int, **options: Any) -> None:
    """A process that learned something for a tenant, and ended."""
    async with replicas(1, server.url, **options) as [memory]:
        await learn_output(memory, tenant, numbers(tokens))
        await agreed([memory], tenant)


async def test_a_purge_reaches_other_models_and_plain_names(server: Valkey) -> None:
    await leave(server, "acme", 11, fingerprint=OLD)
    await leave(server, "acme", 12)
    await leave(server, "acme2", 13)
    await leave(server, "acme", 14, keys=KEYS, fingerprint=OLD)
    async with replicas(1, server.url, keys=KEYS) as [memory]:
        await learn_output(memory, "acme", numbers(15))
        await agreed([memory], "acme")
        assert await perform(PurgeMemory("acme"), memory) == PurgeResult(4, 11 + 12 + 14 + 15)
        assert log_of(memory, "acme") == []
    left = [key for pattern in ("*:log", "*:snap") for key in server.client.scan_iter(pattern)]
    assert [b"acme2" in key for key in left] == [True]
    async with replicas(1, server.url) as [plain]:
        assert await agreed([plain], "acme2") == [numbers(13)]


async def test_a_running_server_of_another_model_hears_of_the_purge(server: Valkey) -> None:
    async with replicas(1, server.url) as [first], replicas(1, server.url, fingerprint=OLD) as [second]:
        await learn_output(second, "t", numbers(10))
        await agreed([second], "t")
        assert (await perform(PurgeMemory("t"), first)).tokens == 10
        await until(lambda: log_of(second, "t") == [])


@pytest.mark.usefixtures("at_once")
async def test_orphans_are_listed_and_purged(server: Valkey) -> None:
    await leave(server, "acme", 11, fingerprint=OLD)
    await leave(server, "acme", 12, keys=KEYS)
    async with replicas(1, server.url) as [memory]:
        await learn_output(memory, "live", numbers(20))
        await agreed([memory], "live")
        found = await perform(ListOrphans(), memory)
        assert [(one.fingerprint, one.name, one.stored.tokens) for one in found] == [
            (OLD, MemoryName("acme"), 11),
            (memory.naming.fingerprint, None, 12),
        ]
        assert [one.name.tenant for one in (await perform(GetStatistics(None), memory)).memories] == ["live"]
        assert await perform(PurgeOrphans("0" * 16), memory) == PurgeResult(0, 0)
        assert await perform(PurgeOrphans(OLD), memory) == PurgeResult(1, 11)
        assert await perform(PurgeOrphans(), memory) == PurgeResult(1, 12)
        assert await perform(ListOrphans(), memory) == []
        assert await agreed([memory], "live") == [numbers(20)]


async def test_what_was_served_lately_is_no_orphan(server: Valkey) -> None:
    await leave(server, "acme", 11, fingerprint=OLD)
    async with replicas(1, server.url) as [memory]:
        assert await perform(ListOrphans(), memory) == []
        assert await perform(PurgeOrphans(), memory) == PurgeResult(0, 0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("ttl", "left"), [(0.0, 1), (3600.0, 1), (0.01, 0)])
async def test_orphans_expire(server: Valkey, ttl: float, left: int) -> None:
    await leave(server, "acme", 11, fingerprint=OLD)
    server.client.zadd("dw:{kinds}:served", {f"{OLD}:": 1.0})
    if ttl == 3600.0:
        server.client.zadd("dw:{kinds}:served", {f"{OLD}:": server.client.time()[0] - 1800.0})
    async with replicas(1, server.url, config=MemoryConfig(orphan_ttl=ttl, round_seconds=0.03)) as [memory]:
        await until(lambda: memory.counters().polls > 3)
        assert len(await perform(ListOrphans(), memory)) == left


async def test_servers_with_other_settings_are_noticed(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_service.memory.presence._REGISTER_SECONDS", 0.05)
    other = MemoryConfig(tokens=5000, round_seconds=0.03)
    async with replicas(2, server.url) as [first, second]:
        await until(lambda: min(first.counters().polls, second.counters().polls) > 8)
        assert (first.counters().other_settings, second.counters().other_settings) == (0, 0)
        async with replicas(1, server.url, config=other) as [third]:
            await until(lambda: first.counters().other_settings == 1)
            await until(lambda: third.counters().other_settings == 2)


async def test_the_store_in_this_process_knows_who_uses_it() -> None:
    store = InProcessStore(Limits(1 << 20), shared=True)
    assert await store.register("f:", "one", "a") == []
    assert await store.register("f:", "two", "b") == ["a"]
    assert await store.register("e:", "three", "c") == []
    assert set(await store.kinds()) == {"f:", "e:"}
