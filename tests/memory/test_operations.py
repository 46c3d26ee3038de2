"""Filling and exporting memories, statistics, memories that no process uses, and what ends each."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import Any

import pytest

from draftwood_memory import Memory, MemoryName
from draftwood_memory.errors import MemoryPurgedError, MemoryStoreError, StoreUnavailableError
from draftwood_memory.operations import (
    AdoptArm,
    ExportMemory,
    GetStatistics,
    ListOrphans,
    PurgeMemory,
    PurgeOrphans,
    PurgeResult,
)
from draftwood_memory.records import Kind
from draftwood_memory.store.encryption import KeyRing, read_keys
from draftwood_memory.store.naming import KINDS_KEY
from tests.memory.helpers import (
    FINGERPRINT,
    KEY_A,
    KEY_B,
    NAMES,
    agreed,
    before_command,
    fill,
    learn_output,
    learned_by,
    log_of,
    memory_of,
    numbers,
    perform,
    replicas,
    resident,
    started,
    stored,
    strategy_of,
    stream_of,
    tokens_of,
    until,
)
from tests.memory.servers import Proxy, Valkey
from tests.memory.test_purges import Failing

NAME = MemoryName("t")
OLD = "e" * 16
KEYS = read_keys(f"names={KEY_B}\nk1={KEY_A}", "keys")


async def test_what_is_filled_in_is_drafted_from_everywhere_and_exported(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await strategy_of(second, "t")
        await strategy_of(first, "t")
        progress = await perform(fill("t", numbers(10), numbers(20_000)), first)
        assert (progress.epoch, progress.records, progress.tokens) == (0, 4, 20_010)
        progress = await perform(fill("t", numbers(7), progress=progress), first)
        assert (progress.records, progress.tokens) == (5, 20_017)
        await until(lambda: len(learned_by(second, "t")) == 5 == len(learned_by(first, "t")))
        for memory in (first, second):
            records = await perform(ExportMemory(NAME), memory)
            assert [record.tokens.size for record in records] == [10, 8192, 8192, 20_000 - 2 * 8192, 7]
            assert {record.kind for record in records} == {Kind.CORPUS}
        report = await perform(GetStatistics(None), second)
        [shown] = report.memories
        assert (shown.name, shown.stored.tokens, shown.resident, report.exists) == (NAME, 20_017, True, True)
        assert shown.stored.bytes > 10_000
        empty = await perform(GetStatistics("stranger"), second)
        assert (empty.memories, empty.exists) == ([], False)


async def test_a_purge_ends_the_fill_that_it_interrupts_and_leaves_nothing_of_it(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        progress = await perform(fill("t", numbers(10)), first)
        old = stream_of(first, "t")
        assert server.client.exists(old)
        with (
            before_command(first, "EVAL", lambda: perform(PurgeMemory("t"), second), of="dw:{t:t}"),
            pytest.raises(MemoryPurgedError),
        ):
            await perform(fill("t", numbers(10), progress=progress), first)
        assert not server.client.exists(old)
        with pytest.raises(MemoryPurgedError):
            await perform(fill("t", numbers(10), progress=progress), first)
        assert (await perform(fill("t", numbers(10)), first)).records == 1


async def test_a_fill_of_nothing_reaches_no_store() -> None:
    async with replicas(1, "redis://127.0.0.1:1") as [memory]:
        empty = fill("t", [])
        assert await perform(empty, memory) == empty.progress
        assert NAME not in memory.residents
        for operation in (fill("t", numbers(3)), ExportMemory(NAME), PurgeMemory("t"), GetStatistics("other")):
            with pytest.raises(StoreUnavailableError):
                await perform(operation, memory)


@pytest.mark.parametrize(
    "operation", [GetStatistics("t"), ExportMemory(NAME), PurgeMemory("t"), fill("t", numbers(3)), ListOrphans()]
)
async def test_operations_and_their_results_can_be_sent(server: Valkey, operation: Any) -> None:
    async with replicas(1, server.url) as [memory]:
        result: object = await perform(pickle.loads(pickle.dumps(operation)), memory)
        assert type(pickle.loads(pickle.dumps(result))) is type(result)
    for error in (StoreUnavailableError("away"), MemoryPurgedError("purged")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


async def leave(server: Valkey, tenant: str, tokens: int, **options: Any) -> None:
    """A process that learned something for a tenant, and ended."""
    async with replicas(1, server.url, **options) as [memory]:
        await stored([memory], tenant, numbers(tokens))


async def test_a_purge_reaches_other_models_and_plain_names(server: Valkey) -> None:
    await leave(server, "acme", 11, fingerprint=OLD)
    await leave(server, "acme", 12)
    await leave(server, "acme2", 13)
    await leave(server, "acme", 14, keys=KEYS, fingerprint=OLD)
    async with replicas(1, server.url, keys=KEYS) as [memory]:
        await stored([memory], "acme", numbers(15))
        assert await perform(PurgeMemory("acme"), memory) == PurgeResult(4, 11 + 12 + 14 + 15)
        assert log_of(memory, "acme") == []
    assert [b"acme2" in key for key in server.client.scan_iter("dw:*:3:*")] == [True]


async def test_a_running_server_of_another_model_hears_of_the_purge(server: Valkey) -> None:
    async with replicas(1, server.url) as [first], replicas(1, server.url, fingerprint=OLD) as [second]:
        await stored([second], "t", numbers(10))
        assert (await perform(PurgeMemory("t"), first)).tokens == 10
        await until(lambda: log_of(second, "t") == [])


async def test_orphans_are_listed_and_purged(server: Valkey) -> None:
    await leave(server, "acme", 11, fingerprint=OLD)
    await leave(server, "acme", 12, keys=KEYS)
    async with replicas(1, server.url) as [memory]:
        await stored([memory], "live", numbers(20))
        assert await perform(ListOrphans(), memory) == []  # they were used lately
        for kind in server.client.zrange(KINDS_KEY, 0, -1):
            assert isinstance(kind, bytes)
            server.client.zincrby(KINDS_KEY, -3700, kind)
        found = await perform(ListOrphans(), memory)
        assert [(one.fingerprint, one.name, one.stored.tokens) for one in found] == [
            (OLD, MemoryName("acme"), 11),
            (FINGERPRINT, None, 12),
        ]
        assert min(one.unserved for one in found) > 3600
        assert await perform(PurgeOrphans("0" * 16), memory) == PurgeResult(0, 0)
        assert await perform(PurgeOrphans(OLD), memory) == PurgeResult(1, 11)
        assert await perform(PurgeOrphans(), memory) == PurgeResult(1, 12)
        assert await perform(ListOrphans(), memory) == []
        assert await agreed([memory], "live") == [numbers(20)]


async def test_without_an_answer_of_the_store_statistics_are_those_of_this_process(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_memory.memory_thread._LAST_ROUND_SECONDS", 0.1)
    async with Proxy(server.port) as proxy, replicas(1, proxy.url, timeout=0.2) as [memory]:
        await stored([memory], "t", numbers(10))
        proxy.open.clear()
        for page in (GetStatistics(None), GetStatistics("t")):
            report = await perform(page, memory)
            assert [(shown.name, shown.stored.tokens, shown.resident) for shown in report.memories] == [
                (MemoryName("t"), 10, True)
            ]
            assert (report.healthy, report.exists, report.following) == (False, True, None)
            assert report.counters.learned == 1
        with pytest.raises(StoreUnavailableError):
            await perform(GetStatistics("elsewhere"), memory)
        await learn_output(memory, "t", numbers(11))
        assert (await perform(GetStatistics(None), memory)).counters.outbox_records == 1


async def test_an_operation_that_is_running_at_the_stop_is_cancelled(server: Valkey) -> None:
    class Hang:
        async def run(self, memory: Memory) -> None:
            await asyncio.Event().wait()

    memory = memory_of(server.url)
    async with started(memory):
        waiting = memory.submit(Hang())
    assert waiting.cancelled()


EACH_KEYS = [None, read_keys(f"{NAMES}\nk1={KEY_A}", "keys")]


async def drafted(memory: Memory, after: list[int]) -> list[int]:
    """What the tenant's next request drafts, on the thread that learns, as in the engine."""
    strategy = await strategy_of(memory, "t")
    drafter = strategy.start(tokens_of(9999))
    drafter.observe(tokens_of(*after), None)
    tokens: list[int] = drafter.propose(8).tokens.tolist()
    drafter.close()
    return tokens


@pytest.mark.parametrize("keys", EACH_KEYS)
async def test_the_next_request_on_each_replica_drafts_what_the_arm_has_learned(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, keys: KeyRing | None
) -> None:
    monkeypatch.setattr("draftwood_memory.resident.LIVE_SECONDS", 0.3)
    monkeypatch.setattr("draftwood_memory.memory._FIRST_WAIT", 5.0)  # a busy machine may take longer than 50 ms
    monkeypatch.setattr("draftwood_memory.memory_thread._SLOW_SECONDS", 5.0)  # and a round longer than 300
    async with replicas(3, server.url, keys=keys) as [first, second, third]:
        await learn_output(first, "t", numbers(20))
        await strategy_of(second, "t")
        await agreed([first, second], "t")
        await learn_output(first, "t", numbers(30, 1000), arm="x/a")
        await learn_output(second, "t", numbers(30, 2000), arm="x/a")
        await learn_output(second, "t", numbers(30, 3000), arm="x/b")
        await until(lambda: not (first.outbox.pending or second.outbox.pending))
        own = [resident(memory, "t") for memory in (first, second)]
        await until(lambda: not any(one.live for one in own))  # nobody uses the tenant's own memory
        assert await perform(AdoptArm("x/a"), third) == 2
        for memory in (first, second, third):
            for start in (1000, 2000):
                after = numbers(4, start)
                assert (await drafted(memory, after))[:4] == numbers(4, start + 4)
            assert await drafted(memory, numbers(4, 3000)) == []
        assert await perform(AdoptArm("x/a"), first) == 0  # once
        for memory in (first, second):
            assert len(log_of(memory, "t")) == 3


@pytest.mark.parametrize("failing_at", range(14))
async def test_after_a_crash_it_is_repeated_and_adds_each_record_once(server: Valkey, failing_at: int) -> None:
    async with replicas(1, server.url) as [memory]:
        for tenant in "ab":
            await learn_output(memory, tenant, numbers(10))
            for start in range(3):
                await learn_output(memory, tenant, numbers(30, 1000 * start), arm="x/a")
        await until(lambda: not memory.outbox.pending)
        client = Failing(server.url)
        crashing = Memory(client, FINGERPRINT)  # its thread does not run: the operation runs here
        client.commands_left, client.takes_effect = failing_at, random.Random(failing_at).random() < 0.5
        try:
            await AdoptArm("x/a").run(crashing)
        except MemoryStoreError:
            client.commands_left = None
            await AdoptArm("x/a").run(Memory(client, FINGERPRINT))
        await client.close()
        for tenant in "ab":
            found = await perform(ExportMemory(MemoryName(tenant)), memory)
            assert len(found) == 4, tenant
            assert await perform(ExportMemory(MemoryName(tenant, "x/a")), memory)


@pytest.mark.parametrize("before", ["EVAL", "HMGET", "XRANGE"])
async def test_a_purge_meanwhile_is_final(server: Valkey, before: str) -> None:
    async with replicas(2, server.url) as [memory, operator]:
        await learn_output(memory, "t", numbers(10))
        await learn_output(memory, "t", numbers(30), arm="x/a")
        await agreed([memory, operator], "t")
        client, purged = Failing(server.url), list[object]()

        async def purge() -> None:
            purged.append(await perform(PurgeMemory("t"), operator))

        adopting = Memory(client, FINGERPRINT)
        with before_command(adopting, before, purge, of="dw:{t:t}"):
            await AdoptArm("x/a").run(adopting)
        assert purged
        await client.close()
        assert await agreed([memory, operator], "t") == []
        assert server.client.keys("dw:{t:t}:3:*") == []
