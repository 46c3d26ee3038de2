"""Strategies by tenant, with a store in this process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from draftwood_service.memory.config import MemoryConfig, default_max_bytes
from draftwood_service.memory.errors import StoreUnavailableError
from draftwood_service.memory.manager import MemoryManager
from draftwood_service.memory.naming import MemoryName
from draftwood_service.memory.store.base import Append, Entry, Limits
from draftwood_service.memory.store.in_process import InProcessStore
from draftwood_strategies import UnknownStrategyError
from draftwood_strategies.trie.strategy import TrieStrategy
from tests.service.fakes import until
from tests.service.memory.helpers import Answer, known_to, learn_output, numbers


@pytest.fixture
def memory() -> Iterator[MemoryManager]:
    memory = MemoryManager(InProcessStore(Limits(1 << 20)), "f" * 16, MemoryConfig(max_resident=2, round_seconds=0.02))
    memory.start(lambda task: task())
    yield memory
    memory.stop()


async def test_a_tenant_has_one_instance_of_a_strategy_and_never_anothers(memory: MemoryManager) -> None:
    mine = await memory.strategy("a", "trie")
    assert await memory.strategy("a", "trie") is mine
    assert await memory.strategy("b", "trie") is not mine
    assert await memory.strategy("a", "none") is not mine
    assert await memory.strategy("A", "trie") is not mine


async def test_an_unknown_strategy_leaves_no_tenant_behind(memory: MemoryManager) -> None:
    with pytest.raises(UnknownStrategyError):
        await memory.strategy("a", "oracle")
    assert len(memory.residents) == 0


async def test_all_strategies_of_a_tenant_learn_the_same(memory: MemoryManager) -> None:
    trie = await memory.strategy("a", "trie")
    hybrid = await memory.strategy("a", "hybrid")
    with memory.learn_on_exit(MemoryName("a"), trie, [Answer(numbers(50))]):
        pass
    assert getattr(hybrid, "tokens", 0) == 50
    assert getattr(await memory.strategy("b", "hybrid"), "tokens", 0) == 0


async def test_surplus_tenants_are_evicted_and_loaded_again(memory: MemoryManager) -> None:
    for tenant in ("a", "b", "c", "d"):
        with memory.learn_on_exit(MemoryName(tenant), await memory.strategy(tenant, "trie"), [Answer(numbers(100))]):
            pass
    await until(lambda: MemoryName("a") not in memory.residents)
    assert len(memory.residents) <= 3
    back = await memory.strategy("a", "trie")
    assert isinstance(back, TrieStrategy)
    assert [tokens.tolist() for tokens in back.sequences()] == [numbers(100)]


async def test_a_tenant_is_not_evicted_while_a_request_uses_it(memory: MemoryManager) -> None:
    with memory.learn_on_exit(MemoryName("a"), await memory.strategy("a", "trie"), []):
        for tenant in ("b", "c", "d"):
            await memory.strategy(tenant, "trie")
        await asyncio.sleep(0.2)
        assert MemoryName("a") in memory.residents


async def test_idle_tenants_cost_nothing() -> None:
    store = InProcessStore(Limits(1 << 20), shared=True)
    reads = 0
    read = store.read

    async def counted(requests: object) -> object:
        nonlocal reads
        reads += 1
        return await read(requests)  # type: ignore[arg-type]

    store.read = counted  # type: ignore[method-assign, assignment]
    memory = MemoryManager(store, "f" * 16, MemoryConfig(round_seconds=0.02))
    memory.start(lambda task: task())
    for number in range(50):
        with memory.learn_on_exit(
            MemoryName(f"t{number}"), await memory.strategy(f"t{number}", "trie"), [Answer(numbers(20))]
        ):
            pass
    await until(lambda: memory.outbox.pending == 0)
    for resident in memory.residents.all():
        resident.hot_until = 0.0
    await asyncio.sleep(0.1)
    reads, polls, began = 0, memory.counters().polls, time.monotonic()
    await asyncio.sleep(0.3)
    assert reads == 0
    assert 1 < memory.counters().polls - polls <= (time.monotonic() - began) / 0.02 + 1
    memory.stop()


class Away:
    """A store that can go away."""

    def __init__(self) -> None:
        self.store = InProcessStore(Limits(1 << 20), shared=True)
        self.shared, self.description, self.away = True, "away", False

    def __getattr__(self, name: str) -> object:
        async def call(*arguments: object) -> object:
            if self.away:
                raise StoreUnavailableError("it is away")
            return await getattr(self.store, name)(*arguments)

        return call


@pytest.mark.parametrize("away", [False, True])
async def test_memories_fit_their_bytes_whether_or_not_the_store_answers(
    away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was learned is lost: it waits in the outbox for the store."""
    monkeypatch.setattr("draftwood_service.memory.replica.replica._EVICT_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_service.memory.replica.residents._WAITED_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_service.memory.replica.replica_thread._MAX_BACKOFF", 0.05)
    store, budget, tenants = Away(), 1 << 20, [f"t{number}" for number in range(40)]
    memory = MemoryManager(store, "f" * 16, MemoryConfig(max_bytes=budget, round_seconds=0.02))  # type: ignore[arg-type]
    memory.start(lambda task: task())
    try:
        await until(lambda: memory.counters().polls > 0)
        store.away = away
        for number, tenant in enumerate(tenants):
            await learn_output(memory, tenant, numbers(2000, 100 * number))
        await until(lambda: memory.residents.evicted > 0 and memory.counters().resident_bytes <= budget)
        assert MemoryName(tenants[-1]) in memory.residents
        assert not away or memory.outbox.pending == len(tenants)
        store.away = False
        await until(lambda: memory.outbox.pending == 0)
        assert memory.counters().dropped == 0
        await until(lambda: memory.counters().resident_bytes <= budget)
        for number, tenant in enumerate(tenants):
            await memory.strategy(tenant, "trie")
            await until(partial(_knows, memory, tenant, numbers(2000, 100 * number)))
    finally:
        memory.stop()


def _knows(memory: MemoryManager, tenant: str, tokens: list[int]) -> bool:
    return known_to(memory, tenant) == [tokens]


async def test_surplus_tenants_are_evicted_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_service.memory.replica.replica._EVICT_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_service.memory.replica.residents._WAITED_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_service.memory.replica.replica_thread._MAX_BACKOFF", 0.05)
    store = Away()
    store.away = True
    memory = MemoryManager(store, "f" * 16, MemoryConfig(max_resident=3, round_seconds=0.02))  # type: ignore[arg-type]
    memory.start(lambda task: task())
    try:
        await until(lambda: memory.thread.failing)
        for number in range(20):
            await learn_output(memory, f"t{number}", numbers(20))
        await until(lambda: len(memory.residents) <= 3)
        assert memory.outbox.pending == 20
        store.away = False
        await until(lambda: memory.outbox.pending == 0)
        assert len(await store.store.tags()) == 20
    finally:
        memory.stop()


async def test_a_memory_in_use_is_never_evicted_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_service.memory.replica.replica._EVICT_SECONDS", 0.0)
    store = InProcessStore(Limits(1 << 20))
    memory = MemoryManager(store, "f" * 16, MemoryConfig(max_bytes=1, round_seconds=0.02))
    memory.start(lambda task: task())
    with memory.learn_on_exit(MemoryName("a"), await memory.strategy("a", "trie"), []):
        await memory.strategy("b", "trie")
        await memory.strategy("c", "trie")
        await until(lambda: MemoryName("b") not in memory.residents)
        assert MemoryName("a") in memory.residents
    memory.stop()


async def test_the_store_in_this_process_is_bounded_in_bytes() -> None:
    store = InProcessStore(Limits(1 << 20), max_bytes=1000)
    for number in range(10):
        await store.append([Append(f"f:t{number}:", 0, "a" * 16, b"", [Entry(1, 1, bytes(300))])])
    assert await store.tags() == ["f:t9:", "f:t8:", "f:t7:"]
    assert [info.tag for info in await store.info([f"f:t{number}:" for number in range(10)])] == [
        "f:t7:",
        "f:t8:",
        "f:t9:",
    ]


async def test_a_memory_that_comes_late_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_service.memory.manager._FIRST_WAIT", 0.05)
    store = InProcessStore(Limits(1 << 20), shared=True)
    read = store.read

    async def slow(requests: object) -> object:
        await asyncio.sleep(0.2)
        return await read(requests)  # type: ignore[arg-type]

    store.read = slow  # type: ignore[method-assign, assignment]
    memory = MemoryManager(store, "f" * 16, MemoryConfig(round_seconds=0.02))
    memory.start(lambda task: task())
    await memory.strategy("a", "trie")
    assert memory.counters().late == 1
    await until(lambda: not memory.residents.open(MemoryName("a")).unbuilt)
    await memory.strategy("a", "trie")
    assert memory.counters().late == 1
    memory.stop()


def test_the_default_bound_on_bytes_heeds_the_container(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = default_max_bytes(limit)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    limit.write_text("max\n")
    assert default_max_bytes(limit) == whole
    limit.write_text(f"{1 << 28}\n")
    assert default_max_bytes(limit) == 1 << 26
