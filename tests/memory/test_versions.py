"""Several versions over one store: an older one reads what it can and changes nothing; what is older is discarded."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from draftwood_memory import Memory, MemoryName, Terms
from draftwood_memory.errors import StoreRefusedError
from draftwood_memory.operations import FillMemory, FillProgress, GetStatistics, PurgeArms, PurgeMemory
from draftwood_memory.records import Kind
from draftwood_memory.store.naming import SCHEMA, tenant_key
from tests.memory.helpers import (
    FINGERPRINT,
    agreed,
    learn_output,
    log_of,
    numbers,
    perform,
    replicas,
    resident,
    strategy_of,
    stream_of,
    until,
)
from tests.memory.servers import Valkey


async def test_an_old_replica_keeps_what_a_newer_one_wrote(server: Valkey) -> None:
    async with replicas(1, server.url) as [old], replicas(1, server.url, schema=SCHEMA + 1) as [new]:
        await learn_output(old, "t", numbers(10))
        assert await agreed([old, new], "t") == [numbers(10)]
        await learn_output(new, "t", numbers(11))
        server.client.xadd(stream_of(new, "t"), {"e": b"\x00\x63a format of the future"})
        await until(lambda: log_of(old, "t") == [numbers(10), numbers(11)])
        old.thread._checked_at -= 60.0
        old.thread.wake()
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
    async with replicas(1, server.url) as [old], replicas(1, server.url, schema=SCHEMA + 1) as [new]:
        await learn_output(new, "t", numbers(10), arm="x/a")
        await learn_output(new, "t", numbers(10))
        await agreed([new], "t")
        fill = FillMemory(MemoryName("t"), Kind.CORPUS, [np.arange(2, dtype=np.int32)], FillProgress(), Terms())
        for operation in (PurgeMemory("t"), fill):
            with pytest.raises(StoreRefusedError, match="newer version"):
                await perform(operation, old)
        assert await perform(PurgeArms(("x/a",)), old) == 0
        assert server.client.xlen(stream_of(new, "t")) == 1


async def test_both_versions_write_while_neither_is_newer(server: Valkey) -> None:
    """A service and a worker of another release, with the same schema, share a memory."""
    async with replicas(3, server.url) as memories:
        for number in range(30):
            await learn_output(memories[number % 3], "t", numbers(10, 20 * number))
        assert len(await agreed(memories, "t")) == 30


def _stored_before(server: Valkey, tenant: str = "t") -> list[str]:
    """The keys of a memory as the version before stored it."""
    tag = f"{FINGERPRINT}:{tenant}:"
    server.client.xadd(f"dw:{{{tag}}}:log", {"r": b"x"}, id="1-0")
    server.client.set(f"dw:{{{tag}}}:snap", b"x")
    server.client.hset(f"dw:{{{tag}}}:meta", mapping={"epoch": 0, "pos": 1, "schema": 2})
    server.client.zadd(f"dw:{{{FINGERPRINT}}}:active", {tag: 1})
    return [f"dw:{{{tag}}}:{one}" for one in ("log", "snap", "meta")]


async def test_what_the_version_before_stored_is_discarded_with_a_line(
    server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    keys = _stored_before(server)
    async with replicas(1, server.url) as [memory]:
        await until(lambda: not server.client.exists(*keys))
        await learn_output(memory, "t", numbers(5))
        assert await agreed([memory], "t") == [numbers(5)]
    assert "memories of an earlier version were deleted, since this one does not read them: 1" in caplog.text


async def test_replicas_of_the_version_before_keep_theirs_and_hear_of_purges(server: Valkey) -> None:
    keys, other = _stored_before(server), _stored_before(server, "other")
    server.client.hset(f"dw:{{{FINGERPRINT}}}:instances", "a", f"{server.client.time()[0]} settings")
    async with replicas(1, server.url) as [memory]:
        await learn_output(memory, "t", numbers(5))
        await agreed([memory], "t")
        await asyncio.sleep(0.1)
        assert server.client.exists(*keys) == 3
        await perform(PurgeMemory("t"), memory)
        assert server.client.exists(*keys[:2]) == 0
        epoch = server.client.hget(keys[2], "epoch")
        assert isinstance(epoch, bytes)
        assert int(epoch) > 10**15  # what makes those replicas drop their copies
        assert server.client.exists(*other) == 3


def _generation(memory: Memory) -> int | None:
    return resident(memory, "t").generation


async def test_generations_go_on_after_the_store_lost_everything(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        await perform(PurgeMemory("t"), memory)
        await strategy_of(memory, "t")
        first = _generation(memory)
        server.client.flushall()
        await perform(PurgeMemory("t"), memory)
        await until(lambda: (_generation(memory) or 0) > (first or 0))
