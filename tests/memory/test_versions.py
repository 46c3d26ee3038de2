"""Several versions over one store: an older one reads what it can and changes nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest

from draftwood_memory import MemoryName, MemoryOverrides
from draftwood_memory.errors import StoreRefusedError
from draftwood_memory.operations import (
    FillMemory,
    FillProgress,
    GetStatistics,
    ListOrphans,
    PurgeArms,
    PurgeMemory,
    PurgeOrphans,
    PurgeResult,
)
from draftwood_memory.records import Kind
from draftwood_memory.store.naming import KINDS_KEY, SCHEMA, tenant_key
from tests.memory.helpers import agreed, learn_output, numbers, perform, replicas, stored, strategy_of, stream_of, until
from tests.memory.servers import Valkey


def _upgrade(server: Valkey) -> None:
    """What a program with a higher schema says when it writes to the tenant's memories."""
    server.client.hset(tenant_key("t"), "v", str(SCHEMA + 1))


async def test_an_old_replica_keeps_what_a_newer_one_wrote(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._CHECK_SECONDS", 0.1)
    async with replicas(1, server.url) as [old]:
        async with replicas(1, server.url) as [new]:
            assert await stored([old, new], "t", numbers(10)) == [numbers(10)]
            await learn_output(new, "t", numbers(11))
            assert await agreed([old, new], "t") == [numbers(10), numbers(11)]
        _upgrade(server)
        server.client.xadd(stream_of(old, "t"), {"e": b"\x00\x63a format of the future"})
        await until(lambda: old.counters().unreadable == 1)
        await until(lambda: old.counters().newer_memories == 1)
        before = server.client.xrange(stream_of(old, "t")), server.client.hgetall(tenant_key("t"))
        await learn_output(old, "t", numbers(12))
        await until(lambda: old.counters().newer_records == 1)
        await until(lambda: not old.outbox.pending)
        assert (server.client.xrange(stream_of(old, "t")), server.client.hgetall(tenant_key("t"))) == before
        # A request is still drafted for, from what can be read and from what was learned here.
        assert (await strategy_of(old, "t")).tokens == 10 + 11 + 12
        [shown] = (await perform(GetStatistics("t"), old)).memories
        assert shown.stored.newer
        assert old.healthy


async def test_operators_of_an_old_replica_are_told(server: Valkey) -> None:
    async with replicas(1, server.url) as [old]:
        await learn_output(old, "t", numbers(10), arm="x/a")
        await stored([old], "t", numbers(10))
        _upgrade(server)
        fill = FillMemory(
            MemoryName("t"), Kind.CORPUS, [np.arange(2, dtype=np.int32)], FillProgress(), MemoryOverrides()
        )
        for operation in (PurgeMemory("t"), fill):
            with pytest.raises(StoreRefusedError, match="newer version"):
                await perform(operation, old)
        assert await perform(PurgeArms(("x/a",)), old) == 0
        server.client.zadd(KINDS_KEY, {old.naming.kind: time.time() - 7200})
        async with replicas(1, server.url, fingerprint="0" * 16) as [other]:
            assert len(await perform(ListOrphans(), other)) == 2
            assert await perform(PurgeOrphans(), other) == PurgeResult(0, 0)
        assert server.client.xlen(stream_of(old, "t")) == 1
