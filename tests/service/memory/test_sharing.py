"""Several replicas over one real server: records of one reach the others once, in order, and no other tenant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as SequenceOf
from functools import partial

import pytest

from draftwood_service.memory.codec.encryption import read_keys
from draftwood_service.memory.config import MemoryConfig
from draftwood_service.memory.manager import MemoryManager
from draftwood_service.memory.naming import Keys, MemoryName
from draftwood_service.memory.operations import PurgeMemory
from draftwood_service.memory.orphans import PurgeResult
from draftwood_service.memory.store.redis_client import RedisClient
from draftwood_service.quotas import RateLimits
from draftwood_service.quotas.shared import SharedLimiter
from tests.service.fakes import until
from tests.service.memory.helpers import (
    FAST,
    Answer,
    agreed,
    known_to,
    learn_output,
    log_of,
    memory_of,
    numbers,
    perform,
    replicas,
)
from tests.service.memory.servers import Valkey, wait_for

KEY_A, KEY_B = "A" * 43 + "=", "B" * 42 + "A="
NAMES = "names=" + "C" * 42 + "A="


def _all_hold(memories: SequenceOf[MemoryManager], records: int) -> bool:
    return all(len(log_of(memory, "t")) == records for memory in memories)


async def test_records_reach_the_other_replicas_within_a_second(server: Valkey) -> None:
    async with replicas(3, server.url, config=MemoryConfig()) as memories:
        for memory in memories:
            await memory.strategy("t", "trie")
        await learn_output(memories[0], "other", numbers(40))  # loads compiled functions, which takes seconds
        lags = []
        for number in range(5):
            began = time.monotonic()
            await learn_output(memories[number % 3], "t", numbers(40, 100 * number))
            await until(partial(_all_hold, memories, number + 1))
            lags.append(time.monotonic() - began)
        assert max(lags) < 1.0
        log = await agreed(memories, "t")
        assert sorted(log) == [numbers(40, 100 * number) for number in range(5)]


async def test_a_new_process_loads_what_others_have_learned(server: Valkey) -> None:
    async with replicas(1, server.url) as [first]:
        for number in range(300):
            await learn_output(first, "t", numbers(20, number))
        await until(lambda: first.counters().folds > 0)
        await learn_output(first, "t", numbers(30))
        await agreed([first], "t")
    async with replicas(1, server.url) as [second]:
        await second.strategy("t", "trie")
        log = await agreed([second], "t")
        assert log == [numbers(20, number) for number in range(300)] + [numbers(30)]


async def test_order_of_a_source_is_kept_and_nothing_comes_twice(server: Valkey) -> None:
    async with replicas(2, server.url) as memories:
        for number in range(100):
            for index, memory in enumerate(memories):
                await learn_output(memory, "t", [1000 * index + number] * 3)
        log = await agreed(memories, "t")
    assert len(log) == 200
    for index in range(2):
        own = [tokens[0] for tokens in log if tokens[0] // 1000 == index]
        assert own == [1000 * index + number for number in range(100)]


async def test_capacity_is_the_same_on_all(server: Valkey) -> None:
    async with replicas(2, server.url, config=MemoryConfig(tokens=2000, bytes=1 << 20, round_seconds=0.03)) as memories:
        for number in range(60):
            await learn_output(memories[number % 2], "t", numbers(90, 100 * number))
        await until(lambda: all(one.residents.open(MemoryName("t")).log.position == 60 for one in memories))
        log = log_of(memories[0], "t")
        assert log == log_of(memories[1], "t")
        assert sum(map(len, log)) <= 2000
        assert len(log) == 22


async def test_a_full_log_is_folded_and_goes_on(server: Valkey) -> None:
    config = MemoryConfig(tokens=20_000, bytes=1 << 16, round_seconds=0.03)
    async with replicas(1, server.url, config=config) as [memory]:
        for number in range(200):
            await learn_output(memory, "t", numbers(300, 7 * number))
            if number % 20 == 0:
                await asyncio.sleep(0.04)
        await until(lambda: not memory.outbox.pending)
        await until(lambda: len(log_of(memory, "t")) > 0 and log_of(memory, "t")[-1] == numbers(300, 7 * 199))
        assert memory.counters().folds > 0
        assert memory.counters().dropped == 0
    keys = Keys.of(memory.naming.tag(MemoryName("t")))
    sizes = server.client.memory_usage(keys.log, samples=0), server.client.memory_usage(keys.snapshot)
    used = sum(size for size in sizes if size is not None)
    assert used < 3 * (1 << 16)


async def test_a_purge_is_final_everywhere(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await learn_output(first, "t", numbers(20))
        await learn_output(first, "other", numbers(30))
        await agreed([first, second], "t")
        late = first.learn_on_exit(MemoryName("t"), await first.strategy("t", "trie"), [Answer(numbers(25))])
        with late:  # a request that runs while the memory is purged
            assert await perform(PurgeMemory("t"), second) == PurgeResult(1, 20)
            await until(lambda: log_of(first, "t") == [])
        assert await agreed([first, second], "t") == []
        await learn_output(second, "t", numbers(5))
        assert await agreed([first, second], "t") == [numbers(5)]
        assert await agreed([first, second], "other") == [numbers(30)]


async def test_records_from_before_a_purge_do_not_come_from_an_outbox(server: Valkey) -> None:
    async with replicas(1, server.url) as [first]:
        await learn_output(first, "t", numbers(20))
        await agreed([first], "t")
        slow = memory_of(server.url)  # learned something and never reached the store
        for epoch_known in (True, False):
            resident = slow.residents.open(MemoryName("t"))
            if epoch_known:
                await slow.replica.follower.refresh(resident)
            await learn_output(slow, "t", numbers(33))
            await perform(PurgeMemory("t"), first)
        await slow.replica.round()
        await slow.replica.round()
        assert slow.counters().stale >= 1
        await slow.store.close()
        slow.thread.stop(0)
        assert await agreed([first], "t") == []


async def test_another_model_reads_nothing(server: Valkey) -> None:
    async with replicas(1, server.url) as [first]:
        await learn_output(first, "t", numbers(20))
        await agreed([first], "t")
        async with replicas(1, server.url, fingerprint="e" * 16) as [other]:
            await other.strategy("t", "trie")
            await asyncio.sleep(0.15)
            assert log_of(other, "t") == []
            snapshot_of_ours = first.replica.folder.snapshot(first.residents.open(MemoryName("t"))).value
            server.client.set(Keys.of(other.naming.tag(MemoryName("x"))).snapshot, snapshot_of_ours)


async def test_encrypted_values_contain_no_tokens_and_keys_can_be_rotated(server: Valkey) -> None:
    old = read_keys(f"{NAMES}\nk1={KEY_A}", "keys")
    new = read_keys(f"{NAMES},k2={KEY_B},k1={KEY_A}", "keys")
    newest = read_keys(f"{NAMES},k2={KEY_B}", "keys")
    secret = [4242] * 64
    async with replicas(1, server.url, keys=old) as [first]:
        await learn_output(first, "acme-secret", secret)
        await agreed([first], "acme-secret")
    dump = b"".join(server.client.dump(key) + key for key in server.client.scan_iter())
    assert b"acme" not in dump
    assert (4242).to_bytes(2, "little") * 4 not in dump
    async with replicas(1, server.url, keys=new) as [second]:
        await second.strategy("acme-secret", "trie")
        assert await agreed([second], "acme-secret") == [secret]
        resident = second.residents.open(MemoryName("acme-secret"))
        resident.fold_due = True
        await until(lambda: second.counters().folds == 1)
        await learn_output(second, "acme-secret", numbers(10))
        await agreed([second], "acme-secret")
    async with replicas(1, server.url) as [plain]:
        await plain.strategy("acme-secret", "trie")
        await asyncio.sleep(0.1)
        assert log_of(plain, "acme-secret") == []
    tag = Keys.of(second.naming.tag(MemoryName("acme-secret")))
    server.client.xtrim(tag.log, minid="2-0")
    async with replicas(1, server.url, keys=newest) as [third]:
        await third.strategy("acme-secret", "trie")
        assert await agreed([third], "acme-secret") == [secret, numbers(10)]


async def test_values_moved_to_another_tenant_do_not_decrypt(server: Valkey) -> None:
    keys = read_keys(f"{NAMES},k1={KEY_A}", "keys")
    async with replicas(1, server.url, keys=keys) as [memory]:
        await learn_output(memory, "victim", numbers(50))
        await agreed([memory], "victim")
        victim, thief = (Keys.of(memory.naming.tag(MemoryName(name))) for name in ("victim", "thief"))
        for source, target in ((victim.log, thief.log), (victim.meta, thief.meta)):
            server.client.copy(source, target)
        await memory.strategy("thief", "trie")
        await until(lambda: memory.counters().unreadable > 0)
        assert log_of(memory, "thief") == []
        assert known_to(memory, "thief") == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "newer", "foreign", "gone"])
async def test_a_snapshot_that_cannot_be_read_leaves_the_log_served(server: Valkey, damage: str) -> None:
    from draftwood_service.memory.codec import snapshots

    async with replicas(1, server.url) as [first]:
        for number in range(300):  # more than stay in the log beside a snapshot
            await learn_output(first, "t", numbers(10, number))
        await agreed([first], "t")
        folds = first.counters().folds
        await learn_output(first, "t", numbers(16))
        await agreed([first], "t")
        first.residents.open(MemoryName("t")).fold_due = True
        await until(lambda: first.counters().folds > folds)
        first.residents.open(MemoryName("t")).fold_due = False  # that fold may have been due before
        await learn_output(first, "t", numbers(17))
        complete = await agreed([first], "t")
    keys = Keys.of(first.naming.tag(MemoryName("t")))
    value = server.client.get(keys.snapshot)
    assert isinstance(value, bytes)
    if damage == "flipped":
        server.client.set(keys.snapshot, value[:-9] + bytes([value[-9] ^ 1]) + value[-8:])
    elif damage == "cut":
        server.client.set(keys.snapshot, value[: len(value) // 2])
    elif damage == "newer":
        server.client.set(keys.snapshot, value[:9] + (snapshots.VERSION + 1).to_bytes(2, "little") + value[11:])
    elif damage == "foreign":
        opened = snapshots.decode(value[1:], "f" * 16)
        other = snapshots.Snapshot("e" * 16, opened.epoch, opened.position, opened.chain, opened.records)
        server.client.set(keys.snapshot, b"\x00" + snapshots.encode(other))
    else:
        server.client.delete(keys.snapshot)
    damaged = server.client.get(keys.snapshot)
    async with replicas(1, server.url) as [second]:
        await second.strategy("t", "trie")
        log = await agreed([second], "t")
        assert 0 < len(log) < len(complete)
        assert log == complete[-len(log) :]
        await learn_output(second, "t", numbers(18))
        assert (await agreed([second], "t"))[-1] == numbers(18)
        second.residents.open(MemoryName("t")).fold_due = True
        await asyncio.sleep(0.1)
        assert second.counters().folds == 0
        if damage == "newer":
            assert server.client.get(keys.snapshot) == damaged
        else:
            assert not server.client.exists(keys.snapshot)
            assert bool(server.client.exists(keys.aside)) == (damage != "gone")


async def test_a_process_with_all_records_replaces_a_lost_snapshot(server: Valkey) -> None:
    async with replicas(2, server.url) as memories:
        for number in range(20):
            await learn_output(memories[0], "t", numbers(30, number))
        await agreed(memories, "t")
        memories[0].residents.open(MemoryName("t")).fold_due = True
        await until(lambda: memories[0].counters().folds == 1)
        keys = Keys.of(memories[0].naming.tag(MemoryName("t")))
        server.client.delete(keys.snapshot)
        await learn_output(memories[1], "t", numbers(9))
        wait_for(lambda: bool(server.client.exists(keys.snapshot)), "the snapshot")
        complete = await agreed(memories, "t")
    async with replicas(1, server.url) as [third]:
        assert await agreed([third], "t") == complete


async def test_time_to_live(server: Valkey) -> None:
    config = MemoryConfig(ttl=0.6, round_seconds=0.03)
    async with replicas(1, server.url, config=config) as [memory]:
        await learn_output(memory, "t", numbers(20))
        await agreed([memory], "t")
        keys = Keys.of(memory.naming.tag(MemoryName("t")))
        assert 0 < server.client.pttl(keys.log) <= 600
        wait_for(lambda: not server.client.exists(keys.log, keys.meta), "the expiry")
        memory.residents.open(MemoryName("t")).checked_at = 0.0
        await asyncio.sleep(0.2)
        memory.replica.follower.check_all = True
        await until(lambda: log_of(memory, "t") == [])
        assert not server.client.exists(keys.meta)


async def test_an_idle_tenant_is_evicted_and_loaded_again(server: Valkey) -> None:
    async with replicas(1, server.url, config=MemoryConfig(idle_seconds=0.2, round_seconds=0.03)) as [memory]:
        await learn_output(memory, "t", numbers(40))
        await until(lambda: MemoryName("t") not in memory.residents)
        back = await memory.strategy("t", "trie")
        assert getattr(back, "tokens", 0) == 40


async def test_a_restricted_user_is_enough(server: Valkey) -> None:
    rights = ["+eval", "+set", "+get", "+zrange", "+zrem", "+xadd", "+xrange", "+xtrim", "+xlen", "+hset", "+hmget"]
    rights += ["+hget", "+hgetall", "+hdel", "+hlen", "+incr", "+zadd", "+zrangebyscore", "+exists", "+del", "+time"]
    rights += [
        "+rename",
        "+pexpire",
        "+pttl",
        "+persist",
        "+strlen",
        "+zcard",
        "+zremrangebyscore",
        "+ping",
        "+client|setname",
        "+client|setinfo",
        "+hello",
    ]
    server.client.execute_command("ACL", "SETUSER", "dw", "on", ">pw", "resetkeys", "~dw:*", "-@all", *rights)
    url = f"redis://dw:pw@127.0.0.1:{server.port}"
    async with replicas(2, url, config=FAST) as memories:
        await learn_output(memories[0], "t", numbers(12))
        assert await agreed(memories, "t") == [numbers(12)]
        memories[0].residents.open(MemoryName("t")).fold_due = True
        await until(lambda: memories[0].counters().folds == 1)
    limiter = SharedLimiter(RedisClient(url), answer_seconds=2.0)
    reservation = await limiter.reserve("t", RateLimits(5, 100, 5), 10)
    await limiter.refresh()
    reservation.settle(5)
    await reservation.settled()
    await limiter.close()
    assert limiter.outages == 0
    async with replicas(1, f"redis://dw:wrong@127.0.0.1:{server.port}") as [refused]:
        await learn_output(refused, "t", numbers(3))
        await until(lambda: refused.thread.failing)
        assert refused.outbox.pending == 1
