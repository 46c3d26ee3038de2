"""A purge is final: nothing written before it is read after it, whatever fails in between and whoever is cut off."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from draftwood_memory import Memory, MemoryName, RedisClient, StrategyKey
from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_memory.operations import PurgeArms, PurgeMemory, PurgeResult
from draftwood_memory.store.naming import PURGES_KEY, tenant_key
from tests.memory.helpers import (
    FINGERPRINT,
    agreed,
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
from tests.memory.servers import Valkey


async def test_a_purge_is_final_everywhere(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await learn_output(first, "t", numbers(20))
        await learn_output(first, "other", numbers(30))
        await agreed([first, second], "t")
        old = stream_of(first, "t")
        with first.learning(MemoryName("t"), await strategy_of(first, "t")) as running:
            assert await perform(PurgeMemory("t"), second) == PurgeResult(1, 20)
            await until(lambda: log_of(first, "t") == [] == learned_by(first, "t"))
            running.learn(tokens_of(*numbers(25)))  # of a request that ran while the memory was purged
        assert await agreed([first, second], "t") == []
        assert not server.client.exists(old)
        await learn_output(second, "t", numbers(5))
        assert await agreed([first, second], "t") == [numbers(5)]
        assert await agreed([first, second], "other") == [numbers(30)]


@pytest.mark.parametrize("generation_known", [True, False])
async def test_records_from_before_a_purge_do_not_come_from_an_outbox(server: Valkey, generation_known: bool) -> None:
    async with replicas(1, server.url) as [first]:
        await stored([first], "t", numbers(20))
        late = memory_of(server.url)  # its thread does not run yet: it learned something and has reached no store
        if generation_known:
            late.residents.open(MemoryName("t")).generation = 0
        with late.learning(MemoryName("t")) as request:
            request.learn(tokens_of(*numbers(33)))
        await perform(PurgeMemory("t"), first)
        async with started(late):
            await until(lambda: late.outbox.pending == 0)
        assert late.counters().stale == 1
        assert await agreed([first], "t") == []


async def test_a_writer_that_has_not_heard_of_a_purge_deletes_what_it_wrote(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await stored([first, second], "t", numbers(20))
        old = stream_of(first, "t")
        server.client.hset(tenant_key("t"), "g", 10**15)  # a purge that died before it told anyone
        await learn_output(first, "t", numbers(33))
        await until(lambda: first.counters().stale == 1 and log_of(first, "t") == [])
        assert not server.client.exists(old)
        await learn_output(first, "t", numbers(34))
        assert stream_of(first, "t") != old
        await until(lambda: not first.outbox.pending)
        async with replicas(1, server.url) as [third]:
            assert await agreed([third], "t") == [numbers(34)]


async def test_a_store_that_went_behind_a_purge_is_purged_again(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_memory.replication.memory_thread._CHECK_SECONDS", 0.2)
    async with replicas(1, server.url) as [memory]:
        await stored([memory], "t", numbers(20))
        old = stream_of(memory, "t")
        saved = server.client.dump(old), server.client.dump(tenant_key("t"))
        await perform(PurgeMemory("t"), memory)
        for key, value in zip((old, tenant_key("t")), saved, strict=True):  # an old primary took over
            assert isinstance(value, bytes)
            server.client.restore(key, 0, value, replace=True)
        await until(lambda: not server.client.exists(old))
        await stored([memory], "t", numbers(5))
    async with replicas(1, server.url) as [later]:
        assert await agreed([later], "t") == [numbers(5)]


async def test_a_purge_holds_in_a_store_whose_clock_went_back(server: Valkey) -> None:
    """For each of the tenant's memories: an arm was purged by itself, later."""
    async with replicas(1, server.url) as [memory]:
        generations = {"": 10**17, "x/a": 10**17 + 5}
        for arm in generations:
            await learn_output(memory, "t", numbers(20), arm)
        await agreed([memory], "t")
        for arm, ahead in generations.items():
            resident(memory, "t", arm).generation = ahead  # of a purge that the store has lost since
        await perform(PurgeMemory("t"), memory)
        for arm in generations:
            assert (log_of(memory, "t", arm), resident(memory, "t", arm).generation) == ([], 10**17 + 6)


async def test_a_purge_makes_room_in_a_full_store(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        draw = random.Random(0)
        for _ in range(30):
            await learn_output(memory, "t", [draw.randrange(30_000) for _ in range(5000)])
        await agreed([memory], "t")
        before = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", before - (1 << 16))  # more than connections give back
        try:
            await learn_output(memory, "t", numbers(100))
            await asyncio.sleep(0.1)
            assert memory.outbox.pending == 1
            assert (await perform(PurgeMemory("t"), memory)).memories == 1
            assert await stored([memory], "t", numbers(7)) == [numbers(7)]
        finally:
            server.client.config_set("maxmemory", 0)


async def test_arms_are_purged_for_all_tenants_and_models_and_on_all_replicas(server: Valkey) -> None:
    arms = ("", "x/a", "x/b", "xx/a", "x/ab")
    async with replicas(1, server.url, fingerprint="0" * 16) as [other]:
        await learn_output(other, "acme", numbers(10), arm="x/b")
        await learn_output(other, "acme", numbers(10))
        await until(lambda: not other.outbox.pending)
    async with replicas(2, server.url) as [first, second]:
        for tenant in ("acme", "x/a"):
            for arm in arms:
                await learn_output(first, tenant, numbers(10), arm=arm)
        await learn_output(second, "acme", numbers(11), arm="x/a")
        await until(lambda: not first.outbox.pending and not second.outbox.pending)
        assert await perform(PurgeArms(("x/a", "x/b")), first) == 2 * 2 + 1
        for arm in arms:
            assert bool(log_of(first, "x/a", arm)) == (arm not in ("x/a", "x/b")), arm
        await until(lambda: log_of(second, "acme", "x/a") == [])
        assert await perform(PurgeArms(("y/a",)), first) == 0


class Failing(RedisClient):
    """A client that fails at one command, before or after it took effect: as a crash or a cut connection does.

    Attributes:
        commands: how many commands pass until one fails; None for no failure.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, timeout=1.0)
        self.commands_left: int | None = None
        self.takes_effect = False

    async def command(self, *words: Any) -> Any:
        [answer] = await self.commands([words])
        if isinstance(answer, MemoryStoreError):
            raise answer
        return answer

    async def commands(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        if self.commands_left is None:
            return await super().commands(commands)
        passing = [*commands][: self.commands_left + self.takes_effect]
        if self.commands_left >= len(commands):
            self.commands_left -= len(commands)
            return await super().commands(commands)
        await super().commands(passing)
        raise StoreUnavailableError("cut off")


class Cut:
    """One run: a purge that fails at some command, a writer and a reader, either of which may be cut off meanwhile."""

    def __init__(self, server: Valkey, draw: random.Random) -> None:
        self._server = server
        self._draw = draw
        self._clients: list[Failing] = []

    def process(self) -> Memory:
        client = Failing(self._server.url)
        self._clients.append(client)
        return Memory(client, FINGERPRINT)

    async def run(self) -> None:
        purger, writer, reader = (self.process() for _ in range(3))
        name, draw = MemoryName("t"), self._draw
        for memory in (purger, writer, reader):
            memory.residents.pin(name).instance(StrategyKey("trie"))
            await self._round(memory)
        self._learn(writer, numbers(10))
        await self._round(writer)
        with writer.learning(name) as running:
            self._learn(writer, numbers(11))  # waits in the outbox while the memory is purged
            if draw.random() < 0.5:
                await self._follow(reader)
            self._clients[0].commands_left, self._clients[0].takes_effect = draw.randrange(14), draw.random() < 0.5
            done = await self._tried(purger)
            heard = draw.random() < 0.5
            if heard:
                await self._follow(writer)
            await self._round(writer)  # partitioned until now, or not
            if not done:  # the operator is told, and tries again: with this process, or another after a crash
                self._clients[0].commands_left = None
                assert await self._tried(purger if draw.random() < 0.5 else self.process())
            running.learn(tokens_of(*numbers(12)))
        await self._round(writer)
        self._learn(writer, numbers(13))
        await self._round(writer)
        await self._round(writer)
        await self._follow(reader)
        await self._follow(reader)
        fresh = self.process()
        fresh.residents.pin(name)
        await self._round(fresh)
        for memory in (fresh, reader):
            found = log_of(memory, "t")
            assert all(tokens == numbers(13) for tokens in found), found
        streams = self._server.client.keys("dw:{t:t}:3:*")
        assert len(streams) <= 1, streams
        for client in self._clients:
            await client.close()

    def _learn(self, memory: Memory, tokens: list[int]) -> None:
        with memory.learning(MemoryName("t")) as request:
            request.learn(tokens_of(*tokens))

    async def _round(self, memory: Memory) -> None:
        assert memory.replica is not None
        await memory.replica.load()
        await memory.replica.sender.push()

    async def _follow(self, memory: Memory) -> None:
        """What the follower reads at its next turn."""
        assert memory.replica is not None
        if self._server.client.exists(PURGES_KEY):
            await memory.replica.purged(frozenset(["t"]))
        await memory.replica.load()
        found = resident(memory, "t")
        read = await memory.replica.memories.read(found.tag, found.generation or 0, found.position)
        await memory.replica.apply_entries(found, found.generation or 0, read)

    async def _tried(self, memory: Memory) -> bool:
        try:
            await PurgeMemory("t").run(memory)
        except MemoryStoreError:
            return False
        return True


@pytest.mark.system
@pytest.mark.parametrize("part", range(6))
async def test_a_purge_is_final_at_any_point_of_a_crash_or_a_partition(server: Valkey, part: int) -> None:
    """300 points in six parts."""
    for number in range(50):
        server.client.flushall()
        seed = 50 * part + number
        try:
            await Cut(server, random.Random(seed)).run()
        except AssertionError as error:
            raise AssertionError(f"run {seed}: {error}") from error
