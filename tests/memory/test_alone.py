"""Memories in a process without a store, and the bounds of those in a process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from draftwood_memory import MemoryConfig, MemoryName, MemoryOverrides, StrategyKey, StrategyUse
from draftwood_memory.config import default_max_bytes
from draftwood_memory.errors import StoreUnavailableError
from draftwood_memory.operations import (
    AdoptArm,
    ExportMemory,
    GetStatistics,
    ListOrphans,
    PurgeArms,
    PurgeMemory,
    PurgeResult,
)
from draftwood_strategies import UnknownStrategyError
from tests.memory.helpers import (
    learn_output,
    learned_by,
    log_of,
    memory_of,
    numbers,
    perform,
    replicas,
    resident,
    strategy_of,
    until,
)
from tests.memory.servers import Valkey


async def test_an_unknown_strategy_leaves_no_tenant_behind() -> None:
    async with replicas(1, None) as [memory]:
        with pytest.raises(UnknownStrategyError):
            memory.strategy("a", "oracle")
        assert len(memory.residents) == 0


async def test_all_strategies_of_a_tenant_learn_the_same() -> None:
    async with replicas(1, None) as [memory]:
        trie, hybrid = await strategy_of(memory, "a"), await strategy_of(memory, "a", "hybrid")
        with memory.learning(MemoryName("a"), trie) as request:
            request.learn(np.arange(50, dtype=np.int32))
        assert (trie.tokens, hybrid.tokens) == (0, 50)  # its own strategy has learned it before
        assert (await strategy_of(memory, "b", "hybrid")).tokens == 0


async def test_operators_are_served_without_a_store() -> None:
    async with replicas(1, None) as [memory]:
        await learn_output(memory, "t", numbers(10))
        await learn_output(memory, "t", numbers(20), arm="x/a")
        await learn_output(memory, "u", numbers(5))
        report = await perform(GetStatistics(None), memory)
        assert [(one.name, one.stored.tokens) for one in report.memories] == [
            (MemoryName("u"), 5),
            (MemoryName("t", "x/a"), 20),
            (MemoryName("t"), 10),
        ]
        assert (report.store, report.healthy, report.exists) == ("memory", True, True)
        assert memory.counters().newer_memories == 0
        assert [one.tokens.tolist() for one in await perform(ExportMemory(MemoryName("t")), memory)] == [numbers(10)]
        assert await perform(PurgeArms(("x/a",)), memory) == 1
        assert await perform(PurgeMemory("t"), memory) == PurgeResult(2, 10)
        assert log_of(memory, "t") == []
        assert await perform(ListOrphans(), memory) == []


async def test_a_forked_arm_begins_with_its_tenants_memory_and_gives_back_only_what_it_has_learned() -> None:
    async with replicas(1, None) as [memory]:
        await learn_output(memory, "t", numbers(30))
        use = StrategyUse(MemoryName("t", "x/a"), StrategyKey("trie"), MemoryOverrides(forked=True))
        memory.fetch(use, lambda _: None)
        await until(lambda: learned_by(memory, "t", "x/a") == [numbers(30)])
        await learn_output(memory, "t", numbers(5), arm="x/a")
        assert log_of(memory, "t") == [numbers(30)]
        assert await perform(AdoptArm("x/a"), memory) == 1
        assert log_of(memory, "t") == [numbers(30), numbers(5)]


async def test_a_memory_expires_after_its_last_record() -> None:
    async with replicas(1, None, config=MemoryConfig(ttl=0.2)) as [memory]:
        await learn_output(memory, "t", numbers(10))
        await asyncio.sleep(0.25)
        memory.thread.wake()
        await until(lambda: log_of(memory, "t") == [] and resident(memory, "t").loaded)
        assert (memory.counters().tokens, learned_by(memory, "t")) == (0, [])


@pytest.mark.usefixtures("evicts_at_once")
async def test_surplus_tenants_are_evicted_and_loaded_again(server: Valkey) -> None:
    async with replicas(1, server.url, config=MemoryConfig(max_resident=2)) as [memory]:
        used = memory.learning(MemoryName("used"))
        with used:
            for tenant in "abcd":
                await learn_output(memory, tenant, numbers(100))
            await until(lambda: MemoryName("a") not in memory.residents)
            assert MemoryName("used") in memory.residents
        assert [sequence.tolist() for sequence in (await strategy_of(memory, "a")).sequences()] == [numbers(100)]


async def test_a_stopped_memory_runs_nothing() -> None:
    memory = memory_of(None)
    memory.stop()
    with pytest.raises(StoreUnavailableError):
        await perform(GetStatistics(None), memory)


def test_the_default_bound_on_bytes_heeds_the_container(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    whole = default_max_bytes(limit)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    limit.write_text("max\n")
    assert default_max_bytes(limit) == whole
    limit.write_text(f"{1 << 28}\n")
    assert default_max_bytes(limit) == 1 << 26
