"""A purge is final: nothing written before it is read after it, whatever fails in between and whoever is cut off."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from draftwood_memory import Memory, MemoryConfig, MemoryName, RedisClient, StrategyKey
from draftwood_memory.errors import MemoryPurgedError, MemoryStoreError, StoreUnavailableError
from draftwood_memory.operations import PurgeArms, PurgeMemory, PurgeOrphans, PurgeResult
from draftwood_memory.store import purges
from draftwood_memory.store.naming import KINDS_KEY, PROCESSES_KEY, PURGES_KEY, tenant_key
from tests.memory.helpers import (
    FINGERPRINT,
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


async def test_a_purge_is_final_on_all_replicas_once_the_call_has_returned(server: Valkey) -> None:
    async with replicas(4, server.url) as memories:
        await stored(memories, "other", numbers(30))
        for turn in range(2):
            await stored(memories, "t", numbers(20, turn))
            old = stream_of(memories[0], "t")
            with memories[0].learning(MemoryName("t"), await strategy_of(memories[0], "t")) as running:
                # Each process has answered: a purge is not final with one that is silent.
                assert await perform(PurgeMemory("t"), memories[turn]) == PurgeResult(1, 20, final_in=0.0)
                assert [(learned_by(memory, "t"), log_of(memory, "t")) for memory in memories] == [([], [])] * 4
                assert [(await strategy_of(memory, "t")).tokens for memory in memories] == [0] * 4
                running.learn(tokens_of(*numbers(25)))
            assert await agreed(memories, "t") == []
            assert not server.client.exists(old)
        assert await stored(memories, "t", numbers(5)) == [numbers(5)]
        assert await agreed(memories, "other") == [numbers(30)]


@pytest.mark.parametrize("known", ["nothing", "the epoch", "the epoch, and was evicted"])
async def test_records_from_before_a_purge_do_not_come_from_an_outbox(server: Valkey, known: str) -> None:
    async with replicas(1, server.url) as [first]:
        await stored([first], "t", numbers(20))
        config = MemoryConfig(max_resident=0) if "evicted" in known else None
        late = memory_of(server.url, config=config)  # its thread does not run yet: it has reached no store
        if known != "nothing":
            late.residents.open(MemoryName("t")).epoch = 0
        with late.learning(MemoryName("t")) as request:
            request.learn(tokens_of(*numbers(33)))
        if "evicted" in known:
            late.residents.evict(late.outbox.names())
            assert len(late.residents) == 0
        await perform(PurgeMemory("t"), first)
        async with started(late):
            await until(lambda: late.outbox.pending == 0)
        assert late.counters().stale == 1
        assert await agreed([first], "t") == []


async def test_a_store_that_went_behind_a_purge_is_purged_again(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_memory.memory_thread._CHECK_SECONDS", 0.2)
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
        epochs = {"": 8 * 10**15, "x/a": 8 * 10**15 + 5}
        for arm in epochs:
            await learn_output(memory, "t", numbers(20), arm)
        await agreed([memory], "t")
        for arm, ahead in epochs.items():
            resident(memory, "t", arm).epoch = ahead  # of a purge that the store has lost since
        await perform(PurgeMemory("t"), memory)
        for arm in epochs:
            assert (log_of(memory, "t", arm), resident(memory, "t", arm).epoch) == ([], 8 * 10**15 + 6)


async def test_a_purge_makes_room_in_a_full_store(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def frees_nothing(*_: object) -> None: ...

    monkeypatch.setattr("draftwood_memory.sender.free_space", frees_nothing)
    async with replicas(1, server.url) as [memory]:
        draw = random.Random(0)
        for _ in range(30):
            await learn_output(memory, "t", [draw.randrange(30_000) for _ in range(5000)])
        await agreed([memory], "t")
        before = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", before - 150_000)  # more than connections give back; half of the memory
        try:
            await learn_output(memory, "t", numbers(100))
            await until(lambda: "refuses" in caplog.text)
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
            self._clients[0].commands_left, self._clients[0].takes_effect = draw.randrange(8), draw.random() < 0.5
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
        read = await memory.replica.memories.read(found.tag, found.epoch or 0, found.position)
        await memory.replica.apply_entries(found, found.epoch or 0, read)

    async def _tried(self, memory: Memory) -> bool:
        try:
            await PurgeMemory("t").run(memory)
        except MemoryStoreError:
            return False
        return True


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


@pytest.mark.parametrize("imports_itself", [False, True])
async def test_a_replica_that_learns_a_large_import_applies_a_purge_at_once(
    server: Valkey, imports_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine makes no step meanwhile, so that its strategies cannot learn."""
    monkeypatch.setattr("draftwood_memory.resident._LEARN_SECONDS", 60.0)  # who waits for them is silent for too long
    async with replicas(2, server.url) as [here, busy]:
        await stored([here, busy], "t", numbers(20))
        waiting = list[Callable[[], None]]()
        run_on_engine, busy.between_steps.run_on_engine = busy.between_steps.run_on_engine, waiting.append
        texts = [numbers(8000, start) for start in range(0, 20_000, 1000)]
        importing = asyncio.create_task(perform(fill("t", *texts), busy if imports_itself else here))
        await until(lambda: waiting)
        assert (await perform(PurgeMemory("t"), here)).final_in == 0.0
        assert (learned_by(busy, "t"), log_of(busy, "t")) == ([], [])
        for task in waiting:
            task()
        assert (await strategy_of(busy, "t")).tokens == 0
        with suppress(MemoryPurgedError):  # some of it was not sent before the purge
            await importing
        busy.between_steps.run_on_engine = run_on_engine
        assert await stored([here, busy], "t", numbers(5)) == [numbers(5)]


async def test_two_purges_at_once_do_not_wait_for_each_other(server: Valkey) -> None:
    async with replicas(2, server.url) as memories:
        for tenant in "ab":
            await stored(memories, tenant, numbers(20))
        both = [perform(PurgeMemory(tenant), memory) for tenant, memory in zip("ab", memories, strict=True)]
        # One that waited for the other would be silent for too long.
        assert await asyncio.gather(*both) == [PurgeResult(1, 20, final_in=0.0)] * 2
        assert [learned_by(memory, tenant) for memory in memories for tenant in "ab"] == [[]] * 4


async def test_a_replica_without_the_store_is_told_of_and_forgets_in_time(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(purges, "LEASE_SECONDS", 4.0)
    monkeypatch.setattr(purges, "_SILENT_SECONDS", 1.0)
    async with (
        Proxy(server.port) as proxy,
        replicas(1, server.url) as [here],
        replicas(1, proxy.url, timeout=0.5) as [away],
    ):
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
            await until(lambda: "nothing is drafted from memories" in caplog.text)
        assert log_of(away, "t") == []
        await learn_output(away, "t", numbers(30))
        assert (log_of(away, "t"), away.outbox.pending) == ([], 0)  # another purge may have come since
        proxy.open.set()
        await until(lambda: away.thread.healthy)
        assert await stored([here, away], "t", numbers(5)) == [numbers(5)]
        proxy.open.clear()
        await until(lambda: log_of(away, "t") == [])  # once more


async def test_a_process_that_ended_is_not_waited_for_and_a_killed_one_not_for_long(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purges, "_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(purges, "_WAIT_SECONDS", 60.0)
    async with replicas(1, server.url) as [here]:
        async with replicas(1, server.url) as [ended]:
            await until(lambda: server.client.zcard(PROCESSES_KEY) == 2)
            assert ended.thread.healthy
        assert server.client.zcard(PROCESSES_KEY) == 1
        assert here.replica is not None
        killed = purges.Purges(here.replica.memories.client, "0" * 16)
        await asyncio.wrap_future(here.thread.submit(killed.missed()))
        purged = await perform(PurgeMemory("t"), here)
        silent = purges.LEASE_SECONDS - purged.final_in
        assert purges._SILENT_SECONDS <= silent < purges._WAIT_SECONDS


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


async def test_what_is_written_just_before_a_purge_is_deleted_by_it(server: Valkey) -> None:
    async with replicas(2, server.url) as [writer, operator]:
        await stored([writer, operator], "t", numbers(10))
        with before_command(operator, "EVAL", lambda: writes(writer, "new", 12), of=tenant_key("t")):
            await perform(PurgeMemory("t"), operator)
        await until(lambda: server.client.keys("dw:{t:t}:3:*") == [])
        assert log_of(writer, "t", "new") == []
