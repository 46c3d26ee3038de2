"""Several versions over one store: an older one reads what it can and changes nothing."""

from __future__ import annotations

import logging
import time

import pytest

from draftwood_memory.errors import StoreRefusedError, WrongTypeError
from draftwood_memory.operations import (
    GetStatistics,
    ListOrphans,
    PurgeArms,
    PurgeMemory,
    PurgeOrphans,
    PurgeResult,
)
from draftwood_memory.store.naming import KINDS_KEY, SCHEMA, stream_key, tenant_key
from tests.memory.helpers import (
    FINGERPRINT,
    agreed,
    fill,
    learn_output,
    learned_by,
    log_of,
    numbers,
    perform,
    replicas,
    resident,
    stored,
    strategy_of,
    stream_of,
    until,
)
from tests.memory.servers import Valkey


def _upgrade(server: Valkey) -> None:
    """What a program with a higher schema says when it writes to the tenant's memories."""
    server.client.hset(tenant_key("t"), "v", str(SCHEMA + 1))


@pytest.mark.usefixtures("checks_often")
async def test_an_old_replica_keeps_what_a_newer_one_wrote(server: Valkey) -> None:
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
        for operation in (PurgeMemory("t"), fill("t", numbers(2))):
            with pytest.raises(StoreRefusedError, match="newer version"):
                await perform(operation, old)
        assert await perform(PurgeArms(("x/a",)), old) == 0
        server.client.zadd(KINDS_KEY, {old.naming.kind: time.time() - 7200})
        async with replicas(1, server.url, fingerprint="0" * 16) as [other]:
            assert len(await perform(ListOrphans(), other)) == 2
            assert await perform(PurgeOrphans(), other) == PurgeResult(0, 0)
        assert server.client.xlen(stream_of(old, "t")) == 1


def spoil(server: Valkey, key: str | bytes) -> None:
    server.client.set(key, "another program's")  # at once: a key that is gone is restored


HASH, STREAM = tenant_key("bad"), stream_key(f"{FINGERPRINT}:bad:", 0)


@pytest.mark.usefixtures("checks_often")
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("keys", [[HASH], [STREAM], [HASH, STREAM]])
async def test_a_memory_waits_until_its_keys_are_free_and_other_tenants_go_on(
    keys: list[str], known: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_memory.replica._RETRY_SECONDS", 0.1)
    caplog.set_level(logging.WARNING, "draftwood_memory")
    with Valkey() as server:
        async with replicas(2, server.url) as memories:
            for tenant in ("bad", "good") if known else ("good",):
                await stored(memories, tenant, numbers(10))
            for key in keys:
                spoil(server, key)
            for memory in memories:
                await strategy_of(memory, "bad")
            await until(lambda: all(resident(memory, "bad").problem for memory in memories))
            await learn_output(memories[0], "bad", numbers(10, 100))
            for start in (200, 300, 400):  # rounds, with checks among them
                await learn_output(memories[0], "good", numbers(10, start))
                assert numbers(10, start) in await agreed(memories, "good", outboxes=False)
            report = await perform(GetStatistics(None), memories[0])
            assert [one.name.tenant for one in report.memories] == ["good"]
            assert [(memory.counters().failures, memory.healthy) for memory in memories] == [(0, True)] * 2
            await until(lambda: memories[0].counters().outbox_records == 1)  # it waits until the key is free
            learned = [numbers(10)] * known + [numbers(10, 100)]
            assert learned_by(memories[0], "bad") == learned  # and is drafted from meanwhile
            told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
            assert len(told) == 2, told  # once for each process
            assert all("memory ffffffffffffffff:bad: cannot be read" in message for message in told)
            server.client.delete(*keys)
            left = learned if keys == [HASH] else [numbers(10, 100)]  # another program's value replaced the stream
            await until(lambda: [log_of(memory, "bad") for memory in memories] == [left] * 2)
            if keys == [HASH]:  # what is drafted from, too
                await until(lambda: [learned_by(memory, "bad") for memory in memories] == [left] * 2)
            await until(lambda: not memories[0].outbox.pending)
            assert memories[0].counters().failures == 0


async def test_a_memory_that_takes_none_of_its_records_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_memory.sender._PUSH_TOKENS", 16)
    monkeypatch.setattr("draftwood_memory.memory_thread._LAST_ROUND_SECONDS", 0.1)
    with Valkey() as server:
        spoil(server, "dw:{t:bad}:tenant")
        async with replicas(2, server.url) as memories:
            for start in range(0, 100, 10):
                await learn_output(memories[0], "bad", numbers(10, start))
            await learn_output(memories[0], "good", numbers(10))
            await until(lambda: (memories[0].counters().pushed, memories[0].outbox.pending) == (1, 10))


async def test_operations_fail_for_this_tenant_alone() -> None:
    with Valkey() as server:
        async with replicas(1, server.url) as [memory]:
            for tenant in ("bad", "good"):
                await learn_output(memory, tenant, numbers(10), "arm")
                await until(lambda: not memory.outbox.pending)
            spoil(server, tenant_key("bad"))
            for operation in (PurgeMemory("bad"), fill("bad", numbers(9)), PurgeArms(("arm",))):
                with pytest.raises(WrongTypeError):
                    await perform(operation, memory)
            assert log_of(memory, "good", "arm") == []
            assert log_of(memory, "bad", "arm") == [numbers(10)]
