"""Faults of the store do not affect requests, and afterwards replicas draft again from what the others learn."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import pytest
import redis

from draftwood_memory.store.naming import tenant_key
from tests.memory.servers import Proxy, Valkey, cluster, sentinel, wait_for
from tests.service.fakes import until
from tests.service.live import live

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey(persistent=True) as server:
        yield server


async def test_killed_and_restarted_with_its_data(server: Valkey) -> None:
    async with live(server.url, server.url) as running:
        server.kill()
        await until(lambda: all(memory.thread.failing for memory in running.memories))
        await asyncio.sleep(0.7)
        await asyncio.to_thread(server.start)
        await asyncio.sleep(0.7)
        await running.converged()
        assert all(memory.counters().reconnects for memory in running.memories)


async def test_killed_and_restarted_without_its_data() -> None:
    with Valkey() as server:
        async with live(server.url, server.url) as running:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(0.7)
            await asyncio.to_thread(server.start)
            await asyncio.sleep(0.7)
            await running.converged(lossless=False)
            await until(lambda: sum(memory.counters().restored for memory in running.memories) > 0)


@pytest.mark.parametrize("seconds", [2.5, pytest.param(20.0, marks=pytest.mark.slow)])
async def test_stopped_for_a_while(server: Valkey, seconds: float) -> None:
    async with live(server.url, server.url) as running:
        server.pause()
        await asyncio.sleep(seconds)
        server.resume()
        await asyncio.sleep(0.5)
        await running.converged()


async def test_connections_reset_in_mid_write(server: Valkey) -> None:
    async with Proxy(server.port) as proxy, live(proxy.url, server.url) as running:
        draw = random.Random(3)
        while proxy.resets < 5:
            proxy.reset_after = draw.randint(1, 6000)
            await asyncio.sleep(0.2)
        proxy.reset_after = None
        await running.converged()


async def test_a_link_cut_and_healed(server: Valkey) -> None:
    async with Proxy(server.port) as proxy, live(proxy.url, server.url) as running:
        proxy.open.clear()
        await until(lambda: running.memories[0].thread.failing)
        proxy.open.set()
        await running.converged()


async def test_a_store_half_a_second_away(server: Valkey) -> None:
    async with Proxy(server.port) as proxy, live(proxy.url, server.url, store_timeout=3.0) as running:
        proxy.delay = 0.25
        await asyncio.sleep(3.0)
        assert not running.memories[0].thread.failing
        proxy.delay = 0.0
        await running.converged()


async def test_a_full_store(server: Valkey) -> None:
    async with live(server.url, server.url) as running:
        server.client.config_set("maxmemory-policy", "noeviction")
        server.client.config_set("maxmemory", "1")
        await until(lambda: all(memory.outbox.pending > 2 for memory in running.memories))
        pushed = [memory.counters().pushed for memory in running.memories]
        await until(lambda: all(memory.outbox.pending > 9 for memory in running.memories))
        assert [memory.counters().pushed for memory in running.memories] == pytest.approx(pushed, abs=3)
        server.client.config_set("maxmemory", "0")
        await running.converged()


async def test_a_sentinel_failover_that_loses_writes() -> None:
    with Valkey() as master, Valkey("--replicaof", f"127.0.0.1 {master.port}") as replica:
        wait_for(lambda: _link_is_up(replica), "replication")
        with sentinel(master) as port:
            wait_for(lambda: _replicas_known(port) == 1, "the sentinel's view")
            url = f"redis+sentinel://127.0.0.1:{port}/dw"
            async with live(url, url) as running:
                replica.pause()
                master.client.execute_command(
                    "CLIENT", "KILL", "TYPE", "replica"
                )  # otherwise its socket's buffer keeps the writes
                before = running.learned()
                # The master confirms what will be lost.
                await until(lambda: sum(memory.counters().pushed for memory in running.memories) > before + 10)
                await asyncio.to_thread(master.kill)
                replica.resume()
                await asyncio.sleep(4.0)
                await running.converged(40.0, lossless=False)
                await until(lambda: sum(memory.counters().reloads for memory in running.memories) > 0)


async def test_a_cluster_whose_slots_migrate() -> None:
    with cluster() as nodes:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        async with live(url, url) as running:
            for tenant in ("a", "b%3Ac"):
                await asyncio.to_thread(_migrate, nodes, tenant_key(tenant))
            await asyncio.sleep(0.5)
            await running.converged()


def _link_is_up(replica: Valkey) -> bool:
    return bool(replica.client.info("replication").get("master_link_status") == "up")


def _replicas_known(port: int) -> int:
    client = redis.Redis(port=port)
    try:
        found = client.execute_command("SENTINEL", "REPLICAS", "dw")
    finally:
        client.close()
    return len(found)


def _migrate(nodes: list[Valkey], key: str) -> None:
    """Moves the slot of a key to the next node, while the key is used."""
    slot = nodes[0].client.execute_command("CLUSTER", "KEYSLOT", key)
    names = [node.client.execute_command("CLUSTER", "MYID").decode() for node in nodes]
    source = [node.port for node in nodes].index(_owner(nodes[0], slot))
    target = (source + 1) % len(nodes)
    nodes[target].client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
    nodes[source].client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
    time.sleep(0.4)
    while keys := nodes[source].client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
        nodes[source].client.execute_command("MIGRATE", "127.0.0.1", nodes[target].port, "", 0, 5000, "KEYS", *keys)
    for node in (nodes[target], nodes[source], *nodes):
        node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])


def _owner(node: Valkey, slot: int) -> int:
    """The port of the node that serves a slot."""
    for shard in node.client.execute_command("CLUSTER", "SHARDS"):
        ends = shard[b"slots"]
        if any(first <= slot <= last for first, last in zip(ends[::2], ends[1::2], strict=True)):
            port: int = shard[b"nodes"][0][b"port"]
            return port
    raise AssertionError(f"no node serves slot {slot}")
