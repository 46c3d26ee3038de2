"""What tenants share: the memories in a process, and the store. Each keeps its part, whatever others do."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from draftwood_memory import Memory, MemoryConfig, MemoryName
from draftwood_memory.config import surplus
from draftwood_memory.errors import StoreFullError
from draftwood_memory.operations import ExportMemory, FillMemory
from draftwood_memory.store.memories import Memories
from draftwood_memory.store.naming import memories_key
from draftwood_memory.store.space import free_space
from draftwood_memory.store.stored import StoreClock
from tests.memory.helpers import (
    FINGERPRINT,
    agreed,
    fill,
    learn_output,
    log_of,
    numbers,
    perform,
    replicas,
    stream_of,
    until,
)
from tests.memory.servers import Valkey

DAY = 24 * 3600.0


def evicted(limit: int, *items: str) -> list[str]:
    """Of items like "a1", of tenant a, the least recently used first, each of size 1."""
    return [*surplus([(item, item[0], 1) for item in items], limit)]


def test_who_holds_more_than_a_share_gives_way() -> None:
    assert evicted(4, "a1", "b1", "c1", "c2") == []
    assert evicted(3, "a1", "b1", "c1", "c2", "c3") == ["c1", "c2"]
    assert evicted(2, "a1", "b1", "c1") == ["a1"]  # nobody's share is a whole memory
    assert evicted(4, "a1", "c1", "a2", "a3", "c2", "c3", "c4") == ["a1", "c1", "c2"]
    assert [*surplus([("a", "a", 5), ("b", "b", 3), ("c", "c", 9)], 12)] == ["a"]
    assert [*surplus([("a", "a", 9), ("b", "b", 3), ("c", "c", 9)], 12, kept={"a"}.__contains__)] == ["c"]


@pytest.mark.parametrize("stored", [True, False])
async def test_exports_open_nothing(server: Valkey, stored: bool) -> None:
    """Neither of arms that do not exist, nor of what the store has."""
    async with replicas(2, server.url if stored else None) as [first, second]:
        await learn_output(first, "t", numbers(10))
        for number in range(40):
            assert await perform(ExportMemory(MemoryName("attacker", f"x/{number}")), first) == []
        assert len(first.residents) == 1
        if stored:
            await until(lambda: not first.outbox.pending)
            assert [one.tokens.size for one in await perform(ExportMemory(MemoryName("t")), second)] == [10]
            assert not server.client.keys("*attacker*")
        assert len(second.residents) == 0


@pytest.mark.parametrize("stored", [True, False])
async def test_one_tenants_arms_evict_no_others_memory(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """The memory thread evicts as soon as there is one too many: the next round is far away."""
    monkeypatch.setattr("draftwood_memory.residents._WAITED_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_memory.memory_thread._ROUND_SECONDS", 60.0)
    async with replicas(1, server.url if stored else None, config=MemoryConfig(max_resident=20)) as [memory]:
        for number in range(15):
            await learn_output(memory, f"t{number}", numbers(10))
        for number in range(149):
            await learn_output(memory, "loud", numbers(10), arm=f"x/{number}")
            await until(lambda: len(memory.residents) <= 30)
        await until(lambda: len(memory.residents) <= 20)
        for number in range(15):
            assert log_of(memory, f"t{number}") == [numbers(10)]


def much(tenant: str, seed: int, tokens: int) -> FillMemory:
    """An import of text that does not compress."""
    return fill(tenant, np.random.default_rng(seed).integers(0, 30_000, tokens).tolist())


async def make_space(memory: Memory, is_full: bool) -> None:
    assert memory.memories is not None
    await asyncio.wrap_future(memory.thread.submit(free_space(memory.memories, FINGERPRINT, is_full)))


@pytest.mark.slow
async def test_a_year_of_tenants_in_a_small_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each day new tenants come and never again; one writes every day, and one only drafts from what it has."""
    days = 0.0
    at = StoreClock.at
    monkeypatch.setattr(StoreClock, "at", lambda clock, monotonic: at(clock, monotonic) + days * DAY)
    monkeypatch.setattr("draftwood_memory.memory_thread._CHECK_SECONDS", 0.02)
    monkeypatch.setattr("draftwood_memory.sender._SPACE_CHECK_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_memory.sender._LISTED_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_memory.sender._USE_SECONDS", 0.0)
    config = MemoryConfig(max_resident=20, idle_seconds=0.5)
    with Valkey("--maxmemory-policy", "noeviction", "--maxmemory", "8mb") as server:
        async with replicas(2, server.url, config=config) as memories:
            await perform(much("reader", 1, 4000), memories[0])
            most = 0
            for day in range(365):
                memory = memories[day % 2]
                await perform(much("daily", day, 500), memory)
                for number in range(3):
                    await perform(much(f"new{day}-{number}", day, 10_000), memory)
                if day % 5 == 0:
                    await asyncio.to_thread(memory.strategy, "reader", "trie")
                    memory.thread.wake()
                    await asyncio.sleep(0.03)
                most = max(most, server.client.info("memory")["used_memory"])
                server.client.set("dw:configuration", b"x" * 10_000)  # is never refused
                days += 1
            assert most < 8 << 20
            assert server.client.info("stats")["evicted_keys"] == 0
            for memory in memories:
                assert (memory.counters().failures, memory.counters().dropped) == (0, 0)
            keys: Any = server.client.keys("dw:{t:*}:3:*")
            kept = {key.decode().split("}")[0].removeprefix("dw:{t:") for key in keys}
            assert {"reader", "daily", *(f"new{day}-0" for day in range(350, 365))} <= kept
            assert not kept & {f"new{day}-0" for day in range(250)}
            assert server.client.zcard(memories_key(FINGERPRINT)) < 3 * 100
        async with replicas(1, server.url) as [later]:
            assert len(await perform(ExportMemory(MemoryName("reader")), later)) == 1


@pytest.mark.parametrize(
    ("wanted", "is_full", "gone"),
    [
        (0.05, False, 0),  # the store is not nearly full
        (0.5, False, 1),
        (1.5, False, 2),
        (2.5, False, 3),
        (0.0, True, 1),  # a tenth of all, if the limit is not known
    ],
)
async def test_who_was_not_used_for_a_day_gives_way_and_then_who_has_most(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, wanted: float, is_full: bool, gone: int
) -> None:
    """Memories of the same size in the order in which they go, with the hours since they were used."""
    in_turn = {"older:": 72.0, "old:": 25.0, "loud:x": 23.0, "small:": 23.9, "loud:y": 2.0, "loud:": 1.0}
    async with replicas(1, server.url) as [memory]:
        for name in in_turn:
            tenant, arm = name.split(":")
            await learn_output(memory, tenant, numbers(1000), arm)
        await until(lambda: not memory.outbox.pending)
        used = {f"{FINGERPRINT}:{name}": time.time() - 3600 * hours for name, hours in in_turn.items()}
        server.client.zadd(memories_key(FINGERPRINT), used)
        size = server.client.memory_usage(stream_of(memory, "small")) or 0

        async def usage(_: Memories) -> tuple[float, float]:
            return (0.0, 0.0) if is_full else ((0.75 + wanted) * size, size)

        monkeypatch.setattr(Memories, "usage", usage)
        await make_space(memory, is_full)
        keys = {stream_of(memory, *name.split(":")): name for name in in_turn}
        left = [name for key, name in keys.items() if server.client.exists(key)]
        assert left == [*in_turn][gone:]


async def test_the_list_of_memories_does_not_grow_for_ever(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        for tenant in ("gone", "old", "new"):
            await learn_output(memory, tenant, numbers(10))
        await until(lambda: not memory.outbox.pending)
        key = memories_key(FINGERPRINT)
        for tenant in ("gone", "old"):
            server.client.zadd(key, {f"{FINGERPRINT}:{tenant}:": time.time() - (91 if tenant == "old" else 90) * DAY})
        server.client.delete(*server.client.keys("dw:{t:gone}:3:*"))
        assert memory.memories is not None
        await asyncio.wrap_future(memory.thread.submit(memory.memories.forget_listed(FINGERPRINT)))
        listed: Any = server.client.zrange(key, 0, -1)
        assert [tag.split(b":")[1] for tag in listed] == [b"old", b"new"]


async def test_a_small_store_beside_a_large_server_keeps_most_memories(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server uses for itself is nearly all of its limit: deleting memories does not change that."""
    async with replicas(1, server.url) as [memory]:
        for number in range(10):
            await learn_output(memory, f"t{number}", numbers(1000))
        await until(lambda: not memory.outbox.pending)
        size = server.client.memory_usage(stream_of(memory, "t0")) or 0

        async def usage(_: Memories) -> tuple[float, float]:
            return 100 * size, 100.5 * size  # ten of them for memories

        monkeypatch.setattr(Memories, "usage", usage)
        await make_space(memory, is_full=True)
        assert 6 <= len(server.client.keys("dw:{t:*}:3:*")) <= 8


@pytest.mark.usefixtures("checks_often")
async def test_an_eviction_from_the_store_is_no_failover(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        await learn_output(memory, "t", numbers(10))
        await until(lambda: not memory.outbox.pending)
        evicted = memory.residents.open(MemoryName("t"))
        await until(lambda: evicted.position != b"0-0")
        assert memory.memories is not None
        await asyncio.wrap_future(memory.thread.submit(memory.memories.delete(evicted.tag, 0)))

        def noticed() -> bool:
            memory.thread.wake()
            return evicted.position == b"0-0"

        await until(noticed)
        assert memory.counters().reloads == 0
        await learn_output(memory, "t", numbers(11))
        await until(lambda: not memory.outbox.pending)
        assert log_of(memory, "t") == [numbers(10), numbers(11)]


async def test_a_store_without_a_limit_keeps_everything(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        await perform(much("t", 0, 10_000), memory)
        await make_space(memory, is_full=False)
        assert server.client.exists(stream_of(memory, "t"))


async def test_a_store_that_is_full_of_other_things_is_left_alone(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    async with replicas(1, server.url) as [memory]:
        server.client.set("other", b"x" * (8 << 20))
        server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] - (1 << 20))
        try:
            with pytest.raises(StoreFullError):
                await perform(much("imported", 0, 1000), memory)
            await learn_output(memory, "t", numbers(100))
            await until(lambda: "refuses" in caplog.text)
            for _ in range(5):  # each sends it again
                memory.thread.wake()
                await asyncio.sleep(0.05)
            assert caplog.text.count("refuses") == 1
            assert (memory.outbox.pending, log_of(memory, "t")) == (1, [numbers(100)])
            assert memory.thread.healthy
        finally:
            server.client.config_set("maxmemory", 0)
        server.client.delete("other")
        assert await agreed([memory], "t") == [numbers(100)]


@pytest.mark.parametrize("begun", [False, True])
async def test_an_import_into_a_full_store_whose_limit_is_not_known_replaces_what_is_old(
    server: Valkey, begun: bool
) -> None:
    """A user who may not ask for the store's memory; on a cluster nobody can. It is refused first where the memory is
    listed as used or, if that was done a moment ago, where records are written.
    """
    server.client.execute_command("ACL", "SETUSER", "dw", "on", ">pw", "~dw:*", "+@all", "-info")
    async with replicas(1, f"redis://dw:pw@127.0.0.1:{server.port}") as [memory]:
        await perform(much("old", 0, 200_000), memory)
        server.client.zadd(memories_key(FINGERPRINT), {f"{FINGERPRINT}:old:": time.time() - 2 * DAY})
        old = stream_of(memory, "old")
        if begun:
            await perform(much("new", 2, 10), memory)
        server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] - 200_000)
        try:
            await perform(much("new", 1, 20_000), memory)
        finally:
            server.client.config_set("maxmemory", 0)
        assert (server.client.exists(old), server.client.exists(stream_of(memory, "new"))) == (0, 1)
