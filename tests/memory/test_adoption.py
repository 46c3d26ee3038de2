"""The memory of an experiment's winner becomes the tenant's, whoever holds it and whatever fails meanwhile."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from draftwood_memory import Memory, MemoryName
from draftwood_memory.errors import MemoryStoreError
from draftwood_memory.operations import AdoptArm, ExportMemory, PurgeMemory
from draftwood_memory.store.encryption import KeyRing, read_keys
from tests.memory.helpers import (
    FINGERPRINT,
    KEY_A,
    NAMES,
    agreed,
    before_command,
    learn_output,
    log_of,
    numbers,
    perform,
    replicas,
    resident,
    strategy_of,
    tokens_of,
    until,
)
from tests.memory.servers import Valkey
from tests.memory.test_purge import Failing

KEYS = [None, read_keys(f"{NAMES}\nk1={KEY_A}", "keys")]


def drafted(memory: Memory, after: list[int]) -> list[int]:
    """What the tenant's next request drafts."""
    strategy: Any = memory.strategy("t", "trie")
    drafter = strategy.start(tokens_of(9999))
    drafter.observe(tokens_of(*after), None)
    tokens: list[int] = drafter.propose(8).tokens.tolist()
    drafter.close()
    return tokens


@pytest.mark.parametrize("keys", KEYS)
async def test_the_next_request_on_each_replica_drafts_what_the_arm_has_learned(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, keys: KeyRing | None
) -> None:
    monkeypatch.setattr("draftwood_memory.local.resident.LIVE_SECONDS", 0.3)
    monkeypatch.setattr("draftwood_memory.memory._FIRST_WAIT", 5.0)  # a busy machine may take longer than 50 ms
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
                assert (await asyncio.to_thread(drafted, memory, after))[:4] == numbers(4, start + 4)
            assert await asyncio.to_thread(drafted, memory, numbers(4, 3000)) == []
        assert await perform(AdoptArm("x/a"), first) == 0  # once
        for memory in (first, second):
            assert len(log_of(memory, "t")) == 3


async def test_a_forked_arm_gives_back_only_what_it_has_learned() -> None:
    from tests.memory.test_overrides import answered

    async with replicas(1, None) as [memory]:
        await learn_output(memory, "t", numbers(30))
        await answered(memory, numbers(10, 100), arm="x/a", forked=True)
        assert await perform(AdoptArm("x/a"), memory) == 1
        assert log_of(memory, "t") == [numbers(30), numbers(10, 100)]


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


@pytest.mark.parametrize("before", ["XADD", "HMGET", "XRANGE"])
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
