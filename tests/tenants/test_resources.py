"""What every store of resources does, in this process and on a real server; and what followers make of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from draftwood_memory.errors import StoreRefusedError, StoreUnavailableError
from draftwood_memory.store.encryption import KeyRing, read_keys
from draftwood_memory.store.redis_client import RedisClient
from draftwood_tenants.resources import follower as ending
from draftwood_tenants.resources import redis as redis_resources
from draftwood_tenants.resources import store as base
from draftwood_tenants.resources.follower import ResourceFollower
from draftwood_tenants.resources.redis import RedisResources, ResourceCipher
from draftwood_tenants.resources.store import ConflictError, Cursor, InProcessResources, ResourceStore, Write
from tests.memory.servers import Valkey
from tests.service.fakes import until

KEYS = read_keys(f"k={'A' * 43}=,names={'C' * 42}A=", "store_keys")


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey(persistent=True) as server:
        yield server


def on(server: Valkey, keys: KeyRing | None = None) -> RedisResources:
    return RedisResources(RedisClient(server.url, timeout=10.0), ResourceCipher(keys))


@pytest.fixture(params=["in process", "valkey", "valkey with keys"])
async def store(request: pytest.FixtureRequest, valkey: Valkey) -> AsyncIterator[ResourceStore]:
    valkey.client.flushall()
    found: ResourceStore = (
        InProcessResources() if request.param == "in process" else on(valkey, KEYS if "keys" in request.param else None)
    )
    yield found
    await found.close()


@pytest.fixture
async def redis(valkey: Valkey) -> AsyncIterator[RedisResources]:
    """An empty store on the real server."""
    valkey.client.flushall()
    found = on(valkey)
    yield found
    await found.close()


@asynccontextmanager
async def followers(*stores: ResourceStore) -> AsyncIterator[list[ResourceFollower]]:
    started = [ResourceFollower(store) for store in stores]
    for one in started:
        await one.start()
    try:
        yield started
    finally:
        for one in started:
            await one.close()


async def test_a_write_needs_the_revision_that_is_there(store: ResourceStore) -> None:
    [first] = await store.write([Write("tenants", "a", b"1", 0)])
    for expected in (0, first + 1):
        with pytest.raises(ConflictError) as conflict:
            await store.write([Write("tenants", "b", b"new", 0), Write("tenants", "a", b"2", expected)])
        assert (conflict.value.index, conflict.value.found) == (1, first)
    page = await store.changes(Cursor())
    assert [change and (change.name, change.value) for change in page.changes.values()] == [
        ("a", b"1")
    ]  # all or nothing
    [second] = await store.write([Write("tenants", "a", b"2", first)])
    assert second > first
    [deleted] = await store.write([Write("tenants", "a", None, second)])
    [again] = await store.write([Write("tenants", "a", b"3", 0)])
    assert again > deleted > second
    with pytest.raises(ConflictError):
        await store.write([Write("experiments", "a", b"1", 0)], since=deleted)
    await store.write([Write("experiments", "a", b"1", 0)], since=again)


async def test_changes_are_those_after_the_cursor(store: ResourceStore) -> None:
    odd = "\u00fc/ \x1f:{}" * 40
    [_, second] = await store.write([Write("tenants", "a", b"1", 0), Write("tenants", odd, b"\x00\xff", 0)])
    first = await store.changes(Cursor())
    assert {(change.name, change.value) for change in first.changes.values() if change} == {
        ("a", b"1"),
        (odd, b"\x00\xff"),
    }
    assert (first.is_snapshot, first.cursor.revision) == (True, second)
    await store.write([Write("tenants", odd, None, second)])
    last = await store.changes(first.cursor)
    assert ([*last.changes.values()], last.is_snapshot) == ([None], False)
    nothing = await store.changes(last.cursor)
    assert (nothing.changes, nothing.is_snapshot, nothing.more) == ({}, False, False)


async def test_followers_read_pages_and_what_they_missed(store: ResourceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_resources, "_PAGE", 7)
    for module in (base, redis_resources):
        monkeypatch.setattr(module, "MAX_DELETED", 3)
    follower = ResourceFollower(store)
    revisions = await follower.write([Write("tenants", f"t{number}", b"", 0) for number in range(30)])
    assert len(follower.of_kind("tenants")) == 30
    late = ResourceFollower(store)
    await late.refresh()
    assert late.of_kind("tenants") == follower.of_kind("tenants")
    for number in range(20):  # more than are remembered
        await follower.write([Write("tenants", f"t{number}", None, revisions[number])])
    await late.refresh()
    assert {*late.of_kind("tenants")} == {*follower.of_kind("tenants")} == {f"t{n}" for n in range(20, 30)}


async def test_deletions_are_forgotten_and_nothing_else(store: ResourceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not what has the name of one that was deleted."""
    for module in (base, redis_resources):
        monkeypatch.setattr(module, "MAX_DELETED", 3)

    async def comes_and_goes(name: str) -> None:
        [revision] = await store.write([Write("tenants", name, b"1", 0)])
        await store.write([Write("tenants", name, None, revision)])

    await comes_and_goes("again")
    [kept] = await store.write([Write("tenants", "again", b"2", 0)])
    for number in range(5):
        await comes_and_goes(f"t{number}")
    page = await store.changes(Cursor())
    assert [change.name for change in page.changes.values() if change] == ["again"]
    assert len(page.changes) <= 1 + 3
    await store.write([Write("tenants", "again", b"3", kept)])


async def test_revisions_go_on_where_a_server_with_an_older_clock_takes_over(
    valkey: Valkey, redis: RedisResources
) -> None:
    await redis.write([Write("tenants", "a", b"1", 0)])
    ahead = 8 * 10**15
    valkey.client.hset("dw:{resources}:meta", "revision", ahead)
    assert await redis.write([Write("tenants", "b", b"1", 0)]) == [ahead + 1]


async def test_names_and_values_are_hidden_with_keys(valkey: Valkey) -> None:
    valkey.client.flushall()
    store = on(valkey, KEYS)
    await store.write([Write("tenants", "acme-secret-name", b"the value", 0)])
    [*changes] = valkey.client.zrange("dw:{resources}:changes", 0, -1)
    raw = [*changes, *valkey.client.hgetall("dw:{resources}:values").values()]
    assert not any(text in part for part in raw for text in (b"acme", b"the value"))
    await store.write([Write("tenants", "other", b"another", 0)])
    keys: Any = valkey.client.zrange("dw:{resources}:changes", 0, -1)
    first, second = keys
    values: Any = valkey.client.hgetall("dw:{resources}:values")
    valkey.client.hset("dw:{resources}:values", first, values[second])  # a value moved to another name
    page = await store.changes(Cursor())
    assert [change and change.name for change in page.changes.values()] == ["other"]
    assert page.unreadable == {first.decode()}
    assert not page.foreign
    await store.close()


async def test_a_damaged_value_is_unreadable(valkey: Valkey, redis: RedisResources) -> None:
    await redis.write([Write("tenants", "a", b"1", 0)])
    valkey.client.hset("dw:{resources}:values", "tenants:a:", "damaged")
    page = await redis.changes(Cursor())
    assert page.unreadable == {"tenants:a:"}
    assert not page.foreign


async def test_an_older_server_does_not_overwrite(valkey: Valkey, redis: RedisResources) -> None:
    [revision] = await redis.write([Write("tenants", "a", b"1", 0)])
    valkey.client.hset("dw:{resources}:meta", "schema", redis_resources.SCHEMA + 1)
    with pytest.raises(StoreRefusedError, match="newer version"):
        await redis.write([Write("tenants", "a", b"2", revision)])
    assert len((await redis.changes(Cursor())).changes) == 1


async def test_another_server_follows_within_a_second_and_one_of_two_writers_wins(valkey: Valkey) -> None:
    valkey.client.flushall()
    async with followers(on(valkey), on(valkey)) as [one, two]:
        seconds = float("inf")
        for attempt in range(5):  # other work on the machine may hold up one of them
            [revision] = await one.write([Write("tenants", f"a{attempt}", b"0", 0)])
            began = time.monotonic()
            await until(lambda: one.revision == two.revision)
            seconds = min(seconds, time.monotonic() - began)
        assert seconds < 1.0
        writes = [follower.write([Write("tenants", "a4", b"x", revision)]) for follower in (one, two) * 5]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert sum(isinstance(result, ConflictError) for result in results) == 9


async def test_what_is_known_stays_while_the_store_is_away(valkey: Valkey) -> None:
    valkey.client.flushall()
    async with followers(on(valkey), on(valkey)) as [one, two]:
        [revision] = await one.write([Write("tenants", "a", b"1", 0)])
        await two.refresh()
        valkey.kill()
        with pytest.raises(StoreUnavailableError):
            await two.refresh()
        with pytest.raises(StoreUnavailableError):
            await one.write([Write("tenants", "a", b"2", revision)])
        assert two.of_kind("tenants")["a"].value == b"1"
        valkey.start()
        await one.write([Write("tenants", "a", b"2", revision)])
        await until(lambda: two.of_kind("tenants")["a"].value == b"2")


async def test_a_task_that_misses_a_cancellation_ends_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_RETRY_SECONDS", 0.01)
    missed = 0

    async def deaf() -> None:
        nonlocal missed
        while missed < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                missed += 1

    tasks = [asyncio.create_task(deaf()), asyncio.create_task(asyncio.sleep(60)), None]
    await asyncio.sleep(0)
    await asyncio.wait_for(ending.end(tasks), 5)
    assert missed == 2
    assert all(task.done() for task in tasks if task is not None)
