"""What every store of counts does, in this process and on a real server; and what processes make of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from draftwood_memory.store.encryption import read_keys
from draftwood_memory.store.redis_client import RedisClient
from draftwood_service.experiments.report import CountReader
from draftwood_strategies.drafting import DraftChoice
from draftwood_tenants.experiments import store as redis_counts
from draftwood_tenants.experiments.arms import ArmAssignment, Counting, Running
from draftwood_tenants.experiments.counts import Counts, Origin, Outcome, Snapshot
from draftwood_tenants.experiments.definition import Arm, ExperimentConfig
from draftwood_tenants.experiments.store import (
    CountStore,
    EncodedSnapshot,
    InProcessCounts,
    RedisCounts,
    Target,
    encode,
)
from draftwood_tenants.resources.redis import ResourceCipher
from tests.memory.servers import Valkey, wait_for

KEYS = read_keys(f"k={'A' * 43}=,names={'C' * 42}A=", "store_keys")
A, B = Origin("host:1", "b/1"), Origin("host:2", "b2")
TARGET = Target("x", "ab12")
EXPERIMENT = Running.of(
    ExperimentConfig("x", b"a salt of ours", (Arm("trie", DraftChoice("trie")), Arm("hybrid", DraftChoice("hybrid"))))
)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey(persistent=True) as server:
        yield server


@pytest.fixture
async def client(valkey: Valkey) -> AsyncIterator[RedisClient]:
    valkey.client.flushall()
    found = RedisClient(valkey.url, timeout=1.0)
    yield found
    await found.close()


@pytest.fixture(params=["in process", "valkey", "valkey with keys"])
def store(request: pytest.FixtureRequest, client: RedisClient) -> CountStore:
    if request.param == "in process":
        return InProcessCounts()
    return RedisCounts(client, ResourceCipher(KEYS if "keys" in request.param else None))


def stored(origin: Origin, sequence: int, data: bytes = b"counts") -> EncodedSnapshot:
    return EncodedSnapshot(origin, sequence, data)


async def test_the_newest_of_each_process_is_kept(store: CountStore) -> None:
    await store.write(TARGET, stored(A, 2, b"two"))
    await store.write(TARGET, stored(A, 1, b"one"))  # comes late
    await store.write(TARGET, stored(A, 2, b"again"))
    await store.write(TARGET, stored(B, 1))
    await store.write(Target("x", "ab13"), stored(A, 9))
    await store.write(Target("y", "ab12"), stored(A, 9))
    found = await store.read(TARGET, {})
    assert {one.origin: one for one in found} == {A: stored(A, 2, b"two"), B: stored(B, 1)}
    assert await store.read(TARGET, {A: 2, B: 0}) == [stored(B, 1)]
    await store.write(TARGET, stored(A, 3))
    assert await store.read(TARGET, {A: 2, B: 1}) == [stored(A, 3)]


async def test_many_processes_are_read_in_pages(store: CountStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_counts, "_PAGE", 4)
    for boot in range(12):
        await store.write(TARGET, stored(Origin("a", str(boot)), boot + 1))
    assert {one.origin.boot for one in await store.read(TARGET, {})} == {str(boot) for boot in range(12)}
    assert len(await store.read(TARGET, {Origin("a", "3"): 4})) == 11


async def test_a_deleted_experiment_stays_deleted_and_a_new_one_of_its_name_is_counted(store: CountStore) -> None:
    for target in (TARGET, Target("x", "old"), Target("y", "ab12")):
        await store.write(target, stored(A, 1))
        await store.write_history(target, b"looks")
    assert await store.read_history(TARGET) == b"looks"
    await store.delete(TARGET)
    await store.write(TARGET, stored(A, 2))  # by a server that has not heard of it
    await store.write_history(TARGET, b"late")
    assert [await store.read(Target("x", name), {}) for name in ("ab12", "old")] == [[], []]
    assert await store.read_history(TARGET) == b""
    assert len(await store.read(Target("y", "ab12"), {})) == 1
    await store.write(Target("x", "new"), stored(A, 1))
    assert len(await store.read(Target("x", "new"), {})) == 1


async def test_one_process_leads_until_its_lease_ends(client: RedisClient) -> None:
    stores = [RedisCounts(client, ResourceCipher(None)) for _ in range(2)]
    assert await stores[0].acquire_lease("a", 60.0)
    assert not await stores[1].acquire_lease("b", 60.0)
    assert await stores[0].acquire_lease("a", 0.05)
    await asyncio.sleep(0.1)
    assert await stores[1].acquire_lease("b", 60.0)
    assert not await stores[0].acquire_lease("a", 60.0)


def request(number: int) -> tuple[ArmAssignment, Outcome]:
    unit = EXPERIMENT.split.assign("acme", str(number))
    assert unit is not None
    assignment = ArmAssignment(EXPERIMENT, EXPERIMENT.config.arms[unit.arm], unit, "acme", str(number), True)
    seconds = 0.1 + number / 1e4
    return assignment, Outcome(100.0 + number, tokens=30, steps=10, decode_seconds=seconds, ttft_seconds=0.02)


def process(store: CountStore, boot: str) -> Counting:
    return Counting(store, Origin("replica", boot), lambda: [EXPERIMENT.target])


async def counted(store: CountStore) -> Counts:
    reader = CountReader(store, process(store, "a reader"))
    return (await reader.read(EXPERIMENT)).counts


async def test_processes_add_up_and_a_killed_one_loses_only_what_it_had_not_written(store: CountStore) -> None:
    killed, other = process(store, "1"), process(store, "2")
    for number in range(60):
        (killed if number % 2 else other).record(*request(number))
        if number % 7 == 0:
            await killed.write()
            await other.write()
    await killed.write()
    await other.write()
    killed.record(*request(1000))  # within its last second
    empty = encode(Snapshot(A, 1, Counts.zero(2)))
    await store.write(EXPERIMENT.target, stored(Origin("replica", "1.0"), 1, empty))
    restarted = process(store, "3")
    for number in range(60, 100):
        restarted.record(*request(number))
        await restarted.write()
    alone = InProcessCounts()
    single = process(alone, "sees all of them")
    for number in range(100):
        single.record(*request(number))
    await single.write()
    found, expected = await counted(store), await counted(alone)
    assert found.sums[..., 0].sum() == 100
    assert np.allclose(found.sums, expected.sums, rtol=1e-12, atol=0)
    assert np.array_equal(found.latencies, expected.latencies)


async def test_counts_of_an_experiment_that_was_gone_for_a_while_are_not_lost(store: CountStore) -> None:
    known = [EXPERIMENT.target]
    counting = Counting(store, Origin("replica", "1"), lambda: known)
    for number in range(5):
        counting.record(*request(number))
    await counting.write()
    known.clear()
    await counting.write()
    known.append(EXPERIMENT.target)
    counting.record(*request(5))
    await counting.write()
    assert (await counted(store)).sums[..., 0].sum() == 6


async def test_counts_that_cannot_be_read_are_left_out_and_said_so(store: CountStore) -> None:
    good = process(store, "1")
    for number in range(10):
        good.record(*request(number))
    await good.write()
    newer = b"dx\x63" + bytes(40)
    await store.write(EXPERIMENT.target, stored(Origin("replica", "2"), 5, newer))
    await store.write(EXPERIMENT.target, stored(Origin("other", "3"), 5, b"damaged"))
    reader = CountReader(store, process(store, "a reader"))
    for _ in range(2):
        reading = await reader.read(EXPERIMENT)
        assert (reading.servers, reading.unreadable) == (1, 2)
        assert reading.counts.sums[..., 0].sum() == 10
    assert "2 processes cannot be read" in reading.report().conclusions[0].text


async def test_values_that_were_moved_are_not_read(client: RedisClient, valkey: Valkey) -> None:
    store = RedisCounts(client, ResourceCipher(KEYS))
    for boot in ("1", "2"):
        one = process(store, boot)
        one.record(*request(int(boot)))
        await one.write()
    [key] = [key for key in valkey.client.scan_iter() if key.endswith(b":values")]
    values = valkey.client.hgetall(key)
    assert isinstance(values, dict)
    first, second = values
    valkey.client.hset(key, first, values[second])
    assert (await counted(store)).sums[..., 0].sum() == 1
    assert b"x" not in key.split(b":")


async def test_counts_wait_while_the_store_is_away(valkey: Valkey, client: RedisClient) -> None:
    counting = process(RedisCounts(client, ResourceCipher(None)), "1")
    counting.record(*request(1))
    valkey.kill()
    await counting.write()
    counting.record(*request(2))
    valkey.start()
    wait_for(valkey.client.ping, "the server")
    await counting.write()
    assert (await counted(RedisCounts(client, ResourceCipher(None)))).sums[..., 0].sum() == 2
