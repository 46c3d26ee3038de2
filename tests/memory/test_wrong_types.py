"""Keys that another program wrote to: their tenant's memory alone is affected."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from draftwood_memory import MemoryName, MemoryOverrides
from draftwood_memory.errors import WrongTypeError
from draftwood_memory.operations import FillMemory, FillProgress, GetStatistics, PurgeArms, PurgeMemory
from draftwood_memory.records import Kind
from draftwood_memory.store.naming import stream_key, tenant_key
from tests.memory.helpers import (
    FINGERPRINT,
    agreed,
    learn_output,
    learned_by,
    log_of,
    numbers,
    perform,
    replicas,
    resident,
    strategy_of,
    stream_of,
    until,
)
from tests.memory.servers import Valkey, cluster


def spoil(server: Valkey, key: str | bytes) -> None:
    server.client.set(key, "another program's")  # at once: a key that is gone is restored


@pytest.mark.parametrize("spoiled", ["hash", "stream", "both"])
async def test_other_tenants_go_on(
    spoiled: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._CHECK_SECONDS", 0.05)
    caplog.set_level(logging.WARNING, "draftwood_memory")
    with Valkey() as server:
        async with replicas(2, server.url) as memories:
            for tenant in ("bad", "good"):
                await learn_output(memories[0], tenant, numbers(10))
                await agreed(memories, tenant)
            hash_, stream = tenant_key("bad"), stream_of(memories[0], "bad")
            if spoiled != "stream":
                spoil(server, hash_)
            if spoiled != "hash":
                spoil(server, stream)
            await until(lambda: all(resident(memory, "bad").problem for memory in memories))
            await learn_output(memories[0], "bad", numbers(10, 100))
            for start in (200, 300, 400):  # rounds, with checks among them
                await learn_output(memories[0], "good", numbers(10, start))
                assert numbers(10, start) in await agreed(memories, "good", outboxes=False)
            report = await perform(GetStatistics(None), memories[0])
            assert [one.name.tenant for one in report.memories] == ["good"]
            assert [memory.counters().failures for memory in memories] == [0, 0]
            assert memories[0].counters().outbox_records == 1  # it waits until the key is free
            assert learned_by(memories[0], "bad") == [numbers(10), numbers(10, 100)]  # and is drafted from meanwhile
            told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
            assert len(told) == 2, told  # once for each process; threads of other tests' memories may warn here
            assert all("memory ffffffffffffffff:bad: cannot be read" in message for message in told)


@pytest.mark.parametrize(
    ("key", "known"),
    [(tenant_key("bad"), False), (tenant_key("bad"), True), (stream_key(f"{FINGERPRINT}:bad:", 0), False)],
)
async def test_a_memory_is_used_again_once_the_key_is_free(
    monkeypatch: pytest.MonkeyPatch, key: str, known: bool
) -> None:
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._CHECK_SECONDS", 0.05)
    monkeypatch.setattr("draftwood_memory.replication.replica._RETRY_SECONDS", 0.1)
    with Valkey() as server:
        async with replicas(2, server.url) as memories:
            if known:
                await learn_output(memories[0], "bad", numbers(10))
                await agreed(memories, "bad")
            spoil(server, key)
            for memory in memories:
                await strategy_of(memory, "bad")
            await until(lambda: all(resident(memory, "bad").problem for memory in memories))
            assert all(memory.healthy and not resident(memory, "bad").loaded for memory in memories)
            await learn_output(memories[0], "bad", numbers(10, 100))
            assert memories[0].outbox.pending == 1
            server.client.delete(key)
            assert await agreed(memories, "bad") == [numbers(10)] * known + [numbers(10, 100)]
            assert memories[0].counters().failures == 0


async def test_a_memory_that_takes_none_of_its_records_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_memory.replication.sender._PUSH_TOKENS", 16)
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._LAST_ROUND_SECONDS", 0.1)
    with Valkey() as server:
        spoil(server, "dw:{t:bad}:tenant")
        async with replicas(2, server.url) as memories:
            for start in range(0, 100, 10):
                await learn_output(memories[0], "bad", numbers(10, start))
            await learn_output(memories[0], "good", numbers(10))
            await until(lambda: memories[0].counters().pushed == 1)
            assert memories[0].counters().outbox_records == 10


async def test_operations_fail_for_this_tenant_alone() -> None:
    with Valkey() as server:
        async with replicas(1, server.url) as [memory]:
            for tenant in ("bad", "good"):
                await learn_output(memory, tenant, numbers(10), "arm")
                await until(lambda: not memory.outbox.pending)
            spoil(server, tenant_key("bad"))
            with pytest.raises(WrongTypeError):
                await perform(PurgeMemory("bad"), memory)
            fill = FillMemory(
                MemoryName("bad"), Kind.CORPUS, [np.arange(9, dtype=np.int32)], FillProgress(), MemoryOverrides()
            )
            with pytest.raises(WrongTypeError):
                await perform(fill, memory)
            with pytest.raises(WrongTypeError):
                await perform(PurgeArms(("arm",)), memory)
            assert log_of(memory, "good", "arm") == []
            assert log_of(memory, "bad", "arm") == [numbers(10)]


async def test_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._CHECK_SECONDS", 60.0)
    with cluster() as nodes:
        async with replicas(2, f"redis+cluster://127.0.0.1:{nodes[0].port}") as memories:
            for tenant in ("bad", "good"):
                await learn_output(memories[0], tenant, numbers(10))
                await agreed(memories, tenant)
            [(node, stream)] = [(node, key) for node in nodes for key in node.client.keys("dw:{t:bad}:3:*")]
            spoil(node, stream)
            await learn_output(memories[0], "good", numbers(10, 100))
            assert await agreed(memories, "good") == [numbers(10), numbers(10, 100)]
            assert [memory.counters().failures for memory in memories] == [0, 0]
