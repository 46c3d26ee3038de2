"""Limits over replicas of one real server, which is also killed and stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from draftwood_memory.store.redis_client import RedisClient, Script
from draftwood_service.quotas import NO_LIMITS, QuotaExceededError, RateLimits
from draftwood_service.quotas.local import Reservation
from draftwood_service.quotas.shared import SharedLimiter
from draftwood_service.quotas.store import LEASE_SECONDS, REFRESH_SECONDS
from draftwood_tenants.resources.follower import end
from tests.memory.servers import Valkey, cluster
from tests.service.fakes import until


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@asynccontextmanager
async def limiters(url: str, count: int = 2, secret: bytes | None = None) -> AsyncIterator[list[SharedLimiter]]:
    """Replicas, which wait longer than served ones: this machine may be busy."""
    made = [SharedLimiter(RedisClient(url, timeout=REFRESH_SECONDS), secret, 2.0) for _ in range(count)]
    try:
        for one in made:
            await one.refresh()
            one.start()
        yield made
    finally:
        for one in made:
            await one.close()


async def admitted(
    limiter: SharedLimiter, limits: RateLimits, attempts: int, tokens: int = 1, tenant: str = "t"
) -> list[Reservation]:
    """What is admitted of several attempts at once."""
    found = await asyncio.gather(
        *(limiter.reserve(tenant, limits, tokens) for _ in range(attempts)), return_exceptions=True
    )
    assert all(isinstance(one, QuotaExceededError) for one in found if isinstance(one, BaseException))
    return [one for one in found if not isinstance(one, BaseException)]


async def test_two_replicas_let_no_more_than_the_limit_through(server: Valkey) -> None:
    async with limiters(server.url) as made:
        each = await asyncio.gather(*(admitted(one, RateLimits(requests_per_minute=50), 60) for one in made))
        assert 50 <= sum(map(len, each)) <= 51
        with pytest.raises(QuotaExceededError) as caught:
            await made[0].reserve("t", RateLimits(requests_per_minute=50), 1)
        assert 50 < (caught.value.retry_seconds or 0) <= 61
        assert not any(one.outages for one in made)
        [key] = server.client.keys("dw:{quota:*")
        assert 0 < server.client.ttl(key) <= 62


async def test_nothing_is_stored_without_limits_and_names_are_hidden_with_a_key(server: Valkey) -> None:
    async with limiters(server.url, 1, b"x" * 32) as [limiter]:
        await limiter.reserve("secret-name", NO_LIMITS, 5)
        assert (server.client.keys("*"), limiter.windows) == ([], {})
        await limiter.reserve("secret-name", RateLimits(requests_per_minute=5, concurrency=5), 5)
        keys = server.client.keys("dw:{quota:*")
        assert len(keys) == 2
        assert not any(b"secret-name" in key for key in keys)


async def test_what_is_given_back_counts_for_all_replicas_and_never_below_zero(server: Valkey) -> None:
    limits = RateLimits(tokens_per_minute=100, concurrency=1)
    async with limiters(server.url) as [first, second]:
        [one] = await admitted(first, limits, 3, tokens=90)
        assert not await admitted(second, limits, 1)
        one.release(40)
        one.release(0)
        await one.released()
        with pytest.raises(QuotaExceededError, match="40 of 100"):
            await second.reserve("t", limits, 61)
        [last] = await admitted(second, limits, 1, tokens=60)
        last.release(60)
        await last.released()
        with pytest.raises(QuotaExceededError, match="100 of 100"):
            await first.reserve("t", limits, 1)
        assert first._releasing == second._releasing == set()
        [lost] = await admitted(first, limits, 1, tokens=90, tenant="u")
        server.client.flushall()
        await first.reserve("u", limits, 10)
        lost.release(0)  # counts never become negative
        await lost.released()
        assert len(await admitted(first, RateLimits(tokens_per_minute=100), 3, tokens=50, tenant="u")) == 2


@pytest.mark.system
async def test_places_of_a_killed_replica_come_free(server: Valkey) -> None:
    limits = RateLimits(concurrency=2)
    async with limiters(server.url) as [killed, other]:
        assert len(await admitted(killed, limits, 2)) == 2
        await asyncio.sleep(LEASE_SECONDS + 1)
        assert not await admitted(other, limits, 1)  # the leases are renewed as long as it lives
        await end([killed._refreshing])
        began = time.monotonic()
        held: list[Reservation] = []
        while len(held) < 2:  # a renewal may still have been on its way
            assert time.monotonic() - began < 3 * LEASE_SECONDS
            await asyncio.sleep(0.1)
            held += await admitted(other, limits, 1)
        assert not await admitted(other, limits, 1)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
async def test_each_replica_holds_the_whole_limit_while_the_store_is_away(server: Valkey, fault: str) -> None:
    limits = RateLimits(requests_per_minute=10, concurrency=10)
    async with limiters(server.url) as [first, second]:
        assert len(await admitted(first, limits, 4)) == 4
        first._answer_seconds = second._answer_seconds = 0.3
        server.kill() if fault == "killed" else server.pause()
        began = time.monotonic()
        held = await admitted(first, limits, 20)
        assert time.monotonic() - began < 4.0  # it waits once; twenty waits are six seconds
        assert len(held) == 6  # four are known here
        assert len(await admitted(second, limits, 20)) == 10
        assert (first.outages, first.degraded, first.admitted_alone) == (1, True, 6)
        for one in held:
            one.release(0)
            await one.released()
        server.start() if fault == "killed" else server.resume()
        await until(lambda: not (first.degraded or second.degraded))
        await first.refresh()
        await second.refresh()
        # What was admitted without the server is added once. One that was killed has forgotten the first four; one that
        # was stopped may also run the scripts that nobody waits for any more, up to the limit.
        [key] = server.client.keys("dw:*:used")
        requests, tokens = (sum(int(hval.split()[i]) for hval in server.client.hvals(key)) for i in range(2))
        assert requests in ([16] if fault == "killed" else range(4, 11))
        assert tokens == 10 or fault != "killed"  # six of the sixteen used none


@pytest.mark.parametrize("fault", ["killed", "refuses writes"])
@pytest.mark.parametrize("limits", [RateLimits(requests_per_minute=5), RateLimits(concurrency=5)], ids=str)
async def test_no_replica_refuses_below_the_limit_or_admits_more(
    server: Valkey, fault: str, limits: RateLimits
) -> None:
    async with limiters(server.url, 3) as made:
        if fault == "killed":
            server.kill()
        else:
            server.client.config_set("min-replicas-to-write", 1)
        each = await asyncio.gather(*(admitted(one, limits, 9) for one in made))
        assert [len(one) for one in each] == [5, 5, 5]
        assert all(one.degraded for one in made)


class SlowStore(RedisClient):
    """A server whose answers to scripts wait until they are let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timeout=REFRESH_SECONDS)
        self.free = asyncio.Event()
        self.free.set()

    async def run(self, script: Script) -> Any:
        answer = await super().run(script)
        await self.free.wait()
        return answer


@pytest.mark.parametrize("ends", ["before its answer", "after its answer"])
async def test_an_answer_that_comes_late_counts_once_and_is_given_back(server: Valkey, ends: str) -> None:
    """The store is slow once: nothing is refused for it, then or in the minute after it."""
    limits = RateLimits(requests_per_minute=3, tokens_per_minute=100, concurrency=2)
    store = SlowStore(server.url)
    limiter = SharedLimiter(store, answer_seconds=0.02)
    other = SharedLimiter(RedisClient(server.url, timeout=REFRESH_SECONDS), answer_seconds=2.0)
    await limiter.refresh()
    store.free.clear()
    late = await limiter.reserve("t", limits, 100)
    assert limiter.admitted_alone == 1
    limiter._answer_seconds = 2.0
    if ends == "before its answer":
        late.release(10)
        store.free.set()
    else:
        store.free.set()
        await limiter.refresh()
        assert not await admitted(other, limits, 1)  # it has all tokens
        late.release(10)
    await until(lambda: not limiter._releasing)
    await limiter.refresh()
    assert len(await admitted(other, limits, 3, tokens=45)) == 2  # by tokens, requests and places
    assert (await admitted(limiter, limits, 1, tokens=0)) == []
    await limiter.close()
    await other.close()


@pytest.mark.parametrize("gives_up", ["cancelled", "refused here"])
async def test_a_request_that_is_not_admitted_in_the_end_is_not_counted(server: Valkey, gives_up: str) -> None:
    limits = RateLimits(requests_per_minute=2)
    store = SlowStore(server.url)
    limiter = SharedLimiter(store, answer_seconds=60.0 if gives_up == "cancelled" else 0.02)
    await limiter.refresh()
    store.free.clear()
    if gives_up == "cancelled":
        asking = asyncio.create_task(limiter.reserve("t", limits, 1))
        await until(lambda: bool(server.client.keys("dw:*:used")))
        asking.cancel()
        await asyncio.wait([asking])
    else:
        for _ in range(2):  # as many as it may admit, which the store has forgotten
            limiter.window_of("t").add(1, limiter.clock())
        with pytest.raises(QuotaExceededError):
            await limiter.reserve("t", limits, 1)
    store.free.set()
    await until(lambda: not limiter._releasing)
    await limiter.refresh()
    [key] = server.client.keys("dw:*:used")
    assert sum(int(hval.split()[0]) for hval in server.client.hvals(key)) == 0
    await limiter.close()


async def test_what_ended_while_the_store_was_away_is_given_back(server: Valkey) -> None:
    limits = RateLimits(tokens_per_minute=100, concurrency=1)
    async with limiters(server.url) as [first, second]:
        [held] = await admitted(first, limits, 1, tokens=90)
        server.pause()
        await until(lambda: first.degraded)
        held.release(20)
        await held.released()
        server.resume()
        await until(lambda: not (first.degraded or second.degraded))
        await first.refresh()
        assert len(await admitted(second, limits, 1, tokens=80)) == 1


async def test_a_full_store_counts_on(server: Valkey) -> None:
    server.client.config_set("maxmemory-policy", "noeviction")
    server.client.config_set("maxmemory", 1)
    async with limiters(server.url, 3) as made:
        for limits in (RateLimits(requests_per_minute=5), RateLimits(tokens_per_minute=50), RateLimits(concurrency=5)):
            tenant = str(limits)
            each = await asyncio.gather(*(admitted(one, limits, 5, tokens=10, tenant=tenant) for one in made))
            assert sum(map(len, each)) == 5
            held = [reservation for found in each for reservation in found]
            held[0].release(0)
            await held[0].released()
            again = 0 if limits.requests_per_minute else 1
            assert len(await admitted(made[1], limits, 2, tokens=10, tenant=tenant)) == again
        for one in made:
            await one.refresh()
            assert (one.outages, one.admitted_alone) == (0, 0)


async def test_a_hiccup_concerns_the_tenants_that_met_it(server: Valkey) -> None:
    limits = RateLimits(requests_per_minute=10)
    async with limiters(server.url) as [first, second]:
        await first.refresh()
        first._answer_seconds = 0.1
        server.pause()
        assert len(await admitted(first, limits, 12)) == 10
        server.resume()
        first._answer_seconds = 2.0
        assert first._alone == {"t"}
        assert first.degraded
        for _ in range(3):
            assert len(await admitted(first, limits, 1, tenant="other")) == 1
        assert first.admitted_alone == 10
        await until(lambda: not first.degraded)
        assert first.outages == 1
        assert not second.outages


@pytest.mark.system
async def test_one_tenant_whose_refresh_fails_does_not_end_the_leases_of_others(server: Valkey) -> None:
    limits = RateLimits(concurrency=2)
    async with limiters(server.url) as [holder, other]:
        for tenant in ("a", "b", "c"):
            assert len(await admitted(holder, limits, 2, tenant=tenant)) == 2
        server.client.set("dw:{quota:a}:places", "damaged")
        await asyncio.sleep(LEASE_SECONDS + 1)
        for tenant in ("b", "c"):
            assert not await admitted(other, limits, 1, tenant=tenant)
        assert holder._alone == {"a"}
        assert not await admitted(holder, limits, 1, tenant="a")  # two of its places are known here


async def test_a_replica_whose_store_never_answered_has_the_whole_limit() -> None:
    limiter = SharedLimiter(RedisClient("redis://127.0.0.1:1", timeout=1.0))
    assert len(await admitted(limiter, RateLimits(requests_per_minute=5), 9)) == 5
    assert (limiter.degraded, limiter.outages, limiter.admitted_alone) == (True, 1, 5)
    await limiter.close()


@pytest.mark.system
async def test_a_cluster_counts_as_well() -> None:
    with cluster() as nodes:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        async with limiters(url) as made:
            limits = RateLimits(requests_per_minute=10, tokens_per_minute=1000, concurrency=10)
            each = await asyncio.gather(*(admitted(one, limits, 8) for one in made))
            assert sum(map(len, each)) == 10
            assert not any(one.outages for one in made)
            for one in made:
                await one.refresh()
