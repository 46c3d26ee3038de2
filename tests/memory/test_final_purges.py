"""What PurgeMemory promises when it returns: no process drafts from what was purged, or the call says until when."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from draftwood_memory import Memory, MemoryConfig, MemoryName, MemoryOverrides
from draftwood_memory.errors import MemoryPurgedError
from draftwood_memory.operations import FillMemory, FillProgress, PurgeArms, PurgeMemory, PurgeOrphans
from draftwood_memory.records import Kind
from draftwood_memory.store import processes
from draftwood_memory.store.naming import KINDS_KEY, PROCESSES_KEY
from tests.memory.helpers import (
    agreed,
    before_command,
    learn_output,
    learned_by,
    log_of,
    memory_of,
    numbers,
    perform,
    replicas,
    started,
    stored,
    strategy_of,
    tokens_of,
    until,
)
from tests.memory.servers import Proxy, Valkey


async def test_no_other_replica_drafts_from_it_once_the_call_has_returned(server: Valkey) -> None:
    async with replicas(4, server.url) as memories:
        for turn in range(2):
            await stored(memories, "t", numbers(20, turn))
            began = time.monotonic()
            purged = await perform(PurgeMemory("t"), memories[turn])
            assert (purged.tokens, purged.final_in) == (20, 0.0)
            assert time.monotonic() - began < 4.0  # a process that does not answer is waited for five seconds
            assert [(learned_by(memory, "t"), log_of(memory, "t")) for memory in memories] == [([], [])] * 4
            assert [memory.strategy("t", "trie").tokens for memory in memories] == [0] * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("imports_itself", [False, True])
async def test_a_replica_that_learns_a_large_import_applies_a_purge_at_once(
    server: Valkey, imports_itself: bool
) -> None:
    """Its engine makes no step meanwhile, so that its strategies cannot learn."""
    async with replicas(2, server.url) as [here, busy]:
        await stored([here, busy], "t", numbers(20))
        waiting = list[Callable[[], None]]()
        busy.between_steps.run_on_engine = waiting.append
        texts = [tokens_of(*numbers(8000, start)) for start in range(0, 20_000, 1000)]
        fill = FillMemory(MemoryName("t"), Kind.CORPUS, texts, FillProgress(), MemoryOverrides())
        importing = asyncio.create_task(perform(fill, busy if imports_itself else here))
        await until(lambda: waiting)
        began = time.monotonic()
        purged = await perform(PurgeMemory("t"), here)
        assert (purged.final_in, time.monotonic() - began < 1.0) == (0.0, True)
        assert (learned_by(busy, "t"), log_of(busy, "t")) == ([], [])
        for task in waiting:
            task()
        assert (await strategy_of(busy, "t")).tokens == 0
        with suppress(MemoryPurgedError):  # some of it was not sent before the purge
            await importing
        busy.between_steps.run_on_engine = lambda task: task()
        assert await stored([here, busy], "t", numbers(5)) == [numbers(5)]


async def test_two_purges_at_once_do_not_wait_for_each_other(server: Valkey) -> None:
    async with replicas(2, server.url) as memories:
        for tenant in "ab":
            await stored(memories, tenant, numbers(20))
        async with asyncio.timeout(6.0):  # else eight
            both = [perform(PurgeMemory(tenant), memory) for tenant, memory in zip("ab", memories, strict=True)]
            assert [one.tokens for one in await asyncio.gather(*both)] == [20, 20]
        assert [learned_by(memory, tenant) for memory in memories for tenant in "ab"] == [[]] * 4


@pytest.mark.system
async def test_a_replica_without_the_store_is_told_of_and_forgets_in_time(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "LEASE_SECONDS", 4.0)
    monkeypatch.setattr(processes, "_SILENT_SECONDS", 3.0)
    async with Proxy(server.port) as proxy, replicas(1, server.url) as [here], replicas(1, proxy.url) as [away]:
        await stored([here, away], "t", numbers(20))
        proxy.open.clear()
        await until(lambda: away.thread.failing)
        purged = await perform(PurgeMemory("t"), here)
        final_at = time.monotonic() + purged.final_in
        assert 0.0 < purged.final_in <= 4.0
        assert learned_by(away, "t") == [numbers(20)]  # an outage of the store costs no drafts
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(final_at - time.monotonic())
            assert (await strategy_of(away, "t")).tokens == 0
        assert log_of(away, "t") == []
        await learn_output(away, "t", numbers(30))
        assert (log_of(away, "t"), away.outbox.pending) == ([], 0)  # another purge may have come since
        assert "nothing is drafted from memories" in caplog.text
        proxy.open.set()
        await until(lambda: away.thread.healthy)
        assert await stored([here, away], "t", numbers(5)) == [numbers(5)]
        proxy.open.clear()
        await until(lambda: log_of(away, "t") == [])  # once more


async def test_a_process_that_was_a_day_without_the_store_drafts_from_nothing_until_it_is_back(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    async with Proxy(server.port) as proxy, replicas(1, proxy.url) as [memory]:
        await stored([memory], "t", numbers(20))
        proxy.open.clear()
        await until(lambda: memory.thread.failing)
        assert memory.replica is not None
        memory.replica.processes.reached_at -= processes.LEASE_SECONDS - 60.0
        assert (await strategy_of(memory, "t")).tokens == 20
        memory.replica.processes.reached_at -= 60.0
        assert (await strategy_of(memory, "t")).tokens == 0
        await learn_output(memory, "t", numbers(30))
        assert (log_of(memory, "t"), memory.outbox.pending) == ([], 0)
        assert caplog.text.count("nothing is drafted from memories until it is back") == 1
        proxy.open.set()
        assert await agreed([memory], "t") == [numbers(20)]


@pytest.mark.system
async def test_a_process_that_ended_is_not_waited_for_and_a_killed_one_not_for_long(server: Valkey) -> None:
    async with replicas(1, server.url) as [here]:
        async with replicas(1, server.url) as [ended]:
            await until(lambda: server.client.zcard(PROCESSES_KEY) == 2)
            assert ended.thread.healthy
        assert server.client.zcard(PROCESSES_KEY) == 1
        assert here.replica is not None
        killed = processes.Processes(here.replica.memories.client, here.clock, "0" * 16)
        await asyncio.wrap_future(here.thread.submit(killed.apply(b"0-0")))
        began = time.monotonic()
        purged = await perform(PurgeMemory("t"), here)
        assert time.monotonic() - began < processes._WAIT_SECONDS
        assert processes.LEASE_SECONDS - 10 < purged.final_in < processes.LEASE_SECONDS


@pytest.mark.parametrize("stored", [True, False])
async def test_a_request_that_began_before_a_purge_teaches_nothing_after_it(server: Valkey, stored: bool) -> None:
    """Its memory was opened after the purge: it had waited for its grammar."""
    async with replicas(1, server.url if stored else None) as [memory]:
        await learn_output(memory, "t", numbers(20))
        await until(lambda: not memory.outbox.pending)
        began = time.monotonic()
        await perform(PurgeMemory("t"), memory)
        await strategy_of(memory, "t")
        with memory.learning(MemoryName("t"), began=began) as request:
            request.learn(tokens_of(*numbers(30)))
        assert (log_of(memory, "t"), memory.counters().stale, memory.outbox.pending) == ([], 1, 0)
        await learn_output(memory, "t", numbers(5))
        assert log_of(memory, "t") == [numbers(5)]


async def test_an_evicted_memorys_records_from_before_a_purge_are_not_sent(server: Valkey) -> None:
    async with replicas(1, server.url) as [first]:
        await stored([first], "t", numbers(20))
        late = memory_of(server.url, config=MemoryConfig(max_resident=0))  # its thread does not run yet
        began = time.monotonic()
        await perform(PurgeMemory("t"), first)
        late.residents.open(MemoryName("t")).generation = 0  # it has not heard of the purge
        with late.learning(MemoryName("t"), began=began) as request:
            request.learn(tokens_of(*numbers(33)))
        late.residents.evict(late.outbox.names())
        assert len(late.residents) == 0
        async with started(late):
            await until(lambda: late.outbox.pending == 0)
        assert late.counters().stale == 1
        assert await agreed([first], "t") == []


async def test_what_is_learned_after_a_purge_and_before_the_stores_first_answer_is_kept(server: Valkey) -> None:
    async with replicas(1, server.url) as [first]:
        await stored([first], "t", numbers(20))
        await perform(PurgeMemory("t"), first)
        new = memory_of(server.url)  # its thread does not run yet
        # Seconds later: by as much as the store's answer is read late, a purge is taken to be later than it was.
        with new.learning(MemoryName("t"), began=time.monotonic() + 5.0) as request:
            request.learn(tokens_of(*numbers(33)))
        async with started(new):
            await until(lambda: new.outbox.pending == 0)
        assert new.counters().stale == 0
        assert await agreed([first], "t") == [numbers(33)]


async def writes(memory: Memory, arm: str, count: int) -> None:
    """Another process of the tenant writes, and what it wrote is stored."""
    await learn_output(memory, "t", numbers(count), arm=arm)
    await until(lambda: not memory.outbox.pending)


@pytest.mark.parametrize("word", ["HDEL", "UNLINK"])
async def test_a_memory_that_is_written_to_while_it_is_deleted_stays_listed(server: Valkey, word: str) -> None:
    async with replicas(1, server.url, fingerprint="e" * 16) as [old], replicas(1, server.url) as [operator]:
        await writes(old, "x/a", 10)
        server.client.zadd(KINDS_KEY, {old.naming.kind: time.time() - 7200})
        with before_command(operator, word, lambda: writes(old, "x/a", 12)):
            await perform(PurgeOrphans(), operator)
        await writes(old, "x/a", 14)
        assert server.client.keys("dw:{t:t}:3:*")
        assert await perform(PurgeArms(("x/a",)), operator) == 1
        assert server.client.keys("dw:{t:t}:3:*") == []


async def test_what_is_written_during_a_purge_is_deleted_by_it(server: Valkey) -> None:
    async with replicas(2, server.url) as [writer, operator]:
        await stored([writer, operator], "t", numbers(10))
        with before_command(operator, "HSET", lambda: writes(writer, "new", 12)):  # which raises the generation
            await perform(PurgeMemory("t"), operator)
        await until(lambda: server.client.keys("dw:{t:t}:3:*") == [])
        assert log_of(writer, "t", "new") == []
