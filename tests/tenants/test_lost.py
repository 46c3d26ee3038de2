"""A store that lost its data gets it again; what was deleted stays deleted, and what cannot be read stays in use."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from draftwood_memory.errors import StoreUnavailableError
from draftwood_memory.store.encryption import KeyRing, read_keys
from draftwood_memory.store.redis_client import RedisClient
from draftwood_tenants.resources.follower import ClockWatch, PresenceNote, ResourceFollower
from draftwood_tenants.resources.redis import RedisResources, ResourceCipher
from draftwood_tenants.resources.store import Cursor, Write
from tests.memory.servers import Valkey
from tests.service.fakes import until
from tests.tenants.test_resources import followers, on

NAMES = f"names={'C' * 42}A="
OLD = read_keys(f"old={'A' * 43}=,{NAMES}", "store_keys")
BOTH = read_keys(f"new={'B' * 42}A=,old={'A' * 43}=,{NAMES}", "store_keys")
NEW = read_keys(f"new={'B' * 42}A=,{NAMES}", "store_keys")
OTHER_NAMES = read_keys(f"old={'A' * 43}=,names={'D' * 42}A=", "store_keys")


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


def names(follower: ResourceFollower) -> set[str]:
    return {*follower.of_kind("tenants")}


def values(follower: ResourceFollower) -> dict[str, bytes]:
    return {name: found.value for name, found in follower.of_kind("tenants").items()}


async def stored(server: Valkey, keys: KeyRing | None = None) -> dict[str, bytes]:
    """What a server that has seen nothing reads."""
    store = on(server, keys)
    page = await store.changes(Cursor())
    await store.close()
    return {change.name: change.value for change in page.changes.values() if change is not None}


def all_at(followers: Iterable[ResourceFollower], revision: int) -> bool:
    return all(one.revision == revision for one in followers)


async def revision_of(server: Valkey) -> int:
    store = on(server)
    page = await store.changes(Cursor())
    await store.close()
    return page.cursor.revision


async def test_a_wiped_store_gets_its_resources_again(valkey: Valkey) -> None:
    async with followers(on(valkey), on(valkey), on(valkey)) as made:
        [revision, _] = await made[0].write([Write("tenants", "a", b"1", 0), Write("tenants", "b", b"2", 0)])
        await made[0].write([Write("tenants", "a", None, revision), Write("experiments", "x", b"3", 0)])
        await until(partial(all_at, made, made[0].revision))
        for _ in range(3):
            valkey.client.flushall()
            while not await stored(valkey):
                assert all(names(one) == {"b"} for one in made)
                await asyncio.sleep(0.02)
            assert await stored(valkey) == {"b": b"2", "x": b"3"}  # and not "a", which was deleted
            await until(partial(all_at, made, await revision_of(valkey)))
            assert all(names(one) == {"b"} for one in made)
        [deleted] = await made[1].write([Write("tenants", "b", None, made[1].of_kind("tenants")["b"].revision)])
        await until(partial(all_at, made, deleted))
        for one in made:
            await one.refresh()
        assert await stored(valkey) == {"x": b"3"}


async def test_a_server_that_knew_nothing_wrote_first(valkey: Valkey) -> None:
    """What it wrote or deleted stays as it is; the rest is added."""
    first, late = ResourceFollower(on(valkey)), ResourceFollower(on(valkey))
    try:
        await first.write([Write("tenants", name, b"before", 0) for name in ("a", "b", "c")])
        await late.refresh()
        valkey.client.flushall()
        fresh = ResourceFollower(on(valkey))
        _, revision = await fresh.write([Write("tenants", "a", b"after", 0), Write("tenants", "b", b"after", 0)])
        await fresh.write([Write("tenants", "b", None, revision)])
        for one in (first, late, fresh):
            await one.refresh()
            assert values(one) == {"a": b"after", "c": b"before"}
        assert await stored(valkey) == {"a": b"after", "c": b"before"}
        await fresh.close()
    finally:
        await first.close()
        await late.close()


async def test_a_write_to_a_store_that_lost_its_data_is_refused_until_it_is_restored(valkey: Valkey) -> None:
    """Otherwise a server would take the store with one new tenant for the one that it knew."""
    async with followers(on(valkey)) as [one]:
        await one.write([Write("tenants", "a", b"1", 0)])
        valkey.client.flushall()
        with pytest.raises(StoreUnavailableError, match="lost"):
            await one.write([Write("tenants", "b", b"1", 0)])
        await one.refresh()
        await one.write([Write("tenants", "b", b"1", 0)])
        assert (await stored(valkey)).keys() == {"a", "b"}


async def test_a_store_that_went_back_gets_the_latest_changes_again(valkey: Valkey) -> None:
    """As in a failover to a replica that lags."""
    async with followers(on(valkey), on(valkey)) as [one, two]:
        [first, second] = await one.write([Write("tenants", "a", b"1", 0), Write("tenants", "b", b"1", 0)])
        keys = valkey.client.keys("dw:{resources}:*")
        kept = [(key, found) for key in keys if (found := valkey.client.dump(key)) is not None]
        await one.write([Write("tenants", "a", b"2", first), Write("tenants", "c", b"2", 0)])
        await until(lambda: values(two) == {"a": b"2", "b": b"1", "c": b"2"})
        with valkey.client.pipeline() as pipeline:
            pipeline.delete("dw:{resources}:deleted")
            for key, value in kept:
                pipeline.restore(key, 0, value, replace=True)
            pipeline.execute()
        while await stored(valkey) != {"a": b"2", "b": b"1", "c": b"2"}:
            assert values(one) == values(two) == {"a": b"2", "b": b"1", "c": b"2"}
            await asyncio.sleep(0.02)
        await until(lambda: one.revision == two.revision)
        assert values(one) == values(two) == {"a": b"2", "b": b"1", "c": b"2"}
        assert one.of_kind("tenants")["b"].revision == second


async def test_a_store_of_an_earlier_version_is_no_other_one(valkey: Valkey) -> None:
    async with followers(on(valkey), on(valkey)) as [one, two]:
        await one.write([Write("tenants", "a", b"1", 0)])
        valkey.client.hdel("dw:{resources}:meta", "store")
        early = ResourceFollower(on(valkey))
        await early.refresh()
        await early.write([Write("tenants", "b", b"1", 0)])
        await early.write([Write("tenants", "b", None, early.of_kind("tenants")["b"].revision)])
        await until(lambda: names(two) == {"a"} and two.revision == early.revision)
        await early.refresh()
        assert names(early) == {"a"}
        await early.close()


async def test_what_cannot_be_decrypted_keeps_the_value_before(valkey: Valkey) -> None:
    async with followers(on(valkey, OLD), on(valkey, BOTH)) as [old, both]:
        assert old.synced.is_set()
        await old.write([Write("tenants", "a", b"1", 0), Write("tenants", "b", b"1", 0)])
        await both.refresh()
        await both.write([Write("tenants", "a", b"2", both.of_kind("tenants")["a"].revision)])
        await both.write([Write("tenants", "c", b"2", 0)])
        for _ in range(2):
            await old.refresh()
            assert values(old) == {"a": b"1", "b": b"1"}
            assert [old.is_unknown("tenants", name) for name in "abcd"] == [False, False, True, False]
            old._cursor = Cursor()  # it reads everything again
        await both.write([Write("tenants", "c", None, both.of_kind("tenants")["c"].revision)])
        await old.refresh()
        assert not old.is_unknown("tenants", "c")
        async with followers(on(valkey, NEW)) as [new]:  # one that starts after the old key was taken away
            assert new.synced.is_set()
            assert [new.is_unknown("tenants", name) for name in "abd"] == [False, True, False]


@pytest.mark.parametrize("keys", [None, OTHER_NAMES], ids=["plain", "other names"])
async def test_names_that_cannot_be_read_may_be_anyones(valkey: Valkey, keys: KeyRing | None) -> None:
    async with followers(on(valkey, OLD)) as [one]:
        await one.write([Write("tenants", "a", b"1", 0)])
        async with followers(on(valkey, keys)) as [other]:
            assert not other.synced.is_set()
            assert other.is_unknown("tenants", "a")
            await one.write([Write("tenants", "a", None, one.of_kind("tenants")["a"].revision)])
            await asyncio.wait_for(other.synced.wait(), 30)
            assert not other.is_unknown("tenants", "a")


def remembering(server: Valkey, folder: Path, keys: KeyRing | None = None) -> ResourceFollower:
    client = RedisClient(server.url, timeout=10.0)
    return ResourceFollower(RedisResources(client, ResourceCipher(keys)), PresenceNote(folder, client.identity))


async def test_what_was_remembered_counts_only_while_the_store_does_not_answer(valkey: Valkey, tmp_path: Path) -> None:
    before = remembering(valkey, tmp_path)
    await before.start()
    await before.close()
    async with followers(on(valkey, OLD)) as [one]:
        await one.write([Write("tenants", "a", b"1", 0)])
    after = remembering(valkey, tmp_path, OTHER_NAMES)
    await after.start()
    assert not after.synced.is_set()
    await after.close()


@pytest.mark.parametrize("had", ["nothing", "no tenants", "tenants", "none left", "no tenants two days ago"])
async def test_what_a_server_knows_that_starts_while_its_store_is_away(
    tmp_path: Path, had: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("draftwood_tenants.resources.follower.POLL_SECONDS", 0.05)
    with Valkey(persistent=True) as server:
        if had != "nothing":
            before = remembering(server, tmp_path)
            await before.start()
            if had in ("tenants", "none left"):
                [revision] = await before.write([Write("tenants", "a", b"1", 0)])
                if had == "none left":
                    await before.write([Write("tenants", "a", None, revision)])
            await before.close()
        if had.endswith("ago"):
            os.utime(PresenceNote(tmp_path, on(server)._client.identity).path, (time.time() - 172_800,) * 2)
        server.kill()
        follower = remembering(server, tmp_path)
        await follower.start()
        assert follower.synced.is_set() == (had in ("no tenants", "none left"))
        assert not follower.read
        assert ("requests are refused" in caplog.text) != follower.synced.is_set()
        await asyncio.sleep(0.2)
        server.start()
        await until(lambda: follower.read)
        assert follower.synced.is_set()
        await follower.refresh()
        for said in ("cannot be read; what is known stays in use", "is read again"):
            assert caplog.text.count(said) == 1
        await follower.close()


async def test_a_server_that_starts_on_a_store_that_lost_its_tenants_does_not_know_them(
    valkey: Valkey, tmp_path: Path
) -> None:
    before = remembering(valkey, tmp_path)
    await before.write([Write("tenants", "a", b"1", 0)])
    await before.close()
    valkey.client.flushall()
    after = remembering(valkey, tmp_path)
    await after.start()
    assert not after.synced.is_set()
    await after.write([Write("tenants", "a", b"1", 0)])  # the operator writes them again
    assert after.synced.is_set()
    assert names(after) == {"a"}
    await after.close()


@pytest.mark.parametrize(
    ("began", "stored", "ended", "skew"),
    [
        (100.0, 100.5, 101.0, 0.0),
        (100.0, 7300.0, 100.2, 100.2 - 7300.0),
        (7300.0, 100.0, 7300.2, 7200.0),
        (100.0, 99.0, 100.0, 0.0),
        (100.0, 103.0, 130.0, 0.0),  # the store took long to answer
    ],
)
def test_clocks_that_differ_are_noticed(
    began: float, stored: float, ended: float, skew: float, caplog: pytest.LogCaptureFixture
) -> None:
    watch = ClockWatch(iter([began, ended, 50.0, 50.0]).__next__)
    with watch.timing() as timed:
        timed(stored)
    assert watch.skew == pytest.approx(skew)
    assert ("differs from the store's" in caplog.text) == bool(skew)
    with watch.timing() as timed:
        timed(50.0)
    assert watch.skew == 0.0


async def test_a_follower_compares_its_clock_with_the_stores(valkey: Valkey, caplog: pytest.LogCaptureFixture) -> None:
    follower = ResourceFollower(on(valkey))
    await follower.refresh()
    assert follower._clock.skew == 0.0
    follower._clock = ClockWatch(lambda: time.time() + 7200)
    await follower.refresh()
    assert follower._clock.skew == pytest.approx(7200, abs=5)
    assert "clock of this server differs" in caplog.text
    await follower.close()
