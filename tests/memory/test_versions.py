"""Two versions of the program over one store: the older reads what it can, and changes nothing that the newer wrote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.request import MemoryTerms
from tests.memory.helpers import FINGERPRINT, agreed, learn_output, log_of, numbers, perform, replicas
from tests.memory.servers import Valkey
from tests.service.fakes import until

T = MemoryName("t")


@asynccontextmanager
async def newer_store(server: Valkey) -> AsyncIterator[RedisStore]:
    """The store as a newer version uses it."""
    store = RedisStore(RedisClient(server.url), FINGERPRINT, Limits(1 << 20), schema=SCHEMA + 1)
    try:
        yield store
    finally:
        await store.close()


def value_of_kind(kind: int, seq: int, tokens: list[int]) -> bytes:
    record = Record("a" * 16, seq, kind, np.array(tokens, np.int32))  # type: ignore[arg-type]
    return b"\x00" + pack([record])


async def append(store: Any, memory: MemoryManager, seq: int, value: bytes) -> None:
    """As a newer server appends: in the epoch that the store has."""
    tag = memory.naming.tag(T)
    epoch = memory.residents.open(T).epoch or 0
    name = memory.codec.encode_name(tag, T)
    [result] = await store.append([Append(tag, epoch, "a" * 16, name, [Entry(seq, 3, value)])])
    assert not isinstance(result, Exception)


async def test_an_old_replica_keeps_what_a_newer_one_wrote(server: Valkey) -> None:
    """Folding what it cannot read would lose it for all."""
    async with replicas(1, server.url) as [old], newer_store(server) as store:
        await learn_output(old, "t", numbers(10))
        assert await agreed([old], "t") == [numbers(10)]
        await append(store, old, 1, value_of_kind(Kind.OUTPUT, 1, [5, 6, 7]))
        await append(store, old, 2, value_of_kind(9, 2, [8, 8, 8]))
        await until(lambda: log_of(old, "t") == [numbers(10), [5, 6, 7]])
        assert old.counters().newer_memories == 1
        keys = Keys.of(old.naming.tag(T))
        before = server.client.xrange(keys.log), server.client.hgetall(keys.meta)
        old.residents.open(T).fold_due = True
        await learn_output(old, "t", numbers(11))
        await until(lambda: old.counters().newer_records == 1)
        assert old.outbox.pending == 0
        await asyncio.sleep(0.2)
        assert (server.client.xrange(keys.log), server.client.hgetall(keys.meta)) == before
        assert old.counters().folds == 0
        # A request is still drafted for, from what can be read and from what it learned itself.
        assert getattr(await old.strategy("t", "trie"), "tokens", 0) >= 13
        [shown] = (await perform(GetStatistics("t"), old)).memories
        assert shown.stored.newer
        assert not old.thread.failing


async def test_operators_of_an_old_replica_are_told(server: Valkey) -> None:
    async with replicas(1, server.url) as [old], newer_store(server) as store:
        await append(store, old, 1, value_of_kind(9, 1, [5, 6, 7]))
        fill = FillMemory(T, Kind.CORPUS, [np.array([1, 2], np.int32)], FillProgress(), MemoryTerms())
        for operation in (PurgeMemory("t"), fill):
            with pytest.raises(StoreRefusedError, match="newer version"):
                await perform(operation, old)
        assert server.client.xlen(Keys.of(old.naming.tag(T)).log) == 1


async def test_a_snapshot_of_a_newer_version_is_neither_replaced_nor_set_aside(server: Valkey) -> None:
    async with replicas(1, server.url) as [writer]:
        await learn_output(writer, "t", numbers(10))
        await agreed([writer], "t")
        fold = writer.replica.folder.snapshot(writer.residents.open(T))
    async with newer_store(server) as store:
        assert await store.lease(fold.tag, "newer", 5.0)
        unknown = Fold(fold.tag, fold.epoch, fold.position, fold.chain, b"\x00another format", 10, 1)
        assert await store.fold(unknown, "newer")
    keys = Keys.of(fold.tag)
    async with replicas(1, server.url) as [old]:
        await old.strategy("t", "trie")
        await until(lambda: old.counters().newer_memories == 1)
        old.residents.open(T).fold_due = True
        await asyncio.sleep(0.2)
        assert (old.counters().folds, old.counters().unreadable) == (0, 1)
        assert server.client.get(keys.snapshot) == b"\x00another format"
        assert not server.client.exists(keys.aside)


@pytest.mark.parametrize("with_redis", [False, True])
async def test_no_call_of_an_old_store_changes_a_newer_memory(server: Valkey, with_redis: bool) -> None:
    limits = Limits(1 << 20)
    newer: Any = InProcessStore(limits, schema=SCHEMA + 1)
    old: Any = InProcessStore(limits)
    old._memories = newer._memories
    if with_redis:
        newer = RedisStore(RedisClient(server.url), FINGERPRINT, limits, schema=SCHEMA + 1)
        old = RedisStore(RedisClient(server.url), FINGERPRINT, limits)
    entry = Append("x:t:", 3, "a" * 16, b"n", [Entry(1, 1, b"v")])
    await newer.append([entry])
    fold = Fold("x:t:", 3, 1, "", b"s", 1, 1)
    [result] = await old.append([entry])
    assert isinstance(result, NewerMemoryError)
    for only_raise in (False, True):
        with pytest.raises(NewerMemoryError):
            await old.purge("x:t:", 9, only_raise)
    assert await old.lease("x:t:", "h", 5.0)
    assert not await old.fold(fold, "h")
    assert not await old.seed(fold)
    assert not await old.set_aside("x:t:", b"s")
    [info] = await old.info(["x:t:"])
    assert (info.newer, info.epoch, info.position) == (True, 3, 1)
    assert await newer.purge("x:t:", 9) > 9
    for store in (old, newer):
        await store.close()
