"""What a request takes of the limits before and after it was read, and what stays counted of one that never ran."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from draftwood_service.quotas import Limiter, QuotaExceededError, RateLimits
from draftwood_service.quotas.request_quota import RequestQuota
from draftwood_service.quotas.text_calls import ALLOWANCE, TextCallQuota
from tests.memory.servers import Valkey
from tests.service.quotas.test_shared import limiters
from tests.service.quotas.test_window import Clock


@pytest.fixture(params=["local", "shared"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def limiter_of(kind: str, server: Valkey) -> AsyncIterator[Limiter]:
    if kind == "local":
        yield Limiter()
        return
    async with limiters(server.url, 1) as [limiter]:
        yield limiter


async def used(limiter: Limiter, limits: RateLimits) -> dict[str, int]:
    """What is counted, by limit: how a request that is too large is refused."""
    found = {}
    for name, value in (("requests_per_minute", limits.requests_per_minute), ("tokens_per_minute", 10**6)):
        with pytest.raises(QuotaExceededError) as caught:
            await limiter.reserve("t", RateLimits(**{name: value}), 10**9, requests=10**6)
        found[name] = caught.value.used
    return found


LIMITS = RateLimits(requests_per_minute=3, tokens_per_minute=100, concurrency=2)


async def test_a_request_reserves_in_two_parts_and_counts_once(kind: str, server: Valkey) -> None:
    async with limiter_of(kind, server) as limiter:
        quota = RequestQuota(limiter, "t", LIMITS)
        await quota.enter(31)
        await quota.reserve_tokens(90)
        quota.queued()
        assert await used(limiter, LIMITS) == {"requests_per_minute": 1, "tokens_per_minute": 90}
        quota.release(50)
        quota.release(0)
        await quota.released()
        assert await used(limiter, LIMITS) == {"requests_per_minute": 1, "tokens_per_minute": 50}
        other = RequestQuota(limiter, "t", LIMITS)
        await other.enter(49)
        with pytest.raises(QuotaExceededError) as caught:
            await other.reserve_tokens(51)
        assert (caught.value.limit, caught.value.used, caught.value.needed) == ("tokens_per_minute", 50, 51)
        assert caught.value.retry_seconds is not None
        with pytest.raises(QuotaExceededError, match="lower max_tokens") as caught:
            await other.reserve_tokens(101)  # more than the whole limit, with what is reserved already
        assert caught.value.retry_seconds is None
        await other.reserve_tokens(50)
        assert (await used(limiter, LIMITS))["tokens_per_minute"] == 100


async def test_a_request_that_is_not_queued_is_not_counted(kind: str, server: Valkey) -> None:
    async with limiter_of(kind, server) as limiter:
        for _ in range(10):
            quota = RequestQuota(limiter, "t", LIMITS)
            await quota.enter(2)
            await quota.reserve_tokens(90)
            quota.release(80)
            await quota.released()
        assert await used(limiter, LIMITS) == {"requests_per_minute": 0, "tokens_per_minute": 0}


async def test_concurrency_holds_from_the_arrival(kind: str, server: Valkey) -> None:
    async with limiter_of(kind, server) as limiter:
        running = [RequestQuota(limiter, "t", LIMITS) for _ in range(2)]
        for quota in running:
            await quota.enter(1)
        late = RequestQuota(limiter, "t", LIMITS)
        with pytest.raises(QuotaExceededError, match="concurrency"):
            await late.enter(1)
        late.release(0)
        running[0].release(0)
        await running[0].released()
        await late.enter(1)


async def test_without_a_limit_on_tokens_there_is_one_reservation() -> None:
    limiter = Limiter()
    quota = RequestQuota(limiter, "t", RateLimits(requests_per_minute=2))
    await quota.enter(5)
    await quota.reserve_tokens(10**9)
    quota.queued()
    quota.release(10**9)
    assert limiter.windows["t"].buckets.popitem()[1].requests == 1


def test_calls_on_text_have_a_window_of_their_own() -> None:
    clock = Clock()
    quota, limits = TextCallQuota(clock), RateLimits(requests_per_minute=2, tokens_per_minute=50)
    for _ in range(2 * ALLOWANCE):
        quota.admit("t", limits)
        quota.count("t", limits, 1)
    with pytest.raises(QuotaExceededError) as caught:
        quota.admit("t", limits)
    assert (caught.value.limit, caught.value.value, caught.value.used) == ("text_calls_per_minute", 20, 20)
    quota.admit("other", limits)
    for texts in ((499, 1), (10**6,)):  # one that is too long is never refused, those after it are
        clock.now += 61
        for tokens in texts:
            quota.admit("t", limits)
            quota.count("t", limits, tokens)
        with pytest.raises(QuotaExceededError, match=f"text_tokens_per_minute: {sum(texts)} of 500 are used"):
            quota.admit("t", limits)
    clock.now += 61
    quota.admit("t", limits)


def test_without_limits_no_call_on_text_is_counted() -> None:
    quota = TextCallQuota()
    for limits in (RateLimits(), RateLimits(concurrency=1)):
        for _ in range(1000):
            quota.admit("t", limits)
            quota.count("t", limits, 10**6)
    assert not quota._counted.windows
