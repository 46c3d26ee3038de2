"""Memories in a process: what it keeps of them, which ones it evicts, and what it does without a store."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood_memory import MemoryConfig, MemoryName, MemoryOverrides, StrategyKey, StrategyUse
from draftwood_memory import resident as resident_module
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
from draftwood_memory.records import Kind, LoggedRecord, Record
from draftwood_memory.resident import LIVE_SECONDS, Resident, learn
from draftwood_memory.residents import Residents
from draftwood_memory.store.naming import Naming
from draftwood_memory.store.stored import StoreClock
from draftwood_strategies import TrieStrategy, UnknownStrategyError, create
from tests.memory.helpers import (
    FINGERPRINT,
    learn_output,
    learned_by,
    log_of,
    memory_of,
    numbers,
    perform,
    replicas,
    strategy_of,
    tokens_of,
    until,
)
from tests.memory.servers import Valkey
from tests.strategies.fakes import own_records
from tests.strategies.toy_model import ToyModel, run

T = MemoryName("t")


def logged(count: int, learned_at: int = 1, request: int = 0) -> LoggedRecord:
    return LoggedRecord(Record(Kind.OUTPUT, tokens_of(*numbers(count)), learned_at, request))


def opened(config: MemoryConfig, stored: bool = True) -> tuple[Residents, Resident]:
    """With one memory, which was loaded and used 10 s ago."""
    residents = Residents(Naming(FINGERPRINT), config, StoreClock(), stored)
    resident = residents.open(T)
    resident.loaded = True
    resident.used_at = time.monotonic() - 10.0
    return residents, resident


@pytest.mark.parametrize(
    ("case", "evicted"),
    [
        ("idle", True),
        ("used lately", False),
        ("pinned", False),
        ("unpinned again", True),
        ("pinned twice and unpinned once", False),
        ("not loaded yet", False),
        ("strategies without the records", False),
        ("records that the store lacks", False),
        ("no store", False),
    ],
)
def test_an_idle_memory_is_evicted_if_the_store_can_give_it_back(case: str, evicted: bool) -> None:
    config = MemoryConfig(idle_seconds=60.0 if case == "used lately" else 9.0)
    residents, resident = opened(config, stored=case != "no store")
    for _ in range(2 if "twice" in case else "pinned" in case):
        residents.pin(T)
    if "unpinned" in case:
        residents.unpin(resident)
    resident.used_at -= 10.0
    resident.loaded = case != "not loaded yet"
    if case == "strategies without the records":
        resident.unbuilt[StrategyKey("trie")] = Future()
    residents.evict(frozenset({T}) if case == "records that the store lacks" else frozenset())
    assert (T not in residents, residents.evicted) == (evicted, int(evicted))


@pytest.mark.parametrize(("waited", "kept"), [(0.0, True), (2.0, False)])
def test_of_too_many_one_that_a_request_waits_for_stays_for_a_moment(waited: float, kept: bool) -> None:
    residents, resident = opened(MemoryConfig(max_resident=1))
    resident.unbuilt[StrategyKey("trie")] = Future()
    resident.used_at = time.monotonic() - waited
    assert not residents.too_many
    residents.open(MemoryName("t", "x/a"))
    assert residents.too_many
    residents.evict(frozenset())
    assert (T in residents) == kept


def test_the_memory_that_was_used_last_stays_even_if_it_is_too_large() -> None:
    residents, _ = opened(MemoryConfig(max_bytes=1))
    for arm in "aba":
        last = residents.open(MemoryName("t", arm))
    for resident in residents.all():
        resident.add(logged(9))
    residents.evict(frozenset())
    assert (residents.all(), residents.evicted) == ([last], 2)


def test_a_memory_that_a_request_begins_to_use_during_an_eviction_stays() -> None:
    residents, resident = opened(MemoryConfig(max_bytes=1))
    residents.open(MemoryName("t", "x/a")).add(logged(9))

    class Begun:
        @property
        def nbytes(self) -> int:
            residents.pin(T)
            return 1

    strategy: Any = Begun()
    resident.strategies[StrategyKey("trie")] = strategy
    residents.evict(frozenset())
    assert T in residents


def test_an_instance_that_is_dropped_before_it_was_built_lets_its_request_begin_and_does_not_come_back() -> None:
    _, resident = opened(MemoryConfig())
    keys = [StrategyKey("trie", (("branch_length", length),)) for length in range(1, 10)]
    waiting = [resident.instance(key)[1] for key in keys]
    assert [one is None or one.done() for one in waiting] == [True] + [False] * 8
    resident.build(keys, replace_empty=True)
    assert ([*resident.strategies], resident.unbuilt) == (keys[1:], {})


def test_a_loaded_memory_is_followed_while_a_request_uses_it_and_for_a_while_after() -> None:
    residents, resident = opened(MemoryConfig())
    assert resident.live
    resident.used_at -= LIVE_SECONDS
    assert not resident.live
    residents.pin(T).used_at -= LIVE_SECONDS
    assert resident.live
    resident.loaded = False
    assert not resident.live


@pytest.mark.parametrize(("age", "expired"), [(99, False), (101, True)])
def test_a_memory_that_was_loaded_is_as_old_as_its_newest_record(age: int, expired: bool) -> None:
    _, resident = opened(MemoryConfig(ttl=100.0))
    now = int(time.time())
    resident.replace_log([logged(9, now - 500), logged(9, now - age)], b"1-0")
    assert resident.expired is expired


def test_the_size_of_a_memory_is_that_of_its_records_and_of_the_strategies_that_report_one() -> None:
    _, resident = opened(MemoryConfig())
    resident.add(logged(9))
    trie, hybrid, none = (resident.instance(StrategyKey(name))[0] for name in ("trie", "hybrid", "none"))
    sizes: list[Any] = [trie, hybrid]
    assert not hasattr(none, "nbytes")
    assert resident.index_bytes == sum(size.nbytes for size in sizes) > 0
    assert resident.nbytes == resident.log.nbytes + resident.index_bytes


def learned_besides_texts(strategy: Any) -> list[Any]:
    """Weights, odds, successors and rates, copied."""
    tables: list[Any] = [*strategy.weights] if hasattr(strategy, "weights") else []
    if (mixture := getattr(strategy, "mixture", None)) is not None:
        tables += [*mixture.weights, mixture.table.rows]
    if hasattr(strategy, "rates"):
        tables += [strategy.rates.first, strategy.rates.later, strategy.rates.worth]
    parts = getattr(strategy, "parts", {}).values()
    return [np.copy(table) for table in tables] + [table for part in parts for table in learned_besides_texts(part)]


@pytest.mark.parametrize("name", ["trie", "recycling", "jacobi", "hybrid"])
def test_what_a_strategy_learned_besides_texts_outlives_them_but_no_purge(name: str) -> None:
    _, resident = opened(MemoryConfig(max_age=640.0))
    key = StrategyKey(name)
    strategy: Any = resident.instance(key)[0]
    resident.build([key])
    drafter = strategy.start(tokens_of(1, 2, 3))
    run(ToyModel(), drafter, [1, 2, 3], 200, 16, strategy.top_k)
    learned, fresh = learned_besides_texts(strategy), learned_besides_texts(create(name))
    assert any((table != other).any() for table, other in zip(learned, fresh, strict=True))
    resident.add(logged(9, 1))
    resident.add(logged(5, int(time.time())))
    assert resident.drop_aged()
    resident.build([key], replace_empty=True)
    rebuilt: Any = resident.instance(key)[0]
    assert rebuilt is not strategy
    assert [table.tolist() for table in learned_besides_texts(rebuilt)] == [table.tolist() for table in learned]
    assert getattr(rebuilt, "tokens", 5) == 5
    run(ToyModel(), rebuilt.start(tokens_of(1, 2, 3)), [1, 2, 3], 20, 16, strategy.top_k)
    resident.reset(1, None)
    purged = learned_besides_texts(resident.instance(key)[0])
    assert [table.tolist() for table in purged] == [table.tolist() for table in fresh]


def test_a_strategy_that_cannot_keep_what_it_learned_begins_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(strategy: TrieStrategy, earlier: TrieStrategy) -> None:
        strategy.learned = earlier.learned
        raise RuntimeError("a bug")

    monkeypatch.setattr(TrieStrategy, "keep_learned", broken)
    _, resident = opened(MemoryConfig())
    key = StrategyKey("trie")
    strategy: Any = resident.instance(key)[0]
    resident.add(logged(5))
    resident.build([key])
    rebuilt: Any = resident.instance(key)[0]
    assert rebuilt.tokens == 5
    assert rebuilt.learned is not strategy.learned
    assert [line.getMessage() for line in own_records(caplog)] == ["strategy trie keeps nothing of what it learned"]


class Noting:
    """A strategy that notes the lengths of what it learns."""

    def __init__(self) -> None:
        self.learned: list[int] = []

    def learn(self, tokens: Any) -> None:
        self.learned.append(tokens.size)


def test_what_is_learned_while_a_strategy_is_built_is_learned_by_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, resident = opened(MemoryConfig())
    key = StrategyKey("trie")

    class Slow(Noting):
        def learn(self, tokens: Any) -> None:
            if not self.learned:
                resident.add(logged(5))
            super().learn(tokens)

    monkeypatch.setattr(resident_module, "make", lambda key, capacity: Slow())
    strategy, future = resident.instance(key)
    resident.add(logged(10))
    resident.build([key])
    built: Any = resident.strategies[key]
    assert built is not strategy
    assert future is not None
    assert future.done()
    assert built.learned == [10, 5]
    resident.add(logged(3))
    resident.build([key])
    built = resident.strategies[key]
    assert built.learned == [10, 5, 3, 5]


def test_a_memory_that_is_emptied_while_a_strategy_is_built_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, resident = opened(MemoryConfig())
    key = StrategyKey("trie")

    class Emptied(Noting):
        def learn(self, tokens: Any) -> None:
            super().learn(tokens)
            resident.reset(1, None)

    monkeypatch.setattr(resident_module, "make", lambda key, capacity: Emptied())
    _, future = resident.instance(key)
    resident.add(logged(10))
    resident.build([key])
    assert future is not None
    assert future.done()
    assert own_records(caplog) == []
    left: Any = resident.instance(key)[0]
    assert left.learned == []


def test_what_is_learned_while_the_store_is_read_follows_what_the_store_has() -> None:
    _, resident = opened(MemoryConfig())
    resident.learned_meanwhile = []
    own, stored = logged(5), logged(9)
    resident.add(own)
    resident.replace_log([stored], b"1-0")
    assert [*resident.log] == [stored, own]
    resident.replace_log([stored], b"1-0")
    assert [*resident.log] == [stored]


def test_a_strategy_that_cannot_learn_is_logged_and_one_that_does_not_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Noting):
        def learn(self, tokens: Any) -> None:
            super().learn(tokens)
            raise RuntimeError("a bug")

    strategies: list[Any] = [object(), Noting(), Broken()]
    for strategy in strategies:
        learn(strategy, [tokens_of(1), tokens_of(1, 2)])
    assert [strategy.learned for strategy in strategies[1:]] == [[1, 2], [1]]
    assert [line.getMessage() for line in own_records(caplog)] == ["strategy Broken cannot learn"]


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
        with memory.learning(MemoryName("t"), await strategy_of(memory, "t")) as request:
            assert await perform(PurgeMemory("t"), memory) == PurgeResult(2, 10)
            request.learn(tokens_of(1, 2, 3))  # it began before the purge
        assert (log_of(memory, "t"), memory.counters().stale) == ([], 1)
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
        await until(lambda: log_of(memory, "t") == [] and memory.residents.open(T).loaded)
        assert (memory.counters().tokens, learned_by(memory, "t")) == (0, [])


async def test_records_that_are_too_old_are_dropped_from_the_drafts() -> None:
    async with replicas(1, None, config=MemoryConfig(max_age=100.0)) as [memory]:
        await learn_output(memory, "t", numbers(40))
        found = memory.residents.open(T)
        with found.lock:
            for logged in found.log:
                logged.record = replace(logged.record, learned_at=int(time.time()) - 101)
        await learn_output(memory, "t", numbers(40, 5000))
        found.aged_at = 0.0
        memory.thread.wake()
        await until(lambda: learned_by(memory, "t") == [numbers(40, 5000)])
        assert log_of(memory, "t") == [numbers(40, 5000)]


@pytest.mark.usefixtures("evicts_at_once", "patient")
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
