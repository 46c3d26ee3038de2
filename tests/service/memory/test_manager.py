"""Strategies by tenant, with a store in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from service.memory import MemoryManager, MemoryName
from service.memory.config import MemoryConfig
from service.memory.store.base import Limits
from service.memory.store.in_process import InProcessStore
from strategies import UnknownStrategyError
from strategies.trie.strategy import TrieStrategy
from tests.service.fakes import until
from tests.service.memory.helpers import Answer, numbers


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
    with memory.learn_on_exit("a", trie, [Answer(numbers(50))]):
        pass
    assert getattr(hybrid, "tokens", 0) == 50
    assert getattr(await memory.strategy("b", "hybrid"), "tokens", 0) == 0


async def test_surplus_tenants_are_evicted_and_loaded_again(memory: MemoryManager) -> None:
    for tenant in ("a", "b", "c", "d"):
        with memory.learn_on_exit(tenant, await memory.strategy(tenant, "trie"), [Answer(numbers(100))]):
            pass
    await until(lambda: MemoryName("a") not in memory.residents)
    assert len(memory.residents) <= 3
    back = await memory.strategy("a", "trie")
    assert isinstance(back, TrieStrategy)
    assert [tokens.tolist() for tokens in back.sequences()] == [numbers(100)]


async def test_a_tenant_is_not_evicted_while_a_request_uses_it(memory: MemoryManager) -> None:
    with memory.learn_on_exit("a", await memory.strategy("a", "trie"), []):
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
        with memory.learn_on_exit(f"t{number}", await memory.strategy(f"t{number}", "trie"), [Answer(numbers(20))]):
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
