"""What a tenant's configuration says of its memory: options of strategies, how much is kept and how long, arms."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from draftwood_memory import Memory, MemoryConfig, MemoryName, MemoryOverrides, StrategyKey, StrategyUse
from draftwood_memory.operations import GetStatistics, PurgeArms, PurgeMemory
from draftwood_memory.resident import OVERLAP, make
from draftwood_memory.store.stored import StoreClock
from draftwood_strategies import Strategy
from draftwood_strategies.options import Options
from tests.memory.helpers import (
    agreed,
    fill,
    learn_output,
    learned_by,
    log_of,
    numbers,
    perform,
    replicas,
    resident,
    strategy_of,
    stream_of,
    tokens_of,
    until,
)
from tests.memory.servers import Valkey

pytestmark = pytest.mark.usefixtures("patient")


async def instance(memory: Memory, arm: str = "", options: Options = (), **overrides: Any) -> Any:
    """The instance that a request drafts with, once it has learned the memory's records."""
    loop, loaded = asyncio.get_running_loop(), asyncio.Future[Strategy]()

    def deliver(strategy: Strategy) -> None:
        loop.call_soon_threadsafe(loaded.set_result, strategy)

    use = StrategyUse(MemoryName("t", arm), StrategyKey("trie", options), MemoryOverrides(**overrides))
    return memory.fetch(use, deliver) or await loaded


async def answered(memory: Memory, tokens: list[int], arm: str = "", options: Options = (), **overrides: Any) -> None:
    """A request that wrote `tokens`."""
    strategy = await instance(memory, arm, options, **overrides)
    strategy.learn(tokens_of(*tokens))
    with memory.learning(MemoryName("t", arm), strategy) as request:
        request.learn(tokens_of(*tokens))


async def test_options_make_instances_of_their_own_over_one_memory(server: Valkey) -> None:
    short: Options = (("branch_length", 2),)
    async with replicas(1, server.url) as [memory]:
        long, brief = await instance(memory), await instance(memory, options=short)
        assert (long.options.branch_length, brief.options.branch_length) == (32, 2)
        assert await instance(memory, options=short) is brief
        await answered(memory, numbers(40), options=short)
        await until(lambda: [sequence.tolist() for sequence in long.sequences()] == [numbers(40)])
        other = await instance(memory, options=(("branch_length", 3),))
        assert [sequence.tolist() for sequence in other.sequences()] == [numbers(40)]
        with pytest.raises(ValueError, match="branch_length: 0"):
            await instance(memory, options=(("branch_length", 0),))


async def test_few_instances_are_kept_and_those_in_use_go_on(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_memory.memory._FIRST_WAIT", 100.0)  # no request waits for it
    async with replicas(1, server.url) as [memory]:
        first = await instance(memory, options=(("branch_length", 1),))
        for length in range(2, 20):
            await instance(memory, options=(("branch_length", length),))
        assert len(resident(memory, "t").strategies) == 8
        assert not resident(memory, "t").unbuilt
        assert len(first.start(np.arange(4, dtype=np.int32)).propose(4)) == 0
        assert await instance(memory, options=(("branch_length", 1),)) is not first


def test_no_option_exceeds_the_memorys_capacity() -> None:
    capacity = MemoryConfig(tokens=2000, bytes=1 << 20).capacity
    for limits in (capacity, replace(capacity, tokens=10**9, bytes=8000)):
        for options in ((), (("capacity_tokens", 10**9),)):
            trie: Any = make(StrategyKey("trie", options), limits)
            trie.learn(np.arange(5000, dtype=np.int32))
            assert 1900 < trie.tokens <= 2000
    small: Any = make(StrategyKey("hybrid", (("capacity_tokens", 500),)), capacity)
    small.parts["trie"].learn(np.arange(5000, dtype=np.int32))
    assert small.parts["trie"].tokens <= 500
    make(StrategyKey("hybrid", (("sources", "recycling"),)), capacity)  # has no such option


async def test_a_smaller_memory_evicts_at_once_and_grows_again(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        for number in range(6):
            await answered(memory, numbers(100, 1000 * number))
        trie = await instance(memory)
        await instance(memory, max_tokens=250)
        memory.thread.wake()
        await until(lambda: resident(memory, "t").log.tokens == 200)
        await until(lambda: resident(memory, "t").strategies[StrategyKey("trie")] is not trie)
        assert (await instance(memory, max_tokens=250)).tokens <= 250
        await answered(memory, numbers(100, 9000))
        assert resident(memory, "t").log.tokens == 300


async def test_a_memory_with_an_idle_ttl_is_deleted_and_others_stay(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        await answered(memory, numbers(9), idle_ttl=100.0)
        await answered(memory, numbers(9), arm="x/a")
        await until(lambda: not memory.outbox.pending)
        listed = await perform(GetStatistics("t"), memory)
        assert {one.name.arm for one in listed.memories} == {"x/a", ""}
        own, arms = stream_of(memory, "t"), stream_of(memory, "t", "x/a")
        assert 0 < server.client.pttl(own) <= 100_000 < server.client.pttl(arms)
        async with replicas(1, server.url) as [other]:
            await instance(other, idle_ttl=100.0)
            await until(lambda: resident(other, "t").loaded)
        assert 0 < server.client.pttl(own) <= 100_000  # to be read keeps no memory longer
        server.client.pexpire(own, 1)
        await until(lambda: not server.client.exists(own))
        listed = await perform(GetStatistics("t"), memory)
        assert [one.name.arm for one in listed.memories] == ["x/a"]


async def test_warming_keeps_a_tenants_limits_and_so_does_an_eviction(server: Valkey) -> None:
    overrides = MemoryOverrides(idle_ttl=100.0, max_tokens=2048)
    config = MemoryConfig(idle_seconds=0.0)
    async with replicas(1, server.url, config=config) as [memory]:
        await perform(fill("t", numbers(10), overrides=overrides), memory)
        assert 0 < server.client.pttl(stream_of(memory, "t")) <= 100_000
        await until(lambda: len(memory.residents) == 0)
        assert resident(memory, "t").config.tokens == 2048
        await instance(memory)  # the tenant has no limits any more
        assert resident(memory, "t").config == memory.config


async def test_arms_have_memories_of_their_own_and_are_purged_alone(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await answered(first, numbers(10))
        await answered(first, numbers(10, 100), arm="x/a")
        await answered(second, numbers(10, 200), arm="x/b")
        learned = {"x/a": [numbers(10, 100)], "x/b": [numbers(10, 200)], "": [numbers(10)]}
        for arm in learned:
            await instance(second, arm)
        await until(lambda: {arm: log_of(second, "t", arm) for arm in learned} == learned)
        await until(lambda: not (first.outbox.pending or second.outbox.pending))
        listed = await perform(GetStatistics("t"), first)
        assert sorted(memory.name.arm for memory in listed.memories) == ["", "x/a", "x/b"]
        assert await perform(PurgeArms(("x/a",)), second) == 1
        await until(lambda: log_of(first, "t", "x/a") == [])
        assert log_of(first, "t") == [numbers(10)]
        assert (await perform(PurgeMemory("t"), first)).memories == 3
        assert not any(log_of(memory, "t", arm) for memory in (first, second) for arm in learned)


async def test_a_forked_arm_begins_with_its_tenants_memory_once(server: Valkey) -> None:
    async with replicas(3, server.url) as [first, second, third]:
        await learn_output(first, "t", numbers(30))
        await learn_output(first, "t", numbers(30, 500))
        await until(lambda: not first.outbox.pending)
        await asyncio.gather(*(instance(memory, "x/a", forked=True) for memory in (second, third)))
        both = [numbers(30), numbers(30, 500)]
        for memory in (second, third):
            await until(partial(_knows, memory, both))
        await answered(second, numbers(30, 900), arm="x/a", forked=True)
        await until(lambda: len(log_of(third, "t", "x/a")) == 3)
        assert sorted(log_of(first, "t")) == both  # the tenant's own does not change
        await perform(PurgeArms(("x/a",)), first)
        await until(lambda: log_of(third, "t", "x/a") == [] == log_of(second, "t", "x/a"))
        await instance(first, "x/a", forked=True)
        await until(lambda: resident(first, "t", "x/a").loaded)
        assert log_of(first, "t", "x/a") == []  # a purge is final: it is not forked again


def _knows(memory: Memory, expected: list[list[int]]) -> bool:
    return learned_by(memory, "t", "x/a") == expected


async def test_records_are_dropped_when_they_are_too_old(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the drafts, from the store, and for a process that reads it later."""
    async with replicas(1, server.url) as [memory]:
        for number in range(3):
            await answered(memory, numbers(40, 1000 * number), max_age=100.0)
        await until(lambda: not memory.outbox.pending)
        found = resident(memory, "t")
        with found.lock:
            for logged in found.log:
                logged.record = replace(logged.record, learned_at=int(time.time()) - 101)
        await answered(memory, numbers(40, 5000), max_age=100.0)
        await until(lambda: not memory.outbox.pending)  # what is sent later is of a later time
        found.aged_at = 0.0
        memory.thread.wake()
        await until(lambda: learned_by(memory, "t") == [numbers(40, 5000)])
        assert log_of(memory, "t") == [numbers(40, 5000)]
        assert 0 < server.client.pttl(stream_of(memory, "t")) <= 100_000
        at = StoreClock.at
        monkeypatch.setattr(StoreClock, "at", lambda clock, monotonic: at(clock, monotonic) + 150.0)
        found.aged_at = 0.0
        memory.thread.wake()
        await until(lambda: server.client.xlen(stream_of(memory, "t")) == 0)
        assert log_of(memory, "t") == []


NAME = MemoryName("t")


async def attempt(memory: Memory, answer: list[int], request: str = "r", sample: int = 0) -> bool:
    """A request that wrote an answer; returns whether it was known as repeated. Its drafter learns if it was not."""
    strategy = await strategy_of(memory, "t")
    with memory.learning(NAME, strategy, request=request) as scope:
        if not scope.repeated:
            strategy.learn(tokens_of(*answer))
        scope.learn(tokens_of(*answer), sample)
    return scope.repeated


ANSWER, OTHER = numbers(100), [*numbers(40), *numbers(60, 5000)]


@pytest.mark.parametrize(
    ("attempts", "learned"),
    [
        ([(ANSWER[:1],), (ANSWER,), (ANSWER,)], [ANSWER[:1], ANSWER]),
        ([(ANSWER[:n],) for n in (30, 60, 40, 100, 100)],
         [ANSWER[:30], ANSWER[30 - OVERLAP : 60], ANSWER[60 - OVERLAP :]]),
        ([(ANSWER[:60],), (OTHER,)], [ANSWER[:60], OTHER[40 - OVERLAP :]]),
        ([(ANSWER, *of) for of in (("r", 0), ("r", 1), ("s", 0), ("", 0), ("", 0))], [ANSWER] * 5),
    ],
    ids=["a retry in full", "each what is new", "another answer from where it differs", "samples and others"],
)  # fmt: skip
async def test_what_attempts_add(attempts: list[Any], learned: list[list[int]]) -> None:
    async with replicas(1, None) as [memory]:
        for one in attempts:
            await attempt(memory, *one)
        assert log_of(memory, "t") == learned
        assert learned_by(memory, "t") == sorted(learned)


async def test_long_answers_are_compared_over_all_their_records() -> None:
    async with replicas(1, None) as [memory]:
        answer = np.random.default_rng(0).integers(0, 30_000, 20_000).tolist()
        await attempt(memory, answer[:17_000])
        await attempt(memory, answer)
        assert [len(one) for one in log_of(memory, "t")] == [8192, 8192, 17_000 - 2 * 8192, 3000 + OVERLAP]


@pytest.mark.parametrize("written", [40, 100])
async def test_another_replica_knows_what_was_learned(server: Valkey, written: int) -> None:
    async with replicas(2, server.url) as [first, second]:
        answer = numbers(100)
        await attempt(first, answer[:written])
        await agreed([first, second], "t")
        assert await attempt(second, answer)
        expected = [answer] if written == 100 else [answer[:written], answer[written - OVERLAP :]]
        await until(lambda: not second.outbox.pending)
        assert await agreed([first, second], "t") == sorted(expected)
    async with replicas(1, server.url) as [later]:
        await agreed([later], "t")
        assert await attempt(later, answer)
        assert len(log_of(later, "t")) == len(expected)
