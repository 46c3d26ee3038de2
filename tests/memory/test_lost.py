"""A store that lost records, or cannot serve them: the processes that have them go on, and give them back once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftwood_memory import Memory
from draftwood_memory.errors import StoreUnavailableError
from draftwood_memory.replication.record_store import RecordStore
from draftwood_memory.store.naming import tenant_key
from tests.memory.helpers import (
    FINGERPRINT,
    agreed,
    before_command,
    learn_output,
    log_of,
    numbers,
    replicas,
    resident,
    stored,
    strategy_of,
    stream_of,
    until,
)
from tests.memory.servers import Valkey


async def rounds_until(memory: Memory, condition: Callable[[], object]) -> None:
    def after_a_round() -> object:
        memory.thread.wake()
        return condition()

    await until(after_a_round)


@pytest.mark.parametrize("claimed", [False, True])
async def test_what_a_store_has_lost_is_restored_by_one_process(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, claimed: bool
) -> None:
    """If another one has claimed the memory, what that one writes is loaded. The outbox is sent as ever."""
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._CHECK_SECONDS", 0.0)
    monkeypatch.setattr("draftwood_memory.replication.replica._RESTORE_SECONDS", 0.05)

    async def lose() -> None:
        server.client.delete(tenant_key("t"), *([] if claimed else [stream]))
        if claimed:
            server.client.hset(tenant_key("t"), f"f:{FINGERPRINT}:", "1")
        await learn_output(memory, "t", numbers(11))

    async with replicas(1, server.url) as [memory]:
        await stored([memory], "t", numbers(10))
        stream = stream_of(memory, "t")
        with before_command(memory, "HMGET", lose):
            await rounds_until(memory, lambda: memory.counters().pushed == 2 and resident(memory, "t").loaded)
        assert await agreed([memory], "t") == [numbers(10), numbers(11)]
        assert memory.counters().restored == (0 if claimed else 1)
    async with replicas(1, server.url) as [later]:
        assert await agreed([later], "t") == [numbers(10), numbers(11)]  # once each


async def test_a_restore_that_fails_after_the_claim_is_made_again(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._CHECK_SECONDS", 0.0)
    failures = iter([StoreUnavailableError("cut")])
    write = RecordStore.append

    async def cut(*arguments: Any) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        await write(*arguments)

    async with replicas(1, server.url) as [memory]:
        await stored([memory], "t", numbers(10))
        monkeypatch.setattr(RecordStore, "append", cut)
        server.client.delete(tenant_key("t"), stream_of(memory, "t"))
        await rounds_until(memory, lambda: memory.counters().restored)
        assert memory.counters().failures == 1
    async with replicas(1, server.url) as [later]:
        assert await agreed([later], "t") == [numbers(10)]


async def test_a_store_that_lost_the_latest_entries_is_followed_on(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a failover: the new primary writes entries with ids that have passed here."""
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._CHECK_SECONDS", 0.0)
    async with replicas(2, server.url) as [first, second]:
        await stored([first, second], "t", numbers(10))
        stream = stream_of(first, "t")
        saved: Any = server.client.dump(stream)
        await stored([first, second], "t", numbers(11))
        entries: Any = server.client.xrange(stream)
        [(kept, _), (_, entry)] = entries
        server.client.restore(stream, 0, saved, replace=True)
        await rounds_until(second, lambda: second.counters().reloads)
        server.client.xadd(stream, entry, id=kept.replace(b"-0", b"-1"))
        await strategy_of(second, "other")  # ends the read that began at the lost entry
        await until(lambda: log_of(second, "t") == [numbers(10), numbers(11), numbers(11)])
        assert second.counters().reloads == 1


@pytest.mark.parametrize("live", [True, False])
async def test_after_a_failure_all_memories_are_compared_at_once(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    """Also one that is not followed, for no request used it of late."""
    async with replicas(1, server.url) as [memory]:
        await stored([memory], "t", numbers(10))
        if not live:
            monkeypatch.setattr("draftwood_memory.local.resident.LIVE_SECONDS", 0.0)
        server.client.flushall()

        def cut() -> bool:
            """Until something waited on a connection: one that breaks while nothing does is replaced silently."""
            server.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            return memory.counters().failures > 0

        await until(cut)
        await until(lambda: memory.counters().restored)
    async with replicas(1, server.url) as [later]:
        assert await agreed([later], "t") == [numbers(10)]
