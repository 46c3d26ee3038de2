"""What a request says of its memory: options of strategies, what is kept and how much, memories of arms."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.request import MemoryTerms, Request, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy
from draftwood_strategies.options import Options
from tests.memory.helpers import FAST, Answer, learn_output, numbers, perform, replicas
from tests.memory.servers import Valkey
from tests.service.fakes import until


def request(
    strategy: str = "trie", options: Options = (), *, tenant: str = "t", arm: str = "", **terms: Any
) -> Request:
    return Request(
        request_id="r",
        prompt=np.arange(900, 910, dtype=np.int32),
        stop=StopParams(100),
        strategy_name=strategy,
        strategy_options=options,
        max_draft_nodes=8,
        tenant=tenant,
        arm=arm,
        memory=MemoryTerms(**terms),
    )


async def instance(memory: MemoryManager, of: Request) -> Any:
    """The instance that the request drafts with, once it has learned the memory's log."""
    loop, loaded = asyncio.get_running_loop(), asyncio.Future[Strategy]()

    def deliver(strategy: Strategy) -> None:
        loop.call_soon_threadsafe(loaded.set_result, strategy)

    return memory.fetch(StrategyUse.of(of), deliver) or await loaded


async def answered(memory: MemoryManager, of: Request, tokens: list[int]) -> None:
    """A request that wrote `tokens`."""
    sequence = Sequence(of, await instance(memory, of))
    sequence.output += tokens
    with memory.learning([sequence]):
        pass


def resident(memory: MemoryManager, arm: str = "") -> Resident:
    return memory.residents.open(MemoryName("t", arm))


def records(memory: MemoryManager, arm: str = "") -> list[list[int]]:
    return [record.tokens.tolist() for record in resident(memory, arm).log]


async def test_options_make_instances_of_their_own_over_one_memory(server: Valkey) -> None:
    short: Options = (("branch_length", 2),)
    async with replicas(1, server.url) as [memory]:
        long, brief = await instance(memory, request()), await instance(memory, request(options=short))
        assert (long.branch_length, brief.branch_length) == (32, 2)
        assert await instance(memory, request(options=short)) is brief
        await answered(memory, request(options=short), numbers(40))
        await until(lambda: [one.tolist() for one in long.sequences()] == [numbers(40)])
        other = await instance(memory, request(options=(("branch_length", 3),)))
        assert [one.tolist() for one in other.sequences()] == [numbers(40)]  # learned from the log
        with pytest.raises(ValueError, match="branch_length: 0"):
            await instance(memory, request(options=(("branch_length", 0),)))


async def test_few_instances_are_kept_and_those_in_use_go_on(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        first = await instance(memory, request(options=(("branch_length", 1),)))
        for length in range(2, 20):
            await instance(memory, request(options=(("branch_length", length),)))
        assert len(resident(memory).strategies) == 8
        assert not resident(memory).unbuilt
        assert len(first.start(np.arange(4, dtype=np.int32)).propose(4)) == 0
        assert await instance(memory, request(options=(("branch_length", 1),))) is not first


def test_no_option_exceeds_the_memorys_capacity() -> None:
    capacity = MemoryConfig(tokens=2000, bytes=1 << 20).capacity
    for options in ((), (("capacity_tokens", 10**9),)):
        trie: Any = make(InstanceKey("trie", options), capacity)
        trie.learn(np.arange(5000, dtype=np.int32))
        assert trie.tokens <= 2000
    small: Any = make(InstanceKey("hybrid", (("capacity_tokens", 500),)), capacity)
    small.parts["trie"].learn(np.arange(5000, dtype=np.int32))
    assert small.parts["trie"].tokens <= 500


async def test_prompts_are_kept_with_answers_where_the_terms_say_so(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await answered(first, request(with_prompts=True), numbers(5))
        await answered(first, request(tenant="other"), numbers(5))
        await instance(second, request())
        expected = [[*range(900, 910), *numbers(5)]]
        await until(lambda: records(first) == records(second) == expected)
        await until(lambda: [r.tokens.tolist() for r in first.residents.open(MemoryName("other")).log] == [numbers(5)])


async def test_a_smaller_memory_evicts_at_once_and_grows_again(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        for number in range(6):
            await answered(memory, request(), numbers(100, 1000 * number))
        await until(lambda: resident(memory).log.tokens == 600)
        trie = await instance(memory, request(max_tokens=250))
        await until(lambda: resident(memory).log.tokens == 200)
        await until(lambda: resident(memory).strategies[InstanceKey("trie")] is not trie)
        trie = await instance(memory, request(max_tokens=250))
        assert trie.tokens <= 250
        info = await perform(GetStatistics("t"), memory)
        await until(lambda: resident(memory).fold_due is False)
        info = await perform(GetStatistics("t"), memory)
        assert info.memories[0].stored.tokens <= 600
        await instance(memory, request())
        await until(lambda: not resident(memory).resized)
        await answered(memory, request(), numbers(100, 9000))
        await until(lambda: resident(memory).log.tokens == 300)


@pytest.mark.parametrize("store", ["valkey", "process"])
async def test_a_memory_with_an_idle_ttl_is_deleted_and_others_stay(server: Valkey, store: str) -> None:
    async def check(memory: MemoryManager) -> None:
        await answered(memory, request(idle_ttl=1.5), numbers(9))
        await answered(memory, request(arm="x/a"), numbers(9))
        await until(lambda: not memory.outbox.pending)
        listed = await perform(GetStatistics("t"), memory)
        assert {one.name.arm for one in listed.memories} == {"x/a", ""}
        await asyncio.sleep(1.6)
        listed = await perform(GetStatistics("t"), memory)
        assert [one.name.arm for one in listed.memories] == ["x/a"]

    if store == "valkey":
        async with replicas(1, server.url) as [memory]:
            await check(memory)
    else:
        memory = MemoryManager(InProcessStore(Limits(1 << 20)), "f" * 16, FAST)
        memory.start(lambda task: task())
        await check(memory)
        await asyncio.to_thread(memory.stop)


async def test_warming_keeps_a_tenants_limits_and_so_does_an_eviction(server: Valkey) -> None:
    terms = MemoryTerms(idle_ttl=100.0, max_tokens=2048)
    async with replicas(1, server.url) as [memory]:
        sequences = [np.arange(10, dtype=np.int32)]
        await perform(FillMemory(MemoryName("t"), Kind.CORPUS, sequences, FillProgress(), terms), memory)
        assert 0 < server.client.pttl(Keys.of(resident(memory).tag).meta) <= 100_000
        with memory.residents._lock:
            memory.residents._by_name.clear()
        assert resident(memory).capacity.tokens == 2048
        await instance(memory, request())  # the tenant has no limits any more
        assert resident(memory).limits is None


async def test_what_an_arm_has_to_send_is_not_lost_in_a_fork(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        early = memory.outbox.add(MemoryName("t", "x/a"), None, Kind.OUTPUT, np.arange(50, 55, dtype=np.int32))
        await answered(memory, request(), numbers(10))
        await until(lambda: len(records(memory)) == 1)
        memory.residents.open(MemoryName("t", "x/a"), MemoryTerms(forked=True))
        await instance(memory, request(arm="x/a", forked=True))
        await until(lambda: early.tokens.tolist() in records(memory, "x/a"))


async def test_arms_have_memories_of_their_own(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await answered(first, request(), numbers(10))
        await answered(first, request(arm="x/a"), numbers(10, 100))
        await answered(second, request(arm="x/b"), numbers(10, 200))
        for arm in ("x/a", "x/b", ""):
            await instance(second, request(arm=arm))
        await until(lambda: records(second, "x/a") == [numbers(10, 100)])
        assert (records(second), records(second, "x/b")) == ([numbers(10)], [numbers(10, 200)])
        listed = await perform(GetStatistics("t"), first)
        assert sorted(one.name.arm for one in listed.memories) == ["", "x/a", "x/b"]
        assert (await perform(PurgeMemory("t"), first)).memories == 3
        await until(lambda: not any(records(second, arm) for arm in ("", "x/a", "x/b")))


async def test_an_arm_is_purged_alone(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await answered(first, request(), numbers(10))
        await answered(first, request(arm="x/a"), numbers(10, 100))
        await until(lambda: not first.outbox.pending)
        await instance(second, request(arm="x/a"))
        assert (await perform(PurgeMemory("t", "x/a"), second)).memories == 1
        await until(lambda: records(first, "x/a") == [])
        assert records(first) == [numbers(10)]


async def test_a_forked_arm_begins_with_its_tenants_memory_once(server: Valkey) -> None:
    async with replicas(3, server.url) as [first, second, third]:
        await learn_output(first, "t", numbers(30))
        await learn_output(first, "t", numbers(30, 500))
        await until(lambda: not first.outbox.pending)
        forked = request(arm="x/a", forked=True)
        tries = await asyncio.gather(instance(second, forked), instance(third, forked))
        both = sorted([numbers(30), numbers(30, 500)])
        await until(lambda: sorted(records(second, "x/a")) == sorted(records(third, "x/a")) == both)
        for memory in (second, third):
            trie = await instance(memory, forked)
            assert sorted(one.tolist() for one in trie.sequences()) == both
        await answered(second, forked, numbers(30, 900))
        await until(lambda: len(records(third, "x/a")) == 3)
        assert records(first) == [numbers(30), numbers(30, 500)]  # the tenant's own does not change
        assert tries
        await perform(PurgeMemory("t", "x/a"), first)
        await until(lambda: records(third, "x/a") == [] == records(second, "x/a"))
        await instance(first, forked)
        await asyncio.sleep(0.2)
        assert records(first, "x/a") == []  # a purge is final: it is not forked again


async def test_an_arm_of_a_tenant_with_nothing_is_empty(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        await answered(memory, request(arm="x/a", forked=True), numbers(7))
        await until(lambda: records(memory, "x/a") == [numbers(7)])
        assert Answer(numbers(7)).output == records(memory, "x/a")[0]


def age(memory: MemoryManager, seconds: int) -> None:
    """Lets the records that the process has of the memory be so much older."""
    of_tenant = resident(memory)
    log, records = of_tenant.log, [*of_tenant.log]
    aged = TenantLog(of_tenant.capacity)
    aged.restore([replace(one, learned_at=one.learned_at - seconds) for one in records], log.position, log.chain)
    of_tenant.log = aged
    of_tenant.aged_at = 0.0


async def test_records_are_dropped_when_they_are_too_old(server: Valkey) -> None:
    """From the drafts, from the snapshot in the store, and for a process that reads it later."""
    aging = request(max_age=100.0)
    async with replicas(1, server.url) as [memory]:
        for number in range(3):
            await answered(memory, aging, numbers(40, 1000 * number))
        await until(lambda: len(records(memory)) == 3)
        age(memory, 99)
        await answered(memory, aging, numbers(40, 5000))
        await until(lambda: len(records(memory)) == 4)
        age(memory, 2)
        await until(lambda: records(memory) == [numbers(40, 5000)])
        for _ in range(1000):  # until the instance is replaced by one without them
            trie = await instance(memory, aging)
            if [one.tolist() for one in trie.sequences()] == [numbers(40, 5000)]:
                break
            await asyncio.sleep(0.02)
        assert [one.tolist() for one in trie.sequences()] == [numbers(40, 5000)]
        await until(lambda: memory.replica.counters.folds == 1)
    async with replicas(1, server.url) as [memory]:
        await instance(memory, request())
        assert records(memory) == [numbers(40, 5000)]


async def test_a_memory_without_new_records_expires_with_its_last_one(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        await answered(memory, request(max_age=3600.0, idle_ttl=7200.0), numbers(40))
        await until(lambda: bool(records(memory)))
        ttls = [server.client.ttl(key) for key in server.client.scan_iter("dw:*") if resident(memory).tag in str(key)]
        assert ttls
        assert all(0 < ttl <= 3600 for ttl in ttls)


def test_the_servers_maximum_age_is_the_limit_of_a_tenants() -> None:
    config = MemoryConfig(max_age=1000.0, ttl=50.0)
    assert [config.under(MemoryTerms(max_age=age)).max_age for age in (None, 10.0, 5000.0)] == [1000.0, 10.0, 1000.0]
    assert MemoryConfig().under(MemoryTerms(max_age=10.0)).max_age == 10.0
    assert config.stored_seconds == 50.0
    assert MemoryConfig().oldest(1e9) == -float("inf")
